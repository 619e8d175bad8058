"""The paper's bounds as pure functions that return a measured quantity divided by its bound: above 1 it is violated.

All take float64 rows of one layer: the query and key rows that enter the scores, one per token.
"""

import torch

from attnrx.shapes import Float, Tensor

# Lower limit of a bound: smaller bounds are below the rounding of the measured quantity.
FLOOR = 1e-9


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
