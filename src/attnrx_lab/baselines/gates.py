"""WDPruning as a baseline, which learns gates on query-key dimensions, value dimensions and hidden units."""

import copy
import math
from collections.abc import Mapping
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from attnrx.change.realization import realize
from attnrx.data import ImageSet
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.nouns.prescription import (
    Decision,
    HeadDecision,
    HiddenDecision,
    LayerPrescription,
    OutputDecision,
    Prescription,
    ScoreDecision,
)
from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.models import family_of, model_fingerprint
from attnrx_lab.baselines.compressor import SearchedBaseline
from attnrx_lab.baselines.factoring import linear_at, weights_at

GATED = {"qk": "query", "vo": "output", "hidden": "fc2"}
"""For each kind of unit, the map whose weight the gates multiply: rows of the query, columns of the other two."""

SURROGATE = 0.1  # the width, in ranks in [0, 1], of the sigmoid whose gradient replaces the step's gradient

UnitScores = Mapping[tuple[int, str], Float[Tensor, "units"]]


class UnitGates(nn.Module):
    """Learned unit scores, and a learned threshold per layer and kind of unit (WDPruning: Yu et al., AAAI 2022).

    A unit's gate is 1 if its score is above the threshold for its layer and its kind, otherwise 0. In the backward
    pass, a sigmoid replaces this step function. Two choices are ours. First, the units are the same as in attnrx
    prescriptions. Second, each score starts at the unit's rank when the units are sorted by the norms of their weights.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.scores, self.thresholds = nn.ParameterDict(), nn.ParameterDict()
        for (layer, name), norms in unit_norms(model).items():
            # The ranks are above the first threshold, 0, so all gates start open.
            self.scores[f"{layer}-{name}"] = nn.Parameter(_ranks(norms))
            self.thresholds[f"{layer}-{name}"] = nn.Parameter(norms.new_zeros(()))

    def margins(self) -> dict[tuple[int, str], Float[Tensor, "units"]]:
        """Returns the scores minus their thresholds. Pruning keeps the units with the largest margins."""
        places = {key: key.partition("-") for key in self.scores}
        return {(int(layer), name): self.scores[key] - self.thresholds[key] for key, (layer, _, name) in places.items()}

    def gates(self) -> dict[tuple[int, str], Float[Tensor, "units"]]:
        softs = {place: (margin, (margin / SURROGATE).sigmoid()) for place, margin in self.margins().items()}
        # Straight-through gates take their value from the step, and their gradient from the sigmoid.
        return {place: (margin > 0).to(soft) + soft - soft.detach() for place, (margin, soft) in softs.items()}


class GatedModel(nn.Module):
    """Wraps a model and gates its queries, head outputs and hidden units by multiplying their weights by the gates.

    Raises:
        NotSupported: A layer has scores that are not plain dot products, heads of different sizes, or an MLP that is
            not two linear maps.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        family = family_of(model)
        plain = all(attention.spec.is_plain for attention in family.attention(model))
        if not plain or not family.mlp(model) or not family.has_plain_units(model):
            raise NotSupported("gates need plain dot products and an MLP of two linear maps in every layer.")
        for layer, attention in enumerate(family.attention(model), 1):
            # `prescribe_gates` divides the units equally among the heads.
            ranks, sizes = attention.spec.ranks, attention.spec.value_dims
            if len({*ranks}) > 1 or len({*sizes}) > 1:
                raise NotSupported(
                    f"gates need heads of equal sizes, and those of layer {layer} have {_listed(ranks)} directions and "
                    f"{_listed(sizes)} value dimensions; give the model before its ranks were reduced."
                )
        self.model = model
        self.gates = UnitGates(model).to(next(model.parameters()))

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        # The gates multiply the weights, so the activations need no hooks.
        parameters = {}
        for place, gate in self.gates.gates().items():
            for name, parameter in self._held[place]:
                # The gates multiply rows of the query (and entries of its bias), and columns of the other maps.
                factors = gate.view(-1, *(1,) * (parameter.ndim - 1)) if place[1] == "qk" else gate
                parameters[name] = parameter * factors
        return functional_call(self.model, parameters, (images,))

    @cached_property
    def _held(self) -> dict[tuple[int, str], list[tuple[str, nn.Parameter]]]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        parameters_of = {}
        for layer, kind in self.gates.margins():
            linear = linear_at(self.model, (layer, GATED[kind]))
            parts = [linear.get_parameter("weight")]
            # A query dimension's gate applies to the output of its map, so it multiplies the bias, too. The other gates
            # apply to inputs, which already contain any bias.
            if kind == "qk" and isinstance(linear.bias, nn.Parameter):
                parts.append(linear.bias)
            parameters_of[layer, kind] = [(names[id(parameter)], parameter) for parameter in parts]
        return parameters_of

    def budget(self, macs: float) -> Float[Tensor, ""]:
        """Returns the squared difference between the MACs with the current gates and the target, both as shares."""
        return (gated_macs(self.model, self.gates.gates()) - macs).square()


