"""Bounds: the paper's theorems, checked on the activations of the reference."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison
from attnrx.checks.theorems import (
    head_scores,
    proposition_1,
    proposition_1_half_range,
    proposition_1_prior,
    proposition_4,
    theorem_1,
)
from attnrx.diagnostics.spectral_shape import effective_rank
from attnrx.errors import InvalidInput
from attnrx.evidence import FAILS, HOLDS, Finding
from attnrx.models import evaluating, family_of, model_fingerprint, observing, require_all_tokens
from attnrx.observation import Observation
from attnrx.shapes import Bool, Float, Tensor
from attnrx.spectrum import Spectrum

CLAIMS = {
    "Theorem 1, Eq. 12": "no score moves by more than the largest removed strength allows (Theorem 1, Eq. 12)",
    "Theorem 1, Eq. 13": "no score moves by more than the threshold of its head allows (Theorem 1, Eq. 13)",
    "Proposition 1": "no attention row moves by more than its scores, with C_sm = 1 (Proposition 1, Eq. 21)",
    "Proposition 1, half range": "no attention row moves by more than half the range of its scores' change",
    "Proposition 1 with Theorem 1": "no attention row moves by more than the removed strengths allow for any input",
    "Proposition 4": "no noise moves the scores by more than the spectral norms allow (Proposition 4, Eq. 36)",
}

# Rows computed in float32 have unit length only up to about 1e-7, which affects every bound.
ROUNDING = 1e-5
AT_ONCE = 16  # images per batch; every score of every head is held in float64


@dataclass(frozen=True)
class Bounds(Check):
    """Theorem 1, Propositions 1 and 4 and Eq. 25 on the activations of the reference, layer by layer.

    The theorems apply to one layer and one input: each layer is evaluated on the reference's activations, and only its
    strengths change. (In a masked model the inputs change from the second layer on.) The value of a finding is the
    largest ratio of measurement to bound over images, layers and heads: at most 1, and close to 1 for a tight bound.

    The pruned directions are taken from the comparison's prescription, else from `masked` or the comparison's masked
    model. Without any of them, and in layers without strengths, Theorem 1 and Proposition 1 are skipped. Unchanged
    heads are not counted. Eq. 13 applies only to heads whose weakest directions were pruned; its threshold is the
    smallest kept strength. Proposition 4 perturbs the images with Gaussian noise of standard deviation `noise`, in
    normalized units.
    """

    name: ClassVar[str] = "bounds"
    masked: nn.Module | None = None
    images: int = 256
    noise: float = 0.1

    def __post_init__(self):
        if self.images < 1 or self.noise <= 0:
            raise InvalidInput(
                f"Bounds(images={self.images}, noise={self.noise}): take at least one image and noise above 0."
            )

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Evaluates the reference on clean and on perturbed images."""
        comparison = comparison.with_masked(self.masked).taking(self.images)
        tally = Tally(spectral_changes(comparison))
        generator = torch.Generator().manual_seed(comparison.seed)
        model = comparison.reference
        require_all_tokens(model, "check the bounds of")
        dtype = next(model.parameters()).dtype
        with evaluating([model]), observing(model, family_of(model), tally.observe):
            for batch in comparison.data.batches(AT_ONCE, device=comparison.device):
                # Drawn on the CPU: the same noise on every device.
                noise = self.noise * torch.randn(batch.images.shape, generator=generator, dtype=dtype)
                images = batch.images.to(dtype)
                # One pass of both halves: the tally splits every observation again.
                model(torch.cat([images, images + noise.to(images.device)]))
        found = [self._bound(name, tally.ratios[name], comparison) for name in CLAIMS if name in tally.ratios]
        return (*found, self._effective_rank(comparison))

    def _bound(self, name: str, layers: Mapping[int, list[Tensor]], comparison: Comparison) -> Finding:
        ratios = {layer: torch.cat(parts) for layer, parts in layers.items()}
        worst = {str(layer): float(ratio.max()) for layer, ratio in ratios.items()}
        details = {
            "mean_ratio": float(torch.cat([ratio.flatten() for ratio in ratios.values()]).mean()),
            "worst_per_layer": worst,
            "compared": sum(ratio.numel() for ratio in ratios.values()),
        }
        finding = self._finding(name, CLAIMS[name], max(worst.values()), details)
        return replace(finding, n=len(comparison.data), seed=comparison.seed)

    def _effective_rank(self, comparison: Comparison) -> Finding:
        """Returns the finding for Eq. 25 over all heads with nonzero energy; it needs no images, and n counts heads."""
        spectra = _spectra(comparison.reference)
        ranks = torch.cat([effective_rank(spectrum.strength, spectrum.used) for spectrum in spectra])
        directions = torch.cat([spectrum.rank for spectrum in spectra])
        ranks, directions = ranks[ranks > 0], directions[ranks > 0]
        worst = torch.maximum(ranks / directions, 1 / ranks).max() if len(ranks) else ranks.new_zeros(())
        details = {"effective_ranks": ranks.tolist(), "directions": directions.tolist()}
        claim = "every effective rank lies between 1 and the number of directions (Eq. 25)"
        return replace(self._finding("Eq. 25", claim, float(worst), details), n=len(ranks))

    def _finding(self, name: str, claim: str, worst: float, details: Mapping[str, Any]) -> Finding:
        outcome = HOLDS if worst <= 1 + ROUNDING else FAILS
        about = {"quantity": name, "slack": 1 - worst, "rounding": ROUNDING, **details}
        return Finding(self.name, claim, worst, "of the bound", limit=1.0, outcome=outcome, details=about)


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
        lost = before - after
        counted = (lost != 0).any(-1) & stays
        removed, kept = (after == 0) & (before != 0), after != 0
        largest_removed = torch.where(removed, before.abs(), 0).amax(-1)
        # Infinity and zero are neutral for the minimum and the maximum.
        smallest_kept = torch.where(kept, before.abs(), torch.inf).amin(-1)
        threshold = torch.where(kept.any(-1), smallest_kept, largest_removed)
        only_removals = ((lost == 0) | removed).all(-1)  # Eq. 18: the change contains only removed entries
        return cls(lost, counted, threshold, counted & only_removals & (largest_removed <= threshold))


