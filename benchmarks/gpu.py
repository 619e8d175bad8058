"""Tests attnrx on one CUDA device, and measures its speed: models against timm, kernels, and a real model.

    python benchmarks/gpu.py --pack imagenette224.parquet --images runs/images.parquet  # the images to take along
    python benchmarks/gpu.py --weights vit_tiny_patch16_224.safetensors --images runs/images.parquet --out runs/gpu
    python benchmarks/gpu.py --device cpu --tiny --out runs/gpu  # a minute, on any machine

The script writes gpu.json after every section. At the end it writes gpu.md, which is the page docs/results/gpu.md. If a
section fails, its traceback is recorded. If a section has used up its share of --budget, it ends with the results so
far. Weights are random, because latency does not depend on them. Only the section of the real model has real weights.
Compared models are timed in turns.
"""

import argparse
import copy
import importlib.util
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attnrx as rx
from attnrx.decide.diagnostics import SpectralShape
from attnrx.show.checks import Accuracy, Fidelity
from attnrx.support.storage import read_json, write_json, write_text
from attnrx.support.tables import markdown_table
from attnrx.vit.attention import Attention, Backend, Eager, Fused
from attnrx.vit.costs import Conditions, interleave, ratio_of
from attnrx.vit.costs.measured import PRECISIONS, RecordedCalls
from attnrx.vit.models import family_of
from attnrx.vit.spec import AttentionSpec

ROOT = Path(__file__).resolve().parents[1]
# The tests with the marker gpu, and the tests of code that also runs on a CPU.
TESTS = ("tests/laws/test_cuda.py", "tests/laws/test_compiled.py")

OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")
MODELS = {"T": "vit_tiny_patch16_224", "S": "vit_small_patch16_224", "B": "vit_base_patch16_224"}
TINY = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 48, "num_heads": 3}
# Rules that keep about 0.6 of the MACs, like `attnrx shrink --macs 0.6`. They prune hidden units, choose irregular
# ranks and merge tokens in three stages.
PLAN = (
    "qk=total_rank:0.7,metric=weights{more} vo=total_rank:0.8,metric=weights{more} "
    "hidden=uniform_rank:0.85,metric=weights{more} tokens=ward:0.8@4,7,10"
)
VARIANTS = {
    "unchanged": "",
    "ward:13@every": "tokens=ward:13@every",
    "ward:0.7@4,7,10": "tokens=ward:0.7@4,7,10",
    "plan": PLAN.format(more=""),
    # In half precision, the device's fast kernels need products whose sizes are multiples of 8.
    "plan, multiples of 8": PLAN.format(more=",multiple=8"),
    # These variants run the same operations as the original, but with smaller matrix products.
    "half of hidden": "hidden=uniform_rank:0.5,metric=weights,multiple=64",
    "half of hidden, two stages": "hidden=uniform_rank:0.5,metric=weights,multiple=64 tokens=ward:0.7@3,6",
}
REAL = "qk=total_rank:0.7 vo=total_rank:0.8 hidden=total_rank:0.85 tokens=ward:0.8@4,7,10"
# The sections' shares of the budget, in the order in which they run. Each section also gets the time that earlier
# sections did not use.
SHARES = {"eager": 0.24, "compiled": 0.36, "real": 0.32, "tests": 0.05, "backends": 0.02, "content": 0.01}
TITLES = {
    "tests": "Tests of the CUDA paths",
    "eager": "Speed, eager",
    "compiled": "Speed, compiled",
    "backends": "Irregular ranks against the unpruned layer",
    "content": "Weights that change in place",
    "real": "A real ViT-Tiny on the device",
}


@dataclass(frozen=True)
class Cell:
    """One model at one batch size."""

    size: str
    batch: int


