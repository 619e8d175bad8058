"""Measures accuracy against speed for every method, without training, on a pre-trained model and its test images.

    python benchmarks/frontier.py MODEL --data DATA [--weights W] [--label-column L] [--test-column T]
    python benchmarks/frontier.py ... --chart docs/assets/frontier.svg      # with the chart for the README

Our methods are `plan` (`attnrx shrink`) and Ward's merging in every layer. They are compared with ToMe at the same
numbers of merged patches, EViT, Torch-Pruning and SVD-LLM, each implemented from its paper or its library. All models
are timed in turns with the unchanged library model, in one run per batch size and number of threads. The folder stores
the results, so an interrupted run resumes.
"""

import argparse
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from charts import Chart, Curve, CurvePoint
from torch import nn

import attnrx as rx
from attnrx.cli.options import add_data, add_model, model_argument, splits_argument
from attnrx.nouns.plan import Plan
from attnrx.show.checks import Accuracy, Comparison, Fidelity
from attnrx.support.storage import read_json, write_json, write_text
from attnrx.support.subprocess_runner import run_in_subprocess
from attnrx.support.tables import markdown_table
from attnrx.vit.attention import Attention
from attnrx.vit.costs import Conditions, LatencyProtocol, compare_latencies
from attnrx.vit.models import attach_tokens_, family_of, working_copy
from attnrx.vit.tokens import parse_policy
from attnrx_lab.comparison.methods import Method, MethodBench

# The names of the methods, with the rule text of each point on the curve.
POLICIES: Mapping[str, tuple[str, ...]] = {
    "Ward": ("ward:8@every", "ward:13@every", "ward:16@every"),
    "ToMe": ("tome:8@every", "tome:13@every", "tome:16@every"),
    "EViT": ("evit:0.9@4,7,10", "evit:0.8@4,7,10", "evit:0.7@4,7,10"),
}
BASELINES = {"Torch-Pruning": "baseline:torch_pruning", "SVD-LLM": "baseline:svd_llm"}
SHARES = (0.9, 0.8, 0.7)  # of the MACs
FASTER = (1.3, 1.6, 1.9)  # the targets of the plans, at the batch size and threads of the chart
CHART_BATCH, CHART_THREADS = 32, 1
BATCHES, THREADS = (1, 8, 32, 64), (1, 2)
CALIBRATION, DIAGNOSED = 192, 64  # how many training images to calibrate on, and how many of these to diagnose on
LOWEST = -12.0  # change of accuracy in points. Worse results appear only in the table.
COLOURS = ("#1f6fb4", "#b35a14", "#2a7a4b", "#7a4fa3", "#8a8578", "#b0305c")


def models(model: nn.Module, splits: rx.data.Splits, folder: Path) -> Iterator[tuple[str, str, nn.Module]]:
    """Yields the name of a method, a point on its curve, and the smaller model."""
    for method, texts in POLICIES.items():
        for text in texts:
            merging = copy.deepcopy(model)
            attach_tokens_(merging, family_of(merging), parse_policy(text))
            yield method, text, merging
    images = splits.train.take(CALIBRATION)
    bench = MethodBench(model, rx.diagnose(model, images, images=DIAGNOSED, batch_size=32), images, splits.test)
    before = family_of(model).costs(model).macs
    for name, text in BASELINES.items():
        compressor = bench.compressor(Method.parse(f"{name}={text}"))
        for share in SHARES:
            for kept_share in torch.arange(1.0, 0.1, -0.02).tolist():
                if compressor.costs(kept_share).macs <= share * before:
                    yield name, f"{100 * share:.0f} % of the MACs", compressor.make(kept_share)
                    break
    for faster in FASTER:
        yield "plan", f"target {faster:g}x", planned(model, splits, faster, folder / f"plan-{faster:g}")


