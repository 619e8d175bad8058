"""attnrx train: a model and a dataset in, a folder with the trained model out."""

from argparse import BooleanOptionalAction, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.inputs import load_splits, splits_for
from attnrx.cli.losses import parse_losses
from attnrx.cli.options import BATCH, COUNT, NOT_NEGATIVE, NUMBER, SEED
from attnrx.cli.outcome import Outcome, Table, percent
from attnrx.cli.outputs import FOLDER
from attnrx.cli.parser import POLICY, Parser, add_data, add_model, add_out
from attnrx.progress import Log

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "train a model, or go on with a run that was stopped"
EXAMPLE = "attnrx train svda:cifar10 --data cifar10 --out runs/cifar10 --epochs 4 --seed 42"

# Knobs of TrainingConfig that are one number: the option, its type, its help with the default.
KNOBS = (
    ("epochs", COUNT, "passes over the training images (80)"),
    ("batch_size", BATCH, "images of one step, over all processes (256, or less where there are fewer images)"),
    ("accumulate", BATCH, "parts that every step runs in, one after another, for less memory (1)"),
    ("learning_rate", NUMBER, "peak of the warm-up and cosine (0.001)"),
    ("min_learning_rate", NUMBER, "where the cosine ends (0)"),
    ("warmup_learning_rate", NUMBER, "where the warm-up begins (0)"),
    ("layer_decay", NUMBER, "factor on the learning rate for every block before the last (1.0)"),
    ("joining", NUMBER, "share of the run over which blocks begin to train, the last first (0: all at once)"),
    ("weight_decay", NUMBER, "on matrices; never on biases, norms or strengths (0.05)"),
    ("warmup_epochs", NUMBER, "epochs of rising learning rate (5, at most a tenth of the run)"),
    ("gradient_clip", NUMBER, "largest norm of a gradient (1.0)"),
    ("strength_init", NUMBER, "set every strength to this first; larger lets attention sharpen sooner (1.0)"),
    ("strength_decay", NUMBER, "weight decay of the strengths; pulls the weak ones to zero (0)"),
    ("strength_learning_rate", NUMBER, "factor on the strengths' learning rate; spreads them sooner (1.0)"),
    ("predictor_learning_rate", NUMBER, "factor on the learning rate of the predictors of tokens that leave (10)"),
    ("ema", NUMBER, "decay of a running mean of the weights, which is then saved (off)"),
    ("seed", SEED, "weights, order, augmentation and noise (42)"),
    ("checkpoint_every", COUNT, "steps between checkpoints (500)"),
)


def add(parser: Parser) -> None:
    """Declares the options."""
    add_model(parser)
    add_data(parser, "what to train on")
    add_out(parser, "the folder of the run: model, history, training.json, checkpoints", writes=FOLDER)
    parser.add_argument(
        "--tokens",
        metavar="POLICY",
        help=f"let tokens leave the model, and train it so: {POLICY}; predictors begin fresh, from --seed",
    )
    parser.add_argument("--resume", action=BooleanOptionalAction, default=True, help="go on with the run in --out")
    parser.add_argument("--tensorboard", action="store_true", help="log to TensorBoard in --out too")
    knobs = parser.add_argument_group("training")
    for name, kind, message in KNOBS:
        knobs.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar="X" if kind is NUMBER else "N", help=message
        )
    knobs.add_argument("--precision", choices=("bf16", "fp32"), help="of the forward pass (bf16)")
    knobs.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        help="with several processes (accelerate launch, torchrun): each has a copy of the model, or a part (ddp)",
    )
    knobs.add_argument("--compile", action="store_true", help="train through torch.compile")
    knobs.add_argument(
        "--losses",
        nargs="+",
        metavar="LOSS",
        help="terms beside the task, e.g. target_rank:16:0.1 perturbation_robustness; task:0 turns smoothing off",
    )
    knobs.add_argument("--no-task", action="store_true", help="without the task: labels are not read")
    knobs.add_argument("--teacher", metavar="MODEL", help="a folder or timm:NAME that the losses learn from")
    knobs.add_argument("--teacher-weights", metavar="FILE", help="the weights of a teacher timm:NAME, in a local file")
    knobs.add_argument("--frozen", nargs="+", metavar="NAME", help="parameters that stay, e.g. 'source.patch_embed'")
    knobs.add_argument("--nonnegative-fusion", action="store_true", help="keep shared directions' strengths above zero")
    knobs.add_argument("--mixup", type=NOT_NEGATIVE, metavar="A", help="blend images, shares from Beta(A, A) (off)")
    knobs.add_argument("--cutmix", type=NOT_NEGATIVE, metavar="A", help="paste parts, shares from Beta(A, A) (off)")


