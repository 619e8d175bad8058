"""Gates of VTP, WDPruning and UVC: the equations of their budgets, and the prescription that they are read into."""

import pytest
import torch
import torch.nn.functional as F

from attnrx.change.realization import realize
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.planning.budget import prescribed_costs
from attnrx.support.errors import InvalidInput, NotSupported, UnknownName
from attnrx.training.losses import LossContext
from attnrx.verbs.prescribe import prescribe
from attnrx.vit.costs import count_params
from attnrx.vit.models import family_of
from attnrx_lab.baselines import GATES, GateBudget, GatedBaseline, GatedModel, gated, prescribe_gates
from attnrx_lab.baselines.gates import gated_macs
from support import cases
from support.comparisons import logits, pixels

CONFIG = cases.CONFIGS["dense"]


def wrapped(kind: str) -> GatedModel:
    return GatedModel(cases.model(CONFIG), kind)


def context(model: torch.nn.Module) -> LossContext:
    shown = cases.images(CONFIG, 3)
    return LossContext(model, shown, torch.zeros(3, dtype=torch.long), model(shown), seed=0)


def gradients(model: GatedModel, value: torch.Tensor) -> dict[str, torch.Tensor]:
    value.backward()
    return {name: own.grad for name, own in model.gates.named_parameters() if own.grad is not None}


@pytest.mark.parametrize("kind", GATES)
def test_open_gates_are_the_model_and_gates_learn(kind: str) -> None:
    model = wrapped(kind)
    shown = cases.images(CONFIG, 3)
    if kind == "uvc":
        with torch.no_grad():
            for score in model.gates.scores.values():
                score.fill_(40.0)
    torch.testing.assert_close(model(shown), model.model(shown))
    model = wrapped(kind)
    found = gradients(model, model(shown).square().sum())
    assert all(bool((found[f"scores.{name}"] != 0).any()) for name in model.gates.scores)


def test_the_budget_of_vtp_is_the_l1_norm_of_the_gates() -> None:
    model = wrapped("vtp")
    with torch.no_grad():
        model.gates.scores["0-qk"].copy_(torch.linspace(-1, 1, 12))
    value = GateBudget(0.5)(context(model))
    scores = torch.cat([own.detach() for own in model.gates.scores.values()])
    assert float(value.detach()) == pytest.approx(float(scores.abs().sum()))
    torch.testing.assert_close(gradients(model, value)["scores.0-qk"], torch.linspace(-1, 1, 12).sign())


def test_the_budget_of_wdpruning_is_the_squared_distance_of_the_open_gates() -> None:
    model = wrapped("wdpruning")
    with torch.no_grad():
        model.gates.thresholds["1-hidden"].fill_(0.5)  # of ranks in (0, 1): half of the units close
    gates = model.gates.gates()
    assert float(gates[1, "hidden"].detach().sum()) == len(gates[1, "hidden"]) // 2
    share = float(gated_macs(model.model, gates))
    value = GateBudget(0.4)(context(model))
    assert share < 1 and float(value) == pytest.approx((share - 0.4) ** 2)
    # More MACs than the target: descent raises every threshold, and lowers the scores.
    slopes = gradients(model, value)
    assert all(float(slopes[f"thresholds.{name}"]) < 0 for name in model.gates.thresholds)
    assert all(bool((slopes[f"scores.{name}"] > 0).all()) for name in model.gates.scores)


def test_uvc_descends_on_the_gates_and_ascends_on_the_multiplier() -> None:
    model = wrapped("uvc")
    share = float(gated_macs(model.model, model.gates.gates()))
    slopes = gradients(model, GateBudget(0.4)(context(model)))
    multiplier = F.softplus(model.gates.multiplier)
    (slope,) = torch.autograd.grad(multiplier, model.gates.multiplier)
    torch.testing.assert_close(slopes["multiplier"], -slope * (share - 0.4))
    excess = gated_macs(model.model, model.gates.gates())
    (of_gates,) = torch.autograd.grad(excess, model.gates.scores["0-vo"])
    torch.testing.assert_close(slopes["scores.0-vo"], multiplier.detach() * of_gates)


@pytest.mark.parametrize("macs", [0.6, 0.3])
def test_the_prescription_is_the_model_with_closed_gates_at_the_cost_of_the_open_ones(macs: float) -> None:
    model = wrapped("vtp")
    torch.manual_seed(0)
    with torch.no_grad():
        for score in model.gates.scores.values():
            score.uniform_(-1, 1)
    importance = model.gates.importance()
    expected = wrapped("vtp")
    folded = model.fold_()
    found = prescribe_gates(folded, importance, macs)
    small = realize(folded, found)
    costs = family_of(folded).costs(folded)
    assert family_of(small).costs(small).macs == prescribed_costs(folded, found).macs <= macs * costs.macs
    with torch.no_grad():
        for layer, own in enumerate(found.layers):
            values = own.outputs["vo"]
            hidden = own.hidden
            assert hidden is not None
            masks = {"qk": own.qk.keep.flatten(), "vo": values.decode.sum(1) > 0, "hidden": hidden.keep}
            for kind, mask in masks.items():
                score = expected.gates.scores[f"{layer}-{kind}"]
                score.copy_(model.gates.scores[f"{layer}-{kind}"] * mask)
    shown = cases.images(CONFIG, 3)
    torch.testing.assert_close(small(shown), expected(shown))
    hard = {place: (expected.gates.scores[f"{place[0]}-{place[1]}"] != 0).double() for place in importance}
    assert float(gated_macs(folded, hard)) == pytest.approx(family_of(small).costs(small).macs / costs.macs)


@pytest.mark.parametrize("kind", GATES)
def test_baselines_fit_their_budget(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "STEPS", 2)
    model, images = cases.model(CONFIG), pixels(CONFIG, 8)
    before = logits(model, images)
    own = GatedBaseline(model, kind, images)
    small = own.make(0.6)
    costs = own.costs(0.6)
    assert costs.macs <= 0.6 * family_of(model).costs(model).macs and costs.params == count_params(small)
    assert logits(small, images).isfinite().all()
    assert 0 < own.least < 0.5 and own.share_within(1) is None
    torch.testing.assert_close(logits(model, images), before)  # the original does not train


def test_what_has_no_gates_is_refused() -> None:
    with pytest.raises(NotSupported, match="plain dot products"):
        GatedModel(cases.model(cases.CONFIGS["svda"]), "vtp")
    model = cases.model(CONFIG)
    for rules in ("qk=total_rank:0.4", "vo=total_rank:0.4"):  # five of twelve, for three heads
        smaller = realize(model, prescribe(diagnose(model, pixels(CONFIG, 8)), rules))
        with pytest.raises(NotSupported, match="heads of equal sizes, and those of layer 1 have"):
            GatedModel(smaller, "vtp")
    with pytest.raises(UnknownName, match="wdpruning"):
        wrapped("wdprune")
    with pytest.raises(NotSupported, match="wrap it in GatedModel"):
        GateBudget(0.5)(context(cases.model(CONFIG)))
    with pytest.raises(InvalidInput, match="share"):
        GateBudget(1.5)
