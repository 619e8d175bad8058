"""attnrx train: trains a model on a dataset and saves it in a folder."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli import options
from attnrx.cli.inputs import load_splits, parse_losses, splits_argument
from attnrx.cli.outcome import Outcome, as_percent
from attnrx.support.progress import Log
from attnrx.support.tables import aligned_table

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "train a model, or resume an interrupted run"
EXAMPLE = "attnrx train svda:cifar10 --data cifar10 --out runs/cifar10 --epochs 4 --seed 42"

PRECISIONS, PARALLEL = ("bf16", "fp32"), ("ddp", "fsdp")

# Models of the SVDA paper: a scenario fits any data of its image size. All others have weights, or the shape of a
# published model.
BUILT_FOR_DATA = ("svda", "dense")

LOSSES = "terms added to the task, e.g. target_rank:16:0.1 perturbation_robustness:layers=3/4 task:0 (no smoothing)"


def plain_fields() -> tuple[str, ...]:
    """Returns the fields of TrainingConfig that are one number or a flag."""
    fields = {name: field.value for name, field in options.parameters("TrainingConfig").items()}
    return tuple(
        name for name, kind in fields.items() if kind is bool or (isinstance(kind, options.Number) and not kind.several)
    )


def add(parser: options.Parser) -> None:
    options.add_model(parser)
    options.add_data(parser, "the training data")
    options.add_out(parser, "the folder of the run: model, history, training.json, checkpoints", folder=True)
    tokens = f"train with token pruning or merging: {options.POLICY}; predictors are initialized from --seed"
    options.option(parser, "--tokens", "POLICY", tokens)
    knobs = parser.add_argument_group("training")
    options.add_arguments(knobs, "TrainingConfig", *plain_fields(), precision=PRECISIONS, parallel=PARALLEL)
    options.option(knobs, "--losses", "LOSS", LOSSES, nargs="+")
    options.option(knobs, "--no-task", bool, "train without the task loss: labels are not read")
    options.option(knobs, "--teacher", "MODEL", "the teacher of distillation losses: a folder or timm:NAME")
    options.option(knobs, "--teacher-weights", "FILE", "the weights of a teacher timm:NAME, in a local file")


def run(arguments: Namespace, log: Log) -> Outcome:
    # The losses are parsed first, so that a typing error is reported before the dataset is loaded.
    config = rx.TrainingConfig(**_chosen(arguments))
    policy = None if arguments.tokens is None else rx.tokens.parse_policy(arguments.tokens)
    model, splits = _model_and_data(arguments, config.seed, log)
    if arguments.batch_size is None and len(splits.train) < config.batch_size:
        # At least four steps per epoch if there are enough images.
        config = replace(config, batch_size=max(1, len(splits.train) // 4))
        log(f"{splits.name} has {len(splits.train)} training images: a batch is {config.batch_size} of them")
    if policy is not None:
        # Before training, because predictors are trained with the model.
        model = _reducing(model, policy, config, log)
    trained = rx.train(model, splits, config, arguments.out, log=log)
    accuracy = trained.record["accuracy"]
    best = accuracy["best_epoch"]  # None where the validation images have no labels of the model
    rows = (
        ("test", as_percent(accuracy["test"])),
        ("validation, last epoch", as_percent(accuracy["validation"])),
        ("validation, best epoch" + ("" if best is None else f" ({best})"), as_percent(accuracy["best_validation"])),
    )
    record = {"model": str(trained.folder), **{key: trained.record[key] for key in ("accuracy", "steps", "seconds")}}
    return Outcome(record, (aligned_table(("", "accuracy"), rows), f"model and history: {trained.folder}"))


def _chosen(arguments: Namespace) -> dict[str, Any]:
    """Returns the given arguments of TrainingConfig; the others keep their defaults."""
    chosen = options.given_arguments(arguments, *plain_fields(), "precision", "parallel")
    teaching = {"teacher": arguments.teacher, "weights": arguments.teacher_weights}
    shared = {knob: value for knob, value in teaching.items() if value is not None}
    # Otherwise the default losses are those of TrainingConfig, with label smoothing.
    if arguments.losses or shared or arguments.no_task:
        chosen["losses"] = parse_losses(arguments.losses or (), shared, not arguments.no_task)
    return chosen


def _reducing(
    model: "nn.Module", policy: "rx.tokens.TokenPolicy", config: "rx.TrainingConfig", log: Log
) -> "nn.Module":
    """Attaches the token policy to the model, with predictors initialized from the seed of the run."""
    if policy.reducer.learned and "keep_ratio" not in [loss.name for loss in config.losses]:
        log(
            f"warning: {policy.reducer} is trained with sampled masks, and without the loss keep_ratio their shares "
            "may differ from the policy's; add --losses keep_ratio."
        )
    from attnrx.nouns.prescription import TokenPrescription

    tokens = TokenPrescription(policy, seed=config.seed)
    return rx.realize(model, rx.prescribe(model, {"tokens": tokens}))


def _model_and_data(arguments: Namespace, seed: int, log: Log) -> "tuple[nn.Module, rx.data.Splits]":
    """Returns model and data: data normalized for a model, or a new model with the data's shape and scale."""
    # A new model is built twice: this one states the image size that the data are loaded with.
    model = rx.load(arguments.model, seed, weights=arguments.weights, trust=arguments.trust)
    form = arguments.model.partition(":")[0]
    if form not in BUILT_FOR_DATA or Path(arguments.model).exists():
        return model, splits_argument(model, arguments)
    family = rx.models.family_of(model)
    channels, size, _ = family.input_shape(model)
    splits = load_splits(arguments, image_size=size)
    for note in splits.notes:
        log(f"{splits.name}: {note}")
    classes = len(splits.class_names)
    if (splits.channels, classes) != (channels, rx.models.num_outputs(*family.heads(model))):
        log(f"{arguments.model} is built for this data: {splits.channels} channels, {classes} classes")
    scale = splits.normalization
    shape = {"channels": splits.channels, "classes": classes, "image_size": splits.image_size}
    shape["geometry"] = splits.geometry
    return rx.models.build_model(arguments.model, seed, mean=scale.mean, std=scale.std, **shape), splits
