"""Compares the speeds of exported files with files from the vendor's own converter, in one interleaved run per cell.

    python benchmarks/runtimes.py --out runs/runtimes                       # ViT-Tiny, all cells
    python benchmarks/runtimes.py --only openvino-bf16 --batches 1 --threads 1 --rounds 60
    python benchmarks/runtimes.py --models runs/slim --only onnx --batches 1   # a folder that `attnrx shrink` wrote
    python benchmarks/runtimes.py --counts                                  # only operations by type, no timing
    python benchmarks/runtimes.py --only int8 --shapes static --batches 1 32 --data imagenette224.parquet \\
        --weights vit_tiny_patch16_224.safetensors --label-column imagenet1k_label --test-column ilsvrc_val

All speeds are relative to an anchor: timm's own model, converted by `openvino.convert_model`, or by `torch.onnx.export`
with its defaults. attnrx exports every other model, with a dynamic batch size. "static" compiles each file for one
batch size, and "free" for any batch size. All weights are random, including norms and biases, because a runtime removes
a scale of 1 and an offset of 0. If a cell was measured before, the folder contains its result, so an interrupted run
resumes.

With --weights and --data the weights come from a file, and every exported file is compared with timm's model on 500
test images. 8-bit files need both options and are quantized on 300 training images. The anchor uses the defaults of
NNCF or ONNX Runtime. For ONNX Runtime there is also "timm, percentiles", the most accurate file among several settings.
Only its matrix products are quantized, with a scale for every output feature, and its ranges omit the largest 0.001 %
of the activations.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import timm
import torch
from onnxruntime import quantization
from safetensors.torch import load_file

import attnrx as rx
from attnrx.data.model_data import images_for
from attnrx.support.storage import read_json, write_json
from attnrx.support.tables import markdown_table
from attnrx.vit.costs.measured import interleave, ratio_of
from attnrx.vit.models import attach_tokens_, family_of
from attnrx.vit.tokens import parse_policy

ANCHOR, UNCHANGED, PERCENTILES = "timm", "unchanged", "timm, percentiles"
MODELS = ("hidden=uniform_rank:0.5", "tokens=ward:0.7@4,7,10", "tokens=ward:0.4@5", "tokens=ward:13@every")
RUNTIMES = {"openvino-f32": "openvino", "openvino-bf16": "openvino(precision=bf16)", "onnx-f32": "onnx"}
RUNTIMES |= {"openvino-int8": "openvino(precision=int8)", "onnx-int8": "int8"}
CALIBRATED_ON, COMPARED_ON = 300, 500
HISTOGRAMS_ON = 60  # images for percentiles. More would not fit, because ONNX Runtime keeps all activations in memory.
ROUNDS = {1: 60, 8: 20, 32: 10}


def library_model_of(architecture: str, weights: Path | None) -> torch.nn.Module:
    """Returns the timm model, with a file's weights or with random weights."""
    torch.manual_seed(0)
    library_model = timm.create_model(architecture).eval()
    if weights is not None:
        library_model.load_state_dict(load_file(weights))
        return library_model
    with torch.no_grad():
        for parameter in library_model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return library_model


def model_of(name: str, library_model: torch.nn.Module) -> torch.nn.Module:
    """Returns the timm model in attnrx, compressed by a rule text, or the model in a folder."""
    if Path(name).is_dir():
        return rx.load(name).eval()
    model = rx.load(library_model)
    if name.startswith("tokens="):
        attach_tokens_(model, family_of(model), parse_policy(name.removeprefix("tokens=")))
    elif name != UNCHANGED:
        model = rx.realize(model, rx.prescribe(rx.diagnose(model, torch.randn(8, *images_of(1).shape[1:])), name))
    return model.eval()


