"""Zero-TPrune, which prunes by PageRank on the attention graph and by similarity, without training."""

from dataclasses import dataclass

import torch
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.tokens.reducer import PerPatch, Reducer, Reduction, Shape, TokenState, best, gathered_rows, stable_order


@dataclass(frozen=True)
class ZeroTPrune(Reducer):
    """Prunes patches that resemble more important ones, then the least important patches (Wang et al., 2024).

    Importance is computed from the attention of the previous layer, which is treated as a graph. PageRank runs
    `iterations` steps from uniform scores, and computes a score for every token in every head. A head is excluded if
    its scores vary too little or too much: scaled to a mean of 1, they must have a variance over the patches between
    `least` and `most`. If no head meets these limits, all heads are used. The importance is the quadratic mean of the
    scores over the remaining heads, which emphasizes patches that some heads find informative.

    A stage first ranks the patches, and divides them into a less important half and a more important half. From the
    less important half it prunes the patches that are most similar to a patch of the more important half. Similarity is
    the cosine of the keys, averaged over the heads. Of all patches that the stage prunes, the fraction `similar` is
    pruned by similarity, but never more than the less important half contains. Then the stage ranks the remaining
    patches again, and prunes the least important.

    The steps follow the order that the paper calls I'-S-I. Three choices are ours: scaling the scores before their
    variance is computed, the fraction `similar`, and the same number of iterations in all stages (the paper uses fewer
    in deeper layers). PageRank treats the class token like other tokens.
    """

    iterations: int = 30
    similar: float = 0.5
    least: float = 0.01
    most: float = 0.7

    needs = ("attention", "keys")

    def __post_init__(self):
        super().__post_init__()
        if self.iterations < 1 or not 0 <= self.similar <= 1 or not 0 <= self.least < self.most:
            raise InvalidInput(
                f"{self}: give at least one iteration, a share `similar` in [0, 1], and variances 0 <= least < most."
            )

    def importance(
        self,
        attention: Float[Tensor, "batch heads tokens tokens"],
        present_mask: Float[Tensor, "batch tokens"],
        prefix: int,
    ) -> PerPatch:
        """Returns every patch's importance, computed only from the tokens whose entry in `present_mask` is 1."""
        # PageRank includes the class token and other prefix tokens, but the statistics of a head use only patches.
        scores = page_rank(attention, present_mask, self.iterations)[:, :, prefix:]
        patches = present_mask[:, None, prefix:]
        count = patches.sum(2, keepdim=True)
        # Scores are scaled to a mean of 1, so that the variance limits do not depend on the number of patches.
        scaled = scores / (scores.sum(2, keepdim=True) / count).clamp_min(torch.finfo(attention.dtype).tiny)
        variance = ((scaled - 1).square() * patches).sum(2) / count[..., 0]
        head_mask = ((variance >= self.least) & (variance <= self.most)).to(scores.dtype)
        # If no head meets the limits, all heads count.
        head_mask = torch.where(head_mask.sum(1, keepdim=True) > 0, head_mask, 1.0)
        return ((scores.square() * head_mask[..., None]).sum(1) / head_mask.sum(1, keepdim=True)).sqrt()

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of comparing the less important half with the rest, or 0 without similarity pruning."""
        half = patches // 2
        return half * (patches - half) * shape.directions if self._num_similar(patches, count) else 0

    def _num_similar(self, num_present: int, count: int) -> int:
        return min(int(self.similar * (num_present - count)), num_present // 2)

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        assert state.attention is not None
        assert state.keys is not None
        num_present = state.num_present
        num_similar = self._num_similar(num_present, count)
        present_mask = (state.sizes > 0).to(state.attention.dtype)
        if num_similar:  # the steps I' and S of the paper: rank and divide the patches, then remove similar patches
            first = self.importance(state.attention, present_mask, state.prefix)
            pruned = redundant(
                state.keys[:, state.prefix :], first, present_mask[:, state.prefix :], num_present, num_similar
            )
            present_mask = present_mask.scatter(1, state.prefix + pruned, 0.0)
        # The paper's step I ranks the patches again, without the attention of the removed patches.
        importance = self.importance(state.attention, present_mask, state.prefix)
        kept = best(importance, present_mask[:, state.prefix :], count)
        return Reduction(kept, gathered_rows(state.patches, kept))


def page_rank(
    attention: Float[Tensor, "batch heads tokens tokens"], present_mask: Float[Tensor, "batch tokens"], iterations: int
) -> Float[Tensor, "batch heads tokens"]:
    """Returns the PageRank of every remaining token after `iterations` steps. The edge weights are the attention.

    Attention to pruned tokens is set to zero, and every row is rescaled to sum to 1. The scores sum to 1.
    """
    steps = attention * present_mask[:, None, None, :]
    # A query that attends only to pruned tokens has a row of zeros, which stays zero.
    steps = steps / steps.sum(3, keepdim=True).clamp_min(torch.finfo(attention.dtype).tiny)
    scores = (present_mask / present_mask.sum(1, keepdim=True))[:, None, None, :].expand(-1, attention.shape[1], -1, -1)
    for _ in range(iterations):
        # [batch, heads, 1, tokens]: a query passes its score on to the keys, in proportion to its attention.
        scores = (scores.transpose(2, 3) * steps).sum(2, keepdim=True)
    return scores[:, :, 0]


def redundant(
    keys: Float[Tensor, "batch patches directions"],
    importance: PerPatch,
    present_mask: PerPatch,
    num_present: int,
    count: int,
) -> Int[Tensor, "batch pruned"]:
    """Returns the `count` patches of the less important half that are most similar to a patch of the other half.

    Only the `num_present` patches whose entry in `present_mask` is 1 are divided into halves.
    """
    order = stable_order(importance.masked_fill(present_mask == 0, float("-inf")))
    # An odd patch goes to the more important half. Pruned patches come last and belong to neither half.
    high, low = order[:, : num_present - num_present // 2], order[:, num_present - num_present // 2 : num_present]
    unit = nn.functional.normalize(keys, dim=-1)
    similarity = (gathered_rows(unit, low) @ gathered_rows(unit, high).transpose(1, 2)).amax(-1)
    return low.gather(1, stable_order(similarity)[:, :count])
