"""attnrx plan: a model, images and a target in; a prescription over ranks and tokens, with its promises, out."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import attnrx as rx
from attnrx.cli.inputs import load_model, splits_for
from attnrx.cli.options import BATCH, COUNT, ROUNDS, THREADS, TRIALS
from attnrx.cli.outcome import Outcome, Table, percent
from attnrx.cli.outputs import FOLDER
from attnrx.cli.parser import Parser, add_data, add_model, add_out, add_running
from attnrx.errors import InvalidInput
from attnrx.progress import Log

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "share one budget out over ranks and tokens, for a target of latency, MACs, parameters or accuracy"
EXAMPLE = "attnrx plan timm:vit_tiny_patch16_224 --target latency=0.6x --data imagenette224.parquet --out runs/plan"


def add(parser: Parser) -> None:
    """Declares the options."""
    add_model(parser, "what to plan for")
    parser.add_argument(
        "--target",
        required=True,
        metavar="TARGET",
        help="latency=0.6x, macs=0.5x or params=0.7x of the original's, or max-drop=1pt of its top-1 accuracy",
    )
    parser.add_argument("--spend", choices=("latency", "macs", "params"), help="what max-drop is to buy (macs)")
    add_data(parser, "images to measure on: training images to plan by, validation images to promise by")
    add_out(parser, "the folder of plan.json and prescription.json", writes=FOLDER)
    chosen = parser.add_argument_group("what may be chosen")
    chosen.add_argument("--axes", metavar="AXIS,AXIS", help="qk, vo, mlp (fc1 and fc2) and tokens (all)")
    chosen.add_argument("--reducer", default="ward", metavar="REDUCER", help="how tokens leave, untrained (ward)")
    sought = parser.add_argument_group("how it is sought")
    sought.add_argument("--diagnosis", metavar="FILE", help="of this model (made on the first 96 training images)")
    sought.add_argument("--images", type=COUNT, default=1024, metavar="N", help="training images to plan by (1024)")
    sought.add_argument("--other-images", type=COUNT, default=256, metavar="N", help="images to promise by (256)")
    sought.add_argument("--trials", type=TRIALS, default=48, metavar="N", help="plans to make and measure (48)")
    sought.add_argument("--storage", metavar="PLACE", help="where trials are kept: a file, or an address of Optuna")
    timing = parser.add_argument_group("the clock, for latency")
    timing.add_argument("--batch", type=BATCH, default=32, metavar="N", help="images at once (32)")
    timing.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads (as many as torch takes)")
    timing.add_argument("--precision", default="float32", choices=("float32", "bfloat16", "float16"))
    timing.add_argument("--clock", choices=("wall", "cpu", "cuda"), help="cpu: for a machine that is busy")
    timing.add_argument(
        "--rounds", type=ROUNDS, default=7, metavar="N", help="rounds in which every block is timed (7)"
    )
    add_running(parser, 32)


def run(arguments: Namespace, log: Log) -> Outcome:
    """Plans, and tells every choice."""
    target = rx.planning.Target.parse(arguments.target, arguments.spend)
    settings = replace(_ways(arguments), log=log)
    model = load_model(arguments.model, arguments.device, arguments.weights, arguments.trust)
    splits = splits_for(model, arguments)
    images = splits.train.take(arguments.images)
    others = splits.validation.take(arguments.other_images)
    plan = rx.plan(model, _diagnosis(arguments, model, images), target, images, others, settings=settings)
    path = plan.save(arguments.out)
    rows = tuple((f"{point.cost:.3f}", f"{point.sensitivity:.3g}", f"{point.divergence:.3g}") for point in plan.front)
    front = Table((f"share of the {plan.spend}", "predicted nats", "measured nats"), rows)
    prescription = Path(arguments.out) / "prescription.json"
    return Outcome(
        rx.storage.read_json(path),
        (*plan.explained, front, *_promised(plan), f"plan: {path}", f"prescription: {prescription}"),
    )


def _ways(arguments: Namespace) -> "rx.planning.PlanSettings":
    conditions = rx.costs.Conditions(_device(arguments), arguments.precision, arguments.threads)
    timing = rx.planning.TimingSettings(
        arguments.batch, conditions, arguments.timing or ("cuda" if conditions.on_cuda else "wall"), arguments.rounds
    )
    search = rx.planning.Search(arguments.trials, arguments.seed, arguments.storage)
    axes = rx.planning.AXES if arguments.axes is None else tuple(arguments.axes.split(","))
    return rx.planning.PlanSettings(axes, arguments.reducer, search, timing, arguments.batch_size)


def _device(arguments: Namespace) -> str:
    """Returns where the model will run."""
    import torch

    return arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _diagnosis(arguments: Namespace, model: "nn.Module", images: "rx.data.ImageSet") -> "rx.Diagnosis":
    if arguments.diagnosis is None:
        spectra = tuple(layer.spectrum() for layer in rx.models.family_of(model).attention(model))
        diagnostics = rx.diagnostics.suited(spectra, moments=True)
        few = min(96, len(images))
        return rx.diagnose(model, images, diagnostics=diagnostics, images=few, batch_size=arguments.batch_size)
    found = rx.Diagnosis.load(arguments.diagnosis)
    if found.fingerprint != rx.models.model_fingerprint(model):
        raise InvalidInput(
            f"--diagnosis {arguments.diagnosis} is of another model; diagnose this one, or leave it out."
        )
    return found


def _promised(plan: "rx.planning.Plan") -> tuple[str, ...]:
    lines = [f"{percent(plan.cost)} of the original's {plan.spend} by the prices"]
    if plan.measured is not None:
        ratio = plan.measured
        lines.append(
            f"by measured latency {ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] of the unchanged "
            f"model: batch {ratio['batch']}, {ratio['threads']} threads, {ratio['precision']}, {ratio['hardware']}"
        )
    for name, scale, unit in (("divergence", 1.0, "nats"), ("agreement", 100.0, "%"), ("change", 100.0, "points")):
        own = plan.expected.get(name)
        if own is None:  # no labels, no accuracy
            continue
        low, high = own.interval(own.images)
        lines.append(
            f"{name}: {scale * own.value:.4g} {unit}, on as many other images as these {own.images} between "
            f"{scale * low:.4g} and {scale * high:.4g}"
        )
    return tuple(lines)