def unit_norms(model: nn.Module) -> dict[tuple[int, str], Float[Tensor, "units"]]:
    """Returns the norm of each unit's incoming weights times the norm of its outgoing weights, by layer and kind."""
    norms = {}
    pairs = {"qk": ("query", "key"), "vo": ("value", "output"), "hidden": ("fc1", "fc2")}
    for layer in range(len(family_of(model).attention(model))):
        for kind, names in pairs.items():
            first, second = (linear_at(model, (layer, name)).get_parameter("weight").detach() for name in names)
            norms[layer, kind] = first.norm(dim=1) * second.norm(dim=1 if kind == "qk" else 0)
    return norms


def unit_macs(model: nn.Module) -> dict[tuple[int, str], int]:
    """Returns the MACs that one unit costs per image, for every layer and kind of unit."""
    family = family_of(model)
    costs, unit_costs = family.costs(model), {}
    for layer, attention in enumerate(family.attention(model)):
        tokens, width = costs.layers[layer].tokens, attention.spec.width
        # A dimension costs one output or input of two projections (query and key, or value and output). It also costs
        # one multiplication for every entry of the attention map.
        unit_costs[layer, "qk"] = unit_costs[layer, "vo"] = 2 * tokens * width + tokens**2
        units = linear_at(model, (layer, "fc2")).get_parameter("weight").shape[1]
        unit_costs[layer, "hidden"] = costs.layers[layer].mlp.macs // units
    return unit_costs


def gated_macs(model: nn.Module, gates: Mapping[tuple[int, str], Float[Tensor, "units"]]) -> Float[Tensor, ""]:
    """Returns the MACs with these gates, as a share of the model's MACs. Each unit is weighted by its gate."""
    costs = unit_macs(model)
    removed = torch.stack([(1 - gate).sum() * costs[place] for place, gate in gates.items()]).sum()
    return 1 - removed / family_of(model).costs(model).macs


def prescribe_gates(model: nn.Module, importance: UnitScores, macs: float) -> Prescription:
    """Returns the prescription that keeps the most important units within this share of the MACs.

    One threshold applies to all layers and kinds of units. Every MLP keeps its most important unit. Every head keeps
    its most important query dimension, unless the head loses all value dimensions and is removed. No weights are
    compensated.

    Raises:
        NotSupported: The units that always remain already cost more than this share.
    """
    scores = torch.cat([score.double().cpu() for score in importance.values()]).sort().values
    values = [*scores.tolist(), math.inf]  # infinity leaves only the units that no threshold removes
    most = macs * family_of(model).costs(model).macs
    # The costs fall as the threshold rises, so bisection finds the smallest candidate that fits.
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        prescription = _prescription(model, importance, values[middle])
        low, high = (low, middle) if prescribed_costs(model, prescription).macs <= most else (middle + 1, high)
    if low == len(values):
        raise NotSupported(f"gates cannot reach {100 * macs:.1f} % of the MACs.")
    return _prescription(model, importance, values[low])


def least_gated_share(model: nn.Module) -> float:
    """Returns the smallest share of the MACs that gates can reach. Some units remain, however high the threshold."""
    prescription = _prescription(model, unit_norms(model), math.inf)
    return prescribed_costs(model, prescription).macs / family_of(model).costs(model).macs


def _prescription(model: nn.Module, importance: UnitScores, threshold: float) -> Prescription:
    layers = []
    for layer, attention in enumerate(family_of(model).attention(model)):
        spec = attention.spec
        scores = {kind: importance[layer, kind].detach().double().cpu() for kind in GATED}
        value_scores, query_scores = (scores[kind].view(len(spec.heads), -1) for kind in ("vo", "qk"))
        keep_values = value_scores >= threshold
        keep_heads = keep_values.any(1)
        # A head without value dimensions outputs zero, so it does not need scores either.
        keep_dims = _at_least_one(query_scores, threshold) & keep_heads[:, None]
        keep_units = _at_least_one(scores["hidden"][None], threshold)[0]
        reasons = tuple(f"keeps {int(keep.sum())} of {len(keep)} gated dimensions" for keep in keep_dims)
        strength = attention.spectrum().strength * keep_dims
        decisions: dict[str, Decision] = {"qk": ScoreDecision(keep_dims, strength, reasons)}
        # A map that keeps everything has no decision, so `realize` does not change its weights.
        if not bool(keep_heads.all()):
            reason = f"keeps the {int(keep_heads.sum())} of {len(keep_heads)} heads with an open gate"
            decisions["heads"] = HeadDecision(keep_heads, value_scores.amax(1), (reason,))
        if not bool(keep_values.all()):
            decisions["vo"] = _value_decision(keep_values, value_scores)
        if not bool(keep_units.all()):
            weight, stored_bias = weights_at(model, (layer, "fc2"))
            bias = weight.new_zeros(len(weight)) if stored_bias is None else stored_bias
            reason = f"keeps {int(keep_units.sum())} of {len(keep_units)} gated hidden units"
            decisions["hidden"] = HiddenDecision(keep_units, scores["hidden"], weight[:, keep_units], bias, (reason,))
        layers.append(LayerPrescription(decisions))
    return Prescription(tuple(layers), {}, model_fingerprint(model), {"baseline": "gates"})


