"""Balanced directions: a bilinear form rewritten so that its leading terms are the best low-rank form in a metric."""

from dataclasses import dataclass

import torch

from attnrx.support.errors import InvalidInput
from attnrx.support.hardware import one_thread
from attnrx.support.shapes import Bool, Float, Tensor

# Asymmetries up to this share of a Gram's size are rounding (float32 sums).
TOLERANCE = 1e-5
# Singular values are accurate to about d * 2e-16 of the form's scale: below this share, a row divided by one is noise.
NULL_SHARE = 1e-13
# Kept features are duplicates if the eigenvalues of their correlations are below this share of the largest one, or if
# their energy is below this share of the energy of the features that they combine.
COPY_SHARE = 1e-12


@dataclass(frozen=True)
class Balanced:
    """Two changes of basis with strengths between them: left^T diag(strength) right = identity, for every head.

    The form old_left^T old_right of two tables [d, width] becomes sum over r of strength[r] * (left[r] @ old_left)^T
    (right[r] @ old_right). All directions together are the original form for any input. The first r are the best form
    of rank r in the metric, with the sum of the discarded squared strengths as squared error. The bases are nested: one
    `Balanced` serves every rank.

    `strength` is descending and positive. The first `rank[h]` directions of a head have unit energy, left[r] G_left
    left[r]^T = 1 and the same on the right. The following ones are null: one of their two sides has no energy, so they
    contribute nothing in the metric, but they can for other inputs. They have no unit energy, and their strength is a
    placeholder, 1e-13 of the form's scale, so that left, right and the order of the strengths remain finite and valid.
    """

    left: Float[Tensor, "heads directions directions"]
    right: Float[Tensor, "heads directions directions"]
    strength: Float[Tensor, "heads directions"]
    rank: tuple[int, ...]


@one_thread()
def balance(left_gram: Float[Tensor, "heads d d"], right_gram: Float[Tensor, "heads d d"]) -> Balanced:
    """Balances the form left . right of two vectors whose second moments are the given Grams (float64 inside).

    With G = R^T R on each side and R_left R_right^T = U diag(s) V^T, the directions are left = diag(1/s) V^T R_right
    and right = diag(1/s) U^T R_left: square-root balanced truncation, as in model reduction (Moore, 1981). For
    independently drawn vectors, E (error)^2 is the sum of the discarded s^2, by Eckart and Young on the whitened form.
    No Gram is inverted; Grams may be singular, zero and of any scale.

    Strengths below about 1e-8 of the form's scale are dominated by the rounding of the Grams; use `svd_directions` if
    the rows themselves are available. Raises InvalidInput for Grams that are not finite or not symmetric.
    """
    return factor_directions(_gram_factor(left_gram), _gram_factor(right_gram))


def svd_directions(
    left_rows: Float[Tensor, "heads d left_width"], right_rows: Float[Tensor, "heads d right_width"]
) -> Balanced:
    """Returns the exact singular directions of left_rows^T right_rows, [left_width, right_width], of every head.

    The product is never formed: two thin QR factorizations and one d x d SVD per head preserve the precision of small
    singular values, which a Gram would lose. The rewritten rows are orthonormal on each side.
    """
    left, right = (torch.linalg.qr(rows.detach().double().mT).R for rows in (left_rows, right_rows))
    return factor_directions(left, right)


@one_thread()
def factor_directions(
    left_factor: Float[Tensor, "heads left_samples d"], right_factor: Float[Tensor, "heads right_samples d"]
) -> Balanced:
    """Balances in the metric of the Grams factor^T factor, given the factors (whose rows may be samples).

    Null directions complete the basis: with L and R the other directions, I - L^T diag(s) R is a projector on the
    remaining space. Its singular vectors are rotated so that each of them, or its partner, has no energy in the metric.
    Then right = diag(1/strength) left^-T makes the identity hold to rounding: 2e-16 of the largest |left|^T strength
    |right|, which is about 1e-15, but more if the two metrics contradict each other over many orders of magnitude.
    """
    left_factor, right_factor = left_factor.detach().double(), right_factor.detach().double()
    heads, _, size = left_factor.shape
    if heads == 0 or size == 0:
        empty = left_factor.new_zeros(heads, size, size)
        return Balanced(empty, empty, empty.new_zeros(heads, size), (0,) * heads)
    floor = NULL_SHARE * _scale(left_factor, right_factor)
    rotation, values, directions = torch.linalg.svd(left_factor @ right_factor.mT, full_matrices=False)
    significant = values > floor[:, None]
    inverse = torch.where(significant, 1 / values, 0)[..., None]
    left, right = inverse * (directions @ right_factor), inverse * (rotation.mT @ left_factor)
    # Head by head from here on, because heads differ in the number of null directions.
    strength, full = floor[:, None].repeat(1, size), left.new_zeros(heads, size, size)
    ranks = significant.sum(-1).tolist()
    for head, rank in enumerate(ranks):
        strength[head, :rank] = values[head, :rank]
        full[head, :rank] = left[head, :rank]
        if rank < size:
            remaining = torch.eye(size, dtype=full.dtype, device=full.device)
            remaining -= (left[head, :rank].mT * values[head, :rank]) @ right[head, :rank]
            # A basis of the row space of this projector, rotated to separate rows with left energy from those without.
            # A row with left energy has no right energy, because the remaining form is zero in the metric.
            rows = torch.linalg.svd(remaining).U.mT[: size - rank]
            rows = torch.linalg.svd(left_factor[head] @ rows.mT, full_matrices=True).Vh @ rows
            # Divided by the root of their strength, so that both sides have the same size.
            full[head, rank:] = rows / floor[head].sqrt()
    # Signs that make the largest entry of every row positive, so that results agree between machines.
    largest = full.gather(-1, full.abs().argmax(-1, keepdim=True))
    full = full * torch.where(largest < 0, -1.0, 1.0).to(full.dtype)
    # Rows of unit length are well conditioned to invert.
    length = full.norm(dim=-1, keepdim=True)
    right = torch.linalg.inv(full / length).mT / length / strength[..., None]
    return Balanced(full, right, strength, tuple(ranks))


