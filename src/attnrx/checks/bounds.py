"""Bounds: the paper's theorems, checked on the activations of the reference.

The functions of the theorems return a measured quantity divided by its bound: above 1 it is violated. They take float64
rows of one layer: the query and key rows that enter the scores, one per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison
from attnrx.diagnostics.spectral_shape import effective_rank
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
# Lower limit of a bound: smaller bounds are below the rounding of the measured quantity.
FLOOR = 1e-9
NOISE = 0.1  # the standard deviation of the perturbation of Proposition 4, in normalized units
AT_ONCE = 16  # images per batch; every score of every head is held in float64


@dataclass(frozen=True)
class Bounds(Check):
    """Theorem 1, Propositions 1 and 4 and Eq. 25 on the activations of the reference, layer by layer.

    The theorems apply to one layer and one input: each layer is evaluated on the reference's activations, and only its
    strengths change. (In a masked model the inputs change from the second layer on.) The value of a finding is the
    largest ratio of measurement to bound over images, layers and heads: at most 1, and close to 1 for a tight bound.

    The pruned directions are those of the comparison's prescription. Without it, and in layers without strengths,
    Theorem 1 and Proposition 1 are skipped. Unchanged heads are not counted. Eq. 13 applies only to heads whose weakest
    directions were pruned; its threshold is the smallest kept strength. Proposition 4 perturbs the images with Gaussian
    noise of standard deviation NOISE.
    """

    name: ClassVar[str] = "bounds"
    images: int = 256

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Evaluates the reference on clean and on perturbed images."""
        comparison = comparison.taking(self.images)
        tally = Tally(spectral_changes(comparison))
        generator = torch.Generator().manual_seed(comparison.seed)
        model = comparison.reference
        require_all_tokens(model, "check the bounds of")
        dtype = next(model.parameters()).dtype
        with evaluating([model]), observing(model, family_of(model), tally.observe):
            for batch in comparison.data.batches(AT_ONCE, device=comparison.device):
                # Drawn on the CPU: the same noise on every device.
                noise = NOISE * torch.randn(batch.images.shape, generator=generator, dtype=dtype)
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
        spectra = _spectra(comparison)
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
    """Returns the changes of the prescription by layer index, without unchanged layers; empty without one."""
    if comparison.prescription is None:
        return {}
    comparison.prescription.require(model_fingerprint(comparison.reference))
    pairs = zip(_spectra(comparison), comparison.prescription.layers, strict=True)
    changes = (
        SpectralChange.between(spectrum.strength, layer.qk.strength.double() * layer.qk.keep, layer.heads)
        for spectrum, layer in pairs
    )
    return {index: change for index, change in enumerate(changes) if bool(change.counted.any())}


def _spectra(comparison: Comparison) -> list[Spectrum]:
    model = comparison.reference
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


def bound_ratio(measured: Float[Tensor, "*shape"], bound: Float[Tensor, "*#shape"]) -> Float[Tensor, "*shape"]:
    return measured / bound.clamp(min=FLOOR)


def head_scores(
    query: Float[Tensor, "batch queries heads directions"],
    key: Float[Tensor, "batch keys heads directions"],
    strength: Float[Tensor, "heads directions"],
    scale: float,
) -> Float[Tensor, "batch heads queries keys"]:
    """Returns the scores of the rows with these strengths (Eq. 2)."""
    return scale * torch.einsum("bihr,hr,bjhr->bhij", query, strength, key)


def theorem_1(
    change: Float[Tensor, "batch heads queries keys"], most: Float[Tensor, "heads"]
) -> Float[Tensor, "batch heads"]:
    """The largest change of a score is at most `most`: scale times the largest change of a strength (Eq. 12).

    With `most` = scale times an upper limit of the pruned strengths it is Eq. 13. Requires rows of unit length.
    """
    return bound_ratio(change.abs().amax((-2, -1)), most)


def proposition_1(
    change: Float[Tensor, "batch heads queries keys"], moved: Float[Tensor, "batch heads queries keys"]
) -> Float[Tensor, "batch heads"]:
    """The 1-norm of an attention row's change `moved` is at most the largest change of its scores (Eq. 21, C_sm = 1).

    C_sm = 1 because the softmax Jacobian's norm from the max norm to the 1-norm is 4 P (1 - P) <= 1, where P is the
    mass of the increased entries. Returns the largest ratio over the rows of each head.
    """
    return bound_ratio(moved.abs().sum(-1), change.abs().amax(-1)).amax(-1)


def proposition_1_half_range(
    change: Float[Tensor, "batch heads queries keys"], moved: Float[Tensor, "batch heads queries keys"]
) -> Float[Tensor, "batch heads"]:
    """Proposition 1 with half the range of the row's score change: softmax is invariant to adding a constant."""
    return bound_ratio(moved.abs().sum(-1), (change.amax(-1) - change.amin(-1)) / 2).amax(-1)


def proposition_1_prior(
    moved: Float[Tensor, "batch heads queries keys"], most: Float[Tensor, "heads"]
) -> Float[Tensor, "batch heads"]:
    """Proposition 1 with Theorem 1's bound instead of the measured score change, hence independent of the input."""
    return bound_ratio(moved.abs().sum(-1).amax(-1), most)


def proposition_4(
    clean: tuple[Tensor, Tensor], perturbed: tuple[Tensor, Tensor], strength: Tensor, scale: float
) -> Float[Tensor, "batch heads"]:
    """The Frobenius norm of the scores' change under a perturbed input is bounded by that of the rows (Eq. 36).

    `clean` and `perturbed` are query and key rows, [batch, tokens, heads, directions].
    """
    change = head_scores(*perturbed, strength, scale) - head_scores(*clean, strength, scale)
    moved = [
        torch.linalg.vector_norm(after - before, dim=(1, 3)) for before, after in zip(clean, perturbed, strict=True)
    ]
    reach = moved[0] * spectral_norm(perturbed[1]) + spectral_norm(clean[0]) * moved[1]
    return bound_ratio(torch.linalg.vector_norm(change, dim=(-2, -1)), scale * strength.abs().amax(-1) * reach)


def spectral_norm(rows: Float[Tensor, "batch tokens heads directions"]) -> Float[Tensor, "batch heads"]:
    """Returns the largest singular value of every head's rows, from their Gram matrix."""
    gram = torch.einsum("bihr,bihs->bhrs", rows, rows)
    return torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt()  # rounding may put the smallest below zero
