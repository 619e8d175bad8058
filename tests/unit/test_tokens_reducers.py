"""What each reducer decides, on examples small enough to do by hand."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from attnrx.vit.tokens import ClassAttention, Reducer, Reduction, TokenState, ToMe, Ward
from attnrx_lab.tokens import ATS, DTPS, EViT, EvoViT, HaltingScores, PiToMe, SPViT, ZeroTPrune
from attnrx_lab.tokens.pitome import energy_scores
from attnrx_lab.tokens.scores import TokenScores
from attnrx_lab.tokens.spot import standardized_features
from attnrx_lab.tokens.zero_tprune import page_rank, redundant


def state(patches: list[list[float]], sizes: list[float] | None = None, **given: Any) -> TokenState:
    """One image whose first token is no patch."""
    tokens = torch.tensor([[[9.0] * len(patches[0]), *patches]])
    known = torch.tensor([[1.0, *(sizes or [1.0] * len(patches))]])
    return TokenState(tokens, 1, known, torch.arange(len(patches))[None], **given)


def decided(reducer: Reducer, given: TokenState, count: int) -> Reduction:
    return reducer.reduce(given, count, nn.Module())


def class_pays(shares: list[float]) -> torch.Tensor:
    return torch.tensor([[[0.1, *shares]]])


def test_a_package_is_the_mean_weighted_by_keep_scores() -> None:
    given = state([[1.0, 0.0], [0.0, 4.0], [8.0, 0.0]], class_attention=class_pays([0.6, 0.1, 0.2]))
    for kind in (EViT(), SPViT(ClassAttention())):
        found = decided(kind, given, 1)
        assert found.kept.tolist() == [[0]]
        assert found.extra is not None
        torch.testing.assert_close(found.extra, torch.tensor([[[16 / 3, 4 / 3]]]))


class Says(nn.Module):
    """A predictor that says the same of all images."""

    def __init__(self, keep: list[float]):
        super().__init__()
        self.keep = torch.tensor(keep)

    def forward(self, given: TokenState) -> torch.Tensor:
        return torch.stack([self.keep.log(), (1 - self.keep).log()], dim=-1)[None]


def test_a_package_of_a_predictor_is_weighted_by_the_probability_of_keep() -> None:
    found = SPViT().reduce(state([[1.0], [2.0], [6.0]]), 1, Says([0.9, 0.3, 0.1]))
    assert found.kept.tolist() == [[0]]
    assert found.extra is not None
    torch.testing.assert_close(found.extra, torch.tensor([[[3.0]]]))  # (0.3 * 2 + 0.1 * 6) / 0.4


def test_dtps_squeezes_into_the_most_similar_by_exp_of_the_cosine() -> None:
    given = state([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0], [5.0, 0.0]], class_attention=class_pays([0.4, 0.3, 0.1, 0.1]))
    found = decided(DTPS(ClassAttention()), given, 2)
    assert found.kept.tolist() == [[0, 1]]
    # (5, 0) has cosine 1 with the first; (3, 4) has 0.6 with the first and 0.8 with the second.
    own, weight = math.e, math.exp(0.8)
    second = [weight * 3 / (own + weight), (own * 2 + weight * 4) / (own + weight)]
    torch.testing.assert_close(found.tokens, torch.tensor([[[3.0, 0.0], second]]))


def test_the_highest_sum_of_halting_scores_is_pruned() -> None:
    scores = HaltingScores(gamma=2.0, beta=-1.0).layer_score(torch.tensor([[[0.5, 9.0], [1.0, -9.0]]]))
    torch.testing.assert_close(scores, torch.tensor([[0.5, 1 / (1 + math.exp(-1.0))]]))
    given = state([[1.0], [2.0], [3.0]], statistic=TokenScores(torch.tensor([[0.0, 0.2, 0.9, 0.4]])))
    assert decided(HaltingScores(), given, 2).kept.tolist() == [[0, 2]]
    package = decided(SPViT(HaltingScores()), given, 1).extra
    assert package is not None
    torch.testing.assert_close(package, torch.tensor([[[(0.1 * 2 + 0.6 * 3) / 0.7]]]))


def test_page_rank_walks_as_tokens_attend() -> None:
    attention = torch.tensor([[[[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]]]])
    everyone = torch.ones(1, 3)
    torch.testing.assert_close(page_rank(attention, everyone, 1), torch.tensor([[[1 / 6, 1 / 2, 1 / 3]]]))
    torch.testing.assert_close(page_rank(attention, everyone, 2), torch.tensor([[[1 / 4, 1 / 3, 5 / 12]]]))
    left = page_rank(attention, torch.tensor([[1.0, 1.0, 0.0]]), 1)  # the second now attends to the first alone
    torch.testing.assert_close(left, torch.tensor([[[0.5, 0.5, 0.0]]]))


def _pays(columns: list[list[float]]) -> torch.Tensor:
    """Heads in which every token attends alike, so that one step of page rank gives what is attended to."""
    return torch.stack([torch.tensor(column).expand(len(column), -1) for column in columns])[None]


def test_zero_tprune_takes_the_quadratic_mean_of_the_heads_that_vary_as_they_should() -> None:
    # Scores of the patches over their mean vary by 0, 0.28 and 1 in the three heads.
    attention = _pays([[0.4, 0.3, 0.3], [0.2, 0.188, 0.612], [0.1, 0.9, 0.0]])
    everyone = torch.ones(1, 3)
    middle = ZeroTPrune(1, 0.0).importance(attention, everyone, 1)
    torch.testing.assert_close(middle, torch.tensor([[0.188, 0.612]]))
    upper = ZeroTPrune(1, 0.0, 0.01, 2.0).importance(attention, everyone, 1)
    expected = [math.sqrt((0.188**2 + 0.9**2) / 2), math.sqrt((0.612**2 + 0.0) / 2)]
    torch.testing.assert_close(upper, torch.tensor([expected]))
    nobody = ZeroTPrune(1, 0.0, 5.0, 6.0).importance(attention, everyone, 1)
    all_three = [math.sqrt((0.3**2 + a**2 + b**2) / 3) for a, b in ((0.188, 0.9), (0.612, 0.0))]
    torch.testing.assert_close(nobody, torch.tensor([all_three]))


def test_similar_patches_leave_from_the_less_important_half() -> None:
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.5, -1.0]]])
    importance = torch.tensor([[0.4, 0.3, 0.1, 0.2]])
    assert redundant(keys, importance, torch.ones(1, 4), 4, 1).tolist() == [[2]]  # nearly the first, not the last


def test_zero_tprune_drops_the_similar_before_the_unimportant() -> None:
    attention = _pays([[0.1, 0.3, 0.27, 0.2, 0.13]])
    keys = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [-1.0, -1.0]]])
    given = state([[1.0], [2.0], [3.0], [4.0]], attention=attention, keys=keys)
    assert decided(ZeroTPrune(1, similar=1.0), given, 3).kept.tolist() == [[0, 1, 3]]
    assert decided(ZeroTPrune(1, similar=0.0), given, 3).kept.tolist() == [[0, 1, 2]]
    assert decided(ZeroTPrune(1, similar=0.5), given, 2).kept.tolist() == [[0, 1]]


def test_tome_merges_in_rounds_by_the_mean_keys_of_what_it_merged() -> None:
    turns = torch.tensor([0.0, 0.0, 0.1, 3.0, 3.2])  # the first token is no patch
    keys = torch.stack([turns.cos(), turns.sin()], dim=-1)[None]
    given = state([[1.0], [3.0], [10.0], [20.0]], [1.0, 1.0, 2.0, 1.0], keys=keys)
    # Round one: 1 into 3 and 10 (of size 2) into 20, at 0.1 and 0.2 apart. Round two: (1 + 3) into (10, 10, 20).
    two = decided(ToMe(), given, 2)
    assert two.kept.tolist() == [[1, 3]]
    torch.testing.assert_close(two.tokens, torch.tensor([[[2.0], [40 / 3]]]))
    torch.testing.assert_close(two.sizes, torch.tensor([[2.0, 3.0]]))
    one = decided(ToMe(), given, 1)
    assert one.kept.tolist() == [[3]]
    torch.testing.assert_close(one.tokens, torch.tensor([[[44 / 5]]]))
    torch.testing.assert_close(one.sizes, torch.tensor([[5.0]]))


def test_ward_merges_where_the_tokens_change_least_and_keeps_their_length() -> None:
    # The first set is at 0 and at (8, 0), the second at (1, 0) and at (0, 6), which stands for three patches.
    given = state([[0.0, 0.0], [1.0, 0.0], [8.0, 0.0], [0.0, 6.0]], [1.0, 1.0, 1.0, 3.0])
    # 0 into (1, 0) adds 1/2; (8, 0) into (1, 0) adds 49/2, into (0, 6) 3/4 * 100.
    means = decided(Ward(lengths=False), given, 3)
    assert means.kept.tolist() == [[1, 2, 3]]
    torch.testing.assert_close(means.tokens, torch.tensor([[[0.5, 0.0], [8.0, 0.0], [0.0, 6.0]]]))
    torch.testing.assert_close(means.sizes, torch.tensor([[2.0, 1.0, 3.0]]))
    two = decided(Ward(lengths=False), given, 2)  # both of the first set leave
    torch.testing.assert_close(two.tokens, torch.tensor([[[3.0, 0.0], [0.0, 6.0]]]))
    turned = state([[3.0, 0.0], [0.0, 4.0]], [1.0, 3.0])
    (token,) = decided(Ward(), turned, 1).tokens[0]
    assert token.norm().item() == pytest.approx((3 + 3 * 4) / 4)  # as long as they were in the mean
    torch.testing.assert_close(token / token.norm(), torch.tensor([3.0, 12.0]) / math.hypot(3, 12))


def unit(*degrees: float) -> list[list[float]]:
    return [[math.cos(math.radians(each)), math.sin(math.radians(each))] for each in degrees]


def test_pitome_protects_isolated_patches_and_merges_within_groups() -> None:
    # Three patches within four degrees, two at 90 and 92, and one alone at 200.
    keys = unit(0, 2, 4, 90, 92, 200)
    given = state(keys, keys=torch.tensor([[[0.0, 0.0], *keys]]), layer=2, depth=12)
    found = decided(PiToMe(), given, 4)
    # The highest energies are those of the group of three: the first and the third are merged into the second.
    assert found.kept[0].tolist()[1:] == [3, 4, 5]
    assert found.sizes is not None and found.sizes.tolist() == [[3.0, 1.0, 1.0, 1.0]]
    cosines = torch.tensor(keys) @ torch.tensor(keys).T
    order = energy_scores(cosines[None], 0.9, 1.0)[0].argsort(descending=True)
    assert set(order[:3].tolist()) == {0, 1, 2} and order[-1].item() == 5


def test_the_margin_of_pitome_falls_with_depth() -> None:
    cosines = torch.tensor([[[1.0, 0.5], [0.5, 1.0]]])
    assert energy_scores(cosines, 0.9, 1.0)[0, 0].item() == pytest.approx((1 + math.exp(-0.4) - 1) / 2)
    assert energy_scores(cosines, 0.45, 1.0)[0, 0].item() == pytest.approx(0.75)
    # Three patches with cosines of 0.6, and a pair that is the same: only late do the three have the highest energy.
    shared, own = math.sqrt(0.6), math.sqrt(0.4)
    keys = [[shared if axis == 0 else own * (axis == number) for axis in range(5)] for number in (1, 2, 3)]
    keys += [[0.0, 0.0, 0.0, 0.0, 1.0]] * 2
    early, late = (state(keys, keys=torch.tensor([[[0.0] * 5, *keys]]), layer=layer, depth=12) for layer in (2, 12))
    assert decided(PiToMe(), early, 4).sizes.tolist() == [[1.0, 1.0, 1.0, 2.0]]  # type: ignore[union-attr]
    assert decided(PiToMe(), late, 4).kept[0].tolist()[-2:] == [3, 4]


def test_ats_samples_by_class_attention_times_the_length_of_the_values() -> None:
    # Two heads of .2, .4, .2, .2 and 0, .6, 0, .4, each scaled to a sum of 1: significance .1, .5, .1, .3. The points
    # of four are at 1/8, 3/8, 5/8 and 7/8.
    attention = torch.tensor([[[0.2, 0.2, 0.4, 0.2, 0.2], [0.2, 0.0, 0.06, 0.0, 0.04]]])
    norms = torch.tensor([[[9.0, 1.0, 1.0, 1.0, 1.0], [9.0, 5.0, 5.0, 5.0, 5.0]]])
    patches = [[float(number)] for number in range(4)]
    given = state(patches, class_attention=attention, value_norms=norms)
    torch.testing.assert_close(ATS().significance(given), torch.tensor([[0.1, 0.5, 0.1, 0.3]]))
    assert decided(ATS(), given, 2).kept.tolist() == [[1, 3]]  # points 1/4 and 3/4: the second patch and the last
    assert decided(ATS(), given, 3).kept.tolist() == [[0, 1, 3]]  # 1/6, 1/2, 5/6 hit two; of equals the first fills
    # A point may hit a patch of little significance: this is a distribution, and no top-k.
    spread = torch.tensor([[[0.0, 0.24, 0.02, 0.34, 0.40]]])
    sampled = state(patches, class_attention=spread, value_norms=torch.ones(1, 1, 5))
    assert decided(ATS(), sampled, 2).kept.tolist() == [[1, 3]]


def test_evo_vit_blends_the_class_attention_of_the_layers() -> None:
    first, second, third = (torch.tensor([row]) for row in ([0.6, 0.4], [0.0, 1.0], [1.0, 0.0]))
    reducer = EvoViT(alpha=0.5)
    blended = None
    for shares in (first, second, third):
        blended = reducer.add_layer(blended, torch.nn.functional.pad(shares, (1, 0))[:, None])
    assert blended is not None
    torch.testing.assert_close(blended.scores, torch.tensor([[0.0, 0.65, 0.35]]))
    assert decided(reducer, state([[1.0], [2.0]], statistic=blended), 1).kept.tolist() == [[0]]


def test_standardized_features_have_mean_zero_and_variance_one_over_the_remaining_patches() -> None:
    features = torch.tensor([[[1.0, 1e-9, 5.0], [3.0, 3e-9, 5.0], [100.0, 7.0, -1.0]]]).float()
    there = torch.tensor([[1.0, 1.0, 0.0]]).float()
    found = standardized_features(features, features, there)
    expected = torch.tensor([[[-1.0, -1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]).float()
    torch.testing.assert_close(found, expected)
    large = standardized_features(features, features + 1.0, there)
    assert large[0, :, 1].tolist() == [0.0, 0.0, 0.0]  # 1e-9 is a rounding error of 1
