"""What a decision guarantees before anything is measured."""

import math

import torch

from attnrx.prescription import ScoreDecision
from attnrx.shapes import Float, Tensor
from attnrx.spectrum import Spectrum


def score_bound(spectrum: Spectrum, decision: ScoreDecision) -> Float[Tensor, "heads"]:
    """Bounds how far the mask moves any score on the same tokens: max |change of strength| * scale (Theorem 1, Eq. 12).

    It holds because rows of unit length meet in the score, also where strengths are changed instead of removed.
    It is infinite where no such law exists: for dense attention, whose rows have any length, if anything
    changes, for directions that all heads share, and for a removed head.
    """
    if decision.keep.shape != spectrum.used.shape:  # directions of another kind, which no such law compares
        return torch.full((len(decision.heads),), math.inf, dtype=torch.float64)
    prescribed = torch.where(decision.keep, decision.strength.double(), 0.0)
    change = torch.where(spectrum.used, spectrum.strength.double() - prescribed, 0.0).abs()
    # The column of zeros stands for a head without directions, of which there is no maximum.
    bound = torch.nn.functional.pad(change, (0, 1)).amax(-1) * spectrum.scale
    holds = decision.heads if spectrum.norms != "none" else decision.heads & (bound == 0)
    return torch.where(holds, bound, math.inf)
