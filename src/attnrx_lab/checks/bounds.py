"""The check `Bounds`, which tests the SVDA paper's theorems on the activations of the reference model.

All theorems and equations below are from the SVDA paper. Each theorem has a function that divides a measured quantity
by its bound. A ratio above 1 violates the theorem. The functions get the query and key rows of one layer (one row per
token), or quantities computed from these rows, in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnrx.decide.diagnostics import effective_rank
from attnrx.nouns.evidence import FAILS, HOLDS, Finding
from attnrx.show.checks.check import Check, Comparison
from attnrx.support.modules import evaluating
from attnrx.support.shapes import Bool, Float, Int, Tensor
from attnrx.vit.attention import Attention, Observation
from attnrx.vit.models import family_of, model_fingerprint, observing, require_all_tokens
from attnrx.vit.spec import Spectrum

CLAIMS = {
    "Theorem 1, Eq. 12": "no score moves by more than the largest removed strength allows (Theorem 1, Eq. 12)",
    "Theorem 1, Eq. 13": "no score moves by more than the threshold of its head allows (Theorem 1, Eq. 13)",
    "Proposition 1": "no attention row moves by more than its scores, with C_sm = 1 (Proposition 1, Eq. 21)",
    "Proposition 3": "no scores have a higher rank than their head has directions left (Proposition 3, Eq. 32)",
    "Proposition 4": "no noise moves the scores by more than the spectral norms allow (Proposition 4, Eq. 36)",
    "Proposition 5": "heads with the same projections and spectra add the same, up to rounding (Proposition 5)",
}

# A ratio may exceed 1 by this tolerance. Rows computed in float32 have unit length only up to about 1e-7.
ROUNDING = 1e-5
# Bounds are raised to at least this value, because smaller bounds are below the rounding of the measured quantity.
FLOOR = 1e-9
RANK_ROUNDING = 1e-10  # singular values of float64 scores below this share of the largest one are rounding
NOISE = 0.1  # the standard deviation of the perturbation in SVDA's Proposition 4, in normalized units
BATCH = 16  # images per batch, because the scores of all heads are stored in float64


@dataclass(frozen=True)
class Bounds(Check):
    """Tests SVDA's Theorem 1 and Propositions 1 to 5 on the activations of the reference model, layer by layer.

    Each theorem applies to one layer with a fixed input. In a pruned model, however, the inputs of all layers after the
    first one change. So the check evaluates every layer on the reference model's activations, and changes only the
    strengths of this layer. A finding reports the largest ratio of the measured quantity to its bound, over all images,
    layers and heads. The ratio is at most 1 if the theorem holds, and close to 1 if the bound is tight.

    The check reads the pruned directions from the comparison's prescription. Without a prescription, and in layers
    without strengths, it skips Theorem 1 and Propositions 1 and 3. It also skips heads that pruning did not change. The
    check tests Eq. 13 only on heads that lost just their weakest directions. The threshold in Eq. 13 is the smallest
    kept strength. Proposition 2 (Eq. 25) depends only on the strengths, so it needs no images. Proposition 3 needs a
    matrix decomposition, so it uses only one of every BATCH images. Proposition 4 adds Gaussian noise with the standard
    deviation NOISE to the images. Proposition 5 is tested on heads with exactly equal weights. Training does not
    produce such heads, so the check usually skips this proposition.
    """

    images: int = 256

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Evaluates the reference on clean and on perturbed images."""
        comparison = comparison.taking(self.images)
        changes, worst = spectral_changes(comparison), dict[str, float]()
        layers = family_of(comparison.reference).attention(comparison.reference)
        pairs = [equal_heads(layer) for layer in layers]

        # Only the largest ratio of every claim is stored, because the scores of all layers would not fit in memory.
        def observe(layer: int, observation: Observation) -> None:
            for name, ratios in _ratios(observation, changes.get(layer), pairs[layer]).items():
                if ratios.numel():
                    worst[name] = max(worst.get(name, 0.0), float(ratios.max()))

        generator = torch.Generator().manual_seed(comparison.seed)
        model = comparison.reference
        # Clean and perturbed images are compared token by token, so both halves of a batch must keep the same tokens.
        require_all_tokens(model, "check the bounds of")
        dtype = next(model.parameters()).dtype
        with evaluating([model]), observing(model, family_of(model), observe):
            for batch in comparison.data.batches(BATCH, device=comparison.device):
                # Drawn on the CPU, so that the noise is the same on every device.
                noise = NOISE * torch.randn(batch.images.shape, generator=generator, dtype=dtype)
                images = batch.images.to(dtype)
                # One pass computes both halves, and `_ratios` splits them again.
                model(torch.cat([images, images + noise.to(images.device)]))
        images = len(comparison.data)
        counted = {"Proposition 3": -(-images // BATCH)}
        findings = [
            _finding(name, CLAIMS[name], worst[name], counted.get(name, images), comparison.seed)
            for name in CLAIMS
            if name in worst
        ]
        # Eq. 25 is tested on all heads with nonzero energy. It needs no images, so n counts heads instead.
        spectra = _spectra(comparison)
        ranks = torch.cat([effective_rank(spectrum.strength, spectrum.used) for spectrum in spectra])
        directions = torch.cat([spectrum.rank for spectrum in spectra])
        ranks, directions = ranks[ranks > 0], directions[ranks > 0]
        # The two limits of Eq. 25 become ratios that must be at most 1: rank / directions, and 1 / rank.
        largest = float(torch.maximum(ranks / directions, 1 / ranks).max()) if len(ranks) else 0.0
        claim = "every effective rank lies between 1 and the number of directions (Proposition 2, Eq. 25)"
        return (*findings, _finding("Eq. 25", claim, largest, len(ranks)))


def _finding(name: str, claim: str, worst: float, n: int, seed: int | None = None) -> Finding:
    outcome, details = HOLDS if worst <= 1 + ROUNDING else FAILS, {"quantity": name}
    return Finding(Bounds.name, claim, worst, "of the bound", 1.0, outcome, n=n, seed=seed, details=details)


@dataclass(frozen=True)
class SpectralChange:
    """The changes that pruning made to the strengths of one layer.

    `lost` is the decrease of every strength. `counted` selects the heads that remain and have changed strengths.
    Removed heads are not counted, because the theorems do not cover them. `threshold` (tau of SVDA, Eq. 8) is the
    smallest kept strength of a head, or the largest pruned strength if the head keeps none. `thresholded` selects the
    counted heads that lost only their weakest directions and have no other change. Only in these heads is `threshold`
    an upper bound for the pruned strengths.
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
        # A refit changes kept strengths, too. SVDA's Eq. 12 covers any change, but Eq. 13 only covers removals.
        counted = (lost != 0).any(-1) & stays
        removed, kept = (after == 0) & (before != 0), after != 0
        largest_removed = torch.where(removed, before.abs(), 0).amax(-1)
        # Infinity does not change a minimum, and zero does not change a maximum.
        smallest_kept = torch.where(kept, before.abs(), torch.inf).amin(-1)
        threshold = torch.where(kept.any(-1), smallest_kept, largest_removed)
        only_removals = ((lost == 0) | removed).all(-1)  # SVDA, Eq. 18: only removed entries change
        return cls(lost, counted, threshold, counted & only_removals & (largest_removed <= threshold))


def spectral_changes(comparison: Comparison) -> dict[int, SpectralChange]:
    """Returns the spectral change of every changed layer, by layer index. Without a prescription, the dict is empty."""
    if comparison.prescription is None:
        return {}
    comparison.prescription.require(model_fingerprint(comparison.reference), "the reference")
    pairs = zip(_spectra(comparison), comparison.prescription.layers, strict=True)
    changes = (
        SpectralChange.between(spectrum.strength, layer.qk.strength.double() * layer.qk.keep, layer.heads)
        for spectrum, layer in pairs
    )
    return {index: change for index, change in enumerate(changes) if bool(change.counted.any())}


def _spectra(comparison: Comparison) -> list[Spectrum]:
    model = comparison.reference
    return [layer.spectrum() for layer in family_of(model).attention(model)]


def equal_heads(layer: Attention) -> list[tuple[int, int]]:
    """Returns the pairs of heads with identical weights and strengths. A head is paired with the first identical head.

    The function compares the query, key and value projections, the spectrum, and the head's part of the output
    projection (SVDA, Proposition 5). If anything else can differ between the heads of a layer, such as a bias per pair
    of tokens, the function returns no pairs.
    """
    spec = layer.spec
    if not spec.heads or spec.pair_bias or spec.traits.has_distances or spec.traits.rotates or spec.inner_norms:
        return []
    spectrum, dims = layer.spectrum(), spec.value_dims
    # If heads share their directions, there is one table for all heads, and heads differ only in their strengths.
    tables = [side.expand(len(dims), -1, -1) for side in (spectrum.query, spectrum.key)]
    values = layer.value.augmented().split(dims)
    outputs = layer.output.weight.detach().cpu().double().split(dims, dim=1)
    heads = list(zip(*tables, spectrum.strength, spectrum.used, values, outputs, strict=True))
    pairs = list[tuple[int, int]]()
    for second, parts in enumerate(heads):
        for first in range(second):
            if all(map(torch.equal, heads[first], parts)):
                pairs.append((first, second))
                break
    return pairs


def _ratios(
    observation: Observation, change: SpectralChange | None, pairs: Sequence[tuple[int, int]]
) -> dict[str, Float[Tensor, "batch counted"]]:
    """Returns one layer's ratios for every claim. The batch contains clean images, then their perturbed copies.

    `pairs` are the layer's equal heads.
    """
    (query, moved_query), (key, moved_key) = (rows.double().chunk(2) for rows in (observation.query, observation.key))
    scale, strengths = observation.scale, observation.strength
    strength = torch.ones_like(query[0, 0]) if strengths is None else strengths.double()
    # Dense attention has no strengths, so every strength counts as 1.
    ratios = {"Proposition 4": proposition_4((query, key), (moved_query, moved_key), strength, scale)}
    if pairs:
        added = [
            [observation.output[:, head].double() @ observation.readout[head].double() for head in pair]
            for pair in pairs
        ]
        ratios["Proposition 5"] = torch.stack([proposition_5(first, second) for first, second in added], 1)
    if strengths is None or change is None:
        return ratios
    # The other claims use only the clean half, because they compare strengths on the same input.
    removed, threshold = change.lost.to(strength.device), change.threshold.to(strength.device)
    scores = head_scores(query, key, strength, scale)
    # The change is computed directly, because a difference of two scores would be mostly rounding.
    lost = head_scores(query, key, removed, scale)
    moved = (scores - lost).softmax(-1) - scores.softmax(-1)
    counted = change.counted.to(strength.device)
    # Removed directions leave zeros, up to rounding in the model's precision.
    left = strength - removed
    active = left.abs() > ROUNDING * strength.abs()
    first = head_scores(query[:1], key[:1], torch.where(active, left, 0), scale)
    return ratios | {
        "Theorem 1, Eq. 12": theorem_1(lost, scale * removed.abs().amax(-1))[:, counted],
        "Theorem 1, Eq. 13": theorem_1(lost, scale * threshold)[:, change.thresholded.to(strength.device)],
        "Proposition 1": proposition_1(lost, moved)[:, counted],
        "Proposition 3": proposition_3(first, active.sum(-1))[:, counted],
    }


def bound_ratio(measured: Float[Tensor, "*shape"], bound: Float[Tensor, "*#shape"]) -> Float[Tensor, "*shape"]:
    return measured / bound.clamp(min=FLOOR)


def head_scores(
    query: Float[Tensor, "batch queries heads directions"],
    key: Float[Tensor, "batch keys heads directions"],
    strength: Float[Tensor, "heads directions"],
    scale: float,
) -> Float[Tensor, "batch heads queries keys"]:
    """Returns the attention scores for these query rows, key rows and strengths (SVDA, Eq. 2)."""
    return scale * torch.einsum("bihr,hr,bjhr->bhij", query, strength, key)


def theorem_1(
    change: Float[Tensor, "batch heads queries keys"], most: Float[Tensor, "heads"]
) -> Float[Tensor, "batch heads"]:
    """Returns the largest score change of every head, divided by its bound `most` (SVDA, Theorem 1).

    In Eq. 12, `most` is the scale of the scores times the largest change of a strength. In Eq. 13, it is this scale
    times an upper bound of the pruned strengths. The query and key rows must have unit length.
    """
    # [batch, heads]: the largest change of a head's scores. All scores of a head have the same bound.
    return bound_ratio(change.abs().amax((-2, -1)), most)


def proposition_1(
    change: Float[Tensor, "batch heads queries keys"], moved: Float[Tensor, "batch heads queries keys"]
) -> Float[Tensor, "batch heads"]:
    """Returns the 1-norm of an attention row's change, divided by the largest change of its scores (SVDA, Eq. 21).

    `moved` is the change of the attention rows. The function returns the largest ratio over the rows of each head. The
    paper's constant C_sm is 1, because the operator norm of the softmax Jacobian from the max norm to the 1-norm is
    4P(1 - P), which is at most 1. P is the total attention weight of the entries that increase.
    """
    return bound_ratio(moved.abs().sum(-1), change.abs().amax(-1)).amax(-1)


def proposition_3(
    scores: Float[Tensor, "batch heads queries keys"], directions: Int[Tensor, "heads"]
) -> Float[Tensor, "batch heads"]:
    """Returns the rank of the pruned scores, divided by the number of remaining directions (SVDA, Eq. 32)."""
    return bound_ratio(torch.linalg.matrix_rank(scores, rtol=RANK_ROUNDING).double(), directions.double())


def proposition_4(
    clean: tuple[Tensor, Tensor], perturbed: tuple[Tensor, Tensor], strength: Tensor, scale: float
) -> Float[Tensor, "batch heads"]:
    """Returns the change of the scores under a perturbed input, divided by its bound (SVDA, Eq. 36, Frobenius norm).

    `clean` and `perturbed` are the query and key rows before and after the perturbation. Each has the shape
    [batch, tokens, heads, directions]. The bound follows from the change of these rows.
    """
    change = head_scores(*perturbed, strength, scale) - head_scores(*clean, strength, scale)
    moved = [
        torch.linalg.vector_norm(after - before, dim=(1, 3)) for before, after in zip(clean, perturbed, strict=True)
    ]
    # The telescoped difference is q' k' - q k = (q' - q) k' + q (k' - k). A Frobenius norm times a spectral norm bounds
    # each product.
    reach = moved[0] * spectral_norm(perturbed[1]) + spectral_norm(clean[0]) * moved[1]
    return bound_ratio(torch.linalg.vector_norm(change, dim=(-2, -1)), scale * strength.abs().amax(-1) * reach)


def proposition_5(
    first: Float[Tensor, "batch tokens width"], second: Float[Tensor, "batch tokens width"]
) -> Float[Tensor, "batch"]:
    """Returns the difference between the outputs of two identical heads, divided by a bound for rounding errors.

    Heads with identical projections and spectra add the same vector to every token (SVDA, Proposition 5). The bound is
    ROUNDING times the largest absolute value in the first head's output.
    """
    difference, largest = (values.abs().amax((-2, -1)) for values in (first - second, first))
    return bound_ratio(difference, ROUNDING * largest)


def spectral_norm(rows: Float[Tensor, "batch tokens heads directions"]) -> Float[Tensor, "batch heads"]:
    """Returns the largest singular value of every head's rows, computed from their Gram matrix."""
    # [batch, heads, directions, directions], because there are far fewer directions than tokens. In float64 the squares
    # have enough digits.
    gram = torch.einsum("bihr,bihs->bhrs", rows, rows)
    return torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt()  # rounding may put the smallest below zero