def _value_decision(keep: Bool[Tensor, "heads d"], importance: Float[Tensor, "heads d"]) -> OutputDecision:
    # Selects value dimensions. The center is zero, because nothing compensates for the removed dimensions.
    heads, size = keep.shape
    encode = torch.eye(size, dtype=torch.float64).repeat(heads, 1)[keep.flatten()]  # on the features of one head
    decode = torch.eye(keep.numel(), dtype=torch.float64)[:, keep.flatten()]
    ranks = tuple(keep.sum(1).tolist())
    reasons = tuple(f"keeps {rank} of {keep.shape[1]} gated value dimensions" for rank in ranks)
    return OutputDecision(ranks, encode, decode, encode.new_zeros(keep.numel()), importance, reasons)


def _at_least_one(scores: Float[Tensor, "groups units"], threshold: float) -> Bool[Tensor, "groups units"]:
    largest = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.argmax(1, keepdim=True), True)
    return (scores >= threshold) | largest


def _listed(sizes: tuple[int, ...]) -> str:
    return "/".join(map(str, sizes))


def _ranks(norms: Float[Tensor, "units"]) -> Float[Tensor, "units"]:
    """Returns the rank of every unit, scaled to (0, 1). The unit with the smallest norm has the lowest rank."""
    return (norms.argsort(stable=True).argsort().to(norms) + 0.5) / len(norms)


STEPS, BATCH = 100, 32  # of the gate training, and again of the fine-tuning
LEARNING_RATE = 3e-4  # of the weights
GATE_RATE = 0.02  # of the scores, which are ranks in (0, 1)
BUDGET_WEIGHT = 100.0  # of the squared difference from the target share of the MACs, added to KL in nats


class GatedBaseline(SearchedBaseline):
    """A baseline that trains WDPruning's gates (`UnitGates`) for a share of the MACs, then prunes and fine-tunes.

    Adam trains weights and gates for STEPS steps. `prescribe_gates` then turns the gates into a prescription, and Adam
    fine-tunes the smaller model for another STEPS steps. Three choices are ours. First, the loss is the KL divergence
    from the original instead of cross-entropy and distillation, so the method uses no labels. Second, training takes
    only a few steps, while the paper trains for tens of epochs. Third, we chose all learning rates and loss weights.
    """

    def __init__(self, model: nn.Module, calibration: ImageSet, seed: int = 0):
        super().__init__(model, calibration, seed)
        GatedModel(model)  # raises if the model has no units to gate

    @property
    def least(self) -> float:
        return least_gated_share(self.model)

    def searched(self, share: float) -> nn.Module:
        gated = GatedModel(copy.deepcopy(self.model))
        groups = [
            {"params": list(gated.model.parameters())},
            {"params": list(gated.gates.parameters()), "lr": GATE_RATE},
        ]
        self._train_(gated, groups, share)
        small = realize(gated.model, prescribe_gates(gated.model, gated.gates.margins(), share))
        self._train_(small, [{"params": list(small.parameters())}])
        return small.eval()

    def _train_(self, model: nn.Module, groups: list[dict], macs: float | None = None) -> None:
        """Trains on the calibration images. The loss is the KL divergence, plus the budget term if `macs` is given."""
        optimizer = torch.optim.Adam(groups, lr=LEARNING_RATE)
        model.train()
        reference = self.model.eval()
        with torch.enable_grad():
            for step in range(STEPS):
                images = self.images_of_step(step, BATCH)
                with torch.no_grad():
                    target = reference(images).log_softmax(-1)
                logits = model(images)
                loss = F.kl_div(logits.log_softmax(-1), target, log_target=True, reduction="batchmean")
                if macs is not None:
                    assert isinstance(model, GatedModel)
                    loss = loss + BUDGET_WEIGHT * model.budget(macs)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
