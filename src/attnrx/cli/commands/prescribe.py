"""attnrx prescribe: applies rules to a diagnosis and writes a prescription."""

from argparse import Namespace
from typing import TYPE_CHECKING

import attnrx as rx
from attnrx.cli.inputs import names_model
from attnrx.cli.options import POLICY, Parser, add_out, add_trust, option
from attnrx.cli.outcome import Outcome, as_percent
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log
from attnrx.support.tables import aligned_table

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "decide which directions, heads and tokens of a model to prune"
EXAMPLE = "attnrx prescribe diagnosis.json --rules qk=energy_retention:0.90 --out prescription.json"


SUBJECT = (
    "the file of a diagnosis; or, for tokens=POLICY alone, a model: a saved folder, timm:NAME, hf:ID, or a name such "
    "as dense:cifar10"
)
RULES = (
    "the rule of every map: qk=RULE for query and key, vo=RULE for value and output, fc1=RULE, fc2=RULE for the MLP, "
    "hidden=RULE for its hidden units, heads=RULE for whole heads, tokens=POLICY. RULE: NAME:KNOB,..., joined by & and "
    "|, e.g. total_rank:0.5, uniform_rank:0.5,metric=weights, 'energy_retention:0.9 | top_rank:8'. POLICY: " + POLICY
)


def add(parser: Parser) -> None:
    parser.add_argument("diagnosis", metavar="DIAGNOSIS", help=SUBJECT)
    option(parser, "--weights", "FILE", "the weights of that timm:NAME or lvvit:SIZE")
    add_trust(parser)
    option(parser, "--rules", "MAP=RULE", RULES, nargs="+", required=True)
    kind = "attnrx prescription"
    add_out(parser, "the prescription: a JSON file, and a second file if it has tensors", kind=kind)


def run(arguments: Namespace, log: Log) -> Outcome:
    """Prescribes and saves the prescription."""
    # The shell splits the rules at spaces, and a rule may contain some.
    rules = rx.rules.split_maps(" ".join(arguments.rules))
    prescription = rx.prescribe(_diagnosis(arguments), rules)
    path, tokens = prescription.save(arguments.out), prescription.tokens
    notes = list(prescription.about.get("notes", ()))
    record = {
        "prescription": str(path),
        "rules": dict(prescription.rules),
        "removed_share": prescription.removed_share,
        "notes": notes,
        "ranks": [list(ranks) for ranks in prescription.ranks],
        "reasons": [list(layer.qk.reasons) for layer in prescription.layers],
        "tokens": tokens
        and {"policy": str(tokens.policy), "reasons": list(tokens.reasons), "must_be_trained": tokens.must_be_trained},
    }
    rows = tuple(
        (
            f"layer {index}",
            " ".join(map(str, layer.qk.ranks)),
            str(layer.qk.directions if layer.qk.is_shared else layer.qk.keep.shape[1]),
            str(int((~layer.heads).sum())),
        )
        for index, layer in enumerate(prescription.layers)
    )
    table = aligned_table(("", "kept directions per head", "of", "heads pruned"), rows)
    removed = f"{as_percent(prescription.removed_share)} of the directions are removed; the file has the reasons"
    warnings = (f"warning: {note}" for note in notes)
    token_reasons = () if tokens is None else tokens.reasons
    return Outcome(record, (table, removed, *token_reasons, *warnings, f"prescription: {path}"))


def _diagnosis(arguments: Namespace) -> "rx.Diagnosis | nn.Module":
    """Reads the diagnosis, or loads the model given instead."""
    if names_model(arguments.diagnosis):
        return rx.load(arguments.diagnosis, weights=arguments.weights, trust=arguments.trust)
    if arguments.weights is not None:
        raise InvalidInput(f"--weights needs the name of a model, and {arguments.diagnosis} is none; omit it.")
    return rx.Diagnosis.load(arguments.diagnosis)
