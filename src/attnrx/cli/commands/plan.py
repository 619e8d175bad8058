"""attnrx plan: searches a prescription of ranks and tokens for a target, and writes it with its predictions."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import attnrx as rx
from attnrx.cli import options
from attnrx.cli.inputs import default_device, model_argument, require_clock, splits_argument
from attnrx.cli.outcome import Outcome, Table, as_percent
from attnrx.cli.parser import Parser
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log

if TYPE_CHECKING:
    from torch import nn

DIAGNOSED = 96  # images of the diagnosis that is made if none is given
SUMMARY = "allocate one budget to ranks and tokens, for a target of latency, MACs, parameters or accuracy"
EXAMPLE = "attnrx plan timm:vit_tiny_patch16_224 --target latency=0.6x --data imagenette224.parquet --out runs/plan"


def add(parser: Parser) -> None:
    options.add_model(parser, "the model to plan for")
    targets = "latency=0.6x, macs=0.5x or params=0.7x of the original's, or max-drop=1pt of its top-1 accuracy"
    options.option(parser, "--target", "TARGET", targets, required=True)
    options.add_data(parser, "the images: training images for the plan, validation images for its predictions")
    options.add_out(parser, "the folder of plan.json and prescription.json", folder=True)
    space = parser.add_argument_group("search space")
    options.option(space, "--axes", "AXIS,AXIS", "qk, vo, mlp (fc1 and fc2) and tokens (all)")
    options.option(
        space, "--reducer", "REDUCER", "the token reducer, untrained (ward, by relevance if there is a class token)"
    )
    search = parser.add_argument_group("search")
    options.option(search, "--diagnosis", "FILE", "of this model (made on the first 96 training images)")
    options.option(search, "--effort", ("quick", "normal", "thorough"), "how much is measured", "normal")
    options.option(search, "--images", options.COUNT, "training images for the plan (192, 512 or 1024, by effort)")
    options.option(search, "--other-images", options.COUNT, "validation images for its predictions", 256)
    options.option(search, "--trials", options.TRIALS, "plans to realize and measure (10, 32 or 48, by effort)")
    timing = parser.add_argument_group("measured latency, for targets of latency only")
    options.option(timing, "--batch", options.BATCH, "batch size (32)")
    options.option(timing, "--threads", options.THREADS, "CPU threads (torch's default)")
    options.option(timing, "--precision", ("float32", "bfloat16", "float16"), "(float32)")
    options.option(timing, "--clock", ("wall", "cpu", "cuda"), "cpu: CPU time, for a busy machine")
    options.option(timing, "--rounds", options.ROUNDS, "rounds in which every block is timed (5, 5 or 7, by effort)")
    options.add_running(parser, 32)


def run(arguments: Namespace, log: Log) -> Outcome:
    # Before the model is loaded, so that a typing error is reported at once.
    target = rx.planning.Target.parse(arguments.target)
    _require_latency(arguments, target)
    settings = replace(_settings(arguments), log=log)
    from attnrx.verbs.preflight import preflight  # imports torch

    preflight(folder=arguments.out)
    model = model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    splits = splits_argument(model, arguments, distinct=True)
    for note in splits.notes:
        log(f"{splits.name}: {note}")
    # Training images for the plan and others for its predictions, which would be too good on images it was chosen by.
    images = splits.train.take(arguments.images or min(settings.num_images, len(splits.train)))
    others = splits.validation.take(min(arguments.other_images, len(splits.validation)))
    plan = rx.plan(model, _diagnosis(arguments, model, images), target, images, others, settings=settings)
    path = plan.save(arguments.out)
    rows = tuple(
        (_cost_text(plan, point.cost), f"{point.sensitivity:.3g}", f"{point.divergence:.3g}") for point in plan.front
    )
    front = Table((f"predicted {plan.minimized}", f"predicted {_unit(plan)}", f"measured {_unit(plan)}"), rows)
    prescription = Path(arguments.out) / "prescription.json"
    return Outcome(
        rx.serialization.read_json(path),
        (*plan.explained, front, *_predictions(plan), f"plan: {path}", f"prescription: {prescription}"),
    )


def _require_latency(arguments: Namespace, target: "rx.planning.Target") -> None:
    """Raises InvalidInput for options of a measurement that this target does not need."""
    given = [name for name in ("batch", "threads", "precision", "clock", "rounds") if getattr(arguments, name)]
    if given and target.minimized != "latency":
        raise InvalidInput(
            f"--{given[0]} belongs to the measurement of latency, and the target {target} spends "
            f"{target.minimized}; omit it, or give a target of latency."
        )
    require_clock(arguments.clock, arguments.device or default_device())


def _settings(arguments: Namespace) -> "rx.planning.PlanSettings":
    device, precision = arguments.device or default_device(), arguments.precision or "float32"
    conditions = rx.costs.Conditions(device, precision, arguments.threads)
    # The effort sets what the options leave open.
    given = options.given_arguments(arguments, "reducer", "batch", "clock", "rounds", "trials")
    if arguments.axes is not None:
        given["axes"] = tuple(arguments.axes.split(","))
    return rx.planning.PlanSettings.preset(
        arguments.effort, conditions=conditions, seed=arguments.seed, batch_size=arguments.batch_size, **given
    )


def _diagnosis(arguments: Namespace, model: "nn.Module", images: "rx.data.ImageSet") -> "rx.Diagnosis":
    if arguments.diagnosis is None:
        # With moments, which the plan needs for values and MLP.
        return rx.diagnose(
            model, images, moments=True, images=min(DIAGNOSED, len(images)), batch_size=arguments.batch_size
        )
    diagnosis = rx.Diagnosis.load(arguments.diagnosis)
    if diagnosis.fingerprint != rx.models.model_fingerprint(model):
        raise InvalidInput(f"--diagnosis {arguments.diagnosis} is of another model; diagnose this one, or omit it.")
    return diagnosis


def _cost_text(plan: "rx.planning.Plan", cost: float) -> str:
    """Formats a cost as a share of the original's: a latency as a speed."""
    return (
        f"{1 / cost:.2f}x faster"
        if plan.minimized == "latency"
        else f"{as_percent(cost)} of the original's {plan.minimized}"
    )


def _unit(plan: "rx.planning.Plan") -> str:
    """Returns the unit of the divergence, or its name where it has none, as for embeddings."""
    return plan.outputs.unit or plan.outputs.distance


def _predictions(plan: "rx.planning.Plan") -> tuple[str, ...]:
    lines = [f"predicted: {_cost_text(plan, plan.cost)}"]
    if plan.measured is not None:
        speed = plan.measured
        lines.append(
            f"measured: {speed['faster']:.2f}x faster [{speed['low']:.2f}, {speed['high']:.2f}] than the original, "
            f"batch {speed['batch']}, {speed['threads']} threads, {speed['precision']}, {speed['hardware']}"
        )
    for name, scale, unit in (("divergence", 1.0, _unit(plan)), ("agreement", 100.0, "%"), ("change", 100.0, "points")):
        expected = plan.expected.get(name)
        if expected is None:  # no labels, no accuracy
            continue
        low, high = expected.interval(expected.images)
        lines.append(
            f"{name}: {scale * expected.value:.4g} {unit}, prediction interval on {expected.images} other images "
            f"{scale * low:.4g} to {scale * high:.4g}"
        )
    return tuple(lines)
