"""Budgets: the largest share is the largest, what it costs is what the realized model costs, and nothing is guessed."""

from dataclasses import replace

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.planning.budget import (
    GRID,
    PARTS,
    Budget,
    costs_at,
    largest_share,
    prescribe_within,
    prescribed_costs,
)
from attnrx.decide.rules import ByLayer, Template, TopRank, parse_rule
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import FingerprintMismatch, InvalidInput, NoOpPrescription, NotSupported
from attnrx.verbs.prescribe import prescribe
from attnrx.vit.models import VisionTransformer, family_of, initialize_
from support import cases
from support.comparisons import pixels

DENSE = cases.CONFIGS["dense"]
ALL = Template.parse("qk=total_rank:{share} vo=total_rank:{share} fc1=uniform_rank:{share} fc2=uniform_rank:{share}")
OF = {
    "qk": Template.parse("energy_retention:{share},metric=mix"),
    "vo": Template.parse("vo=energy_retention:{share}"),
    "attention": Template.parse("qk=energy_retention:{share},metric=mix vo=energy_retention:{share}"),
    "mlp": Template.parse("fc1=energy_retention:{share} fc2=energy_retention:{share}"),
    "model": ALL,
}


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return cases.model(DENSE)


@pytest.fixture(scope="module")
def found(model: VisionTransformer) -> Diagnosis:
    return diagnose(model, pixels(DENSE, 16), batch_size=8)


def parts(of: str, costs: object) -> list[int]:
    names = {
        "qk": ("query_key", "scores", "diagonal", "fusion"),
        "vo": ("value_output", "read_out"),
        "attention": ("query_key", "scores", "diagonal", "fusion", "value_output", "read_out"),
        "mlp": ("mlp",),
    }
    layers = costs.layers  # type: ignore[attr-defined]
    return [sum(layer.parts[name].macs for name in names[of]) for layer in layers]


@pytest.mark.parametrize("limit", [0.0003, 0.3, 0.5, 0.99999, 1.0])
def test_the_largest_share_that_fits_is_found(limit: float) -> None:
    requested: list[float] = []

    def fits(share: float) -> bool:
        requested.append(share)
        return share <= limit

    share = largest_share(fits)
    assert share is not None and share <= limit < share + 1 / GRID
    assert len(requested) <= 14


def test_where_nothing_fits_there_is_no_share() -> None:
    assert largest_share(lambda share: False) is None


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_prescription_is_priced_as_it_is_realized(share: float, model: VisionTransformer, found: Diagnosis) -> None:
    prescription = prescribe(found, ALL.at(share))
    small = realize(model, prescription)
    assert prescribed_costs(model, prescription) == family_of(small).costs(small) == costs_at(model, found, ALL, share)
    assert prescribed_costs(model, prescription).macs < family_of(model).costs(model).macs


def test_what_would_change_nothing_costs_what_the_model_costs(model: VisionTransformer, found: Diagnosis) -> None:
    assert costs_at(model, found, Template.parse("total_rank:{share}"), 1.0) == family_of(model).costs(model)


@pytest.mark.parametrize("macs", [0.75, 0.5])
def test_the_model_costs_no_more_than_allowed_and_one_step_more_would(
    macs: float, model: VisionTransformer, found: Diagnosis
) -> None:
    prescription = prescribe_within(model, found, ALL, Budget(macs))
    small, before = realize(model, prescription), family_of(model).costs(model).macs
    spent = family_of(small).costs(small).macs / before
    reported = prescription.about["budget"]
    assert spent <= macs and reported["spent"] == [spent] and len(reported["shares"]) == 1
    assert costs_at(model, found, ALL, reported["shares"][0] + 1 / GRID).macs > macs * before


