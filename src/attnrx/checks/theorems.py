"""The paper's bounds as pure functions that return a measured quantity and its bound.

All take float64 rows of one layer: the query and key rows that enter the scores, one per token.
"""

from dataclasses import dataclass

import torch

from attnrx.shapes import Float, Tensor

# Lower limit of a bound: smaller bounds are below the rounding of the measured quantity.
FLOOR = 1e-9


@dataclass(frozen=True)
class BoundedQuantity:
    """A measured quantity and its bound, per image and head."""

    measured: Float[Tensor, "batch heads"]
    bound: Float[Tensor, "batch heads"]

    @property
    def ratio(self) -> Float[Tensor, "batch heads"]:
        """Measured / bound; above 1 the bound is violated."""
        return self.measured / self.bound.clamp(min=FLOOR)


def head_scores(
    query: Float[Tensor, "batch queries heads directions"],
    key: Float[Tensor, "batch keys heads directions"],
    strength: Float[Tensor, "heads directions"],
    scale: float,
) -> Float[Tensor, "batch heads queries keys"]:
    """Returns the scores of the rows with these strengths (Eq. 2)."""
    return scale * torch.einsum("bihr,hr,bjhr->bhij", query, strength, key)


def theorem_1(change: Float[Tensor, "batch heads queries keys"], most: Float[Tensor, "heads"]) -> BoundedQuantity:
    """The largest change of a score is at most `most`: scale times the largest change of a strength (Eq. 12).

    With `most` = scale times an upper limit of the pruned strengths it is Eq. 13. Requires rows of unit length.
    """
    measured = change.abs().amax((-2, -1))
    return BoundedQuantity(measured, most.expand_as(measured))


def proposition_1(
    change: Float[Tensor, "batch heads queries keys"], moved: Float[Tensor, "batch heads queries keys"]
) -> BoundedQuantity:
    """The 1-norm of an attention row's change `moved` is at most the largest change of its scores (Eq. 21, C_sm = 1).

    C_sm = 1 because the softmax Jacobian's norm from the max norm to the 1-norm is 4 P (1 - P) <= 1, where P is the
    mass of the increased entries. Returns the row of each head with the largest ratio.
    """
    return _worst_row(moved.abs().sum(-1), change.abs().amax(-1))


def proposition_1_half_range(
    change: Float[Tensor, "batch heads queries keys"], moved: Float[Tensor, "batch heads queries keys"]
) -> BoundedQuantity:
    """Proposition 1 with half the range of the row's score change: softmax is invariant to adding a constant."""
    return _worst_row(moved.abs().sum(-1), (change.amax(-1) - change.amin(-1)) / 2)


def proposition_1_prior(
    moved: Float[Tensor, "batch heads queries keys"], most: Float[Tensor, "heads"]
) -> BoundedQuantity:
    """Proposition 1 with Theorem 1's bound instead of the measured score change, hence independent of the input."""
    measured = moved.abs().sum(-1).amax(-1)
    return BoundedQuantity(measured, most.expand_as(measured))


@dataclass(frozen=True)
class Rows:
    """Query and key rows of one layer for one batch."""

    query: Float[Tensor, "batch tokens heads directions"]
    key: Float[Tensor, "batch tokens heads directions"]


def proposition_4(
    clean: Rows, perturbed: Rows, strength: Float[Tensor, "heads directions"], scale: float
) -> BoundedQuantity:
    """The Frobenius norm of the scores' change under a perturbed input is bounded by that of the rows (Eq. 36)."""
    before = head_scores(clean.query, clean.key, strength, scale)
    after = head_scores(perturbed.query, perturbed.key, strength, scale)
    measured = torch.linalg.vector_norm(after - before, dim=(-2, -1))
    query_change = torch.linalg.vector_norm(perturbed.query - clean.query, dim=(1, 3))
    key_change = torch.linalg.vector_norm(perturbed.key - clean.key, dim=(1, 3))
    reach = query_change * spectral_norm(perturbed.key) + spectral_norm(clean.query) * key_change
    return BoundedQuantity(measured, scale * strength.abs().amax(-1) * reach)


def spectral_norm(rows: Float[Tensor, "batch tokens heads directions"]) -> Float[Tensor, "batch heads"]:
    """Returns the largest singular value of every head's rows, from their Gram matrix."""
    gram = torch.einsum("bihr,bihs->bhrs", rows, rows)
    return torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt()


def _worst_row(
    measured: Float[Tensor, "batch heads queries"], bound: Float[Tensor, "batch heads queries"]
) -> BoundedQuantity:
    worst = (
        BoundedQuantity(measured.flatten(0, 1), bound.flatten(0, 1)).ratio.argmax(-1).unflatten(0, measured.shape[:2])
    )
    pick = worst[..., None]
    return BoundedQuantity(measured.gather(-1, pick)[..., 0], bound.gather(-1, pick)[..., 0])
