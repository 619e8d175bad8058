"""Rules with an open share: the largest that fits, and what it costs is what the realized model costs."""

import pytest

from attnrx.change.realization import realize
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.planning import prescribed_costs
from attnrx.decide.rules import ByLayer, parse_rule
from attnrx.decide.rules.prescribing import prescribe
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import InvalidInput
from attnrx.vit.models import family_of
from attnrx_lab.baselines.compressor import GRID, largest_share
from attnrx_lab.comparison.methods import Template, costs_at
from attnrx_lab.rules import TopRank
from attnrx_lab.vision_transformer import VisionTransformer
from support import cases
from support.comparisons import pixels

DENSE = cases.CONFIGS["dense"]
ALL = Template.parse("qk=total_rank:{share} vo=total_rank:{share} fc1=uniform_rank:{share} fc2=uniform_rank:{share}")


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return cases.model(DENSE)


@pytest.fixture(scope="module")
def found(model: VisionTransformer) -> Diagnosis:
    return diagnose(model, pixels(DENSE, 16), batch_size=8)


@pytest.mark.parametrize("limit", [0.0003, 0.3, 0.5, 0.99999, 1.0])
def test_the_largest_share_that_fits_is_found(limit: float) -> None:
    requested: list[float] = []

    def fits(share: float) -> bool:
        requested.append(share)
        return share <= limit

    share = largest_share(fits)
    assert share is not None and share <= limit < share + 1 / GRID
    assert len(requested) <= 14


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_prescription_is_priced_as_it_is_realized(share: float, model: VisionTransformer, found: Diagnosis) -> None:
    prescription = prescribe(found, ALL.at(share))
    small = realize(model, prescription)
    assert prescribed_costs(model, prescription) == family_of(small).costs(small) == costs_at(model, found, ALL, share)
    assert prescribed_costs(model, prescription).macs < family_of(model).costs(model).macs


def test_a_rule_for_every_layer_decides_layer_by_layer(found: Diagnosis) -> None:
    prescription: Prescription = prescribe(found, ByLayer((TopRank(3, metric="mix"), TopRank(1))))
    assert prescription.ranks == ((3, 3, 3), (1, 1, 1))
    with pytest.raises(InvalidInput, match="1 rules for 2 layers"):
        prescribe(found, ByLayer((TopRank(3, metric="mix"),)))


def test_a_small_share_of_all_directions_leaves_the_minimum(found: Diagnosis) -> None:
    prescription = prescribe(found, parse_rule("total_rank:0.001"))
    assert prescription.ranks == ((1, 1, 1), (1, 1, 1))
