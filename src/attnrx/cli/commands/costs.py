"""attnrx costs: a model, and perhaps a prescription, in; parameters and MACs, exactly, out."""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.outcome import Outcome, Say, Table
from attnrx.cli.parser import Parser
from attnrx.cli.prices import priced, prices_table
from attnrx.errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn

EXAMPLE = "attnrx costs svda:cifar10 --prescription prescription.json --json"


def add(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument("model", help="a name such as svda:cifar10, or a saved folder")
    smaller = parser.add_mutually_exclusive_group()
    smaller.add_argument("--prescription", metavar="FILE", help="price the model that this would leave")
    smaller.add_argument(
        "--removed-share",
        type=float,
        metavar="SHARE",
        help="price the removal of this share of the directions, 0 to 1, the same in every layer",
    )
    parser.add_argument(
        "--norms",
        choices=("renormalized", "exact", "refit"),
        default="renormalized",
        help="the kind of compression that --prescription is priced for (renormalized)",
    )


def run(arguments: Namespace, say: Say) -> Outcome:
    """Prices in closed form: nothing is run."""
    model = rx.load(arguments.model)
    costs = rx.models.family_of(model).costs(model)
    record: dict[str, Any] = {"model": arguments.model, **costs.to_record()}
    if arguments.prescription is not None:
        after = _after(model, arguments)
        prices = priced(costs, after)
        record |= {**prices, "compressed": after.to_record(), "norms": arguments.norms}
        return Outcome(record, (_parts(costs), prices_table(costs, after)))
    if arguments.removed_share is not None:
        saving = costs.saving_without(arguments.removed_share)
        params, macs = 100 * saving.params_share, 100 * saving.macs_share
        record |= {"removed_share": arguments.removed_share, "params_down_percent": params, "macs_down_percent": macs}
        return Outcome(record, (_parts(costs), f"saved: {params:.3f} % of the parameters, {macs:.3f} % of the MACs"))
    return Outcome(record, (_parts(costs),))


def _after(model: "nn.Module", arguments: Namespace) -> "rx.costs.ModelCosts":
    """Prices the model that a prescription leaves, without making it."""
    prescription = rx.Prescription.load(arguments.prescription)
    family = rx.models.family_of(model)
    if Path(arguments.model).exists():  # a name stands for every model of its shape, and has no weights of its own
        prescription.require(rx.models.model_fingerprint(model))
    specs = [layer.spec for layer in family.attention(model)]
    shapes = [(len(spec.heads), max(spec.ranks, default=0)) for spec in specs]
    asked = [tuple(layer.keep.shape) for layer in prescription.layers]
    if shapes != asked:
        raise InvalidInput(
            f"{arguments.prescription} is for layers of (heads, directions) {asked}, and {arguments.model} has "
            f"{shapes}; price it on the model it was made for."
        )
    norms = "renormalized" if arguments.norms == "refit" else arguments.norms  # the same shapes
    pairs = zip(specs, prescription.layers, strict=True)
    return family.costs(model, tuple(rx.realization.compressed_spec(spec, layer, norms) for spec, layer in pairs))


def _parts(costs: "rx.costs.ModelCosts") -> Table:
    rows = [(name.replace("_", " "), f"{part.params:,}", f"{part.macs:,}") for name, part in costs.parts.items()]
    return Table(("part", "parameters", "MACs"), (*rows, ("all", f"{costs.params:,}", f"{costs.macs:,}")))
