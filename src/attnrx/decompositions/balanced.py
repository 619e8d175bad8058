"""Balanced directions: a bilinear form rewritten so that its leading terms are the best low-rank form in a metric."""

from dataclasses import dataclass

import torch

from attnrx.decompositions.grams import gram_factor, require_finite
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor

# Singular values are accurate to about d * 2e-16 of the form's scale: below this share, a row divided by one is noise.
NULL_SHARE = 1e-13


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


def balance(left_gram: Float[Tensor, "heads d d"], right_gram: Float[Tensor, "heads d d"]) -> Balanced:
    """Balances the form left . right of two vectors whose second moments are the given Grams (float64 inside).

    With G = R^T R on each side and R_left R_right^T = U diag(s) V^T, the directions are left = diag(1/s) V^T R_right
    and right = diag(1/s) U^T R_left: square-root balanced truncation, as in model reduction (Moore, 1981). For
    independently drawn vectors, E (error)^2 is the sum of the discarded s^2, by Eckart and Young on the whitened form.
    No Gram is inverted; Grams may be singular, zero and of any scale.

    Strengths below about 1e-8 of the form's scale are dominated by the rounding of the Grams; use `svd_directions` if
    the rows themselves are available. Raises InvalidInput for Grams of other shapes, not finite, not symmetric or not
    positive semidefinite.
    """
    _require_alike(left_gram.shape, right_gram.shape, square=True)
    return factor_directions(gram_factor(left_gram, "left Gram"), gram_factor(right_gram, "right Gram"))


def svd_directions(
    left_rows: Float[Tensor, "heads d left_width"], right_rows: Float[Tensor, "heads d right_width"]
) -> Balanced:
    """Returns the exact singular directions of left_rows^T right_rows, [left_width, right_width], of every head.

    The product is never formed: two thin QR factorizations and one d x d SVD per head preserve the precision of small
    singular values, which a Gram would lose. The rewritten rows are orthonormal on each side. Raises InvalidInput for
    rows that are not finite, and sides that differ in heads or rows.
    """
    _require_alike(left_rows.shape[:2], right_rows.shape[:2])
    for side, rows in (("left", left_rows), ("right", right_rows)):
        require_finite(rows, f"{side} table")
    left, right = (torch.linalg.qr(rows.detach().double().mT).R for rows in (left_rows, right_rows))
    return factor_directions(left, right)


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
    rotation, found, directions = torch.linalg.svd(left_factor @ right_factor.mT, full_matrices=False)
    significant = found > floor[:, None]
    inverse = torch.where(significant, 1 / found, 0)[..., None]
    left, right = inverse * (directions @ right_factor), inverse * (rotation.mT @ left_factor)
    strength, full = floor[:, None].repeat(1, size), left.new_zeros(heads, size, size)
    ranks = significant.sum(-1).tolist()
    for head, rank in enumerate(ranks):
        strength[head, :rank] = found[head, :rank]
        full[head, :rank] = left[head, :rank]
        if rank < size:
            remaining = torch.eye(size, dtype=full.dtype, device=full.device)
            remaining -= (left[head, :rank].mT * found[head, :rank]) @ right[head, :rank]
            # Divided by the root of their strength, so that both sides have the same size.
            full[head, rank:] = _null_rows(remaining, size - rank, left_factor[head]) / floor[head].sqrt()
    # Signs that make the largest entry of every row positive, so that results agree between machines.
    largest = full.gather(-1, full.abs().argmax(-1, keepdim=True))
    full = full * torch.where(largest < 0, -1.0, 1.0).to(full.dtype)
    # Rows of unit length are well conditioned to invert.
    length = full.norm(dim=-1, keepdim=True)
    right = torch.linalg.inv(full / length).mT / length / strength[..., None]
    return Balanced(full, right, strength, tuple(ranks))


def _null_rows(
    remaining: Float[Tensor, "d d"], count: int, left_factor: Float[Tensor, "samples d"]
) -> Float[Tensor, "count d"]:
    """Returns a basis of a projector's row space, rotated to separate rows with left energy from those without."""
    rows = torch.linalg.svd(remaining).U.mT[:count]
    # A row with left energy has no right energy, because the remaining form is zero in the metric: sorting is enough.
    return torch.linalg.svd(left_factor @ rows.mT, full_matrices=True).Vh @ rows


def _scale(left: Float[Tensor, "heads left_samples d"], right: Float[Tensor, "heads right_samples d"]) -> Tensor:
    """Returns a bound of the strengths, independent of the units of the features; positive even for a zero form."""
    energy_left, energy_right = left.square().sum(1), right.square().sum(1)
    both = (energy_left * energy_right).sqrt().sum(-1)
    total = (energy_left.sum(-1) * energy_right.sum(-1)).sqrt()
    either = energy_left.sum(-1) + energy_right.sum(-1)
    fallback = torch.where(total > 0, total, torch.where(either > 0, either, 1.0))
    return torch.where(both > 0, both, fallback)


def _require_alike(left: tuple[int, ...], right: tuple[int, ...], *, square: bool = False) -> None:
    if tuple(left) != tuple(right) or (square and left[-1] != left[-2]):
        wanted = "[heads, d, d] on both sides" if square else "the same heads and rows on both sides"
        raise InvalidInput(f"the two sides of a form need {wanted}, found {list(left)} and {list(right)}.")
