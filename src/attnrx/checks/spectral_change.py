"""The change of the strengths of each layer by a prescription, in the terms of the theorems."""

from dataclasses import dataclass

import torch

from attnrx.checks.comparison import Comparison
from attnrx.errors import InvalidInput
from attnrx.models import family_of, model_fingerprint
from attnrx.shapes import Bool, Float, Tensor


@dataclass(frozen=True)
class SpectralChange:
    """The change of the strengths of one layer.

    `lost` is the decrease of every strength, `counted` marks kept heads with any change, and `thresholded` those whose
    pruned directions are their weakest. `threshold` is the smallest kept strength of a head, or the largest pruned one
    if it keeps none (tau of Eq. 8); it bounds the pruned strengths only in the `thresholded` heads. Pruned heads are
    not counted: the theorems do not apply to them.
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
        """Computes the change from the strengths of a layer before and after."""
        lost = before - after
        counted = (lost != 0).any(-1) & stays
        removed, kept = (after == 0) & (before != 0), after != 0
        largest_removed = torch.where(removed, before.abs(), 0).amax(-1)
        smallest_kept = torch.where(kept, before.abs(), torch.inf).amin(-1)
        threshold = torch.where(kept.any(-1), smallest_kept, largest_removed)
        only_removals = ((lost == 0) | removed).all(-1)  # Eq. 18: the change contains only removed entries
        return cls(lost, counted, threshold, counted & only_removals & (largest_removed <= threshold))

    def on(self, like: Tensor) -> "SpectralChange":
        """Returns the change on the device of a tensor."""
        lost, threshold = self.lost.to(like.device), self.threshold.to(like.device)
        counted, thresholded = self.counted.to(like.device), self.thresholded.to(like.device)
        return SpectralChange(lost, counted, threshold, thresholded)


def spectral_changes(comparison: Comparison) -> dict[int, SpectralChange]:
    """Returns the changes by layer index, from the prescription or else the masked model, without unchanged layers."""
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
    """Returns the strengths after pruning and the kept heads, per layer; None without prescription and mask."""
    if comparison.prescription is not None:
        comparison.prescription.require(model_fingerprint(comparison.reference))
        decisions = [layer.qk for layer in comparison.prescription.layers]
        return [(own.strength.double() * own.keep, own.heads) for own in decisions]
    if comparison.masked is None:
        return None
    spectra = [layer.spectrum() for layer in family_of(comparison.masked).attention(comparison.masked)]
    return [(spectrum.strength, torch.ones(len(spectrum.heads), dtype=torch.bool)) for spectrum in spectra]