def run(arguments: Namespace, log: Log) -> Outcome:
    """Trains, or goes on."""
    # The losses first: a typing error must not wait for a dataset.
    config = rx.TrainingConfig(**_chosen(arguments))
    policy = None if arguments.tokens is None else rx.tokens.parse_policy(arguments.tokens)
    model, splits = _model_and_data(arguments, config.seed, log)
    if arguments.batch_size is None and len(splits.train) < config.batch_size:
        config = replace(config, batch_size=_batch_size(len(splits.train), config.accumulate))
        log(f"{splits.name} has {len(splits.train)} training images: a batch is {config.batch_size} of them")
    if policy is not None:
        model = _reducing(model, policy, config, log)
    reporter = rx.training.default_reporter()
    if arguments.tensorboard:
        reporter = rx.training.Several(reporter, rx.training.TensorBoard(arguments.out))
    trained = rx.train(model, splits, config, arguments.out, resume=arguments.resume, reporter=reporter)
    accuracy = trained.record["accuracy"]
    table = Table(
        ("", "accuracy"),
        (
            ("test", percent(accuracy["test"])),
            ("validation, last epoch", percent(accuracy["validation"])),
            (f"validation, best epoch ({accuracy['best_epoch']})", percent(accuracy["best_validation"])),
        ),
    )
    record = {"model": str(trained.folder), **{key: trained.record[key] for key in ("accuracy", "steps", "seconds")}}
    return Outcome(record, (table, f"model and history: {trained.folder}"))


def _batch_size(images: int, accumulate: int) -> int:
    """Returns a batch size with at least four steps an epoch where the images allow it."""
    return max(1, images // 4 // accumulate) * accumulate


def _chosen(arguments: Namespace) -> dict[str, Any]:
    """The knobs that were given; what was not keeps the default of TrainingConfig."""
    names = [*(name for name, _, _ in KNOBS), "precision", "parallel"]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    teaching = {"teacher": arguments.teacher, "weights": arguments.teacher_weights}
    shared = {knob: value for knob, value in teaching.items() if value is not None}
    if arguments.losses or shared or arguments.no_task:
        given["losses"] = parse_losses(arguments.losses or (), shared, not arguments.no_task)
    if arguments.frozen:
        given["frozen"] = tuple(arguments.frozen)
    if arguments.mixup is not None or arguments.cutmix is not None:
        given["mixing"] = rx.training.Mixing(mixup=arguments.mixup or 0.0, cutmix=arguments.cutmix or 0.0)
    return {**given, "compile": arguments.compile, "nonnegative_fusion": arguments.nonnegative_fusion}


def _reducing(
    model: "nn.Module", policy: "rx.tokens.TokenPolicy", config: "rx.TrainingConfig", log: Log
) -> "nn.Module":
    """Puts the policy into the model, with fresh predictors of the run's seed."""
    if policy.reducer.learned and not any(isinstance(loss, rx.losses.KeepRatio) for loss in config.losses):
        log(
            f"warning: {policy.reducer} is trained by what it draws, and without keep_ratio among the losses nothing "
            "holds that to the policy's shares; add --losses keep_ratio."
        )
    from attnrx.prescription import TokenPrescription

    tokens = TokenPrescription.of(policy, seed=config.seed)
    return rx.realize(model, rx.prescribe(model, {"tokens": tokens}))


def _model_and_data(arguments: Namespace, seed: int, log: Log) -> "tuple[nn.Module, rx.data.Splits]":
    """A trained model gets the data on its scale; a fresh one is built for the data: channels, classes and scale."""
    model = rx.load(arguments.model, seed, weights=arguments.weights, trust=arguments.trust)
    if Path(arguments.model).exists() or arguments.model.partition(":")[0] in rx.models.LIBRARIES:
        return model, splits_for(model, arguments)
    family = rx.models.family_of(model)
    channels, size, _ = family.input_shape(model)
    splits = load_splits(arguments, size)
    for note in splits.notes:
        log(f"{splits.name}: {note}")
    classes = len(splits.class_names)
    if (splits.channels, classes) != (channels, rx.models.SCENARIOS[arguments.model.partition(":")[2]]["classes"]):
        log(f"{arguments.model} is built for this data: {splits.channels} channels, {classes} classes")
    scale = splits.normalization
    shape = {"channels": splits.channels, "classes": classes, "image_size": splits.image_size}
    return rx.models.build_model(arguments.model, seed, mean=scale.mean, std=scale.std, **shape), splits
