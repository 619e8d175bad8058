"""attnrx costs: computes parameters and MACs of a model, optionally with a token policy, in closed form."""

from argparse import Namespace
from typing import Any

import attnrx as rx
from attnrx.cli.inputs import outline
from attnrx.cli.options import POLICY, Parser, add_trust, option
from attnrx.cli.outcome import Outcome, cost_changes, cost_table
from attnrx.support.progress import Log
from attnrx.support.tables import aligned_table

SUMMARY = "compute the parameters and MACs of a model, with or without a token policy"
EXAMPLE = "attnrx costs timm:deit_small_patch16_224 --tokens spot:0.7@4,7,10 --json"


def add(parser: Parser) -> None:
    parser.add_argument("model", help="a name such as svda:cifar10, whose weights are not needed, or a saved folder")
    add_trust(parser)
    option(parser, "--tokens", "POLICY", f"the costs with token pruning or merging: {POLICY}")


def run(arguments: Namespace, log: Log) -> Outcome:
    """Computes the costs in closed form; a model given by name is built without weights."""
    # An invalid policy raises before the model is built, which may be slow.
    policy = None if arguments.tokens is None else rx.tokens.parse_policy(arguments.tokens)
    model = outline(arguments.model, arguments.trust)
    family = rx.models.family_of(model)
    costs = family.costs(model)
    record: dict[str, Any] = {"model": arguments.model, **costs.to_record()}
    if policy is None:
        return Outcome(record, (_parts_table(costs), *_token_lines(costs)))
    after = family.costs(model, tokens=policy)
    # "compressed" comes last: it replaces the shorter record of the changes.
    record |= {**cost_changes(costs, after), "policy": arguments.tokens, "compressed": after.to_record()}
    return Outcome(record, (_parts_table(after), cost_table(costs, after), *_token_lines(after)))


def _parts_table(costs: "rx.costs.ModelCosts") -> str:
    """Returns the table of the parts with nonzero costs, and their sum."""
    parts = [(name.replace("_", " "), part) for name, part in costs.parts.items() if part.params or part.macs]
    rows = [(name, f"{each.params:,}", f"{each.macs:,}") for name, each in (*parts, ("all", costs.total))]
    return aligned_table(("part", "parameters", "MACs"), tuple(rows))


def _token_lines(costs: "rx.costs.ModelCosts") -> tuple[str, ...]:
    """Returns a line with the number of tokens per layer, if it is not constant."""
    if len(set(costs.tokens)) < 2:
        return ()
    return (f"tokens, layer by layer: {' '.join(map(str, costs.tokens))}",)