def _scale(left: Float[Tensor, "heads left_samples d"], right: Float[Tensor, "heads right_samples d"]) -> Tensor:
    """Returns a bound of the strengths, independent of the units of the features; positive even for a zero form."""
    energy_left, energy_right = left.square().sum(1), right.square().sum(1)
    both = (energy_left * energy_right).sqrt().sum(-1)
    total = (energy_left.sum(-1) * energy_right.sum(-1)).sqrt()
    either = energy_left.sum(-1) + energy_right.sum(-1)
    fallback = torch.where(total > 0, total, torch.where(either > 0, either, 1.0))
    return torch.where(both > 0, both, fallback)


def checked_gram(gram: Float[Tensor, "*heads d d"]) -> Float[Tensor, "*heads d d"]:
    """Returns the symmetric part in float64; raises InvalidInput if it is not finite or not symmetric."""
    gram = gram.detach().double()
    limit = TOLERANCE * (gram.abs().max() if gram.numel() else 0.0)
    if not bool(torch.isfinite(gram).all()) or bool(((gram - gram.mT).abs() > limit).any()):
        raise InvalidInput("a Gram matrix is not symmetric or not finite; give second moments, features^T features.")
    return (gram + gram.mT) / 2


def _gram_factor(gram: Float[Tensor, "heads d d"]) -> Float[Tensor, "heads d d"]:
    """Returns R with R^T R = gram, from the correlations, so that badly scaled features keep their precision."""
    epsilon = torch.finfo(gram.dtype).eps
    gram = checked_gram(gram)
    if gram.numel() == 0:
        return gram
    # The diagonal of a difference of moments can be slightly negative.
    spread = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    unit = torch.where(spread > 0, 1 / spread, 0)
    values, vectors = torch.linalg.eigh(gram * unit[:, :, None] * unit[:, None, :])
    # Eigenvalues below the rounding of the correlations, in the precision of the given Gram, are noise.
    cut = gram.shape[-1] * epsilon * values.amax(-1, keepdim=True)
    root = torch.where(values > cut, values, 0).sqrt()
    return root[:, :, None] * vectors.mT * spread[:, None, :]


def read_out(
    directions: Balanced,
    keep: Bool[Tensor, "heads directions"],
    covariance: Float[Tensor, "features features"] | None = None,
) -> Float[Tensor, "features kept"]:
    """Returns the weight that restores the concatenated outputs of all heads from their kept directions.

    A head gives the features left[kept] @ o_h; with K the projection of all heads, each head restored alone has the
    weight W0 = strength * right. With the `covariance` C of the outputs of all heads, features ordered head by head, it
    is refitted by least squares over all heads jointly: W = W0 + (1 - W0 K) C K^T (K C K^T)^+ is a minimum of
    E |o - W K o - constant|^2, the one nearest to W0 if kept features are duplicates.
    """
    kept = keep.flatten()  # one row of the block-diagonal projection per direction, head by head
    projections = torch.block_diag(*directions.left)[kept]
    weight = torch.block_diag(*(directions.strength[..., None] * directions.right)).mT[:, kept]
    if covariance is None or not bool(kept.any()):
        return weight
    covariance = checked_gram(covariance)
    missed = torch.eye(len(kept), dtype=weight.dtype) - weight @ projections
    moved = projections @ covariance
    moment = moved @ projections.mT
    energy = moment.diagonal().clamp_min(0)
    # The energy of a constant feature is rounding, in proportion to the energy of the features that it combines.
    alive = energy > COPY_SHARE * (projections.square() @ covariance.diagonal().clamp_min(0))
    # On correlations: kept features differ in scale by many orders of magnitude.
    unit = torch.where(alive, energy.rsqrt(), 0)
    inverse = torch.linalg.pinv((moment + moment.mT) / 2 * torch.outer(unit, unit), rtol=COPY_SHARE, hermitian=True)
    return weight + (missed @ moved.mT * unit) @ inverse * unit
