"""Budgets of given rules: the largest share whose closed-form MACs fit a target; no model is built.

A plan (`planner.py`) chooses ranks and tokens of every layer by what they change. This is for what it cannot do: one
share of rules that the user states, the same share of the MACs of a part of every layer, and models without weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import nn

from attnrx.change.realization import compressed_spec
from attnrx.decide.diagnosing import diagnosis_or_spectra
from attnrx.decide.rules import SHARE, Template, by_layer, parse_rules, prescribe_maps, require_remainder
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import LayerPrescription, Prescription, TokenPrescription
from attnrx.support.arguments import MODEL, checked, instance, number, one_of, require_fields
from attnrx.support.errors import FingerprintMismatch, InvalidInput, NoOpPrescription, NotSupported
from attnrx.vit.costs import ModelCosts
from attnrx.vit.costs.conventions import ATTENTION
from attnrx.vit.maps import COST_PARTS, LINEAR_MAPS, REALIZED_NORMS, TOKENS
from attnrx.vit.models import family_of, hidden_units, linear_units, model_fingerprint, rank_of, require_all_tokens
from attnrx.vit.models.verbs import verb
from attnrx.vit.tokens import parse_policy

# Shares are multiples of 1 / GRID: finer than one direction of any layer, and exact in binary.
GRID = 4096

MACS = number(0.0, 1.0, "a share of the original's MACs above 0, at most 1, e.g. 0.7")
# The parts of a layer that a budget may be of, each a group of cost parts.
PARTS: Mapping[str, tuple[str, ...]] = {**COST_PARTS, "attention": ATTENTION}


@dataclass(frozen=True)
class Budget:
    """An upper limit on MACs as a share of the original's: of the whole model, or of a part of every layer.

    A part is the local target of IrrAtt (Section 3.4): FLOPs(R) / FLOPs_orig <= CR with the same CR for every layer,
    where R is a rank or a total rank. The parts are "qk" (query-key projections and scores), "vo" (value-output
    projections and the product of attention and values), "attention" (both) and "mlp". MACs are `ModelCosts.macs`.
    """

    macs: float
    part: str = "model"

    def __post_init__(self):
        require_fields(self, macs=MACS, part=one_of("model", *PARTS))


def largest_share(fits: Callable[[float], bool], least: float = 1 / GRID) -> float | None:
    """Returns the largest share in [`least`, 1] that fits, by bisection; None if `least` does not fit.

    `fits` must be monotone: true up to some share and false above it, because costs rise with the kept share.
    """
    # The invariant of the bisection is that `high` does not fit, so the full share is tested first. Integers, because
    # shares are multiples of 1 / GRID and `low` and `high` must meet exactly.
    if fits(1.0):
        return 1.0
    below = round(least * GRID) - 1  # counts as fitting until a share is found
    low, high = below, GRID
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle / GRID) else (low, middle)
    return low / GRID if low > below else None


def least_share(model: nn.Module, template: Template) -> float:
    """Returns the smallest share that can be prescribed; a share of tokens must keep at least one patch."""
    if not template.has_token_share:
        return 1 / GRID
    family = family_of(model)
    layout, depth = family.token_layout(model), len(family.attention(model))
    _policy(template, 1.0, model)  # raises for errors that do not depend on the share

    def is_too_small(share: float) -> bool:
        try:
            parse_policy(template.at(share)[TOKENS]).require(layout, depth)
        except InvalidInput:
            return True
        return False

    # Being too small is monotone like a cost: the smallest share that can be prescribed is one step above.
    largest = largest_share(is_too_small)
    return 1 / GRID if largest is None else largest + 1 / GRID


def prescribed_costs(model: nn.Module, prescription: Prescription, norms: str = REALIZED_NORMS[0]) -> ModelCosts:
    """Returns the costs of the model after the prescription (qk, vo, MLP and tokens) without realizing it."""
    require_all_tokens(model, "compute the costs of a prescription on")
    family = family_of(model)
    # The specs of the layers after `realize`; below, the ranks of both MLP maps and the numbers of hidden units.
    pairs = zip(family.attention(model), prescription.layers, strict=True)
    specs = tuple(compressed_spec(attention.spec, layer, norms) for attention, layer in pairs)
    ranks = tuple(
        tuple(
            # A map without a decision costs what it does now, which may be a factored one.
            sum(layer.outputs[name].ranks) if name in layer.outputs else rank_of(linear)
            for name, linear in zip(LINEAR_MAPS, pair, strict=True)
        )
        # Not strict: a model whose MLPs are not pairs of linear maps has none here.
        for pair, layer in zip(family.mlp(model), prescription.layers, strict=False)
    )
    hidden = tuple(
        _kept_units(units, specs[0].width, layer)
        for units, layer in zip(hidden_units(family.mlp(model)), prescription.layers, strict=False)
    )
    policy = None if prescription.tokens is None else prescription.tokens.policy
    return family.costs(model, specs, tuple((first, second) for first, second in ranks), policy, hidden)


def _kept_units(units: int, width: int, layer: LayerPrescription) -> int:
    if layer.in_place_of("MLP") is not None:
        return linear_units(units, width)
    return units if layer.hidden is None else int(layer.hidden.keep.sum())


@checked(
    model=MODEL,
    diagnosis=instance("a Diagnosis, e.g. attnrx.diagnose(model, images), or a model", Diagnosis, nn.Module),
    template=instance("rules with {share}, e.g. 'qk=total_rank:{share}'", str, Template),
    budget=instance("a Budget, e.g. attnrx.Budget(0.7)", Budget),
)
@verb
def prescribe_within(
    model: nn.Module, diagnosis: Diagnosis | nn.Module, template: Template | str, budget: Budget
) -> Prescription:
    """Prescribes with the largest {share} in a template such as "qk=total_rank:{share} vo=total_rank:{share}" that fits
    the budget. Costs are computed in closed form, so the model may be on the meta device.

    For a budget of a part of every layer, each layer has its own largest share, and the rules are per layer
    (`by_layer`). A template of tokens alone accepts the model instead of a diagnosis. `about["budget"]` records the
    target, the shares, and the resulting shares of the MACs.

    Args:
        model: The model whose MACs count.
        diagnosis: Its diagnosis; or the model itself, for a template of tokens alone.
        template: Rules with {share} in place of a share.
        budget: The limit on the MACs.

    Returns:
        The prescription with the largest share, which is recorded.

    Raises:
        InvalidInput: The template has no {share}, or {share} is a share of tokens and the budget is per layer.
        FingerprintMismatch: The diagnosis belongs to another model.
        NotSupported: Even the smallest share exceeds the budget.
        NoOpPrescription: The budget allows the unchanged model.

    Examples:
        >>> model = rx.load("svda:digits")
        >>> diagnosis = rx.diagnose(model, torch.randn(64, 1, 16, 16))
        >>> prescription = rx.prescribe_within(model, diagnosis, "qk=total_rank:{share}", rx.Budget(0.95))
        >>> prescription.about["budget"]["macs"] <= 0.95
        True
    """
    template = Template.parse(template) if isinstance(template, str) else template
    template.require_varying()
    if template.has_token_share and budget.part != "model":
        raise InvalidInput(
            f"tokens={template.texts[TOKENS]}: a layer has no share of the tokens of its own; give a keep ratio "
            f"instead of {SHARE}, or a budget of the whole model."
        )
    if isinstance(diagnosis, Diagnosis):
        _require_diagnosed(model, diagnosis)
    diagnosis = diagnosis_or_spectra(diagnosis, *(text for name, text in template.texts.items() if name != TOKENS))
    search = _Search(model, diagnosis, template, budget)
    shares = search.shares()
    rules_of_layers = [parse_rules(template.at(share))[0] for share in shares]
    rules = {name: by_layer([layer_rules[name] for layer_rules in rules_of_layers]) for name in rules_of_layers[0]}
    prescription = require_remainder(prescribe_maps(diagnosis, {**rules, TOKENS: _policy(template, shares[0], model)}))
    spent = _amounts(prescribed_costs(model, prescription), budget.part)
    record = {
        "macs": budget.macs,
        "of": budget.part,
        # One for the model, or one per layer: `shares` repeats that of the model for every layer.
        "shares": shares[: len(spent)],
        "spent": [macs / original_macs for macs, original_macs in zip(spent, search.original_costs, strict=True)],
    }
    return replace(prescription, about={**prescription.about, "budget": record})


def _require_diagnosed(model: nn.Module, diagnosis: Diagnosis) -> None:
    """Raises FingerprintMismatch if the diagnosis belongs to another model, or to one with layers of other shapes."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        diagnosis.require(model_fingerprint(model), "the model whose costs are to fit the budget")
        return
    # Without weights there is no fingerprint, and only the shapes of the layers can differ.
    found = [(len(layer.spectrum.heads), layer.spectrum.query.shape[-1] - 1) for layer in diagnosis.layers]
    actual = [(len(layer.spec.heads), layer.spec.width) for layer in family_of(model).attention(model)]
    if found != actual:
        raise FingerprintMismatch(
            f"the diagnosis has {_shapes(found)}, and the model whose costs are to fit the budget {_shapes(actual)}; "
            "give the model that was diagnosed."
        )


