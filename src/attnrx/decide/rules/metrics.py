"""Metrics that rank a head's score directions, also for rotary attention, and functions that apply such a metric.

In rotary attention, pairs of query and key rows are rotated by an angle that depends on the token's position. Only maps
that commute with this rotation preserve the scores, so a pair is kept or removed as a whole.

Pairs with a low frequency hardly rotate over the positions of an image. These "slow pairs" can be stored without
rotation. They are then multiplied by the mean cosine of the rotation between two positions. Their rows can then be
combined by a singular value decomposition, as in other attention. For every rank, the number of slow pairs is chosen so
that the error in the metric is smallest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import torch

from attnrx.change.decompositions import Balanced, balance, svd_directions
from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.nouns.prescription import Basis, ScoreDecision
from attnrx.support.arguments import checked
from attnrx.support.errors import NotSupported, UnknownName
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.attention import Positions
from attnrx.vit.spec import Spectrum

# The metric that uses the model's own directions and strengths. Some forms of attention learn their strengths.
OWN = "own"

# The weight of "softmax" in the recommended metric "mix". If a head attends to a single token, the quadratic
# approximation of the softmax fails, and "softmax" on its own would give this head too few directions.
MIX = 0.7


# For every metric that uses data, the moments of the keys and their weights. Queries always use their second moment.
KEY_MOMENTS: Mapping[str, Mapping[str, float]] = {
    "activation": {"key_gram": 1.0},
    "centered": {"key_covariance": 1.0},
    "softmax": {"key_softmax": 1.0},
    "mix": {"key_softmax": MIX, "key_covariance": 1 - MIX},
}

# The metrics for score directions:
# - weights: the matrix W_Q W_K^T of each head, without data.
# - augmented: like weights, but with the query bias as one more row. The query bias changes the softmax, but the key
#   bias does not.
# - activation: the mean square of the scores on the data.
# - centered: the mean square of the scores on the data, minus their mean over the keys, which the softmax cancels.
# - softmax: the mean square of the scores on the data, weighted by the curvature of the softmax.
# - mix: a weighted mean of softmax and centered.
METRICS = ("weights", "augmented", *KEY_MOMENTS)

COHERENCE = "rotation_coherence"
"""A reading [heads, frequencies]: the mean cosine of the rotation between a patch and the patches it attends to."""

LEAST_COHERENCE = 0.05
"""Pairs with a smaller coherence are never stored without rotation, because almost nothing of them would remain."""
FLOOR = 1e-13
"""The smallest strength, as a share of the largest one. Rows of a basis are divided by the roots of strengths."""


def directions_in(metric: str, layer: LayerDiagnosis) -> "Balanced | RotaryDirections":
    """Returns each head's score directions in a metric, sorted so that the first r are optimal for every rank r.

    For rotary attention, returns `RotaryDirections`, which contain the best form of each head for every rank.

    Raises:
        UnknownName: The metric is not one of METRICS.
        NotSupported: Directions cannot be combined, because rows are divided by norms, heads share their directions, or
            a norm runs over all features of query and key.
        InvalidInput: The diagnosis lacks the moments that the metric needs.
    """
    spectrum = layer.spectrum
    if metric not in METRICS:
        raise UnknownName("metric", metric, (OWN, *METRICS))
    if "qk" in spectrum.fixed:
        raise NotSupported(
            f"metric={metric!r} would combine directions of a layer with a norm over all features of query and key."
        )
    if spectrum.has_norms:
        raise NotSupported(
            f"metric={metric!r} would combine the directions of a layer whose rows are divided by their norms, "
            "which changes the norms; its own strengths rank its directions: omit the metric."
        )
    if spectrum.shared:
        raise NotSupported(
            f"metric={metric!r} would give every head directions of its own in a layer whose heads share them; "
            "the strengths rank the shared directions: omit the metric, or prescribe the original model."
        )
    if metric in KEY_MOMENTS:
        keys = torch.stack([share * layer.reading(name) for name, share in KEY_MOMENTS[metric].items()]).sum(0)
        grams = layer.reading("query_gram"), keys
        return balance(*grams) if spectrum.pairs is None else RotaryDirections(*grams, layer)
    # The metrics "weights" and "augmented" use the rows [heads, directions, features] of query and key, because Grams
    # would lose digits. The last feature is the bias.
    query, key = spectrum.query if metric == "augmented" else spectrum.query[..., :-1], spectrum.key[..., :-1]
    if spectrum.pairs is None:
        return svd_directions(query, key)
    query, key = query.double(), key.double()
    return RotaryDirections(query @ query.mT, key @ key.mT, layer)


@checked()
def rewritten(diagnosis: Diagnosis, metric: str) -> tuple[Diagnosis, tuple[Basis, ...]]:
    """Returns the diagnosis with all score directions rewritten in a metric, and each layer's change of basis.

    The new strengths are the singular values of the bilinear map in that metric. A squared strength is the error of
    removing its direction, so all rules can use these strengths like learned strengths. The moments of queries and keys
    are recomputed. Readings that do not depend on the directions are kept, and all other readings are removed.
    """
    return diagnosis.once(("rewritten", metric), partial(_rewritten, diagnosis, metric))


def _rewritten(diagnosis: Diagnosis, metric: str) -> tuple[Diagnosis, tuple[Basis, ...]]:
    pairs = [_layer(layer, metric) for layer in diagnosis.layers]
    about = {**diagnosis.about, "metric": metric}
    layers = tuple(layer for layer, _ in pairs)
    return replace(diagnosis, layers=layers, about=about), tuple(basis for _, basis in pairs)


def _layer(layer: LayerDiagnosis, metric: str) -> tuple[LayerDiagnosis, Basis]:
    spectrum, balanced = layer.spectrum, directions_in(metric, layer)
    if isinstance(balanced, RotaryDirections):
        return _rotary_layer(layer, balanced)
    # Balanced directions are sorted by strength, so a head with fewer rows uses only the first of them.
    used = torch.arange(spectrum.used.shape[1]) < spectrum.used.sum(-1, keepdim=True)
    changed = replace(
        spectrum,
        query=balanced.left @ spectrum.query,
        key=balanced.right @ spectrum.key,
        strength=torch.where(used, balanced.strength, 0.0),
        used=used,
    )
    readings: dict[str, Tensor] = {
        name: value for name, value in layer.readings.items() if name == "selectivity" or name.startswith("divergence_")
    }
    for side, name, table in (("query", "query_gram", balanced.left), ("key", "key_covariance", balanced.right)):
        if name in layer.readings:
            # Moments are quadratic in the rows: E (T q)(T q)^T = T E[q q^T] T^T.
            gram = table @ layer.reading(name).double() @ table.mT
            readings |= {name: gram, f"{side}_moment": gram.diagonal(dim1=-2, dim2=-1)}
    return LayerDiagnosis(changed, readings), Basis(balanced.left, balanced.right, shared=spectrum.shared)


def _rotary_layer(layer: LayerDiagnosis, found: "RotaryDirections") -> tuple[LayerDiagnosis, Basis]:
    """Returns a rotary layer with new strengths, and a basis that keeps all of its directions.

    The strengths are used only to choose the ranks. A head's best form (`_Choice`) at one rank does not contain its
    best forms at smaller ranks, so the forms are computed later, for the chosen ranks (`RotaryDirections.decision`).
    """
    roots = torch.where(layer.spectrum.used, found.strength, 1.0).rsqrt()
    # Both sides are divided by the root of the strength, so all directions together give the original scores.
    diagonal = torch.diag_embed(torch.where(layer.spectrum.used, roots, 0.0))
    readings = {name: value for name, value in layer.readings.items() if name in ("selectivity", COHERENCE)}
    basis = Basis(diagonal, diagonal, shared=False, pairs=layer.spectrum.pairs)
    return LayerDiagnosis(replace(layer.spectrum, strength=found.strength), readings), basis


@dataclass(frozen=True)
class _Choice:
    """One candidate form of a rotary head, i.e. a choice of the directions that it keeps, with the error.

    The `slow` slowest pairs are stored without rotation. They are combined with the head's unrotated rows, and
    `unrotated` of the resulting directions are kept. Of the other pairs, which stay rotated, `rotated` pairs are kept.
    """

    error: float
    slow: int
    unrotated: int
    rotated: int


class _Head:
    """Finds the best form of one rotary head for every rank, from the Gram matrices of its rows.

    The unrotated rows come first, then the real parts of the pairs, then their imaginary parts.
    """

    # For every number of slow pairs, the unrotated rows and the slow pairs are balanced into ordinary directions. The
    # slow pairs are first multiplied by their mean cosines. The fast pairs are sorted by energy. A greedy path through
    # both lists gives an error for every rank. Each rank then uses the number of slow pairs with the smallest error.

    def __init__(
        self,
        left: Float[Tensor, "d d"],
        right: Float[Tensor, "d d"],
        pairs: Int[Tensor, "d"],
        coherence: Float[Tensor, "frequencies"],
    ):
        self.left, self.right, self.pairs = left, right, pairs
        self.size, self.num_unrotated = len(pairs), int((pairs < 0).sum())
        count = (self.size - self.num_unrotated) // 2
        # [pairs, 2]: the indices of the real and the imaginary row of every pair.
        self.rows_of = self.num_unrotated + torch.stack([torch.arange(count), count + torch.arange(count)], dim=1)
        self.mean = coherence[pairs[self.rows_of[:, 0]]].clamp(0, 1)
        # [pairs, pairs]: the mean product of two pairs' contributions to the scores, for independent queries and keys.
        products = left * right.mT
        self.products = products[self.rows_of][..., self.rows_of].sum((1, 3)) if count else products.new_zeros(0, 0)
        self.energy = self.products.diagonal()  # the mean square of what a single pair adds to the scores
        self.slowest = self.mean.argsort(descending=True, stable=True)
        self.choices = self._choices()

    def _choices(self) -> list[_Choice]:
        total = float((self.left * self.right.mT).sum().clamp_min(0))  # the error of rank 0: all of the scores
        best = [_Choice(total, 0, 0, 0)] * (self.size + 1)
        num_slow = int((self.mean >= LEAST_COHERENCE).sum())
        for slow in range(num_slow + 1):
            for choice in self._path(slow):
                rank = choice.unrotated + 2 * choice.rotated
                # At full rank, the original form is exact. Rounding must not prefer another form.
                if choice.error < best[rank].error and (rank < self.size or not slow):
                    best[rank] = choice
        best[self.size] = _Choice(0.0, 0, self.num_unrotated, len(self.mean))
        for rank in range(1, self.size + 1):  # an odd rank may be no better than the even rank below it
            if best[rank - 1].error < best[rank].error:
                best[rank] = best[rank - 1]
        return best

    def _path(self, slow: int) -> list[_Choice]:
        """Returns forms with `slow` unrotated pairs, from rank 0 up. Each adds the next best direction or pair."""
        # The squared error is the sum of three parts, which are assumed to be independent. `lost` is what slow pairs
        # lose without rotation. `tails` is for removed ordinary directions, and `rests` for removed fast pairs.
        static, fast = self.slowest[:slow], self._fast(slow)
        lost = float((self.energy[static] * (1 - self.mean[static].square())).sum())
        gains = self._unrotated(slow).strength[0].square()
        tails = torch.cat([gains.flip(0).cumsum(0).flip(0), gains.new_zeros(1)]).tolist()
        # Pairs are not orthogonal. So entry k sums the products of all pairs from k on, including their cross terms.
        joint_errors = self.products[fast][:, fast].flip(0, 1).cumsum(0).cumsum(1).diagonal().flip(0)
        rests = torch.cat([joint_errors.clamp_min(0), joint_errors.new_zeros(1)]).tolist()
        unrotated, rotated, path = 0, 0, []
        energy, gain = self.energy[fast].tolist(), gains.tolist()
        while True:
            path.append(_Choice(tails[unrotated] + rests[rotated] + lost, slow, unrotated, rotated))
            if unrotated < len(gain) and rotated < len(energy):
                next_is_pair = energy[rotated] / 2 > gain[unrotated]  # a pair costs two ranks
                if next_is_pair:  # the odd rank in between holds one more ordinary direction
                    path.append(_Choice(tails[unrotated + 1] + rests[rotated] + lost, slow, unrotated + 1, rotated))
            else:
                next_is_pair = rotated < len(energy)
            if next_is_pair:
                rotated += 1
            elif unrotated < len(gain):
                unrotated += 1
            else:
                return path

    def _fast(self, slow: int) -> Int[Tensor, "pairs"]:
        """Returns the indices of the pairs that stay rotated, by decreasing energy."""
        fast = self.slowest[slow:]
        return fast[self.energy[fast].argsort(descending=True, stable=True)]

    def _static_rows(self, slow: int) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows"]]:
        """Returns the indices of all rows that are not rotated, and their mean cosines (1 for rows outside pairs)."""
        static = self.slowest[:slow]
        rows = torch.cat([torch.arange(self.num_unrotated), self.rows_of[static].flatten()])
        ones = torch.ones(self.num_unrotated, dtype=torch.float64)
        return rows, torch.cat([ones, self.mean[static].repeat_interleave(2)])

    def _unrotated(self, slow: int) -> Balanced:
        rows, mean = self._static_rows(slow)
        left, right = (gram[rows][:, rows] for gram in (self.left, self.right))
        return balance(left[None], (mean[:, None] * right * mean)[None])

    def rows(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the form for a rank: left and right rows [kept, d], strengths [kept] and pairs [kept]."""
        choice = self.choices[rank]
        rows, mean = self._static_rows(choice.slow)
        balanced = self._unrotated(choice.slow)
        # The mean cosine multiplies only the key side, as in `_unrotated`.
        left, right = (self.left.new_zeros(choice.unrotated, self.size) for _ in range(2))
        left[:, rows] = balanced.left[0, : choice.unrotated]
        right[:, rows] = balanced.right[0, : choice.unrotated] * mean
        pairs = self._fast(choice.slow)[: choice.rotated]
        pairs = pairs[self.pairs[self.rows_of[pairs, 0]].argsort()]
        largest = float(self.energy.max().clamp_min(0).sqrt()) if len(pairs) else 0.0
        strength = (self.energy[pairs] / 2).clamp_min(0).sqrt().clamp_min(FLOOR * max(largest, 1e-100))
        indices = torch.cat([self.rows_of[pairs, 0], self.rows_of[pairs, 1]])
        strength = torch.cat([strength, strength])
        # Both rows of a pair get the same factor. A combination with other rows would not commute with the rotation.
        scaled_rows = torch.zeros(len(indices), self.size, dtype=torch.float64)
        scaled_rows[torch.arange(len(indices)), indices] = strength.rsqrt()
        none = torch.full((choice.unrotated,), -1)
        return (
            torch.cat([left, scaled_rows]),
            torch.cat([right, scaled_rows]),
            torch.cat([balanced.strength[0, : choice.unrotated], strength]),
            torch.cat([none, self.pairs[indices]]),
        )