def planned(model: nn.Module, splits: rx.data.Splits, faster: float, folder: Path) -> nn.Module:
    """Returns the model that a plan makes. The plan is loaded from the folder, or made and saved there."""
    if not (folder / "plan.json").exists():
        settings = rx.planning.PlanSettings.preset(
            "quick", batch=CHART_BATCH, conditions=Conditions(threads=CHART_THREADS), log=log
        )
        images = splits.train.take(CALIBRATION)
        diagnosis = rx.diagnose(model, images, moments=True, images=DIAGNOSED, batch_size=32)
        target = rx.planning.Target("latency", 1 / faster)
        # The plan's predictions are measured on validation images, because the plan was not made from them.
        plan: Plan = rx.plan(model, diagnosis, target, images, splits.validation.take(64), settings=settings)
        plan.save(folder)
    return rx.realize(model, rx.Prescription.load(folder / "prescription.json"))


def quality(model: nn.Module, candidate: nn.Module, splits: rx.data.Splits) -> dict[str, Any]:
    """Returns the paired change of accuracy in points and the divergence on the test images, with intervals."""
    compared = Comparison(candidate, model, splits.test, batch_size=32)
    findings = {finding.details["quantity"]: finding for finding in (*Accuracy(None)(compared), *Fidelity()(compared))}
    return {
        name: {"value": finding.value, "low": finding.low, "high": finding.high, "n": finding.n}
        for name, finding in (("change", findings["accuracy change"]), ("divergence", findings["divergence"]))
    }


