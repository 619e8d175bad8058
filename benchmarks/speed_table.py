"""Makes a table of the speeds of compressed models relative to timm's own model.

    python benchmarks/speed_table.py    # make bench
    python benchmarks/speed_table.py --only vit_tiny --rounds 20

The kept share of every method is chosen so that all methods have the same share of the original's MACs. All methods
are timed in turns with timm's model, in one run. If a cell was measured before, the folder contains its result, so an
interrupted run resumes. Weights are random, because latency does not depend on them.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attnrx as rx
from attnrx.support.storage import read_json, write_text
from attnrx.vit.costs import Conditions, LatencyProtocol
from attnrx.vit.models import build_model
from attnrx_lab.comparison import Method, Rates, compare_speeds, noise_bench

STAGES = "4,7,10"
# Kernels load this many numbers at once. If a rank is not a multiple, it takes longer than the next multiple.
HEADS, MLP = "uniform_rank:{share},multiple=4", "uniform_rank:{share},multiple=16"
OURS = {
    "ranks": f"qk={HEADS} vo={HEADS} fc1={MLP} fc2={MLP}",
    "Ward": f"tokens=ward:{{share}}@{STAGES}",
    "scores 0.75 and Ward": f"qk=uniform_rank:0.75,metric=mix tokens=ward:{{share}}@{STAGES}",
}
OTHERS = {
    "ToMe": f"tokens=tome:{{share}}@{STAGES}",
    "DynamicViT": f"tokens=dynamicvit:{{share}}@{STAGES}",
    "Torch-Pruning": "baseline:torch_pruning",
    "plain SVD": "baseline:svd",
}


@dataclass(frozen=True)
class Part:
    """A part of the table: one model in one runtime, at some batch sizes and numbers of threads."""

    model: str
    runtime: str
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.runtime}"


# Large models and slow compilers are timed in fewer cells, to limit the whole table to about twenty minutes.
PARTS = (
    Part("vit_tiny_patch16_224", "eager", (1, 8, 64), (1, 2), 8),
    Part("vit_tiny_patch16_224", "onnx", (1, 8, 64), (1, 2), 8),
    Part("vit_tiny_patch16_224", "compiled", (8,), (1,), 8),
    Part("deit_small_patch16_224", "eager", (1, 8, 64), (2,), 4),
    Part("deit_base_patch16_224", "eager", (1, 8), (2,), 4),
)


def measure(part: Part, macs: float, rounds: int | None, folder: Path) -> dict[str, Any]:
    """Returns the speeds of one part. They are loaded from the folder, or measured and saved there."""
    path = folder / f"{part.name}-{macs:g}.json"
    if path.exists():
        return read_json(path)
    # Every runtime except "eager" and "compiled" is a format of `attnrx export`. Then the exported files are timed.
    torch_runs = part.runtime in ("eager", "compiled")
    form = None if torch_runs else rx.exporting.parse_format(part.runtime)
    # The defaults of the conditions are the CPU and float32.
    conditions = [Conditions(threads=count, compiled=part.runtime == "compiled") for count in part.threads]
    protocols = tuple(LatencyProtocol(each, rounds or part.rounds, warmup=1) for each in conditions)
    model = build_model(f"timm:{part.model}", seed=0)
    methods = [Method.parse(f"{name}={text}") for name, text in {**OURS, **OTHERS}.items()]
    rates = Rates(part.batches, protocols, macs=(macs,), runtime=form)
    partial = path.with_suffix(".partial.json")  # `compare_speeds` writes this file after every batch size
    compare_speeds(noise_bench(model), methods, rates, log, partial)
    partial.rename(path)  # only a complete part has the final name
    return read_json(path)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(measured: dict[Part, dict[str, Any]]) -> str:
    """Returns one line for every model, runtime, batch size and number of threads, and one column for every method."""
    names = ["attnrx", *OURS, *OTHERS]
    head = ["model", "runs in", "batch", "threads", "timm, ms", *("unchanged" if n == "attnrx" else n for n in names)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for part, record in measured.items():
        cells: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
        for speed in record["speeds"]:
            latency = speed["latency"]
            # A record is ordered by method, but a line shows all methods at one batch size and thread count.
            cells.setdefault((latency["threads"], latency["batch"]), {})[speed["method"]] = speed
        for (threads, batch), speeds in cells.items():
            # All methods of a cell were timed against the same runs of the reference.
            library_model = next(iter(speeds.values()))["latency"]["reference"]["median"]
            row = [
                part.model.partition("_patch")[0],
                part.runtime,
                str(batch),
                str(threads),
                f"{1000 * library_model:.1f}",
            ]
            lines.append("| " + " | ".join([*row, *(_cell(speeds.get(name)) for name in names)]) + " |")
    return "\n".join(lines)


def _cell(speed: dict[str, Any] | None) -> str:
    if speed is None:
        return "-"
    value, low, high = speed["speedup"]
    return f"{value:.2f}x [{low:.2f}, {high:.2f}], {100 * speed['of_ideal']:.0f} %"


def caption(measured: dict[Part, dict[str, Any]], macs: float) -> str:
    """Returns the conditions of the table in words."""
    latency = next(iter(measured.values()))["speeds"][0]["latency"]
    return (
        f"{latency['hardware']}, torch {latency['torch_version']}, float32, {latency['clock']} clock; speed-ups are "
        "medians over rounds with 95 % intervals, against the model as timm ships it in the same runtime, all in turns "
        "in one run; then the share of the ideal, the inverse of the share of the MACs. Every method comes to "
        f"{100 * macs:g} % of the MACs."
    )


def main(words: Sequence[str] | None = None) -> None:
    """Measures the missing parts, and writes the table to speeds.md in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT", help="parts whose names have this in them")
    parser.add_argument("--macs", type=float, default=0.6, help="the share of the MACs (0.6)")
    parser.add_argument("--rounds", type=int, metavar="N", help="of every part (8 or 4)")
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if arguments.only in part.name]
    if not parts:
        raise SystemExit(f"no part has {arguments.only!r} in its name: {', '.join(part.name for part in PARTS)}.")
    measured = {part: measure(part, arguments.macs, arguments.rounds, arguments.out) for part in parts}
    text = f"{table(measured)}\n\n{caption(measured, arguments.macs)}"
    print(text)
    write_text(arguments.out / "speeds.md", text)


if __name__ == "__main__":
    main()
