"""attnrx prescribe: applies rules to a diagnosis and writes a prescription."""

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.inputs import names_model, outline
from attnrx.cli.options import POLICY, SHARE, add_out, add_trust, option
from attnrx.cli.outcome import Outcome, Table, as_percent
from attnrx.cli.parser import Parser
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log

if TYPE_CHECKING:
    from torch import nn

    from attnrx.decide.rules import Template
    from attnrx.nouns.prescription import TokenPrescription

SUMMARY = "decide which directions, heads and tokens of a model to prune"
EXAMPLE = "attnrx prescribe diagnosis.json --rules qk=energy_retention:0.90 --out prescription.json"


SUBJECT = (
    "the file of a diagnosis; or, for tokens=POLICY or --predictors alone, a model: a saved folder, timm:NAME, hf:ID, "
    "or a name such as dense:cifar10"
)
RULES = (
    "the rule of every map: qk=RULE for query and key, vo=RULE for value and output, fc1=RULE, fc2=RULE for the MLP, "
    "hidden=RULE for its hidden units, heads=RULE for whole heads, tokens=POLICY. RULE: NAME:KNOB,..., joined by & and "
    "|, e.g. total_rank:0.5, uniform_rank:0.5,metric=weights, 'energy_retention:0.9 | top_rank:8'. POLICY: " + POLICY
)
PREDICTORS = "a saved model with a token policy and trained predictors, used instead of tokens=POLICY"
SCOPE = (
    "the scope of --macs: the model, with one share for all layers, or this part of every layer, with a share per "
    "layer (the local target of IrrAtt, Section 3.4)"
)


def add(parser: Parser) -> None:
    parser.add_argument("diagnosis", metavar="DIAGNOSIS", help=SUBJECT)
    option(parser, "--weights", "FILE", "the weights of that timm:NAME or lvvit:SIZE")
    add_trust(parser)
    option(parser, "--rules", "MAP=RULE", RULES, nargs="+")
    option(parser, "--predictors", "FOLDER", PREDICTORS)
    budget = parser.add_argument_group(
        "a target instead of a share: {share} in the rules becomes the largest that fits"
    )
    # argparse formats help texts with %, so a percent sign is written twice.
    option(budget, "--macs", SHARE, "the largest share of the original's MACs after pruning: 0.7, 70%%")
    option(budget, "--of", ("model", "qk", "vo", "attention", "mlp"), SCOPE, "model")
    option(budget, "--model", "MODEL", "the model whose MACs count: a saved folder or a name")
    kind = "attnrx prescription"
    add_out(parser, "the prescription: a JSON file, and a second file if it has tensors", kind=kind)


def run(arguments: Namespace, log: Log) -> Outcome:
    """Prescribes and saves the prescription."""
    # Here, because it imports torch, which --help does not need.
    from attnrx.decide.rules import Template

    # The shell splits the rules at spaces, and a rule may contain some.
    template = Template.parse(" ".join(arguments.rules or ()))
    if not template.texts and arguments.predictors is None:
        raise InvalidInput("prescribe needs --rules, e.g. --rules qk=total_rank:0.5, or --predictors.")
    if arguments.predictors is not None and ("tokens" in template.texts or arguments.macs is not None):
        raise InvalidInput("--predictors has its own policy; drop tokens=POLICY and --macs.")
    prescription = _prescription(arguments, template)
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
    table = Table(("", "kept directions per head", "of", "heads pruned"), rows)
    budget = prescription.about.get("budget")
    if budget is not None:
        record["budget"] = dict(budget)
    removed = f"{as_percent(prescription.removed_share)} of the directions are removed; the file has the reasons"
    spent = () if budget is None else (_spent(budget),)
    warnings = (f"warning: {note}" for note in notes)
    token_reasons = () if tokens is None else tokens.reasons
    return Outcome(record, (table, removed, *token_reasons, *spent, *warnings, f"prescription: {path}"))


def _prescription(arguments: Namespace, template: "Template") -> "rx.Prescription":
    diagnosis = _diagnosis(arguments)
    if arguments.macs is None:
        if arguments.of != "model" or arguments.model is not None or template.varies:
            raise InvalidInput(
                "--of, --model and {share} in a rule go with --macs, the target; give it, e.g. --macs 0.7."
            )
        rules: dict[str, str | TokenPrescription] = dict(template.texts)
        if arguments.predictors is not None:
            carrier = rx.load(arguments.predictors, trust=arguments.trust)
            rules["tokens"] = rx.realization.prescribed_tokens(carrier)
        return rx.prescribe(diagnosis, rules)
    budget = rx.Budget(arguments.macs, arguments.of)
    template.require_varying()
    if arguments.model is not None:
        return rx.prescribe_within(outline(arguments.model, arguments.trust), diagnosis, template, budget)
    if isinstance(diagnosis, rx.Diagnosis):
        raise InvalidInput("--macs needs the model of the diagnosis: give --model NAME or a saved folder.")
    # A model that was given in place of a diagnosis is also the one whose MACs count.
    return rx.prescribe_within(diagnosis, diagnosis, template, budget)


def _diagnosis(arguments: Namespace) -> "rx.Diagnosis | nn.Module":
    """Reads the diagnosis, or loads the model given instead."""
    if names_model(arguments.diagnosis):
        return rx.load(arguments.diagnosis, weights=arguments.weights, trust=arguments.trust)
    if arguments.weights is not None:
        raise InvalidInput(f"--weights needs the name of a model, and {arguments.diagnosis} is none; omit it.")
    return rx.Diagnosis.load(arguments.diagnosis)


def _spent(budget: Mapping[str, Any]) -> str:
    shares, spent = (_span(budget[name]) for name in ("shares", "spent"))
    what = "the model's MACs" if budget["of"] == "model" else f"the MACs of every layer's {budget['of']}"
    return f"kept {shares}, which costs {spent} of {what}; {100 * budget['macs']:g} % were allowed"


def _span(values: list[float]) -> str:
    # Equal ends, as written, become one.
    ends = dict.fromkeys(f"{100 * value:.4g} %" for value in (min(values), max(values)))
    return " to ".join(ends)