def speeds(
    candidates: Mapping[str, nn.Module], model: nn.Module, batch: int, threads: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Times all models in turns with the library's model, in a separate process."""
    library_model, shape = family_of(model).library_model(model), family_of(model).input_shape(model)
    images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
    protocol = LatencyProtocol(Conditions(threads=threads), rounds, warmup=2)
    # Models are timed in a new process, because memory allocation is slower or faster after other work.
    sides = candidates, library_model, images, protocol, model
    comparisons = run_in_subprocess(compare_latencies, *sides, on_line=log)
    # The speed-up by compression is relative to the unchanged model in the same kernels. Without attnrx attention, a
    # model runs in the library's kernels, so its reference is the library's model.
    attnrx = {name for name, each in candidates.items() if any(isinstance(part, Attention) for part in each.modules())}
    compression = {name: each.by_compression if name in attnrx else each.faster for name, each in comparisons.items()}
    return {
        name: {
            "batch": batch, "threads": threads, "rounds": rounds, "milliseconds": 1000 * each.candidate.median,
            "library_milliseconds": 1000 * each.reference.median, "hardware": each.hardware,
            "torch": each.torch_version, "faster": each.faster.value, "low": each.faster.low, "high": each.faster.high,
            "by_compression": compression[name].value, "kernels": "attnrx" if name in attnrx else "the library",
        }
        for name, each in comparisons.items()
    }  # fmt: skip


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(model: nn.Module, splits: rx.data.Splits, folder: Path) -> dict[str, Any]:
    """Measures the results that are not in the folder yet, and returns all results."""
    # After an interruption, saved plans are realized again, and measured numbers are loaded.
    path = folder / "frontier.json"
    record: dict[str, Any] = read_json(path) if path.exists() else {"quality": {}, "speed": {}}
    # Also measures the unchanged model in attnrx's kernels, because these kernels contribute to every speed-up.
    candidates: dict[str, nn.Module] = {"unchanged, attnrx": model}
    for method, point, candidate in models(model, splits, folder):
        name = f"{method}, {point}"
        candidates[name] = candidate
        if name not in record["quality"]:
            log(f"accuracy of {name}")
            record["quality"][name] = quality(model, candidate, splits)
            write_json(path, record)
    for batch in BATCHES:
        for threads in THREADS:
            cell = f"batch {batch}, {threads} threads"
            if cell not in record["speed"]:
                log(f"speed at {cell}")
                rounds = max(6, min(40, 200 // batch))  # fewer for large batches, because their rounds take longer
                record["speed"][cell] = speeds(candidates, model, batch, threads, rounds)
                write_json(path, record)
    return record


def table(record: Mapping[str, Any]) -> str:
    """Returns one row per model with accuracy, divergence, and the speed relative to the library's model.

    There is one speed per batch size and number of threads. The combination in the chart also has the speed relative to
    the unchanged model in the same kernels.
    """
    cells, charted = list(record["speed"]), record["speed"][f"batch {CHART_BATCH}, {CHART_THREADS} threads"]
    rows = []
    for name in record["speed"][cells[0]]:
        values = ("-", "-")
        if (measures := record["quality"].get(name)) is not None:  # the unchanged model has no measures
            values = (_value(measures["change"], "+.1f"), f"{measures['divergence']['value']:.3f}")
        fast = [record["speed"][cell][name] for cell in cells]
        rows.append(
            (
                name,
                *values,
                f"{charted[name]['by_compression']:.2f}x in the kernels of {charted[name]['kernels']}",
                *(f"{each['faster']:.2f}x [{each['low']:.2f}, {each['high']:.2f}]" for each in fast),
            )
        )
    by_compression = f"by compression, batch {CHART_BATCH}, {CHART_THREADS} threads"
    return markdown_table(("model", "accuracy, points", "KL", by_compression, *cells), rows)


def _value(estimate: Mapping[str, Any], form: str) -> str:
    return f"{estimate['value']:{form}} [{estimate['low']:{form}}, {estimate['high']:{form}}]"


def chart(record: Mapping[str, Any]) -> str:
    """Returns the chart as a stand-alone SVG picture."""
    speed = record["speed"][f"batch {CHART_BATCH}, {CHART_THREADS} threads"]
    methods: dict[str, list[CurvePoint]] = {}
    for name, measures in record["quality"].items():
        change, method = measures["change"], name.partition(",")[0]
        if change["value"] < LOWEST:  # such a point would squeeze the axis for all others
            continue
        # Speeds are relative to the unchanged model in the same kernels, because methods run in different kernels.
        point = CurvePoint(speed[name]["by_compression"], change["value"], change["low"], change["high"], name)
        methods.setdefault(method, []).append(point)
    order = sorted(methods, key=lambda method: method != "plan")  # ours has the first colour
    curves = tuple(
        Curve(method, tuple(sorted(methods[method], key=lambda point: point.x)), index)
        for index, method in enumerate(order)
    )
    labels = "times faster than the unchanged model in the same kernels", "change of accuracy, points"
    drawing = Chart("accuracy against speed", *labels, curves)
    colours = "".join(f".style-{index}{{color:{colour}}}" for index, colour in enumerate(COLOURS))
    style = (
        "<style>text{font:11px system-ui,sans-serif;fill:#57606a}.grid{stroke:#8884;stroke-width:.6}"
        ".axis,.tick{stroke:#57606a}.curve{fill:none;stroke:currentColor;stroke-width:1.6}"
        f".whisker{{fill:none;stroke:currentColor;opacity:.6}}.band{{fill:currentColor;opacity:.16}}.marker{{fill:currentColor}}{colours}"
        "@media(prefers-color-scheme:dark){text{fill:#d0d7de}.grid{stroke:#fff4}.axis,.tick{stroke:#d0d7de}}</style>"
    )
    legend = "".join(
        f'<g class="style-{index}" transform="translate(362 {34 + 20 * index})">'
        f'<path class="marker" d="M-4 0h8v3h-8z"/><text x="9" y="4">{curve.name}</text></g>'
        for index, curve in enumerate(curves)
    )
    # A README can show only a separate file. The file needs the namespace, the style, and room for a legend.
    svg = drawing.draw().replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    svg = svg.replace('viewBox="0 0 360 230"', 'viewBox="0 0 460 230"').replace(
        'width="360" height="230"', 'width="690" height="345"'
    )
    return svg.replace("</svg>", f"{style}{legend}</svg>")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    add_data(parser, "training images for the methods, test images for the measurement")
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"), metavar="FOLDER")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="writes the chart, too")
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust).eval()
    splits = splits_argument(model, arguments)
    with torch.inference_mode(False):
        record = measure(working_copy(model), splits, arguments.out)  # the baselines read attnrx attention
    print(table(record))
    if arguments.chart is not None:
        write_text(arguments.chart, chart(record))


if __name__ == "__main__":
    main()