def images_of(batch: int) -> torch.Tensor:
    """Returns a batch of noise images, [batch, 3, 224, 224]."""
    return torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def file_of(name: str, library_model: torch.nn.Module, to: str, folder: Path, images: torch.Tensor | None) -> Path:
    """Writes the file of a model, unless it exists. The images calibrate 8-bit files."""
    form, stem = rx.exporting.parse_format(to), "".join(letter if letter.isalnum() else "-" for letter in name)
    path = folder / f"{stem}-{''.join(letter for letter in to if letter.isalnum())}{form.suffix}"
    if path.exists():
        return path
    if name == PERCENTILES:
        assert images is not None
        anchor = file_of(ANCHOR, library_model, to, folder, images)
        return by_percentiles(anchor.with_name(f"float_{anchor.name}"), path, images[:HISTOGRAMS_ON])
    if name != ANCHOR:
        rx.export(model_of(name, library_model), path, form, calibration=images)
        return path
    model = rx.load(library_model)
    calibration = None if images is None else images_for(model, images, "calibration")
    subject = rx.exporting.ExportSubject.of(model, form, calibration=calibration)
    return rx.exporting.vendor_file(rx.exporting.bare_subject(library_model, subject), path, form).path


def by_percentiles(plain: Path, path: Path, images: torch.Tensor) -> Path:
    """Quantizes a float file to 8 bits by ONNX Runtime's static quantization, with ranges from percentiles."""
    inputs = ({"images": batch.numpy()} for batch in images.split(10))
    quantization.quantize_static(
        str(plain),
        str(path),
        SimpleNamespace(get_next=lambda: next(inputs, None)),
        calibrate_method=quantization.CalibrationMethod.Percentile,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
    )
    return path


