"""What a prescription takes from the strengths of each layer, as the theorems speak of it."""

from dataclasses import dataclass

import torch

from attnrx.checks.comparison import Comparison
from attnrx.errors import InvalidInput
from attnrx.models import family_of, model_fingerprint
from attnrx.shapes import Bool, Float, Tensor


@dataclass(frozen=True)
class SpectralChange:
    """One layer: the strength that every direction lost, the heads that lost any, and those that lost their weakest.

    `threshold` is the smallest strength that a head kept, or the largest that it lost where it kept none (tau of Eq.
    8). It bounds the removed strengths only in the `thresholded` heads. Heads that were removed whole are counted
    nowhere: their attention is not perturbed but gone.
    """

    lost: Float[Tensor, "heads directions"]
    counted: Bool[Tensor, "heads"]
    threshold: Float[Tensor, "heads"]
    thresholded: Bool[Tensor, "heads"]

    @classmethod
    def between(
        cls,
        before: Float[Tensor, "heads directions"],
        after: Float[Tensor, "heads directions"],
        stays: Bool[Tensor, "heads"],
    ) -> "SpectralChange":
        """Compares the strengths of a layer before and after."""
        lost = before - after
        counted = (lost != 0).any(-1) & stays
        removed, kept = (after == 0) & (before != 0), after != 0
        largest_removed = torch.where(removed, before.abs(), 0).amax(-1)
        smallest_kept = torch.where(kept, before.abs(), torch.inf).amin(-1)
        threshold = torch.where(kept.any(-1), smallest_kept, largest_removed)
        untouched = ((lost == 0) | removed).all(-1)  # Eq. 18: the change contains only removed entries
        return cls(lost, counted, threshold, counted & untouched & (largest_removed <= threshold))

    def on(self, like: Tensor) -> "SpectralChange":
        """The same on the device of a tensor."""
        lost, threshold = self.lost.to(like.device), self.threshold.to(like.device)
        counted, thresholded = self.counted.to(like.device), self.thresholded.to(like.device)
        return SpectralChange(lost, counted, threshold, thresholded)


def spectral_changes(comparison: Comparison) -> dict[int, SpectralChange]:
    """Returns the change of every layer that changes, from the prescription or else from the masked model."""
    spectra = [layer.spectrum() for layer in family_of(comparison.reference).attention(comparison.reference)]
    after = _after(comparison)
    if after is None:
        return {}
    if [strength.shape for strength, _ in after] != [spectrum.strength.shape for spectrum in spectra]:
        raise InvalidInput(
            f"the masked model has strengths of shape {[tuple(strength.shape) for strength, _ in after]}, the "
            f"reference of {[tuple(spectrum.strength.shape) for spectrum in spectra]}; mask the reference itself."
        )
    changes = {
        index: SpectralChange.between(spectrum.strength, strength, stays)
        for index, (spectrum, (strength, stays)) in enumerate(zip(spectra, after, strict=True))
    }
    return {index: change for index, change in changes.items() if bool(change.counted.any())}


def _after(comparison: Comparison) -> list[tuple[Tensor, Tensor]] | None:
    """The strengths that stay, and the heads that stay, per layer."""
    if comparison.prescription is not None:
        comparison.prescription.require(model_fingerprint(comparison.reference))
        decisions = [layer.qk for layer in comparison.prescription.layers]
        return [(own.strength.double() * own.keep, own.heads) for own in decisions]
    if comparison.masked is None:
        return None
    spectra = [layer.spectrum() for layer in family_of(comparison.masked).attention(comparison.masked)]
    return [(spectrum.strength, torch.ones(len(spectrum.heads), dtype=torch.bool)) for spectrum in spectra]