def _shapes(layers: Sequence[tuple[int, int]]) -> str:
    shapes = " or ".join(f"{heads} heads of {width} features" for heads, width in sorted(set(layers)))
    return f"{len(layers)} layers with {shapes}"


class _Search:
    """Searches the largest shares; costs are cached per share, one value for the model or one per layer."""

    def __init__(self, model: nn.Module, diagnosis: Diagnosis, template: Template, budget: Budget):
        self.layers, self.budget = len(diagnosis.layers), budget
        before = family_of(model).costs(model)
        self.least = least_share(model, template)
        self.original_costs = _amounts(before, budget.part)

        # The costs of all layers at a share come from one prescription, so the bisections of the layers share a cache.
        # It is that of a closure, because a cached method would keep its object alive.
        @cache
        def amounts(share: float) -> tuple[int, ...]:
            return _amounts(costs_at(model, diagnosis, template, share), budget.part)

        self.amounts = amounts

    def shares(self) -> list[float]:
        """Returns the share of every layer; raises NotSupported if the smallest share exceeds the budget."""
        largest = [self._share(unit) for unit in range(len(self.original_costs))]
        return largest * self.layers if self.budget.part == "model" else largest

    def _share(self, unit: int) -> float:
        allowed = self.budget.macs * self.original_costs[unit]
        share = largest_share(lambda share: self.amounts(share)[unit] <= allowed, self.least)
        if share is None:
            least = self.amounts(self.least)[unit] / self.original_costs[unit]
            where = "the model" if self.budget.part == "model" else f"{self.budget.part} of layer {unit}"
            raise NotSupported(
                f"{where} cannot cost {100 * self.budget.macs:g} % of its MACs: with the smallest share it still costs "
                f"{100 * least:.1f} %. Give a larger budget, or add rules for more maps of the model."
            )
        return share


def costs_at(model: nn.Module, diagnosis: Diagnosis, template: Template, share: float) -> ModelCosts:
    """Returns the costs at one share of the template; for a no-op prescription those of the unchanged model."""
    rules, _ = parse_rules(template.at(share))
    try:
        prescription = prescribe_maps(diagnosis, {**rules, TOKENS: _policy(template, share, model)})
    # Near a share of 1 the rules may keep everything, which `prescribe_maps` refuses; the bisection needs a cost there.
    except NoOpPrescription:
        return family_of(model).costs(model)
    return prescribed_costs(model, prescription)


def _policy(template: Template, share: float, model: nn.Module) -> TokenPrescription | None:
    _, tokens = parse_rules({TOKENS: template.at(share).get(TOKENS)})
    if tokens is not None:
        family = family_of(model)
        tokens.policy.on(family.token_layout(model), len(family.attention(model)))  # for its errors
    return tokens


def _amounts(costs: ModelCosts, part: str) -> tuple[int, ...]:
    if part == "model":
        return (costs.macs,)
    return tuple(sum(layer.parts[name].macs for name in PARTS[part]) for layer in costs.layers)
