"""A third-order tensor that stores each slice as a product of two thin factors, for tensor decompositions."""

from dataclasses import dataclass
from functools import cached_property

import torch

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor

# Below this relative error, the difference between large squares loses too many digits by cancellation.
_RESOLVED = 1e-3
# Eigenvalues of a normal matrix below this share of the largest one are rounding.
_NULL = 1e-13

# The factors of all slices, multiplied by the factors of the terms.
Projection = Float[Tensor, "slices inner rank"]


@dataclass(frozen=True)
class FactoredTensor:
    """A tensor with the slices Y_h = left_h^T right_h of shape rows x columns, which are stored only as these factors.

    All operations use float64, without gradients. The slices can have different ranks, because `left` and `right` can
    be padded with rows of zeros. A product with R terms costs one matrix product of rows x (slices * inner) x R. Raises
    InvalidInput if a factor is empty or not finite.
    """

    left: Float[Tensor, "slices inner rows"]
    right: Float[Tensor, "slices inner columns"]

    def __post_init__(self):
        left, right = as_matrix(self.left, "left"), as_matrix(self.right, "right")
        object.__setattr__(self, "left", left)
        object.__setattr__(self, "right", right)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of rows, columns and slices, which are the sizes I, J, K of the three modes."""
        return self.left.shape[2], self.right.shape[2], self.left.shape[0]

    @cached_property
    def square(self) -> float:
        """The sum of squares of all entries."""
        # |L^T R|^2 = <L L^T, R R^T>, computed from Gram matrices of size inner x inner.
        return float(((self.left @ self.left.mT) * (self.right @ self.right.mT)).sum())

    @property
    def norm(self) -> float:
        return self.square**0.5

    @property
    def slice_rank(self) -> int:
        """The rank at which every slice is exact."""
        return min(self.left.shape[1:] + self.right.shape[2:])

    def project_left(self, left: Float[Tensor, "rows rank"]) -> Projection:
        return self.left.flatten(0, 1).mm(left).view(*self.left.shape[:2], -1)

    def project_right(self, right: Float[Tensor, "columns rank"]) -> Projection:
        return self.right.flatten(0, 1).mm(right).view(*self.right.shape[:2], -1)

    def left_products(
        self, right_projection: Projection, mix: Float[Tensor, "slices rank"]
    ) -> Float[Tensor, "rows rank"]:
        """Returns G_A = Y_(1) (C o B) (Khatri-Rao), from B projected by `project_right` and C = `mix`."""
        return self.left.flatten(0, 1).T.mm((right_projection * mix[:, None]).flatten(0, 1))

    def right_products(
        self, left_projection: Projection, mix: Float[Tensor, "slices rank"]
    ) -> Float[Tensor, "columns rank"]:
        """Returns G_B = Y_(2) (C o A) (Khatri-Rao), from A projected by `project_left` and C = `mix`."""
        return self.right.flatten(0, 1).T.mm((left_projection * mix[:, None]).flatten(0, 1))

    def mix_products(self, left_projection: Projection, right_projection: Projection) -> Float[Tensor, "slices rank"]:
        """Returns G_C = Y_(3) (B o A) (Khatri-Rao), from both projections."""
        return (left_projection * right_projection).sum(1)

    def relative_error(
        self, left: Float[Tensor, "rows rank"], right: Float[Tensor, "columns rank"], mix: Float[Tensor, "slices rank"]
    ) -> float:
        """Returns the relative error || Y - [[A, B, C]] || / || Y ||, which is accurate even for small errors.

        If both tensors are zero, the result is 0. If only Y is zero, the result is infinite.
        """
        # |Y - T|^2 = |Y|^2 - 2 <Y, T> + |T|^2, and each term is computed from small Gram matrices.
        terms = float((left.T.mm(left) * right.T.mm(right) * mix.T.mm(mix)).sum())
        inner = float((self.mix_products(self.project_left(left), self.project_right(right)) * mix).sum())
        square = self.square - 2 * inner + terms
        if square < _RESOLVED**2 * max(self.square, terms):
            # QR avoids the cancellation of digits. A slice of the residual is one product of [rows, inner + rank] and
            # [inner + rank, columns]. The product of their two R factors has the same norm.
            rows = torch.cat([self.left.mT, left.expand(len(mix), -1, -1)], -1)
            columns = torch.cat([self.right.mT, -right * mix[:, None]], -1)
            small_rows, small_columns = torch.linalg.qr(rows, "r").R, torch.linalg.qr(columns, "r").R
            square = float((small_rows @ small_columns.mT).square().sum())
        if self.square == 0:
            return 0.0 if square == 0 else float("inf")
        return (square / self.square) ** 0.5

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the SVD of each slice: [slices, rows, triples], [slices, triples] and [slices, columns, triples].

        There are min(inner, rows, columns) triples per slice, in descending order. The function computes two thin QRs
        and one small SVD.
        """
        basis_left, small_left = torch.linalg.qr(self.left.mT)
        basis_right, small_right = torch.linalg.qr(self.right.mT)
        left, strength, right = torch.linalg.svd(small_left @ small_right.mT, full_matrices=False)
        return basis_left @ left, strength, basis_right @ right.mT

    def dense(self) -> Float[Tensor, "rows columns slices"]:
        """Returns the dense tensor. Only tests use it."""
        return torch.einsum("hdi,hdj->ijh", self.left, self.right)


def as_matrix(values: Tensor, name: str) -> Tensor:
    """Converts values of any shape to a contiguous float64 tensor without gradient.

    Raises:
        InvalidInput: The values are empty or not finite.
    """
    values = values.detach().to(torch.float64).contiguous()
    if values.numel() == 0 or not bool(torch.isfinite(values).all()):
        raise InvalidInput(f"{name} of shape {tuple(values.shape)} is empty or holds values that are not finite.")
    return values


def solve_normal(normal: Float[Tensor, "rank rank"], products: Float[Tensor, "size rank"]) -> Tensor:
    """Solves a least-squares step. Returns `products` times the inverse of the positive semidefinite matrix `normal`.

    The function uses a Cholesky decomposition if it is numerically safe, otherwise a pseudoinverse from eigenvalues. It
    adds no regularization, so the step is the exact minimum. Rescale the columns first, so that the diagonal is near
    one.
    """
    lower, failed = torch.linalg.cholesky_ex(normal)
    pivots = lower.diagonal()
    # The ratio of squared pivots is a lower bound of the condition number. Cholesky fails only at pivots <= 0.
    if not int(failed) and float(pivots.min()) ** 2 > _NULL * float(pivots.max()) ** 2:
        return torch.cholesky_solve(products.T, lower).T
    # Collinear terms make the system singular. The pseudoinverse finds the solution with the smallest norm.
    values, vectors = torch.linalg.eigh(normal)
    significant = values > _NULL * values[-1].clamp_min(0)
    return (products @ vectors[:, significant] / values[significant]) @ vectors[:, significant].T


def unit_columns(matrix: Float[Tensor, "size rank"]) -> tuple[Float[Tensor, "size rank"], Float[Tensor, "rank"]]:
    """Returns the columns scaled to unit length, and their original lengths. Columns of zeros do not change."""
    length = matrix.norm(dim=0)
    return matrix / length.masked_fill(length == 0, 1), length
