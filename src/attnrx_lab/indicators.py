"""Indicators of a head that SVDA states and no rule reads: sparsity, sensitivity and alignment."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attnrx.decide.diagnostics import Diagnostic
from attnrx.decide.diagnostics.geometry import widened
from attnrx.decide.diagnostics.spectral_shape import largest_of, magnitude_of
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.observation import Observation
from attnrx.vit.spectrum import Spectrum

# A direction below a tenth of the strongest one's strength has less than a hundredth of its energy.
INACTIVE_BELOW = 0.1


@dataclass(frozen=True)
class Indicators(Diagnostic):
    """Returns sparsity, sensitivity and alignment [heads]; a head without energy has sparsity 1 and sensitivity 0."""

    def of_spectrum(self, spectrum: Spectrum) -> dict[str, Tensor]:
        strength, used = spectrum.strength, spectrum.used
        return {
            "sparsity": sparsity(strength, used),
            "sensitivity": sensitivity(strength, spectrum.scale, used),
        }

    def measure(self, observation: Observation) -> dict[str, Tensor]:
        return {"alignment": alignment(observation.query, observation.key)}


def sparsity(
    strength: Float[Tensor, "*heads directions"], used: Bool[Tensor, "*heads directions"] | None = None
) -> Float[Tensor, "*heads"]:
    """Returns the share of a head's directions whose |strength| lies below the threshold (P_epsilon, SVDA, Eq. 29).

    Eq. 29 has an absolute threshold epsilon. Ours is a tenth of the head's largest |strength|, which does not depend on
    the scale of the strengths.
    """
    magnitude = magnitude_of(strength, used)
    there = torch.ones_like(magnitude, dtype=torch.bool) if used is None else used
    # Zero is inactive also in the head whose largest strength, and so its threshold, is zero.
    inactive = ((magnitude < INACTIVE_BELOW * largest_of(magnitude)[..., None]) | (magnitude == 0)) & there
    directions = there.sum(-1)
    share = inactive.sum(-1).to(strength.dtype) / directions.clamp(min=1)
    return torch.where(directions > 0, share, torch.ones_like(share))


def sensitivity(
    strength: Float[Tensor, "*heads directions"], scale: float, used: Bool[Tensor, "*heads directions"] | None = None
) -> Float[Tensor, "*heads"]:
    """Returns max|strength| * scale, which bounds the change of the scores per change of query and key (Prop. 4)."""
    return scale * largest_of(magnitude_of(strength, used))


def alignment(
    query: Float[Tensor, "batch queries heads directions"], key: Float[Tensor, "batch keys heads directions"]
) -> Float[Tensor, "heads"]:
    """Returns the mean cosine between the query and key rows of an image, over all pairs and images, in [-1, 1].

    The strength is not used. The rows are divided by their norms here, so dense and compressed heads are comparable;
    a zero row has cosine zero with everything.
    """
    # The mean over all pairs of a dot product is the dot product of the two means.
    cosine = (_mean_unit(query) * _mean_unit(key)).sum(-1)
    return cosine.mean(0).clamp(-1, 1)  # only rounding can exceed the interval


def _mean_unit(rows: Float[Tensor, "batch tokens heads directions"]) -> Float[Tensor, "batch heads directions"]:
    rows = widened(rows)
    return F.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny).mean(1)