def spectral_changes(comparison: Comparison) -> dict[int, SpectralChange]:
    """Returns the changes by layer index, from the prescription or else the masked model, without unchanged layers."""
    spectra = _spectra(comparison.reference)
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
        layers = comparison.prescription.layers
        return [(layer.qk.strength.double() * layer.qk.keep, layer.heads) for layer in layers]
    if comparison.masked is None:
        return None
    spectra = _spectra(comparison.masked)
    return [(spectrum.strength, torch.ones(len(spectrum.heads), dtype=torch.bool)) for spectrum in spectra]


def _spectra(model: nn.Module) -> list[Spectrum]:
    return [layer.spectrum() for layer in family_of(model).attention(model)]


@dataclass
class Tally:
    """Collects the ratios of measurement to bound by claim and layer, per image and counted head."""

    changes: Mapping[int, SpectralChange]
    ratios: dict[str, dict[int, list[Float[Tensor, "batch counted"]]]] = field(default_factory=dict)

    def observe(self, layer: int, observation: Observation) -> None:
        """Measures one layer on a batch whose second half is the perturbed first half."""
        (query, moved_query), (key, moved_key) = (
            rows.double().chunk(2) for rows in (observation.query, observation.key)
        )
        strength = torch.ones_like(query[0, 0]) if observation.strength is None else observation.strength.double()
        ratios = proposition_4((query, key), (moved_query, moved_key), strength, observation.scale)
        self._add("Proposition 4", layer, ratios)
        if observation.strength is not None and layer in self.changes:
            self._observe_change(layer, (query, key), strength, observation.scale)

    def _observe_change(self, layer: int, rows: tuple[Tensor, Tensor], strength: Tensor, scale: float) -> None:
        change = self.changes[layer]
        removed, threshold = change.lost.to(strength.device), change.threshold.to(strength.device)
        scores = head_scores(*rows, strength, scale)
        # The change is computed directly: the difference of two scores would be dominated by their rounding.
        lost = head_scores(*rows, removed, scale)
        moved = (scores - lost).softmax(-1) - scores.softmax(-1)
        most = scale * removed.abs().amax(-1)
        self._add("Theorem 1, Eq. 12", layer, theorem_1(lost, most), change.counted)
        self._add("Theorem 1, Eq. 13", layer, theorem_1(lost, scale * threshold), change.thresholded)
        self._add("Proposition 1", layer, proposition_1(lost, moved), change.counted)
        self._add("Proposition 1, half range", layer, proposition_1_half_range(lost, moved), change.counted)
        self._add("Proposition 1 with Theorem 1", layer, proposition_1_prior(moved, most), change.counted)

    def _add(self, name: str, layer: int, ratios: Tensor, heads: Tensor | None = None) -> None:
        ratios = ratios.cpu() if heads is None else ratios.cpu()[:, heads]
        if ratios.numel():
            self.ratios.setdefault(name, {}).setdefault(layer, []).append(ratios)
