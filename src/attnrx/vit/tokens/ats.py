"""ATS: samples patches from the distribution of class attention times value norms."""

from dataclasses import dataclass

import torch
from torch import nn

from attnrx.vit.tokens.reducer import PerPatch, Reducer, Reduction, reduced_to_best
from attnrx.vit.tokens.state import TokenState


@dataclass(frozen=True)
class ATS(Reducer):
    """Adaptive token sampling (Fayyaz et al., ECCV 2022) with a fixed number of patches; nothing is learned.

    The significance of a patch is the class attention to it times the norm of its value, scaled to a sum of 1 in every
    head, and averaged over the heads. Inverse transform sampling at the fixed points (2 k - 1) / 2 K (k = 1..K) selects
    the patches: one of large significance is hit more than once, patches of small significance share a point. As
    published the number of patches differs between images, because each patch is kept once however often it is hit.
    Here it is fixed: K is the number to keep, and the patches of the highest significance replace repeated hits. As
    published patches are removed within the attention of a layer; here it is before the next layer.
    """

    needs = ("class_attention", "value_norms")

    def significance(self, state: TokenState) -> PerPatch:
        """Returns the distribution that is sampled from; 0 for pruned patches."""
        assert state.class_attention is not None
        assert state.value_norms is not None
        scores = (state.class_attention * state.value_norms)[:, :, state.prefix :] * state.present_mask[:, None]
        totals = scores.sum(2, keepdim=True)
        # A head whose values are all zero has no part in the sum; it would be divided by zero.
        scores = (scores / torch.where(totals > 0, totals, 1.0)).sum(1)
        # Where all are 0 (all values are zero), the remaining patches are equally significant.
        scores = torch.where(scores.sum(1, keepdim=True) > 0, scores, state.present_mask)
        return scores / scores.sum(1, keepdim=True)

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Samples `count` points, and keeps as many patches."""
        significance = self.significance(state)
        # The points up to a share s of the distribution are floor(K s + 1/2): a patch is hit if there are more of them
        # at its end than at its beginning.
        ends = (count * significance.cumsum(1) + 0.5).floor()
        hit = ends > torch.nn.functional.pad(ends, (1, 0))[:, :-1]
        # A significance is at most 1, so 2 puts every hit before every other patch.
        return reduced_to_best(state, significance + 2 * hit, count)
