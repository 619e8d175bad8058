"""Least-squares strengths: the weights of given rank-one terms that come nearest to a bilinear form, over samples."""

import torch

from attnrx.errors import InvalidInput
from attnrx.shapes import Bool, Float, Tensor


class StrengthFit:
    """Accumulates the normal equations of: min over s of sum || T - left diag(s) right^T ||^2, centred over the rows
    of right.

    T = target_left diag(target_strength) target_right^T. Both sides are centred over the keys of one sample, because
    a constant per query row is invisible to a softmax. Memory is one square matrix of the number of terms per head,
    whatever the number of samples.
    """

    def __init__(self, heads: int, terms: int):
        self.normal = torch.zeros(heads, terms, terms, dtype=torch.float64)
        self.right_side = torch.zeros(heads, terms, dtype=torch.float64)
        self.target_energy = torch.zeros(heads, dtype=torch.float64)
        self.samples = 0

    def observe(
        self,
        left: Float[Tensor, "batch queries heads terms"],
        right: Float[Tensor, "batch keys heads terms"],
        target_left: Float[Tensor, "batch queries heads target_terms"],
        target_right: Float[Tensor, "batch keys heads target_terms"],
        target_strength: Float[Tensor, "heads target_terms"],
    ) -> None:
        """Adds one batch."""
        right = right - right.mean(1, keepdim=True)
        target_right = target_right - target_right.mean(1, keepdim=True)
        weighted = target_left * target_strength.to(target_left.dtype)
        self.normal += _total(_gram(left, left) * _gram(right, right))
        self.right_side += _total(_gram(left, weighted) * _gram(right, target_right)).sum(-1)
        self.target_energy += _total(_gram(weighted, weighted) * _gram(target_right, target_right)).sum((-1, -2))
        self.samples += left.shape[0]

    def solve(self, keep: Bool[Tensor, "heads terms"]) -> Float[Tensor, "heads terms"]:
        """Gives the best strengths of the kept terms, zero elsewhere and where the samples never go."""
        if self.samples == 0:
            raise InvalidInput(
                "the least-squares strengths were asked for before any sample was seen; give calibration data."
            )
        strength = torch.zeros_like(self.right_side)
        for head, kept in enumerate(keep):
            if bool(kept.any()):
                normal = self.normal[head][kept][:, kept]
                strength[head, kept] = (
                    torch.linalg.pinv(normal, rtol=1e-10, hermitian=True) @ self.right_side[head, kept]
                )
        return strength

    def relative_error(self, strength: Float[Tensor, "heads terms"]) -> Float[Tensor, "heads"]:
        """Gives || T - fit || / || T || of each head for any strengths, on the samples seen; zero where T is zero."""
        square = (
            self.target_energy
            - 2 * (strength * self.right_side).sum(-1)
            + torch.einsum("hr,hrs,hs->h", strength, self.normal, strength)
        )
        share = square.clamp_min(0) / self.target_energy.clamp_min(torch.finfo(torch.float64).tiny)
        return torch.where(self.target_energy > 0, share.sqrt(), torch.zeros_like(share))


def _gram(left: Tensor, right: Tensor) -> Tensor:
    return torch.einsum("bnhr,bnhs->bhrs", left, right)


def _total(products: Tensor) -> Tensor:
    return products.sum(0, dtype=torch.float64).cpu()
