"""Each rule on spectra where the right decision can be seen, and what each refuses."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attnrx
from attnrx.decide.diagnostics import Moments, suited_diagnostics
from attnrx.decide.rules import EnergyRetention, Rule, UniformRank, parse_rule, prescribe_maps
from attnrx.decide.rules.prescribing import decide_heads
from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.support.errors import InvalidInput, InvalidRule, NoOpPrescription, NotSupported
from attnrx_lab.rules import (
    ContributionEnergy,
    EffectiveRank,
    LargestMatched,
    MedianThreshold,
    NormClip,
    RandomMatched,
    RemoveHeads,
    Shrinkage,
    Threshold,
    TopRank,
    UniformHeads,
    UniformMatched,
)
from support import cases, comparisons
from support.diagnoses import diagnosis, layer, of_strengths, spectrum


def with_readings(given: Diagnosis, **readings: torch.Tensor) -> Diagnosis:
    layers = (LayerDiagnosis(one.spectrum, {**one.readings, **readings}) for one in given.layers)
    return replace(given, layers=tuple(layers))


def test_the_median_threshold_is_that_of_the_used_directions_of_a_head() -> None:
    rows = [9.0, -4.0, 1.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0], [0.0] * 5
    assert MedianThreshold().decide(of_strengths(*rows), 0).ranks == (1, 0, 0)  # 2.858 * 2; the second does not decay
    assert MedianThreshold(1.5).decide(of_strengths(*rows), 0).ranks == (2, 0, 0)


def test_the_median_threshold_finds_the_rank_of_a_matrix_in_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(64, 5, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    noise = torch.randn(64, 64, generator=generator, dtype=torch.float64) / 8
    values = torch.linalg.svdvals(left @ torch.diag(torch.arange(6.0, 11.0, dtype=torch.float64)) @ right.T + noise)
    assert MedianThreshold().decide(of_strengths(values.tolist()), 0).ranks == (5,)


def test_effective_rank_counts_equal_strengths_exactly() -> None:
    rows = [[1.0] * count + [1e-9] * (64 - count) for count in (1, 10, 33, 64)]
    assert EffectiveRank().decide(of_strengths(*rows), 0).ranks == (1, 10, 33, 64)
    assert EffectiveRank().decide(of_strengths([0.0, 0.0]), 0).ranks == (0,)


def test_top_rank_keeps_the_strongest_by_magnitude() -> None:
    decision = TopRank(2).decide(of_strengths([0.1, -3.0, 2.0], [1.0, -1.0, 1.0]), 0)
    assert decision.keep.tolist() == [[False, True, True], [True, True, False]]
    assert decision.strength.tolist() == [[0.0, -3.0, 2.0], [1.0, -1.0, 0.0]]


@pytest.mark.parametrize(
    ("rank", "multiple", "kept"), [(0.6, 4, 8), (0.6, 1, 7), (0.4, 4, 4), (7, 4, 8), (0.99, 4, 12), (11, 5, 10)]
)
def test_a_uniform_rank_is_rounded_to_its_multiple(rank: int | float, multiple: int, kept: int) -> None:
    strengths = [float(12 - place) for place in range(12)]
    decision = UniformRank(rank, metric="own", multiple=multiple).decide(of_strengths(strengths, strengths), 0)
    assert decision.ranks == (kept, kept)


def test_contribution_energy_sees_what_strength_alone_does_not() -> None:
    found = of_strengths([1.0, 2.0, 1.0])
    moments = torch.tensor([[10.0, 0.01, 0.1]]), torch.tensor([[10.0, 1.0, 0.0]])
    found = with_readings(found, query_moment=moments[0], key_moment=moments[1])
    assert EnergyRetention(0.6).decide(found, 0).keep.tolist() == [[False, True, False]]
    decision = ContributionEnergy(0.99).decide(found, 0)
    assert decision.keep.tolist() == [[True, False, False]]
    assert "100.0 % of the contribution" in decision.reasons[0]
    # all that contribute: keys that never vary (moment 0) move no attention
    assert ContributionEnergy(1.0).decide(found, 0).keep.tolist() == [[True, True, False]]


def test_contribution_energy_works_for_dense_attention() -> None:
    found = with_readings(of_strengths([1.0, 1.0], norms="none"), query_moment=torch.tensor([[1.0, 5.0]]))
    found = with_readings(found, key_moment=torch.tensor([[1.0, 5.0]]))
    decision = ContributionEnergy(0.9).decide(found, 0)
    assert decision.keep.tolist() == [[False, True]]
    assert "no bound on the scores" in decision.reasons[0]


def test_shrinkage_is_the_soft_threshold() -> None:
    decision = Shrinkage(0.5).decide(of_strengths([2.0, -1.5, 0.5, -0.25]), 0)
    assert decision.strength.tolist() == [[1.5, -1.0, 0.0, 0.0]]
    assert decision.keep.tolist() == [[True, True, False, False]]


def test_norm_clip_caps_and_keeps_everything() -> None:
    decision = NormClip(1.0).decide(of_strengths([2.0, -1.5, 0.5, 0.0]), 0)
    assert decision.strength.tolist() == [[1.0, -1.0, 0.5, 0.0]]
    assert bool(decision.keep.all())
    assert decision.reasons[0] == (
        "keeps all 4 directions (2 of them capped at 1); no masked score moves by more than 0.5 (Theorem 1)"
    )


def test_uniform_heads_go_to_rank_zero_and_stay() -> None:
    found = with_readings(of_strengths([1.0, 2.0], [1.0, 2.0]), selectivity=torch.tensor([1e-3, 2e-3]))
    decision = UniformHeads().decide(found, 0)
    assert decision.ranks == (0, 2)


def similar(spectral: list[list[float]], output: list[list[float]], strengths: list[float]) -> Diagnosis:
    found = of_strengths(*[[strength, strength] for strength in strengths])
    return with_readings(found, spectral_redundancy=torch.tensor(spectral), output_similarity=torch.tensor(output))


def staying(found: Diagnosis) -> list[bool]:
    (decision,) = decide_heads(found, RemoveHeads())
    return [True] * len(found.layers[0].spectrum.heads) if decision is None else decision.keep.tolist()


def test_a_head_goes_only_if_both_kinds_of_redundancy_say_so() -> None:
    high, low = [[1.0, 0.999], [0.999, 1.0]], [[1.0, 0.2], [0.2, 1.0]]
    assert staying(similar(high, high, [1.0, 2.0])) == [False, True]
    assert staying(similar(high, high, [2.0, 1.0])) == [True, False]
    assert staying(similar(high, low, [1.0, 2.0])) == [True, True]
    assert staying(similar(low, high, [1.0, 2.0])) == [True, True]


def test_the_last_head_stays_and_so_does_every_witness() -> None:
    alike = [[1.0] * 4] * 4
    assert sum(staying(similar(alike, alike, [1.0, 2.0, 3.0, 4.0]))) == 1
    assert staying(similar([[1.0]], [[1.0]], [1.0])) == [True]
    # a chain: 0 is like 1 and 1 is like 2, but 0 is not like 2; when 0 goes for 1, 1 has to stay
    output = [[1.0, 0.99, 0.1], [0.99, 1.0, 0.98], [0.1, 0.98, 1.0]]
    found = similar([[1.0] * 3] * 3, output, [1.0, 2.0, 3.0])
    assert staying(found) == [False, True, False]  # so 2, though stronger, goes for 1 as well
    (decision,) = decide_heads(found, RemoveHeads())
    assert decision is not None
    assert "(head 1 repeats head 2, which stays: similarity 1.000 of spectrum" in decision.reasons[0]
    # 1 goes for 2 first; then 0 is like no head that stays
    output[0][1] = output[1][0] = 0.97
    assert staying(similar([[1.0] * 3] * 3, output, [1.0, 2.0, 3.0])) == [True, False, True]


def test_a_removed_head_is_not_a_head_of_rank_zero() -> None:
    found = diagnosis(layers=1)
    removed = prescribe_maps(found, {"heads": RemoveHeads(0.9, 0.9)}).layers[0]
    uniform = prescribe_maps(found, UniformHeads(0.2)).layers[0]
    assert removed.qk.ranks.count(0) == 1 and not removed.heads.all()
    assert uniform.qk.ranks.count(0) > 0 and bool(uniform.heads.all())


def test_random_draws_differ_by_seed_layer_and_head_and_are_fair() -> None:
    found = of_strengths(*[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]] * 3)
    found = replace(found, layers=found.layers * 2)
    draws = [[RandomMatched(TopRank(4), seed).decide(found, where).keep for where in (0, 1)] for seed in range(100)]
    assert not torch.equal(draws[0][0], draws[1][0])
    assert not torch.equal(draws[0][0], draws[0][1])
    assert not torch.equal(draws[0][0][0], draws[0][0][1])
    again = RandomMatched(TopRank(4), 0).decide(found, 0).keep
    assert torch.equal(draws[0][0], again)
    shares = torch.stack([keep.double() for pair in draws for keep in pair]).mean((0, 1))
    assert bool(((shares - 0.5).abs() < 0.1).all())  # 600 draws: five standard deviations


def test_largest_matched_removes_the_strongest_by_magnitude() -> None:
    found = of_strengths([0.1, -3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    decision = LargestMatched(TopRank(2)).decide(found, 0)
    assert decision.keep.tolist() == [[True, False, False, True], [False, False, True, True]]


def test_uniform_matched_deals_the_same_rank_to_every_head() -> None:
    found = of_strengths([9.0, 1.0, 0.1, 0.1], [5.0, 5.0, 5.0, 6.0], [1.0, 2.0, 3.0, 0.1])
    matched = EnergyRetention(0.9)
    assert matched.decide(found, 0).ranks == (1, 4, 2)
    decision = UniformMatched(matched).decide(found, 0)
    # seven: two each, and one more for the head whose third direction is strongest
    assert decision.ranks == (2, 3, 2)
    used = torch.tensor([[True, False, False], [True, True, True]])
    ragged = Diagnosis((layer(spectrum(torch.ones(2, 3), used)),), "f", {})
    assert UniformMatched(TopRank(3)).decide(ragged, 0).ranks == (1, 3)  # a full head passes its part on


def test_reasons_carry_the_numbers() -> None:
    found = of_strengths([3.0, 4.0, 0.0, 1.0])
    reasons = EnergyRetention(0.9).decide(found, 0).reasons
    assert reasons == (
        "keeps 2 of 4 directions: 96.2 % of the energy; largest removed strength 1; "
        "no masked score moves by more than 0.5 (Theorem 1)",
    )
    assert Threshold(9.0).decide(found, 0).reasons[0].startswith("keeps none of 4 directions and attends uniformly")
    both = (EnergyRetention(0.9) & TopRank(1)).decide(found, 0).reasons[0]
    assert both.startswith("keeps 1 of 4 directions: 61.5 % of the energy; largest removed strength 3; no masked")
    assert "All of: [energy_retention:0.9] keeps 2 of 4" in both and "[top_rank:1] keeps 1 of 4" in both


@pytest.mark.parametrize("rule", [Threshold(0.5), EnergyRetention(0.9), EffectiveRank(), TopRank(1), Shrinkage(0.1)])
def test_rules_by_strength_refuse_dense_attention(rule: Rule) -> None:
    dense = of_strengths([1.0, 1.0], [1.0, 1.0], norms="none")
    for refused in (rule, LargestMatched(rule), UniformMatched(rule), NormClip(0.5), rule & UniformHeads()):
        with pytest.raises(NotSupported, match=r"ranks by strength, but layer 1 is dense attention.*metric=mix"):
            refused.decide(dense, 0)
    assert rule.decide(of_strengths([1.0, 1.0]), 0) is not None  # equal strengths that were learned are a finding
    assert rule.decide(of_strengths([1.0, 2.0], norms="none"), 0) is not None  # so are others in a form without norms


def test_missing_and_broken_readings_are_refused(tmp_path: Path) -> None:
    found = of_strengths([1.0, 2.0])
    bare = Diagnosis((LayerDiagnosis(found.layers[0].spectrum, {}),), "f", {})
    with pytest.raises(InvalidInput, match="the diagnosis has no reading 'query_moment'"):
        prescribe_maps(bare, RandomMatched(EnergyRetention(0.9) & ContributionEnergy(0.9)))
    broken = with_readings(found, selectivity=torch.tensor([math.nan]))
    for name, each in {"selectivity": broken, "strength": of_strengths([1.0, math.nan])}.items():
        path = each.save(tmp_path / f"{name}.json")
        with pytest.raises(InvalidInput, match=f"NaN or infinity in '.*{name}'"):
            Diagnosis.load(path)


def test_prescribe_records_what_a_reviewer_needs() -> None:
    found, rules = diagnosis(), {"qk": EnergyRetention(0.8), "heads": RemoveHeads(0.9, 0.9)}
    given = prescribe_maps(found, rules)
    assert given.fingerprint == found.fingerprint
    assert given.rules == {"qk": "energy_retention:0.8", "heads": "remove_heads:spectral=0.9,output=0.9,metric=own"}
    assert parse_rule(given.rules["heads"]) == RemoveHeads(0.9, 0.9, metric="own")
    assert given.about["data"] == {"name": "noise", "images": 3}


@pytest.mark.parametrize(
    "rule",
    [
        Threshold(1e-9),
        EnergyRetention(1.0),
        TopRank(8),
        NormClip(99.0),
        UniformHeads(1e-9),
        Threshold(1e-9) & TopRank(8),
        TopRank(1) | TopRank(8),
        RandomMatched(TopRank(8)),
    ],
    ids=str,
)
def test_changing_nothing_is_an_error(rule: Rule) -> None:
    with pytest.raises(NoOpPrescription, match=r"would change nothing: every map keeps everything.*\(\|strength\|"):
        prescribe_maps(diagnosis(), rule)


EMPTY = {
    "qk": ("top_rank:0", "uniform_rank:0", "shrinkage:1000", "threshold:1000"),
    "vo": ("uniform_rank:0", "top_rank:0"),
    "hidden": ("uniform_rank:0", "top_rank:0"),
}


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, rules in EMPTY.items() for rule in rules])
def test_a_rule_that_leaves_nothing_of_a_map_is_refused_unless_it_is_meant(name: str, rule: str) -> None:
    model = cases.model(cases.CONFIGS["svda"])
    readings = (*suited_diagnostics(()), Moments())
    diagnosis = attnrx.diagnose(model, comparisons.pixels(cases.CONFIGS["svda"], 8), diagnostics=readings)
    with pytest.raises(InvalidRule, match=f"{name}=.* removes all of {name} in every layer"):
        attnrx.prescribe(diagnosis, f"{name}={rule}")
    # On purpose, for comparisons with a model without the map; and in one layer, as a rule may find it.
    assert prescribe_maps(diagnosis, f"{name}={rule}").rules
    assert attnrx.prescribe(diagnosis, f"{name}=by_layer({rule}; top_rank:1)").rules
