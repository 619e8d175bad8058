"""attnrx prescribe: a diagnosis and a rule in, a prescription out."""

from argparse import Namespace

import attnrx as rx
from attnrx.cli.outcome import Outcome, Say, Table, percent
from attnrx.cli.parser import Parser, add_out

EXAMPLE = "attnrx prescribe diagnosis.json --rule energy_retention:0.90 --out prescription.json"


def add(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument("diagnosis", help="the file of a diagnosis")
    parser.add_argument(
        "--rule",
        required=True,
        metavar="RULE",
        help='NAME:KNOB,..., joined by & and |: energy_retention:0.9, top_rank:32, "threshold:0.1 & remove_heads"',
    )
    add_out(parser, "the prescription, one JSON file")


def run(arguments: Namespace, say: Say) -> Outcome:
    """Decides."""
    rule = rx.rules.parse_rule(arguments.rule)
    prescription = rx.prescribe(rx.Diagnosis.load(arguments.diagnosis), rule)
    path = prescription.save(arguments.out)
    record = {
        "prescription": str(path),
        "rule": dict(prescription.rule),
        "removed_share": prescription.removed_share,
        "ranks": [list(ranks) for ranks in prescription.ranks],
        "reasons": [list(layer.reasons) for layer in prescription.layers],
    }
    rows = tuple(
        (f"layer {index}", " ".join(map(str, layer.ranks)), str(layer.keep.shape[1]), str(int((~layer.heads).sum())))
        for index, layer in enumerate(prescription.layers)
    )
    table = Table(("", "directions that stay, by head", "of", "heads removed"), rows)
    removed = f"{percent(prescription.removed_share)} of the directions are removed; the file says why, head by head"
    return Outcome(record, (table, removed, f"prescription: {path}"))
