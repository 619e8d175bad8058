"""attnrx costs: computes parameters and MACs of a model, optionally after compression, in closed form."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.inputs import outline
from attnrx.cli.options import POLICY, add_trust, option
from attnrx.cli.outcome import Outcome, Table, cost_changes, cost_table
from attnrx.cli.parser import Parser
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log
from attnrx.vit.maps import REALIZED_NORMS

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "compute the parameters and MACs of a model, before or after a prescription or token policy"
EXAMPLE = "attnrx costs timm:deit_small_patch16_224 --tokens spot:0.7@4,7,10 --json"


def add(parser: Parser) -> None:
    parser.add_argument("model", help="a name such as svda:cifar10, whose weights are not needed, or a saved folder")
    add_trust(parser)
    option(parser, "--prescription", "FILE", "the costs after this prescription")
    option(parser, "--norms", REALIZED_NORMS, "the kind of compression assumed for --prescription", REALIZED_NORMS[0])
    option(parser, "--tokens", "POLICY", f"the costs with token pruning or merging: {POLICY}")


def run(arguments: Namespace, log: Log) -> Outcome:
    """Computes the costs in closed form; a model given by name is built without weights."""
    # An invalid policy raises before the model is built, which may be slow.
    policy = None if arguments.tokens is None else rx.tokens.parse_policy(arguments.tokens)
    model = outline(arguments.model, arguments.trust)
    family = rx.models.family_of(model)
    costs = family.costs(model)
    record: dict[str, Any] = {"model": arguments.model, **costs.to_record()}
    if arguments.prescription is None and policy is None:
        return Outcome(record, (_parts_table(costs), *_token_lines(costs)))
    if arguments.prescription is None:
        after = family.costs(model, tokens=policy)
    else:
        after = _after(model, arguments)
        record["norms"] = arguments.norms
    # "compressed" comes last: it replaces the shorter record of the changes.
    record |= {**cost_changes(costs, after), "policy": arguments.tokens, "compressed": after.to_record()}
    return Outcome(record, (_parts_table(after), cost_table(costs, after), *_token_lines(after)))


def _after(model: "nn.Module", arguments: Namespace) -> "rx.costs.ModelCosts":
    """Returns the costs after a prescription, without realizing it."""
    prescription = rx.Prescription.load(arguments.prescription)
    if Path(arguments.model).exists():  # a name has no weights, so the prescription of any model of its shape fits
        prescription.require(rx.models.model_fingerprint(model))
    specs = rx.models.family_of(model).specs(model)
    # A name has no fingerprint, so at least the shapes must agree.
    shapes = [(len(spec.heads), max(spec.ranks, default=0)) for spec in specs]
    requested = [tuple(layer.qk.keep.shape) for layer in prescription.layers]
    if shapes != requested:
        raise InvalidInput(
            f"{arguments.prescription} is for layers of (heads, directions) {requested}, and {arguments.model} has "
            f"{shapes}; give the model it was made for."
        )
    norms = "renormalized" if arguments.norms == "refit" else arguments.norms  # the same shapes
    if arguments.tokens is not None:
        from attnrx.nouns.prescription import TokenPrescription

        if prescription.tokens is not None:
            raise InvalidInput(
                f"the prescription already has a token policy ({prescription.tokens.policy}), and --tokens "
                f"{arguments.tokens} is another; drop one of them."
            )
        tokens = TokenPrescription.of(rx.tokens.parse_policy(arguments.tokens))
        prescription = replace(prescription, tokens=tokens)
    return rx.planning.prescribed_costs(model, prescription, norms)


def _parts_table(costs: "rx.costs.ModelCosts") -> Table:
    """Returns the table of the parts with nonzero costs, and their sum."""
    parts = [(name.replace("_", " "), part) for name, part in costs.parts.items() if part.params or part.macs]
    rows = [(name, f"{each.params:,}", f"{each.macs:,}") for name, each in (*parts, ("all", costs.total))]
    return Table(("part", "parameters", "MACs"), tuple(rows))


def _token_lines(costs: "rx.costs.ModelCosts") -> tuple[str, ...]:
    """Returns a line with the number of tokens per layer, if it is not constant."""
    if len(set(costs.tokens)) < 2:
        return ()
    return (f"tokens, layer by layer: {' '.join(map(str, costs.tokens))}",)
