"""attnrx costs: computes parameters and MACs of a model, optionally after compression, in closed form."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.inputs import outline
from attnrx.cli.options import POLICY, RANK, add_trust, option
from attnrx.cli.outcome import Outcome, Table, convention_table, cost_changes, cost_record
from attnrx.cli.parser import Parser
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log
from attnrx.vit.maps import REALIZED_NORMS

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "compute the parameters and MACs of a model, before or after a prescription"
EXAMPLE = "attnrx costs timm:deit_small_patch16_224 --qk irratt:192 --vo 32 --mlp 152 --convention paper --json"

FORMS = (
    "query and key: full, truncatt:R (R directions per head), cp:R (R directions shared by all heads), irratt:R (R "
    "directions in blocks that are mixed for every head)"
)
CONVENTIONS = (
    "what counts as a MAC: svda (products of patch embedding and layers, and strengths), irratt (classifier and "
    "LayerNorms too, no strengths), paper (that of the model's paper)"
)


def add(parser: Parser) -> None:
    parser.add_argument("model", help="a name such as svda:cifar10, whose weights are not needed, or a saved folder")
    add_trust(parser)
    option(parser, "--prescription", "FILE", "the costs after this prescription")
    option(parser, "--norms", REALIZED_NORMS, "the kind of compression assumed for --prescription", REALIZED_NORMS[0])
    forms = parser.add_argument_group("compressed forms")
    option(forms, "--qk", "FORM", FORMS)
    option(forms, "--vo", RANK, "value and output: R value dimensions per head")
    option(forms, "--mlp", RANK, "MLP: each of its two maps factorized with rank R")
    option(forms, "--tokens", "POLICY", f"token pruning or merging: {POLICY}")
    option(parser, "--convention", ("svda", "irratt", "paper"), CONVENTIONS, "svda")


def run(arguments: Namespace, log: Log) -> Outcome:
    """Computes the costs in closed form; a model given by name is built without weights."""
    policy = None if arguments.tokens is None else rx.tokens.parse_policy(arguments.tokens)
    forms = any(form is not None for form in (arguments.qk, arguments.vo, arguments.mlp))
    if arguments.prescription is not None and forms:
        raise InvalidInput(
            "--qk, --vo and --mlp define a compression, and so does --prescription; give one of them. "
            "(--tokens can be combined with either.)"
        )
    # Invalid forms raise before the model is built, which may be slow.
    compression = rx.costs.Compression(arguments.qk or "full", arguments.vo, arguments.mlp)
    model = outline(arguments.model, arguments.trust)
    family = rx.models.family_of(model)
    by_paper = arguments.convention == "paper"
    convention = rx.costs.paper_convention(family.name) if by_paper else rx.costs.CONVENTIONS[arguments.convention]
    costs = family.costs(model)
    price = convention.price(costs)
    record: dict[str, Any] = {"model": arguments.model, "convention": convention.name}
    if arguments.prescription is not None:
        after = _after(model, arguments)
        smaller = convention.price(after)
        # "compressed" comes last: it replaces the shorter record of the changes.
        record |= {**_record(costs, price), **cost_changes(price, smaller), "compressed": _record(after, smaller)}
        shown = (_parts_table(price), convention_table(price, smaller), *_token_lines(after))
        return Outcome({**record, "norms": arguments.norms}, shown)
    if forms or policy is not None:
        return _priced_forms(model, compression, policy, convention, record)
    return Outcome({**record, **_record(costs, price)}, (_parts_table(price), *_token_lines(costs)))


def _priced_forms(
    model: "nn.Module",
    compression: "rx.costs.Compression",
    policy: "rx.tokens.TokenPolicy | None",
    convention: "rx.costs.Convention",
    record: dict[str, Any],
) -> Outcome:
    """Computes the costs of a compressed form."""
    family = rx.models.family_of(model)
    specs = family.specs(model)
    # Costs follow from the shapes, so no compressed model is built.
    wanted = tuple(compression.spec(spec) for spec in specs)
    after = family.costs(model, wanted, compression.mlp_ranks(specs), policy)
    original, price = convention.price(family.costs(model)), convention.price(after)
    record |= {
        **{name: getattr(compression, name) for name in ("qk", "vo", "mlp")},
        "policy": None if policy is None else str(policy),
        **_record(after, price),
        **price.percent_of(original),
        "original": cost_record(original),
    }
    return Outcome(record, (_parts_table(price), _percent_table(original, price), *_token_lines(after)))


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


def _record(costs: "rx.costs.ModelCosts", price: "rx.costs.Price") -> dict[str, Any]:
    parts = {name: {"params": part.params, "macs": part.macs} for name, part in price.parts.items()}
    predictor_macs = price.parts["predictors"].macs
    return {**costs.to_record(), **cost_record(price), "predictor_macs": predictor_macs, "parts": parts}


def _parts_table(price: "rx.costs.Price") -> Table:
    """Returns the table of the parts with nonzero costs, and their sum."""
    parts = [(name.replace("_", " "), part) for name, part in price.parts.items() if part.params or part.macs]
    # The price of the whole model has the same two numbers as that of a part.
    rows = [(name, f"{each.params:,}", f"{each.macs:,}") for name, each in (*parts, ("all", price))]
    return Table(("part", "parameters", "MACs"), tuple(rows))


def _percent_table(original: "rx.costs.Price", smaller: "rx.costs.Price") -> Table:
    """Returns the table of the costs of both models, with the second in percent of the first."""
    shares = smaller.percent_of(original)
    costs = (
        ("parameters", original.params, smaller.params, shares["params_percent"]),
        ("MACs", original.macs, smaller.macs, shares["macs_percent"]),
        ("MACs of attention", sum(original.attention_macs), sum(smaller.attention_macs), shares["mhsa_percent"]),
    )
    rows = tuple((name, f"{before:,}", f"{after:,}", f"{percent:.3f} %") for name, before, after, percent in costs)
    return Table(("", "original", "compressed", "of the original"), rows)


def _token_lines(costs: "rx.costs.ModelCosts") -> tuple[str, ...]:
    """Returns a line with the number of tokens per layer, if it is not constant."""
    if len(set(costs.tokens)) < 2:
        return ()
    return (f"tokens, layer by layer: {' '.join(map(str, costs.tokens))}",)
