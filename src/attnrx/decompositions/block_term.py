"""The block-term decomposition BTD-(L, L, 1): a term belongs to one block, and a block has one mix of the slices."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from attnrx.decompositions.canonical import Canonical, Trace, check_sweeps, error_of, water_filled
from attnrx.decompositions.factored import FactoredTensor, as_matrix, solve_normal, unit_columns
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class BlockTerms:
    """Y(:, :, h) = sum_b mix[h, b] left_b right_b^T, where left_b are the columns of left with owner b (Eq. 6).

    There are as many blocks as slices; if `mix` is the identity, every slice has exactly the terms it owns. A block may
    have no terms. Stored in float64. Raises InvalidInput for shapes that do not fit, owners that are not block indices,
    and values that are not finite.
    """

    left: Float[Tensor, "rows rank"]
    right: Float[Tensor, "columns rank"]
    mix: Float[Tensor, "slices slices"]
    owner: Int[Tensor, "rank"]
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self):
        for name in ("left", "right", "mix"):
            object.__setattr__(self, name, as_matrix(getattr(self, name), name))
        if self.owner.is_floating_point():
            raise InvalidInput(f"owner has the dtype {self.owner.dtype}; give integers, the block index of each term.")
        object.__setattr__(self, "owner", self.owner.to(self.left.device, torch.int64))
        blocks, ranks = self.mix.shape[-1], {self.left.shape[-1], self.right.shape[-1], len(self.owner)}
        if len(ranks) != 1 or self.mix.shape != (blocks, blocks):
            shapes = [tuple(part.shape) for part in (self.left, self.right, self.mix, self.owner)]
            raise InvalidInput(f"factors of shapes {shapes} are not block terms: give one rank and a square mix.")
        if not bool(((self.owner >= 0) & (self.owner < blocks)).all()):
            raise InvalidInput(f"owner {self.owner.tolist()} has indices out of range; there are {blocks} blocks.")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of terms of every block."""
        return tuple(torch.bincount(self.owner, minlength=self.mix.shape[1]).tolist())

    @property
    def canonical(self) -> Canonical:
        """The same tensor as a canonical decomposition, whose terms of one block share their mix."""
        return Canonical(self.left, self.right, self.mix[:, self.owner], self.trace)


@dataclass(frozen=True)
class Fusion:
    """The slice that owns each term of a canonical decomposition, from its mix: the paper's choice of ranks.

    `owner` is the slice with the largest absolute value in the column, the first one on ties. `order` sorts the terms
    by owner; `reordered` is the mix in that order, each column divided by its entry of the largest absolute value
    (Figure 3 b). `off_block` is the share of each column's energy outside its owner, in the original order: zero
    everywhere if the mix is block-diagonal.
    """

    owner: Int[Tensor, "rank"]
    ranks: tuple[int, ...]
    order: Int[Tensor, "rank"]
    reordered: Float[Tensor, "slices rank"]
    off_block: Float[Tensor, "rank"]


def fusion_ranks(terms: Canonical) -> Fusion:
    """Returns the owners and the ranks of the blocks from the mix (Algorithm 1, Section 3.1).

    A column of zeros is owned by the first slice and has no energy outside it.
    """
    owner = terms.mix.abs().argmax(0)
    peak = terms.mix.gather(0, owner[None])[0]
    normalized = terms.mix / torch.where(peak != 0, peak, torch.ones_like(peak))
    energy = normalized.square().sum(0)
    order = owner.argsort(stable=True)
    return Fusion(
        owner=owner,
        ranks=tuple(torch.bincount(owner, minlength=len(terms.mix)).tolist()),
        order=order,
        reordered=normalized[:, order],
        off_block=torch.where(energy > 0, 1 - 1 / energy, torch.zeros_like(energy)),
    )


def initial_blocks(terms: Canonical) -> BlockTerms:
    """Returns the initial blocks of a canonical decomposition: Algorithm 1 after its first line.

    The largest value of each column of the mix is moved to `left`, the columns are sorted by owner, and the mix becomes
    the identity.
    """
    fusion = fusion_ranks(terms)
    owner, order = fusion.owner, fusion.order
    left = terms.left * terms.mix.gather(0, owner[None])
    identity = torch.eye(len(terms.mix), dtype=torch.float64, device=owner.device)
    return BlockTerms(left[:, order], terms.right[:, order], identity, owner[order])


def water_filled_blocks(tensor: FactoredTensor, rank: int) -> BlockTerms:
    """Returns the best blocks with `rank` terms in total and the identity as mix."""
    return initial_blocks(water_filled(tensor, rank))