@pytest.mark.parametrize("of", PARTS)
def test_every_layer_meets_its_own_target(of: str, model: VisionTransformer, found: Diagnosis) -> None:
    prescription = prescribe_within(model, found, OF[of], Budget(0.8, of))
    small = realize(model, prescription)
    before, after = (parts(of, family_of(each).costs(each)) for each in (model, small))
    shares = prescription.about["budget"]["shares"]
    assert len(shares) == len(before) == 2
    for layer, (own, whole, share) in enumerate(zip(after, before, shares, strict=True)):
        assert own <= 0.8 * whole
        if share < 1:
            assert parts(of, costs_at(model, found, OF[of], share + 1 / GRID))[layer] > 0.8 * whole
    assert len(set(shares)) == 2  # the layers' spectra differ, so one share for both would not do


def test_layers_of_different_shares_record_a_rule_for_each(
    model: VisionTransformer, found: Diagnosis, tmp_path: object
) -> None:
    prescription = prescribe_within(model, found, OF["qk"], Budget(0.7, "qk"))
    first, second = prescription.about["budget"]["shares"]
    parts = "; ".join(f"energy_retention:{share!r},metric=mix" for share in (first, second))
    assert str(prescription) == f"qk=by_layer({parts})"
    again = prescribe(found, str(prescription))
    assert again.ranks == prescription.ranks


def test_a_model_without_weights_is_enough(model: VisionTransformer, found: Diagnosis) -> None:
    with torch.device("meta"):
        outline = VisionTransformer(DENSE)
    ranks = [prescribe_within(each, found, ALL, Budget(0.6)).ranks for each in (model, outline)]
    assert ranks[0] == ranks[1]


def test_the_model_is_the_diagnosed_one(model: VisionTransformer, found: Diagnosis) -> None:
    other = initialize_(VisionTransformer(DENSE), seed=9)
    with pytest.raises(FingerprintMismatch, match="the model whose costs are to fit the budget"):
        prescribe_within(other, found, ALL, Budget(0.6))
    with torch.device("meta"):
        deeper = VisionTransformer(replace(DENSE, attention=DENSE.attention * 2))
    with pytest.raises(FingerprintMismatch, match=r"diagnosis has 2 layers with .*, and the model .* 4 layers"):
        prescribe_within(deeper, found, ALL, Budget(0.6))


def test_what_cannot_be_met_is_said(model: VisionTransformer, found: Diagnosis) -> None:
    with pytest.raises(NotSupported, match=r"the model cannot cost 40 %.* still costs \d"):
        prescribe_within(model, found, Template.parse("total_rank:{share}"), Budget(0.4))
    with pytest.raises(NotSupported, match="attention of layer 0 cannot cost 10 %"):
        prescribe_within(model, found, Template.parse("total_rank:{share}"), Budget(0.1, "attention"))
    with pytest.raises(NoOpPrescription):
        prescribe_within(model, found, Template.parse("total_rank:{share}"), Budget(1.0))
    with pytest.raises(InvalidInput, match="has no share to choose"):
        prescribe_within(model, found, Template.parse("total_rank:0.5"), Budget(0.8))
    with pytest.raises(InvalidInput, match="share of the original's MACs"):
        Budget(1.2)
    with pytest.raises(InvalidInput, match=r"part='heads'.*one of model"):
        Budget(0.5, "heads")


def test_a_rule_for_every_layer_decides_layer_by_layer(found: Diagnosis) -> None:
    prescription: Prescription = prescribe(found, ByLayer((TopRank(3, metric="mix"), TopRank(1))))
    assert prescription.ranks == ((3, 3, 3), (1, 1, 1))
    with pytest.raises(InvalidInput, match="1 rules for 2 layers"):
        prescribe(found, ByLayer((TopRank(3, metric="mix"),)))


def test_a_small_share_of_all_directions_leaves_the_minimum(found: Diagnosis) -> None:
    prescription = prescribe(found, parse_rule("total_rank:0.001"))
    assert prescription.ranks == ((1, 1, 1), (1, 1, 1))