# Cells are measured in order of importance: a small model with one image, a large model with many images, and a case in
# between. Compiling takes long, so only the variants in FEW are compiled.
FIRST = (Cell("T", 1), Cell("S", 64), Cell("B", 256))
OTHERS = tuple(cell for cell in itertools.starmap(Cell, itertools.product("SBT", (64, 256, 1))) if cell not in FIRST)
EAGER = (*FIRST, *OTHERS)
PROFILED = (Cell("S", 64), Cell("T", 1))
FEW = ("unchanged", "half of hidden")
# The ranks are evenly spread between 4 and the head dimension, or one head is full and the others are narrow.
SPECTRA: Mapping[str, Callable[[int, int], tuple[int, ...]]] = {
    "4 to 64": lambda heads, most: tuple(4 + (most - 4) * head // (heads - 1) for head in range(heads)),
    "one of 64, others 8": lambda heads, most: (most, *(8,) * (heads - 1)),
}


@dataclass(frozen=True)
class Models:
    """timm's model of one size, its VARIANTS, and error texts for variants that could not be made."""

    reference: nn.Module
    variants: dict[str, nn.Module]
    failures: dict[str, str]


@dataclass
class Run:
    """The settings of one run of this script, and its record, which is saved after every section."""

    device: str
    tiny: bool
    budget: float
    out: Path
    weights: Path | None
    images: Path | None
    precision: str
    record: dict[str, Any]
    started: float
    sections: tuple[str, ...] = tuple(SHARES)
    cells: tuple[Cell, ...] = EAGER
    ends: float = 0.0  # the time at which the running section has to end
    shares_begun: float = 0.0  # the sum of the shares up to and including the running section
    built: dict[str, "Models"] = field(default_factory=dict)

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def rounds(self) -> int:
        return 4 if self.tiny else 24

    @property
    def conditions(self) -> Conditions:
        return Conditions(self.device, self.precision)

    @property
    def left(self) -> float:
        """Seconds until the section has to end."""
        return self.ends - time.monotonic()

    def save(self) -> None:
        write_json(self.out / "gpu.json", self.record)

    def section(self, name: str, work: Callable[["Run", dict[str, Any]], None]) -> None:
        """Runs a section within its share of the budget, and records its results or its traceback."""
        begin = time.monotonic()
        share = SHARES[name] / sum(SHARES[each] for each in self.sections)
        end = self.started + self.budget
        self.shares_begun += share
        self.ends = min(self.started + self.shares_begun * self.budget, end)
        result: dict[str, Any] = {}
        self.record["sections"][name] = result
        if self.left < 2:
            result["skipped"] = "the budget was used up"
        else:
            try:
                with time_limit(self.left + 5):  # sections also check `left` between measurements
                    work(self, result)
            except (Exception, OutOfTime) as error:
                result["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                result["traceback"] = traceback.format_exc()[-4000:]
        result["seconds"] = round(time.monotonic() - begin, 1)
        self.save()
        print(f"{name}: {result['seconds']} s{', ' + result['error'] if 'error' in result else ''}", flush=True)


class OutOfTime(BaseException):
    """A section exceeded its share. It is a BaseException, so that `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the main thread after this many seconds."""

    def expire(*_: object) -> None:
        raise OutOfTime(f"not finished after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def short(error: BaseException) -> str:
    """Returns the record of a failed measurement, which is the error and the line that raised it."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"


# ---------------------------------------------------------------------------------------------------------- tests


def test_section(run: Run, result: dict[str, Any]) -> None:
    """Runs pytest on the CUDA tests. Shape checks are off, because the machine may lack the library that they need."""
    words = [sys.executable, "-m", "pytest", *TESTS, "-m", "gpu", "--all", "-v", "-rfE", "--tb=short", "--durations=6"]
    words += ["-o", "addopts=", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None and run.on_cuda:
        words += ["-n", "6"]  # most of the time is compilation
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    log = run.out / "tests.txt"
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout=max(run.left, 5))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then prints the failures so far
            result["error"] = "not finished within its share of the budget"
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
    lines = log.read_text().splitlines()
    # A line has one of two forms: "tests/x.py::name PASSED", or "[gw0] PASSED tests/x.py::name" with several processes.
    outcomes = [found[1] for line in lines if "::" in line and (found := OUTCOME.search(line)) and "%]" in line]
    result["counts"] = {name.lower(): outcomes.count(name) for name in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    result["failures"] = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
    result["last_line"] = lines[-1] if lines else ""
    result["output"] = "\n".join(lines)[-30_000:] if result["failures"] or not result["counts"]["passed"] else ""


# --------------------------------------------------------------------------------------------------------- models


def timm_model(run: Run, size: str) -> nn.Module:
    """Returns timm's model with random weights. The size of the weights differs between heads, as in trained models."""
    import timm

    torch.manual_seed(0)
    options: dict[str, Any] = TINY if run.tiny else {}
    model = timm.create_model(MODELS["T" if run.tiny else size], **options).eval()
    for block in model.blocks:  # type: ignore[union-attr]
        attention: Any = block.attn
        weight, heads = attention.qkv.weight, attention.num_heads
        sizes = torch.linspace(-1, 1, heads).exp2()[torch.randperm(heads)]
        with torch.no_grad():
            weight.view(3, heads, -1, weight.shape[1]).mul_(sizes[None, :, None, None])
    return model


def models_of(run: Run, size: str) -> Models:
    """Returns timm's model of one size and its variants, in float32. The models are cached in the run."""
    if size in run.built:
        return run.built[size]
    reference = timm_model(run, size)
    model = rx.load(copy.deepcopy(reference).to(run.device)).eval()
    made: dict[str, nn.Module] = {}
    failures: dict[str, str] = {}
    side = 32 if run.tiny else 224
    # A diagnosis needs images. Noise images are enough, because the variants choose their ranks from the weights.
    images = torch.rand(2, 3, side, side, device=run.device) * 2 - 1
    diagnosis = rx.diagnose(model, images, diagnostics=(SpectralShape(),))
    for name, text in VARIANTS.items():
        if run.tiny:  # three layers of 16 patches
            text = text.replace("4,7,10", "2,3").replace("3,6", "2,3").replace(":13@", ":2@")
        try:
            made[name] = rx.realize(model, rx.prescribe(diagnosis, text)) if text else model
        except Exception as error:
            failures[name] = short(error)
    run.built[size] = Models(reference, made, failures)
    return run.built[size]


def images_of(run: Run, batch: int) -> torch.Tensor:
    side = 32 if run.tiny else 224
    generator = torch.Generator().manual_seed(1)
    count = min(batch, 4) if run.tiny else batch
    return run.conditions.prepare_images(torch.rand(count, 3, side, side, generator=generator))


def synchronize(run: Run) -> None:
    if run.on_cuda:
        torch.cuda.synchronize()


def waits(run: Run, forward: Callable[[], object]) -> dict[str, int]:
    """Returns how often each line of code waits for the device during a pass."""
    if not run.on_cuda:
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            forward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts: dict[str, int] = {}
    for warning in caught:
        if "synchroniz" in str(warning.message):
            line = f"{Path(warning.filename).name}:{warning.lineno}"
            counts[line] = counts.get(line, 0) + 1
    return counts


def kernels(run: Run, forward: Callable[[], object]) -> dict[str, Any]:
    """Returns the number of launched kernels, their milliseconds on the device, and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    if not run.on_cuda:
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        forward()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    longest = sorted(events, key=lambda event: -event.self_device_time_total)[:6]
    return {
        "launches": sum(event.count for event in events),
        "device_ms": round(sum(event.self_device_time_total for event in events) / 1000, 3),
        "longest": [[event.key[:70], event.count, round(event.self_device_time_total / 1000, 3)] for event in longest],
    }


def peak_bytes(run: Run, forward: Callable[[], object]) -> int | None:
    """Returns how much memory a pass needs in addition to the memory that was in use before it."""
    if not run.on_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def timed(
    run: Run, runs: Mapping[str, Callable[[], object]], anchor: str, clock: str | None = None, rounds: int | None = None
) -> dict[str, dict[str, Any]]:
    """Times the runs in turns. Returns milliseconds, and the speed relative to the anchor with its interval."""
    clock = clock or ("cuda" if run.on_cuda else "wall")
    seconds = interleave(runs, rounds=rounds or run.rounds, warmup=3, clock=clock)
    rows = {}
    for name, times in seconds.items():
        faster = ratio_of(seconds[anchor], times)
        rows[name] = {
            "ms": round(1000 * float(times.median()), 4),
            "faster": [round(value, 3) for value in (faster.value, faster.low, faster.high)],
        }
    return rows


# ---------------------------------------------------------------------------------------------------------- speed


def eager_section(run: Run, result: dict[str, Any]) -> None:
    """Times all variants, both eager and as CUDA graphs of the eager kernels."""
    result["cells"] = []
    for cell in run.cells if not run.tiny else run.cells[:1]:
        if run.left < 1:
            result["left_out"] = [*result.get("left_out", ()), f"ViT-{cell.size}, batch {cell.batch}"]
            continue
        models = models_of(run, cell.size)
        macs = {name: family_of(model).costs(model).macs for name, model in models.variants.items()}
        row: dict[str, Any] = {"model": cell.size, "batch": cell.batch, "failures": dict(models.failures)}
        row["macs"] = {name: round(count / macs["unchanged"], 3) for name, count in macs.items()}
        with run.conditions.held():
            batch = images_of(run, cell.batch)
            placed = {
                name: run.conditions.prepare(model)
                for name, model in {"timm": models.reference, **models.variants}.items()
            }
            runs: dict[str, Callable[[], Any]] = {name: partial(model, batch) for name, model in placed.items()}
            outputs = {name: runs[name]() for name in ("timm", "unchanged")}
            difference = (outputs["unchanged"] - outputs["timm"]).abs().max() / outputs["timm"].abs().max()
            row["difference"] = float(difference)
            row["eager"] = timed(run, runs, "timm")
            for name, forward in runs.items():
                row["eager"][name]["peak_bytes"] = peak_bytes(run, forward)
                row["eager"][name]["weights_bytes"] = sum(
                    parameter.nbytes
                    for parameter in placed[name].parameters()  # type: ignore[union-attr]
                )
                if cell in PROFILED:
                    row["eager"][name]["waits"] = waits(run, forward)
                    row["eager"][name]["kernels"] = kernels(run, forward)
            if run.on_cuda:
                graphs = {}
                for name in runs:
                    try:
                        graphs[name] = partial(RecordedCalls(placed[name]), batch)
                        graphs[name]()  # records the graph
                    except Exception as error:
                        row["failures"][f"{name}, CUDA graph"] = short(error)
                        torch.cuda.synchronize()
                if "timm" in graphs:
                    row["graph"] = timed(run, graphs, "timm")
                del graphs
        result["cells"].append(row)
        run.save()
    if run.on_cuda:
        torch.cuda.empty_cache()


def compiled_section(run: Run, result: dict[str, Any]) -> None:
    """Times variants with torch.compile until the time is used up, starting with the most important cells."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    result["cells"] = []
    names = FEW if not run.tiny else ("plan",)
    longest = 0.0
    for cell in run.cells if not run.tiny else run.cells[:1]:
        if run.left < 1.3 * longest + 3:
            result["left_out"] = [*result.get("left_out", ()), f"ViT-{cell.size}, batch {cell.batch}"]
            continue
        row: dict[str, Any] = {"model": cell.size, "batch": cell.batch}
        row |= {"failures": {}, "seconds": {}, "counts": {}}
        result["cells"].append(row)
        found = models_of(run, cell.size)
        models = {"timm": found.reference, **{name: found.variants[name] for name in names if name in found.variants}}
        eager = run.conditions
        compiled = replace(eager, compiled=True)
        with compiled.held():
            batch, runs = images_of(run, cell.batch), {}
            plain = eager.prepare(found.reference)
            runs["timm, eager"] = partial(plain, batch)
            for name, model in models.items():
                if runs.keys() > {"timm, eager"} and run.left < 1.3 * longest + 3:
                    row["failures"][name] = "no time left to compile it"
                    continue
                begin = time.monotonic()
                forward = compiled.prepare(model)
                counters.clear()
                metrics.reset()
                try:
                    for _ in range(3):  # compiles, and warms up
                        forward(batch)
                    synchronize(run)
                    runs[name] = partial(forward, batch)
                except Exception as error:
                    row["failures"][name] = short(error)
                row["seconds"][name] = round(time.monotonic() - begin, 1)
                row["counts"][name] = {
                    "graphs": counters["stats"]["unique_graphs"],
                    "graph breaks": sum(counters["graph_break"].values()),
                    "generated kernels": metrics.generated_kernel_count,
                    **(kernels(run, runs[name]) if name in runs else {}),
                }
                longest = max(longest, row["seconds"][name])
                if "timm" in runs:
                    row["speeds"] = timed(run, runs, "timm")
                run.save()
        torch.compiler.reset()


# ------------------------------------------------------------------------------------------------------- backends


def irregular(run: Run, size: str, spectrum: str) -> AttentionSpec:
    """Returns the spec of a layer of this model whose scores and values have the ranks of a spectrum."""
    heads, dimension = {"S": (6, 64), "B": (12, 64)}[size] if not run.tiny else (3, 16)
    ranks = SPECTRA[spectrum](heads, dimension)
    return AttentionSpec(
        "dense", heads * dimension, dimension, ranks, tuple(range(heads)), dimension**-0.5, dimension, value_ranks=ranks
    )


def backend_section(run: Run, result: dict[str, Any]) -> None:
    """Times one attention layer with irregular ranks on every backend, and also the unpruned layer."""
    result["cells"] = []
    dtype, cells = PRECISIONS[run.precision], list(itertools.product("SB", (64, 256, 1), SPECTRA))
    with torch.inference_mode():
        for size, batch, spectrum in cells if not run.tiny else cells[:1]:
            if run.left < 1:
                break
            spec = irregular(run, size, spectrum)
            full = replace(spec, ranks=(spec.head_dim,) * len(spec.heads), value_ranks=None)
            torch.manual_seed(0)
            layer = Attention(spec).to(run.device, dtype).eval()
            tokens = torch.randn(min(batch, 2) if run.tiny else batch, 17 if run.tiny else 197, spec.width)
            tokens = tokens.to(run.device, dtype)
            exact = copy.deepcopy(layer).double()
            exact.backend = Eager()
            truth = exact(tokens[:2].double())
            backends: dict[str, Backend] = {"fused, padded": Fused(), "explicit": Eager()}
            row: dict[str, Any] = {"model": size, "batch": batch, "ranks": spectrum, "errors": {}, "failures": {}}
            runs: dict[str, Callable[[], object]] = {}
            for name, backend in backends.items():
                copied = copy.deepcopy(layer)
                copied.backend = backend
                try:
                    difference = (copied(tokens)[:2].double() - truth).abs().max() / truth.abs().max()
                    row["errors"][name] = float(f"{float(difference):.2e}")
                    runs[name] = partial(copied, tokens)
                except Exception as error:
                    row["failures"][name] = short(error)
            unpruned = Attention(full).to(run.device, dtype).eval()
            runs["unpruned, fused"] = partial(unpruned, tokens)
            row["speeds"] = timed(run, runs, "fused, padded")
            row["peak_bytes"] = {name: peak_bytes(run, forward) for name, forward in runs.items()}
            result["cells"].append(row)
            run.save()


# -------------------------------------------------------------------------------------------------------- content


def content_section(run: Run, result: dict[str, Any]) -> None:
    """Changes weights in place in every way that PyTorch offers, and compares the outputs with a model that never ran.

    The first row changes nothing, so it shows how much two passes of one model differ. The passes differ because CUDA
    sums merged tokens in any order. In half precision the order changes which tokens are merged next.
    """
    small = models_of(run, "T").variants["plan"]
    changes: dict[str, Callable[[nn.Parameter], object]] = {
        "none": lambda weight: None,
        "in place": lambda weight: weight.mul_(1.1),
        "through .data": lambda weight: weight.data.add_(0.01),
        "a view": lambda weight: weight.view(-1)[: weight.numel() // 2].mul_(0.5),
        "replaced .data": lambda weight: setattr(weight, "data", weight.data * 1.2),
        "copied from another": lambda weight: weight.copy_(torch.randn_like(weight) * 0.02),
    }
    result["differences"] = {}
    for precision in ("float32", run.precision):
        placed: Any = Conditions(run.device, precision).prepare(small)
        images = images_of(run, 4).to(PRECISIONS[precision])
        with torch.no_grad():
            for name, change in changes.items():
                before = placed(images)
                for parameter in placed.parameters():
                    if parameter.ndim > 1:
                        change(parameter)
                after, fresh = placed(images), copy.deepcopy(placed)(images)
                result["differences"][f"{name}, {precision}"] = {
                    "to a copy": float((after - fresh).abs().max() / fresh.abs().max().clamp_min(1e-30)),
                    "to before": float((after - before).abs().max() / before.abs().max().clamp_min(1e-30)),
                }


# ------------------------------------------------------------------------------------------------------ real model


def pack(source: Path, target: Path, training: int = 608) -> None:
    """Writes the encoded pictures for the section of the real model: all test images and some training images."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = parquet.read_table(source, columns=["image", "imagenet1k_label", "split", "ilsvrc_val"]).to_pylist()
    test = [row for row in rows if row["ilsvrc_val"]]
    train = [row for row in rows if row["split"] == "train" and not row["ilsvrc_val"]][:training]
    chosen = [(row, part) for part, rows in (("train", train), ("test", test)) for row in rows]
    table = pa.table(
        {
            "image": [row["image"]["bytes"] for row, _ in chosen],
            "label": [row["imagenet1k_label"] for row, _ in chosen],
            "split": [part for _, part in chosen],
        }
    )
    parquet.write_table(table, target, compression="none")
    print(f"{target}: {len(train)} training and {len(test)} test images, {target.stat().st_size / 1e6:.1f} MB")


def unpacked(run: Run) -> dict[str, list[tuple[Any, int]]]:
    """Returns the pictures and labels that `pack` wrote, by split. With --tiny they are random."""
    from PIL import Image

    if run.images is None:
        generator = torch.Generator().manual_seed(0)
        drawn = [(2 * torch.rand(3, 32, 32, generator=generator) - 1, number % 10) for number in range(48)]
        return {"train": drawn[:32], "test": drawn[32:]}
    import pyarrow.parquet as parquet

    splits: dict[str, list[tuple[Any, int]]] = {"train": [], "test": []}
    for row in parquet.read_table(run.images).to_pylist():
        splits[row["split"]].append((Image.open(io.BytesIO(row["image"])).convert("RGB"), row["label"]))
    return splits


def real_section(run: Run, result: dict[str, Any]) -> None:
    """Runs `shrink` on the device for a target time and target MACs, and the workflow on a CPU and on the device."""
    if run.tiny or run.weights is None or run.images is None:
        if not run.tiny:
            result["skipped"] = "needs --weights and --images"
            return
        reference = timm_model(run, "T")
        model = rx.load(copy.deepcopy(reference)).eval()
    else:
        model = rx.load("timm:vit_tiny_patch16_224", weights=run.weights).eval()
    splits = unpacked(run)
    # The targets of `shrink`, with the seconds that each needs. Other scripts measure target times on a CPU.
    targets = {"faster=1.2, batch=256": 5.0, "macs=0.6, batch=64": 45.0} if run.on_cuda else {"macs=0.6, batch=64": 0.0}
    for text, needed in targets.items():
        if run.left > needed:
            shrink_part(run, result.setdefault("shrink", {}).setdefault(text, {}), model, splits, text)
        else:
            result["left_out"] = [*result.get("left_out", ()), f"shrink to {text}"]
    text = REAL.replace("4,7,10", "2,3") if run.tiny else REAL
    result["rules"], result["workflow"] = text, {}
    strengths = {}
    for device in ("cpu", run.device) if run.on_cuda else ("cpu",):
        if run.left < 12 and not run.tiny:
            result["left_out"] = [*result.get("left_out", ()), f"the workflow on {device}"]
            return
        begin, placed = time.monotonic(), copy.deepcopy(model).to(device)
        diagnosis = rx.diagnose(placed, splits["train"], moments=True, images=16 if run.tiny else 64, batch_size=32)
        prescription = rx.prescribe(diagnosis, text)
        small = rx.realize(placed, prescription)
        evidence = rx.verify(small, placed, splits["test"], checks=[Accuracy(), Fidelity()], batch_size=100)
        result["workflow"][device] = {
            "seconds": round(time.monotonic() - begin, 1),
            "findings": findings(evidence),
            "ranks": sum(sum(layer.spec.ranks) for layer in family_of(small).attention(small)),
            "value_dims": sum(sum(layer.spec.value_dims) for layer in family_of(small).attention(small)),
            "params": family_of(small).costs(small).params,
        }
        strengths[device] = torch.cat([layer.qk.strength.flatten().cpu().double() for layer in prescription.layers])
        run.save()
    if run.on_cuda:
        on_cpu, on_device = strengths["cpu"], strengths[run.device]
        result["strengths_differ"] = float((on_cpu - on_device).abs().max() / on_cpu.abs().max())


def findings(evidence: rx.Evidence) -> list[dict[str, Any]]:
    names = ("check", "claim", "value", "unit", "low", "high")
    return [{name: getattr(finding, name) for name in names} for finding in evidence.findings]


def shrink_part(run: Run, part: dict[str, Any], model: nn.Module, splits: Mapping[str, Any], target: str) -> None:
    """Runs `shrink` on the device, and records the seconds of its steps and the speed of the result."""
    lines: list[list[Any]] = []
    begin = time.monotonic()
    part["log"] = lines
    arguments: dict[str, Any] = {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)", target)}
    try:
        shrunk = rx.shrink(
            copy.deepcopy(model).to(run.device),
            splits,
            **{**arguments, "batch": int(arguments["batch"])},
            effort="quick",
            log=lambda line: lines.append([round(time.monotonic() - begin, 1), str(line)[:160]]),
        )
    except Exception as error:
        part["error"], part["traceback"] = short(error), traceback.format_exc()[-3000:]
        return
    finally:
        part["seconds"] = round(time.monotonic() - begin, 1)
        run.save()
    part["summary"], part["findings"] = str(shrunk.summary), findings(shrunk.evidence)
    part["prescription"] = str(shrunk.prescription)[:2000]
    layers = family_of(shrunk.model).attention(shrunk.model)
    part["ranks"] = [[list(layer.spec.ranks), list(layer.spec.value_dims)] for layer in layers]
    run.save()
    import timm

    reference = timm_model(run, "T") if run.tiny else timm.create_model("vit_tiny_patch16_224").eval()
    part["speeds"] = []
    # The plan was timed in the model's precision, so its result is timed in this precision, too.
    for precision in dict.fromkeys((run.precision, "float32")):
        conditions = replace(run.conditions, precision=precision)
        with conditions.held():
            for count in (256, 64, 1):
                batch = images_of(run, count).to(PRECISIONS[precision])
                models = {"timm": reference, "unchanged": model, "shrunk": shrunk.model}
                placed = {name: conditions.prepare(each) for name, each in models.items()}
                runs = {name: partial(each, batch) for name, each in placed.items()}
                row: dict[str, Any] = {"batch": count, "precision": precision, "eager": timed(run, runs, "timm")}
                if run.on_cuda:
                    try:
                        graphs = {name: partial(RecordedCalls(each), batch) for name, each in placed.items()}
                        row["graph"] = timed(run, graphs, "timm")
                    except Exception as error:
                        row["failures"] = {"CUDA graph": short(error)}
                part["speeds"].append(row)
    run.save()


# ------------------------------------------------------------------------------------------------------------ page


def speed_text(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    value, low, high = row["faster"]
    return f"{value:.2f}x [{low:.2f}, {high:.2f}]"


def notes_of(result: Mapping[str, Any]) -> list[str]:
    """Returns lines that say what a section could not do."""
    lines = [f"Not finished: {result[key]}." for key in ("error", "skipped") if key in result]
    if "left_out" in result:
        lines.append(f"Left out, for lack of time: {'; '.join(result['left_out'])}.")
    for cell in result.get("cells", ()):
        for name, problem in cell.get("failures", {}).items():
            lines.append(f"ViT-{cell['model']}, batch {cell['batch']}, {name}: {problem}.")
    return lines


def speed_tables(cells: Sequence[Mapping[str, Any]], mode: str, title: str) -> list[str]:
    """Returns tables with one line per model and batch size, and one column per variant."""
    cells = [cell for cell in cells if mode in cell]
    if not cells:
        return []
    names = list(dict.fromkeys(name for cell in cells for name in cell[mode] if name != "timm"))
    rows = [
        [
            f"ViT-{cell['model']}",
            str(cell["batch"]),
            f"{cell[mode]['timm']['ms']:.2f}",
            f"{1000 * cell['batch'] / cell[mode]['timm']['ms']:,.0f}",
            *(speed_text(cell[mode].get(name)) for name in names),
        ]
        for cell in cells
    ]
    return [f"**{title}**", "", markdown_table(["model", "batch", "timm, ms", "timm, images/s", *names], rows), ""]


def page(record: Mapping[str, Any]) -> str:
    """Returns the page in Markdown."""
    facts, sections = record["facts"], record["sections"]
    lines = [
        "# On a GPU: measured",
        "",
        f"*{facts['date']}. {facts['device']}, torch {facts['torch']}, Triton {facts['triton']}, timm {facts['timm']}, "
        f"{facts['precision']}, 224 x 224 pixels; random weights except in the last section. Times are medians of "
        "CUDA events, models in turns in one run; speeds are relative to timm's model in the same mode, with 95 % "
        f"intervals. {facts['seconds']:.0f} s in all, by `{facts['command']}`.*",
        "",
    ]
    for name, title in TITLES.items():
        result = sections.get(name)
        if result is None:
            continue
        lines += [f"## {title}", ""]
        lines += RENDERED[name](result)
        notes = notes_of(result)
        lines += ["", *(f"- {note}" for note in notes), ""] if notes else [""]
    return "\n".join(lines)


def tests_text(result: Mapping[str, Any]) -> list[str]:
    counts = ", ".join(f"{count} {name}" for name, count in result.get("counts", {}).items())
    return [f"`pytest {' '.join(TESTS)} -m gpu --all`: {counts} in {result['seconds']} s.", *(
        f"- {line}" for line in result.get("failures", ())
    )]  # fmt: skip


def eager_text(result: Mapping[str, Any]) -> list[str]:
    cells = result.get("cells", ())
    lines = [*speed_tables(cells, "eager", "Eager"), *speed_tables(cells, "graph", "CUDA graphs of the eager kernels")]
    shares = {name: share for cell in cells for name, share in cell.get("macs", {}).items()}
    lines.append("Shares of the MACs: " + ", ".join(f"{name} {share:.2f}" for name, share in shares.items()) + ".")
    largest = max((cell["difference"] for cell in cells), default=0.0)
    lines.append(f"The outputs of the unchanged models differ from timm's by at most {largest:.1e} of the largest one.")
    rows = []
    for cell in cells:
        for name, row in cell["eager"].items():
            if row.get("kernels"):
                rows.append(
                    [f"ViT-{cell['model']}, {cell['batch']}, {name}", str(row["kernels"]["launches"]),
                     f"{row['kernels']['device_ms']:.2f}", str(sum(row["waits"].values())),
                     f"{row['peak_bytes'] / 1e6:,.0f}", f"{row['weights_bytes'] / 1e6:,.0f}"]
                )  # fmt: skip
    if rows:
        head = ["model", "kernels", "ms on the device", "waits for the device", "peak memory, MB", "weights, MB"]
        lines += ["", markdown_table(head, rows)]
    return lines


def compiled_counts(cell: Mapping[str, Any], name: str) -> list[str]:
    counts = cell["counts"].get(name, {})
    # On a CPU, library kernels are not counted.
    launches = counts.get("launches", counts.get("generated kernels"))
    return [str(each) for each in (counts.get("graph breaks", "-"), launches or "-", cell["seconds"].get(name, "-"))]


def compiled_text(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for cell in result.get("cells", ()):
        if "speeds" not in cell:
            continue
        rows = [
            [name, f"{row['ms']:.3f}", speed_text(row), *compiled_counts(cell, name)]
            for name, row in cell["speeds"].items()
        ]
        title = f"**ViT-{cell['model']}, batch {cell['batch']}, compiled**"
        head = ["model", "ms", "speed", "graph breaks", "kernels", "seconds to compile"]
        lines += [title, "", markdown_table(head, rows), ""]
    return lines


def backend_text(result: Mapping[str, Any]) -> list[str]:
    cells = result.get("cells", ())
    names = list(dict.fromkeys(name for cell in cells for name in cell["speeds"]))
    rows = [
        [f"ViT-{cell['model']}", str(cell["batch"]), cell["ranks"], f"{cell['speeds']['fused, padded']['ms']:.3f}",
         *(speed_text(cell["speeds"].get(name)) for name in names[1:]),
         ", ".join(f"{name} {error:.0e}" for name, error in cell["errors"].items())]
        for cell in cells
    ]  # fmt: skip
    if not rows:
        return []
    head = ["layer of", "batch", "ranks and value dimensions", "fused, padded, ms", *names[1:], "relative errors"]
    return ["Speeds relative to the padded fused kernel (`auto`).", "", markdown_table(head, rows)]


def content_text(result: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, f"{each['to before']:.1e}", f"{each['to a copy']:.1e}"]
        for name, each in result.get("differences", {}).items()
    ]
    return [markdown_table(["change of all weights", "change of the outputs", "difference to a new copy"], rows)]


def real_text(result: Mapping[str, Any]) -> list[str]:
    lines = []
    claims: dict[str, dict[str, str]] = {}
    for device, part in result.get("workflow", {}).items():
        kept = f"{part['ranks']} score directions, {part['value_dims']} value dimensions, {part['params']:,} parameters"
        lines.append(f"- {device}: {part['seconds']} s; kept {kept}")
        for each in part["findings"]:
            value = "-" if each["value"] is None else f"{each['value']:.5g}"
            interval = "" if each["low"] is None else f" [{each['low']:.4g}, {each['high']:.4g}]"
            claims.setdefault(f"{each['claim']} ({each['unit']})", {})[device] = value + interval
    if claims:
        devices = list(result["workflow"])
        rows = [[claim, *(by_device.get(device, "-") for device in devices)] for claim, by_device in claims.items()]
        lines = [
            f"`{result['rules']}`, diagnosed on 64 images:",
            "",
            *lines,
            "",
            markdown_table(["", *devices], rows),
            "",
        ]
    for target, part in result.get("shrink", {}).items():
        if "summary" in part:
            call = f"attnrx.shrink(model.to('cuda'), data, {target}, effort='quick')"
            lines += [f"`{call}`, {part['seconds']} s: {part['summary']}", ""]
            cells = [{"model": f"T, shrunk, {row['precision']}", **row} for row in part["speeds"]]
            lines += speed_tables(cells, "eager", "Eager") + speed_tables(cells, "graph", "CUDA graphs")
        elif "error" in part:
            lines += [f"- shrink to {target}, after {part['seconds']} s: {part['error']}"]
    return lines


RENDERED: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "tests": tests_text,
    "eager": eager_text,
    "compiled": compiled_text,
    "backends": backend_text,
    "content": content_text,
    "real": real_text,
}
WORK: Mapping[str, Callable[[Run, dict[str, Any]], None]] = {
    "eager": eager_section,
    "compiled": compiled_section,
    "real": real_section,
    "tests": test_section,
    "backends": backend_section,
    "content": content_section,
}


def facts(run: Run, command: str) -> dict[str, Any]:
    import timm

    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": run.conditions.hardware,
        "torch": torch.__version__,
        "triton": version,
        "timm": timm.__version__,
        "precision": run.precision,
        "threads": torch.get_num_threads(),
        "command": command,
        "seconds": 0.0,
    }


def stop_late(run: Run) -> threading.Timer:
    """Starts a timer that saves the record and ends the process if a call into C++ exceeds the budget."""

    def end() -> None:
        run.record["stopped"] = "the budget was used up inside a call"
        run.record["facts"]["seconds"] = time.monotonic() - run.started
        write_text(run.out / "gpu.json", json.dumps(run.record, indent=1, default=str))
        write_text(run.out / "gpu.md", page(run.record))
        os._exit(3)

    timer = threading.Timer(run.budget + 12, end)  # 12 seconds more than the budget
    timer.daemon = True
    timer.start()
    return timer


def cell_of(text: str) -> Cell:
    size, _, batch = text.partition(":")
    if size not in MODELS or not batch.isdecimal() or not int(batch):
        raise argparse.ArgumentTypeError(f"{text!r} is not SIZE:BATCH with a size of {', '.join(MODELS)}, e.g. B:256")
    return Cell(size, int(batch))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="bfloat16")
    parser.add_argument("--budget", type=float, default=280.0, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER")
    parser.add_argument("--weights", type=Path, help="the safetensors file of timm's vit_tiny_patch16_224")
    parser.add_argument("--images", type=Path, help="the parquet file that --pack writes")
    parser.add_argument("--pack", type=Path, metavar="PARQUET", help="write --images from ImageNette, and end")
    parser.add_argument("--only", nargs="+", choices=tuple(WORK), default=tuple(WORK), help="these sections")
    parser.add_argument(
        "--cells",
        nargs="+",
        type=cell_of,
        default=EAGER,
        metavar="SIZE:BATCH",
        help="the models of the sections eager and compiled, e.g. T:64 B:256 (all)",
    )
    parser.add_argument("--tiny", action="store_true", help="small models and batches, for a test of this script")
    parser.add_argument("--render", action="store_true", help="write gpu.md from an earlier gpu.json, and end")
    arguments = parser.parse_args(words)
    # This script does not measure attnrx's C++ kernels for CPUs, and compiling them takes half a minute.
    os.environ.setdefault("ATTNRX_BUILD", "0")
    if arguments.pack is not None:
        if arguments.images is None:
            parser.error("--pack needs --images, the file to write.")
        pack(arguments.pack, arguments.images)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.render:
        write_text(arguments.out / "gpu.md", page(read_json(arguments.out / "gpu.json")))
        return
    run = Run(
        arguments.device,
        arguments.tiny,
        arguments.budget,
        arguments.out,
        arguments.weights,
        arguments.images,
        arguments.precision,
        {"sections": {}},
        time.monotonic(),
        tuple(arguments.only),
        tuple(arguments.cells),
    )
    run.record["facts"] = facts(run, "python benchmarks/gpu.py --weights W --images I")
    watch = stop_late(run)
    for name, work in WORK.items():
        if name in arguments.only:
            run.section(name, work)
    watch.cancel()
    run.record["facts"]["seconds"] = round(time.monotonic() - run.started, 1)
    run.save()
    write_text(run.out / "gpu.md", page(run.record))
    print(page(run.record))


if __name__ == "__main__":
    main()
