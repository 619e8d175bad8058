"""attnrx realize: applies a prescription to a model, and saves the result."""

from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

import attnrx as rx
from attnrx.cli.inputs import model_argument, splits_argument
from attnrx.cli.options import COUNT, SEED, STEPS, Parser, add_data, add_device, add_model, add_out, option
from attnrx.cli.outcome import Outcome, cost_changes, cost_table
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log
from attnrx.vit.maps import FITS, REALIZATIONS, REALIZED_NORMS

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "apply a prescription to a model, as a mask or by compression"
EXAMPLE = (
    "attnrx realize runs/cifar10 --prescription prescription.json --norms refit --data cifar10 --out runs/cifar10-slim"
)

NORMS = (
    "the norms of compressed SVDA layers: exact as in the mask (saves least), renormalized over the kept directions as "
    "in the paper, or with strengths refitted on --data"
)
REPAIR = (
    "fit the weights of the compressed model, block by block, to the outputs of the original's blocks on --data "
    "without labels, in this many steps per attention and per MLP, e.g. 300"
)
DISTILL = (
    "fit all weights together to the outputs of the original on --data without labels, with tokens pruned and merged, "
    "in this many passes over the images, e.g. 2; last of the fits"
)


def add(parser: Parser) -> None:
    add_model(parser, "the model of the prescription")
    option(parser, "--prescription", "FILE", "the prescription to apply", required=True)
    add_out(parser, "the folder of the new model; an existing model in it is replaced", folder=True)
    option(parser, "--by", REALIZATIONS, "delete the pruned directions, or set them to zero", "compress")
    option(parser, "--norms", REALIZED_NORMS, NORMS, REALIZED_NORMS[0])
    option(parser, "--repair", STEPS, REPAIR, 0)
    option(parser, "--distill", STEPS, DISTILL, 0)
    add_data(parser, "training images for --norms refit and fits of weights", required=False)
    calibration = "training images for --norms refit, --repair and --distill"
    option(parser, "--calibration-images", COUNT, calibration, 512)
    option(parser, "--seed", SEED, "seeds --repair and --distill", 0)
    add_device(parser)


def run(arguments: Namespace, log: Log) -> Outcome:
    from attnrx.change.realization.realizing import fits_of, fits_record, realize_and_fit  # imports torch

    # Before the model is realized, which takes long with --repair.
    rx.models.require_model_folder(arguments.out)
    if arguments.by == "mask" and arguments.norms != REALIZED_NORMS[0]:
        raise InvalidInput(
            f"--by mask --norms {arguments.norms}: a mask keeps the norms of the model, so --norms has no effect; omit "
            "it, or take --by compress."
        )
    prescription = rx.Prescription.load(arguments.prescription)
    model = model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    # The settings are saved with the model, because its matched controls are realized with the same settings.
    how = {name: getattr(arguments, name) for name in ("by", "norms", *FITS, "calibration_images")}
    fits = fits_of({name: how[name] for name in FITS}, arguments.seed)
    how |= fits_record(*fits)
    images = _calibration(model, arguments)
    slim = realize_and_fit(model, prescription, images, fits, arguments.by, arguments.norms)
    prescription = replace(prescription, about={**prescription.about, "realized": how})
    folder = rx.save(slim, arguments.out, prescription=prescription)
    before, after = (rx.models.family_of(each).costs(each) for each in (model, slim))
    record = {"model": str(folder), **how, **cost_changes(before, after), "removed_share": prescription.removed_share}
    return Outcome(record, (cost_table(before, after), f"model: {folder}"))


def _calibration(model: "nn.Module", arguments: Namespace) -> "rx.data.ImageSet | None":
    fits = [f"--{name}" for name in FITS if getattr(arguments, name)]
    fits += ["--norms refit"] * (arguments.norms == "refit")
    # Data that nothing is fitted on are not loaded.
    if not fits:
        return None
    if arguments.data is None:
        requested = " and ".join(fits)
        raise InvalidInput(f"{requested}: fitted on images, and --data names none; add --data NAME.")
    train = splits_argument(model, arguments, distinct=True).train
    return train.take(min(arguments.calibration_images, len(train)))