def truncated_blocks(tensor: FactoredTensor, ranks: Sequence[int]) -> BlockTerms:
    """Returns the best blocks of the given ranks with the identity as mix: the truncated SVD of every slice.

    Raises InvalidInput unless there is one rank per slice, each at most the rank of the slice, and not all are zero.
    """
    rows, columns, slices = tensor.shape
    most = min(rows, columns, tensor.left.shape[1])
    if len(ranks) != slices or not all(0 <= rank <= most for rank in ranks) or not sum(ranks):
        raise InvalidInput(f"ranks {list(ranks)}: give {slices}, each from 0 to {most}, not all zero.")
    left, strength, right = tensor.svd()
    owner = torch.repeat_interleave(torch.arange(slices), torch.tensor(ranks)).to(left.device)
    index = torch.cat([torch.arange(rank) for rank in ranks]).to(left.device)
    return BlockTerms(
        left[owner, :, index].T * strength[owner, index],
        right[owner, :, index].T,
        torch.eye(slices, dtype=torch.float64, device=left.device),
        owner,
    )


def tied_als(tensor: FactoredTensor, start: BlockTerms, *, sweeps: int = 200, tolerance: float = 1e-8) -> BlockTerms:
    """Improves all blocks jointly by alternating least squares; the error never increases.

    Blocks are a canonical decomposition whose terms of one block are tied to one column of the mix, C = mix E with E
    the one-hot owners: left and right have the same updates, and mix = (G_C E^T)(E Gamma_C E^T)^-1 is one small solve.
    This replaces Algorithms 2 and 3, which improve one block at a time. Owners and ranks do not change. The returned
    columns of mix have unit length. Stops as `als` does.
    """
    check_sweeps(sweeps, tolerance)
    check_blocks(tensor, start)
    best, belongs = start, _one_hot(start)
    errors, converged = [tensor.relative_error(*start.canonical.factors)], False
    right, mix = unit_columns(start.right)[0], unit_columns(start.mix)[0]
    projection = tensor.project_right(right)
    for _ in range(sweeps):
        left, right, mix, projection, square = _sweep(tensor, belongs, right, mix, projection)
        blocks = BlockTerms(left, right, mix, start.owner)
        error = error_of(tensor, blocks.canonical.factors, square)
        converged = errors[-1] - error <= tolerance * errors[-1]
        if error <= errors[-1]:
            best = blocks
            errors.append(error)
        if converged:
            break
    return _with_unit_mix(replace(best, trace=Trace(tuple(errors), converged=converged)))


def check_blocks(tensor: FactoredTensor, blocks: BlockTerms) -> None:
    """Raises InvalidInput if the shape of the blocks is not that of the tensor."""
    shape = len(blocks.left), len(blocks.right), len(blocks.mix)
    if shape != tensor.shape:
        raise InvalidInput(f"blocks of shape {shape} do not fit a tensor of shape {tensor.shape}.")


def _sweep(
    tensor: FactoredTensor, belongs: Tensor, right: Tensor, mix: Tensor, projection: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    right, length = unit_columns(right)
    projection = projection / torch.where(length > 0, length, torch.ones_like(length))
    mix = unit_columns(mix)[0]
    full = mix @ belongs
    full_gram = full.T @ full
    left = unit_columns(solve_normal((right.T @ right) * full_gram, tensor.left_products(projection, full)))[0]
    left_gram, left_projection = left.T @ left, tensor.project_left(left)
    right = solve_normal(left_gram * full_gram, tensor.right_products(left_projection, full))
    projection = tensor.project_right(right)
    products = tensor.mix_products(left_projection, projection) @ belongs.T
    normal = belongs @ (left_gram * (right.T @ right)) @ belongs.T
    mix = _solve_mix(normal, products, mix)
    square = tensor.square + float((mix * (mix @ normal - 2 * products)).sum())
    return left, right, mix, projection, square


def _solve_mix(normal: Tensor, products: Tensor, mix: Tensor) -> Tensor:
    # A block without terms has no equation, so its column is unchanged.
    energy = normal.diagonal()
    scale = torch.where(energy > 0, energy, torch.ones_like(energy)).rsqrt()
    solved = solve_normal(scale[:, None] * normal * scale, products * scale) * scale
    return torch.where(energy > 0, solved, mix)


def _one_hot(blocks: BlockTerms) -> Float[Tensor, "slices rank"]:
    identity = torch.eye(len(blocks.mix), dtype=torch.float64, device=blocks.owner.device)
    return identity[:, blocks.owner]


def _with_unit_mix(blocks: BlockTerms) -> BlockTerms:
    mix, length = unit_columns(blocks.mix)
    return replace(blocks, left=blocks.left * length[blocks.owner], mix=mix)