class RotaryDirections:
    """Finds the best form of every head in a rotary layer, for every rank, in a metric defined by two Gram matrices."""

    def __init__(
        self,
        left_gram: Float[Tensor, "heads directions directions"],
        right_gram: Float[Tensor, "heads directions directions"],
        layer: LayerDiagnosis,
    ):
        spectrum, coherence = layer.spectrum, layer.reading(COHERENCE).double()
        assert spectrum.pairs is not None
        self.used, self.heads = spectrum.used, []
        for head, (pairs, used) in enumerate(zip(spectrum.pairs, spectrum.used, strict=True)):
            size = int(used.sum())
            left, right = (gram[head, :size, :size].double() for gram in (left_gram, right_gram))
            self.heads.append(_Head(left, right, pairs[:size], coherence[head]))

    @cached_property
    def strength(self) -> Float[Tensor, "heads directions"]:
        """The strengths, largest first.

        Their squares are the drops from one point to the next along the lower convex hull of the errors.
        """
        # Rules allocate ranks by squared strengths. This allocation is exact only if the error is convex in the rank.
        strength = torch.zeros(self.used.shape, dtype=torch.float64)
        for row, head in zip(strength, self.heads, strict=True):
            row[: head.size] = envelope_decreases([choice.error for choice in head.choices]).sqrt()
        floor = max(FLOOR * float(strength.max()) if strength.numel() else 0.0, 1e-100)
        return torch.where(self.used, strength.clamp_min(floor), 0.0)

    def decision(self, ranks: tuple[int, ...], reasons: tuple[str, ...]) -> ScoreDecision:
        """Returns the decision that keeps, for each head, the best form of the chosen rank.

        A head may keep one direction fewer than its rank, because one row cannot form a pair.
        """
        shape = self.used.shape
        left = torch.zeros(*shape, shape[1], dtype=torch.float64)
        right, strength = torch.zeros_like(left), torch.zeros(shape, dtype=torch.float64)
        keep, pairs = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1)
        for index, (head, rank) in enumerate(zip(self.heads, ranks, strict=True)):
            rows = head.rows(rank)
            num_kept = len(rows[2])
            left[index, :num_kept, : head.size], right[index, :num_kept, : head.size] = rows[0], rows[1]
            strength[index, :num_kept], pairs[index, :num_kept], keep[index, :num_kept] = rows[2], rows[3], True
        counts = ((pairs >= 0).sum(-1) // 2).tolist()
        notes = tuple(f"{why}; rotates {count} pairs" for why, count in zip(reasons, counts, strict=True))
        return ScoreDecision(keep, strength, notes, Basis(left, right, shared=False, pairs=pairs))


def envelope_decreases(errors: list[float]) -> Float[Tensor, "ranks"]:
    """Returns, for every rank from 1 on, by how much the lower convex hull of the errors decreases at this rank.

    The hull is the largest convex function that is nowhere above the errors.
    """
    # The corners of the hull of the points (rank, error), from left to right. A corner is removed unless it is below
    # the line from the previous corner to the new point.
    corners = [0]
    for rank in range(1, len(errors)):
        while len(corners) > 1:
            first, second = corners[-2:]
            slope = (errors[second] - errors[first]) / (second - first)
            if (errors[rank] - errors[second]) / (rank - second) >= slope:
                break
            corners.pop()
        corners.append(rank)
    decreases = torch.zeros(len(errors) - 1, dtype=torch.float64)
    for first, second in pairwise(corners):
        decreases[first:second] = (errors[first] - errors[second]) / (second - first)
    return decreases.clamp_min(0)


def whole_pairs(decision: ScoreDecision, spectrum: Spectrum) -> ScoreDecision:
    """Extends a decision about a layer's own directions to whole pairs. A pair is kept if one of its rows is kept."""
    if spectrum.pairs is None or decision.basis is not None:
        return decision
    same = (spectrum.pairs[:, :, None] == spectrum.pairs[:, None]) & (spectrum.pairs >= 0)[:, None]
    keep = decision.keep | (same & decision.keep[:, None]).any(-1)
    return replace(decision, keep=keep, strength=torch.where(keep, spectrum.strength.double(), 0.0))


def coherence(
    attention: Float[Tensor, "batch heads queries keys"], positions: Positions, heads: tuple[int, ...]
) -> Float[Tensor, "heads frequencies"]:
    """Returns the mean cosine of the rotation between a patch and the patches it attends to, weighted by attention.

    `heads` are the heads' indices in the original model. Positions are the same for all images. Patches attend mostly
    to nearby patches, so the cosines are larger than in a mean over all patches, and more pairs count as slow.
    """
    assert positions.cos is not None and positions.sin is not None
    # Rotations are complex numbers e^(i phi), [heads, patches, frequencies]. cos(phi_j - phi_i) is the real part of
    # e^(i phi_j) times the conjugate of e^(i phi_i). A product with the attention computes the mean over j.
    rotations = torch.complex(positions.cos[0].double(), positions.sin[0].double()).movedim(1, 0)
    rotations = rotations if len(rotations) == 1 else rotations[list(heads)]
    weights = attention[:, :, positions.prefix :, positions.prefix :].double()
    # Attention to tokens before the patches is left out. A patch that attends only to such tokens gets coherence 0, so
    # its pairs count as fast.
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
    differences = (weights.to(rotations.dtype) @ rotations) * rotations.conj()
    return differences.real.mean((0, 2)).cpu()