def data_of(library_model: torch.nn.Module, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the images to calibrate on and the images to compare on, or None without data."""
    if options.data is None:
        return None
    columns = rx.data.Columns(label_column=options.label_column, test_column=options.test_column)
    data = rx.load_data(options.data, image_size=images_of(1).shape[-1], columns=columns)
    data = rx.adapt_preprocessing(data, rx.load(library_model))
    parts = data.train.take(CALIBRATED_ON), data.test.take(COMPARED_ON)
    calibrated, compared = (torch.cat([batch.images for batch in part.batches(50)]) for part in parts)
    return calibrated, compared


def compared(path: Path, runtime: str, library_model: torch.nn.Module, images: torch.Tensor) -> str:
    """Returns the KL divergence between timm's and a file's predictions, and how many predictions are unchanged."""
    run, size, found = opened(path, runtime, 25, torch.get_num_threads(), True), 25, []
    with torch.no_grad():
        wanted = torch.cat([library_model(batch) for batch in images.split(size)])
    whole = images[: len(images) // size * size]
    for batch in whole.split(size):
        found.append(torch.from_numpy(np.array(run(batch.numpy()))))
    answers, wanted = torch.cat(found).double().log_softmax(-1), wanted[: len(whole)].double().log_softmax(-1)
    divergence = torch.nn.functional.kl_div(answers, wanted, reduction="batchmean", log_target=True)
    agreement = (answers.argmax(-1) == wanted.argmax(-1)).double().mean()
    return f"KL {float(divergence):.4f}, {100 * float(agreement):.1f} % of {len(whole)} answers unchanged"


def opened(path: Path, runtime: str, batch: int, threads: int, is_static: bool) -> Callable[..., Any]:
    """Returns a function that runs the file once, on noise unless you pass images."""
    noise = images_of(batch).numpy()
    if path.suffix == ".onnx":
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if is_static:
            options.add_free_dimension_override_by_name("batch", batch)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda images=noise: session.run(None, {"images": images})[0]
    core = openvino.Core()
    model = core.read_model(path)
    if is_static:
        model.reshape(list(noise.shape))
    precision = runtime.rpartition("-")[2]
    hints = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32" if precision == "f32" else "bf16",  # for all operations that are not 8-bit
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = core.compile_model(model, "CPU", hints)
    return lambda images=noise: np.copy(compiled(images)[0])


def counts_of(path: Path) -> Counter[str]:
    """Returns the number of a file's operations by type, without constants, inputs and outputs."""
    if path.suffix == ".onnx":
        types = [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]
    else:
        types = [node.get_type_name() for node in openvino.Core().read_model(path).get_ordered_ops()]
    return Counter(name for name in types if name not in ("Constant", "Parameter", "Result"))


def measured(
    paths: Mapping[str, Path], cell: tuple[str, str, int, int], rounds: int | None, clock: str
) -> dict[str, Any]:
    """Times all files in turns, and returns each file's speed relative to the anchor, with its interval."""
    runtime, shape, batch, threads = cell
    runs = {name: opened(path, runtime, batch, threads, shape == "static") for name, path in paths.items()}
    seconds = interleave(runs, rounds=rounds or ROUNDS.get(batch, 10), warmup=3, clock=clock)
    speeds = {name: ratio_of(seconds[ANCHOR], times) for name, times in seconds.items() if name != ANCHOR}
    return {
        "anchor_seconds": float(seconds[ANCHOR].median()),
        "speeds": {name: [speed.value, speed.low, speed.high] for name, speed in speeds.items()},
    }


def main(words: Sequence[str] | None = None) -> None:
    """Writes the missing files, measures the missing cells, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="vit_tiny_patch16_224", metavar="NAME", help="of timm")
    parser.add_argument("--models", nargs="*", default=MODELS, metavar="RULES", help="or folders")
    parser.add_argument("--out", type=Path, default=Path("runs/runtimes"), metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT", help="runtimes whose names have this in them")
    parser.add_argument("--shapes", nargs="+", default=["static", "free"], choices=["static", "free"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, metavar="N", help="of every cell (60, 20 or 10 by batch size)")
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu: of one thread on a busy machine")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="safetensors, in timm's names")
    parser.add_argument("--data", metavar="DATA", help="images to quantize on, and to compare the files on")
    parser.add_argument("--label-column", metavar="NAME")
    parser.add_argument("--test-column", metavar="NAME")
    parser.add_argument("--counts", action="store_true", help="print the operations of the files and measure nothing")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    names, record, rows = (ANCHOR, UNCHANGED, *options.models), options.out / "speeds.json", []
    cells = read_json(record) if record.exists() else {}
    library_model = library_model_of(options.architecture, options.weights)
    data = data_of(library_model, options)
    folder = options.out / f"{options.architecture}-{'random' if options.weights is None else options.weights.stem}"
    folder.mkdir(exist_ok=True)
    for runtime in (name for name in RUNTIMES if options.only in name):
        if "int8" in runtime and data is None:
            print(f"{runtime}: left out, as it needs --weights and --data", file=sys.stderr)
            continue
        images = None if data is None else data[0]
        also = [PERCENTILES] * (runtime == "onnx-int8")
        paths = {name: file_of(name, library_model, RUNTIMES[runtime], folder, images) for name in [*names, *also]}
        if data is not None:
            for name, path in paths.items():
                print(f"{runtime} {name}: {compared(path, runtime, library_model, data[1])}", flush=True)
        if options.counts:
            for name, path in paths.items():
                counts = counts_of(path)
                print(f"{runtime} {name}: {counts.total()} operations", dict(counts.most_common()))
            continue
        for shape, batch, threads in product(options.shapes, options.batches, options.threads):
            cell = runtime, shape, batch, threads
            key = " ".join(map(str, (folder.name, *cell, options.clock, *options.models)))
            if key not in cells:
                cells[key] = measured(paths, cell, options.rounds, options.clock)
                write_json(record, cells)
                print(key, cells[key], file=sys.stderr, flush=True)
            speeds = cells[key]["speeds"].items()
            shown = {name: f"{value:.2f}x [{low:.2f}, {high:.2f}]" for name, (value, low, high) in speeds}
            shown = [shown.get(name, "-") for name in (*names[1:], PERCENTILES)]
            rows.append([*map(str, cell), f"{1000 * cells[key]['anchor_seconds']:.1f}", *shown])
    if rows:
        print(markdown_table(["runtime", "shape", "batch", "threads", "timm, ms", *names[1:], PERCENTILES], rows))


if __name__ == "__main__":
    main()
