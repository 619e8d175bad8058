"""Gates of WDPruning: the equation of their budget, and the prescription that they are read into."""

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.decide.rules.prescribing import prescribe
from attnrx.support.errors import NotSupported
from attnrx.vit.costs import count_params
from attnrx.vit.models import family_of
from attnrx_lab.baselines import GatedBaseline, GatedModel, gates, prescribe_gates
from attnrx_lab.baselines.gates import gated_macs
from support import cases
from support.comparisons import logits, pixels

CONFIG = cases.CONFIGS["dense"]


def wrapped() -> GatedModel:
    return GatedModel(cases.model(CONFIG))


def gradients(model: GatedModel, value: torch.Tensor) -> dict[str, torch.Tensor]:
    value.backward()
    return {name: own.grad for name, own in model.gates.named_parameters() if own.grad is not None}


def test_open_gates_are_the_model_and_gates_learn() -> None:
    model = wrapped()
    shown = cases.images(CONFIG, 3)
    torch.testing.assert_close(model(shown), model.model(shown))
    found = gradients(model, model(shown).square().sum())
    assert all(bool((found[f"scores.{name}"] != 0).any()) for name in model.gates.scores)


def test_the_budget_of_wdpruning_is_the_squared_distance_of_the_open_gates() -> None:
    model = wrapped()
    with torch.no_grad():
        model.gates.thresholds["1-hidden"].fill_(0.5)  # of ranks in (0, 1): half of the units close
    gates = model.gates.gates()
    assert float(gates[1, "hidden"].detach().sum()) == len(gates[1, "hidden"]) // 2
    share = float(gated_macs(model.model, gates))
    value = model.budget(0.4)
    assert share < 1 and float(value) == pytest.approx((share - 0.4) ** 2)
    # More MACs than the target: descent raises every threshold, and lowers the scores.
    slopes = gradients(model, value)
    assert all(float(slopes[f"thresholds.{name}"]) < 0 for name in model.gates.thresholds)
    assert all(bool((slopes[f"scores.{name}"] > 0).all()) for name in model.gates.scores)


@pytest.mark.parametrize("macs", [0.6, 0.3])
def test_the_prescription_is_the_model_with_closed_gates_at_the_cost_of_the_open_ones(macs: float) -> None:
    model = wrapped()
    torch.manual_seed(0)
    with torch.no_grad():
        for score in model.gates.scores.values():
            score.uniform_(-1, 1)
    importance, folded = model.gates.margins(), model.model
    expected = wrapped()
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
                score.copy_(mask.to(score) - 0.5)
    shown = cases.images(CONFIG, 3)
    torch.testing.assert_close(small(shown), expected(shown))
    hard = expected.gates.gates()
    assert float(gated_macs(folded, hard)) == pytest.approx(family_of(small).costs(small).macs / costs.macs)


def test_the_baseline_fits_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "STEPS", 2)
    model, images = cases.model(CONFIG), pixels(CONFIG, 8)
    before = logits(model, images)
    own = GatedBaseline(model, images)
    small = own.make(0.6)
    costs = own.costs(0.6)
    assert costs.macs <= 0.6 * family_of(model).costs(model).macs and costs.params == count_params(small)
    assert logits(small, images).isfinite().all()
    assert 0 < own.least < 0.5 and own.share_within(1) is None
    torch.testing.assert_close(logits(model, images), before)  # the original does not train


def test_what_has_no_gates_is_refused() -> None:
    with pytest.raises(NotSupported, match="plain dot products"):
        GatedModel(cases.model(cases.CONFIGS["svda"]))
    model = cases.model(CONFIG)
    for rules in ("qk=total_rank:0.4", "vo=total_rank:0.4"):  # five of twelve, for three heads
        smaller = realize(model, prescribe(diagnose(model, pixels(CONFIG, 8)), rules))
        with pytest.raises(NotSupported, match="heads of equal sizes, and those of layer 1 have"):
            GatedModel(smaller)
