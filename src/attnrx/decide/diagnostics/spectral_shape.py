"""Spectral shape: the distribution of a head's energy over its directions, from the strengths alone.

`used` is True for existing directions and False on padding, which is ignored. A head without energy (all
strengths zero, or no directions) has entropy and effective rank 0.
"""

from dataclasses import dataclass

import torch

from attnrx.decide.diagnostics.diagnostic import Diagnostic
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.spectrum import Spectrum


@dataclass(frozen=True)
class SpectralShape(Diagnostic):
    """Returns energy [heads, directions], and entropy and effective_rank [heads]."""

    def of_spectrum(self, spectrum: Spectrum) -> dict[str, Tensor]:
        strength, used = spectrum.strength, spectrum.used
        return {
            "energy": energy(strength, used),
            "entropy": entropy(strength, used),
            "effective_rank": effective_rank(strength, used),
        }


def energy(
    strength: Float[Tensor, "*heads directions"], used: Bool[Tensor, "*heads directions"] | None = None
) -> Float[Tensor, "*heads directions"]:
    """Returns each direction's share of its head's squared strengths (SVDA, Eq. 22); zeros without energy."""
    magnitude = magnitude_of(strength, used)
    largest = largest_of(magnitude)[..., None]
    # Divided by the largest one first, so that squares neither overflow nor vanish.
    square = (magnitude / torch.where(largest > 0, largest, torch.ones_like(largest)).detach()).square()
    total = square.sum(-1, keepdim=True)
    return square / torch.where(total > 0, total, torch.ones_like(total))


def entropy(
    strength: Float[Tensor, "*heads directions"], used: Bool[Tensor, "*heads directions"] | None = None
) -> Float[Tensor, "*heads"]:
    """Returns the spectral entropy H in nats (SVDA, Eq. 23): 0 for one direction, log(directions) for equal strengths.

    Differentiable everywhere; a direction of strength zero receives no gradient.
    """
    share = energy(strength, used)
    # log(1) where the share is zero: 0 log 0 = 0, and autograd finds no infinite slope to multiply with zero.
    return 0 - (share * torch.where(share > 0, share, torch.ones_like(share)).log()).sum(-1)  # 0 -, or zero reads -0.0


def effective_rank(
    strength: Float[Tensor, "*heads directions"], used: Bool[Tensor, "*heads directions"] | None = None
) -> Float[Tensor, "*heads"]:
    """Returns the effective rank exp(H) (SVDA, Eqs. 24 and 25): 1 to the number of directions; 0 without energy."""
    active = (magnitude_of(strength, used) != 0).sum(-1)
    # Rounding may put exp(log(n)) above n, and then its ceiling would be n + 1.
    return torch.minimum(entropy(strength, used).exp(), active.to(strength.dtype))


def magnitude_of(
    strength: Float[Tensor, "*heads directions"], used: Bool[Tensor, "*heads directions"] | None
) -> Float[Tensor, "*heads directions"]:
    """Returns |strength|, zero on padding."""
    return (strength if used is None else torch.where(used, strength, torch.zeros_like(strength))).abs()


def largest_of(magnitude: Float[Tensor, "*heads directions"]) -> Float[Tensor, "*heads"]:
    """Returns the largest entry of every head, zero without directions."""
    # amax refuses an axis without directions.
    return magnitude.amax(-1) if magnitude.shape[-1] else magnitude.sum(-1)
