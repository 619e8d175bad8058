"""attnrx prescribe: a diagnosis and a rule in, a prescription out."""

from argparse import Namespace

import attnrx as rx
from attnrx.cli.outcome import Outcome, Say, Table, percent
from attnrx.cli.parser import Parser, add_out
from attnrx.errors import InvalidInput

EXAMPLE = "attnrx prescribe diagnosis.json --rule energy_retention:0.90 --out prescription.json"


def add(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument("diagnosis", help="the file of a diagnosis")
    parser.add_argument(
        "--rule",
        metavar="RULE",
        help='NAME:KNOB,..., joined by & and |: energy_retention:0.9, top_rank:32, "threshold:0.1 & remove_heads"',
    )
    parser.add_argument(
        "--metric",
        metavar="METRIC",
        help="decide about the score directions that are best in this metric instead of the model's own: weights, "
        "augmented, activation, centered, softmax or mix (models without norms)",
    )
    parser.add_argument("--values", metavar="RULE", help="the rule for what the heads read out, e.g. total_rank:0.75")
    parser.add_argument("--mlp", metavar="RULE", help="the rule for the maps of the MLP, e.g. uniform_rank:0.5")
    add_out(parser, "the prescription, one JSON file, and a .safetensors beside it where directions are rewritten")


def run(arguments: Namespace, say: Say) -> Outcome:
    """Decides."""
    asked = {"values": arguments.values, "mlp": arguments.mlp}
    if arguments.rule is None and not any(asked.values()):
        raise InvalidInput("prescribe needs at least one of --rule, --values and --mlp.")
    diagnosis = rx.Diagnosis.load(arguments.diagnosis)
    prescription = rx.prescribe(diagnosis, arguments.rule, arguments.metric, **asked)
    path = prescription.save(arguments.out)
    notes = list(prescription.about.get("notes", ()))
    record = {
        "prescription": str(path),
        "rule": dict(prescription.rule),
        "removed_share": prescription.removed_share,
        "notes": notes,
        "ranks": [list(ranks) for ranks in prescription.ranks],
        "reasons": [list(layer.reasons) for layer in prescription.layers],
    }
    rows = tuple(
        (f"layer {index}", " ".join(map(str, layer.ranks)), _full(layer), str(int((~layer.heads).sum())))
        for index, layer in enumerate(prescription.layers)
    )
    table = Table(("", "directions that stay, by head", "of", "heads removed"), rows)
    removed = f"{percent(prescription.removed_share)} of the directions are removed; the file says why, head by head"
    return Outcome(record, (table, removed, *(f"warning: {note}" for note in notes), f"prescription: {path}"))


def _full(layer: "rx.LayerPrescription") -> str:
    """What a head could keep: its own directions, or those of all heads where they share them."""
    return str(layer.directions if layer.is_shared else layer.keep.shape[1])
