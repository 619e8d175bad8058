"""A priori bounds on the change of the scores."""

import math

import torch

from attnrx.prescription import ScoreDecision
from attnrx.shapes import Float, Tensor
from attnrx.spectrum import Spectrum


def score_bound(spectrum: Spectrum, decision: ScoreDecision) -> Float[Tensor, "heads"]:
    """Bounds the change of any masked score on the same tokens: max |change of strength| * scale (Theorem 1, Eq. 12).

    The bound holds because the rows of query and key have unit length, also where strengths are changed instead of
    removed. It is infinite for dense attention with any change (its rows have any length), for directions that all
    heads share, and for a removed head.
    """
    if decision.keep.shape != spectrum.used.shape:  # shared directions: no bound exists
        return torch.full((len(decision.heads),), math.inf, dtype=torch.float64)
    prescribed = torch.where(decision.keep, decision.strength.double(), 0.0)
    change = torch.where(spectrum.used, spectrum.strength.double() - prescribed, 0.0).abs()
    # The padding column of zeros gives heads without directions the bound 0; amax of an empty row is undefined.
    bound = torch.nn.functional.pad(change, (0, 1)).amax(-1) * spectrum.scale
    holds = decision.heads if spectrum.has_norms else decision.heads & (bound == 0)
    return torch.where(holds, bound, math.inf)
