"""attnrx realize: a model and a prescription in, the folder of a masked or smaller model out."""

from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

import attnrx as rx
from attnrx.cli.candidate import REFINED_ON, made
from attnrx.cli.cost_tables import priced, prices_table
from attnrx.cli.inputs import load_model, splits_for
from attnrx.cli.options import COUNT, STEPS
from attnrx.cli.outcome import Outcome
from attnrx.cli.outputs import FOLDER
from attnrx.cli.parser import Parser, add_data, add_device, add_model, add_out
from attnrx.errors import InvalidInput
from attnrx.progress import Log

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "carry a prescription out, as a mask or as a smaller model"
EXAMPLE = (
    "attnrx realize runs/cifar10 --prescription prescription.json --norms refit --data cifar10 --out runs/cifar10-slim"
)


def add(parser: Parser) -> None:
    """Declares the options."""
    add_model(parser, "what the prescription was made for")
    parser.add_argument("--prescription", required=True, metavar="FILE", help="what is to be carried out")
    add_out(parser, "the folder of the new model; one that it holds is replaced", writes=FOLDER)
    parser.add_argument(
        "--by",
        choices=("compress", "mask"),
        default="compress",
        help="delete what is not needed, or zero it (compress)",
    )
    parser.add_argument(
        "--norms",
        choices=("renormalized", "exact", "refit"),
        default="renormalized",
        help="how a compressed SVDA layer keeps its norms: the paper's way, exactly (saves less), or with strengths "
        "refitted on --data (renormalized)",
    )
    parser.add_argument(
        "--refine",
        type=STEPS,
        default=0,
        metavar="STEPS",
        help="bring the queries and keys of every layer nearer to the original's attention afterwards, on --data and "
        "without labels, in so many steps, e.g. 200 (0)",
    )
    add_data(parser, "for --norms refit and --refine, whose training images are used", required=False)
    parser.add_argument(
        "--calibration-images",
        type=COUNT,
        default=512,
        metavar="N",
        help=f"training images for --norms refit (512); the first {REFINED_ON} of them for --refine",
    )
    add_device(parser)


def run(arguments: Namespace, log: Log) -> Outcome:
    """Realizes, prices and saves."""
    rx.models.require_model_folder(arguments.out)
    prescription = rx.Prescription.load(arguments.prescription)
    model = load_model(arguments.model, arguments.device, arguments.weights, arguments.trust)
    # How it was made stays with the model: its controls must be made in the same way.
    how = {name: getattr(arguments, name) for name in ("by", "norms", "refine", "calibration_images")}
    slim = made(model, prescription, how, _calibration(model, arguments))
    prescription = replace(prescription, about={**prescription.about, "realized": how})
    folder = rx.save(slim, arguments.out, prescription=prescription)
    before, after = (rx.models.family_of(each).costs(each) for each in (model, slim))
    record = {"model": str(folder), **how, **priced(before, after), "removed_share": prescription.removed_share}
    return Outcome(record, (prices_table(before, after), f"model: {folder}"))


def _calibration(model: "nn.Module", arguments: Namespace) -> "rx.data.ImageSet | None":
    if not arguments.refine and (arguments.by != "compress" or arguments.norms != "refit"):
        return None
    if arguments.data is None:
        requested = "--refine" if arguments.refine else "--norms refit"
        raise InvalidInput(f"{requested} is fitted on images, and --data names none; add --data NAME.")
    train = splits_for(model, arguments).train
    return train.take(min(arguments.calibration_images, len(train)))
