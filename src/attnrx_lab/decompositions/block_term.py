"""The block-term decomposition BTD-(L, L, 1), in which all terms of a block share one column of mixing weights.

`deflate` fits the blocks one at a time (Algorithms 2 and 3 of IrrAtt). The ranks of the blocks are read from the fusion
matrix, which contains the mixing weights. This matrix may have been trained with or without the constraints of Eq. 7.
"""

from dataclasses import dataclass, replace

import torch

from attnrx.support.shapes import Float, Int, Tensor
from attnrx_lab.decompositions.canonical import Canonical, Factors, cpd_epc
from attnrx_lab.decompositions.factored import FactoredTensor

SWEEPS = 5  # the sweeps of IrrAtt's Algorithm 3, and of its Algorithm 2 for each block
TINY = torch.finfo(torch.float32).tiny  # a length below it counts as zero


@dataclass(frozen=True)
class BlockTerms:
    """The tensor Y(:, :, h) = sum_b mix[h, b] left_b right_b^T with one block b per slice h (IrrAtt, Eq. 6).

    `left_b` and `right_b` contain those columns of `left` and `right` whose owner is block b. Each column is one term.
    If `mix` is the identity, every slice consists of exactly the terms that it owns. Terms are sorted by block, and a
    block may have no terms. `errors` contains the relative errors at the start and after each sweep.
    """

    left: Float[Tensor, "rows rank"]
    right: Float[Tensor, "columns rank"]
    mix: Float[Tensor, "slices slices"]
    owner: Int[Tensor, "rank"]
    errors: tuple[float, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of terms of every block."""
        return tuple(torch.bincount(self.owner, minlength=self.mix.shape[1]).tolist())

    @property
    def canonical(self) -> Canonical:
        """The same tensor as a canonical decomposition, in which all terms of a block have equal columns in `mix`."""
        return Canonical(self.left, self.right, self.mix[:, self.owner], self.errors)


@dataclass(frozen=True)
class Fusion:
    """The owner slice of every term in a canonical decomposition, from which IrrAtt derives the blocks' ranks.

    `owner` is the slice with the largest absolute value in the term's column of the mix. If several slices tie, the
    owner is the first of them. `off_block` is the share of each column's energy in slices other than the owner. If the
    mix is block-diagonal, `off_block` is zero.
    """

    owner: Int[Tensor, "rank"]
    ranks: tuple[int, ...]
    off_block: Float[Tensor, "rank"]


def fusion_ranks(terms: Canonical) -> Fusion:
    """Derives the owners of the terms and the ranks of the blocks from `mix` (IrrAtt, Algorithm 1, Section 3.1).

    A column of zeros belongs to the first slice, and its `off_block` is zero.
    """
    owner = terms.mix.abs().argmax(0)
    peak = terms.mix.gather(0, owner[None])[0]
    normalized = terms.mix / peak.masked_fill(peak == 0, 1)
    energy = normalized.square().sum(0)
    return Fusion(
        owner=owner,
        ranks=tuple(torch.bincount(owner, minlength=len(terms.mix)).tolist()),
        off_block=torch.where(energy > 0, 1 - 1 / energy, 0),  # the owner's entry was normalized to 1
    )


def initial_blocks(terms: Canonical) -> BlockTerms:
    """Returns the initial blocks from a canonical decomposition (Algorithm 1 of IrrAtt without its first line).

    The function multiplies each column of `left` by its mixing weight in the owner slice. Then it sorts the columns by
    owner, and sets the mix to the identity.
    """
    # With the identity as mix, a slice has only the terms of its own block. The terms' contributions to other slices
    # are lost here. The mix that `deflate` fits restores them.
    owner = fusion_ranks(terms).owner
    order = owner.argsort(stable=True)
    left = terms.left * terms.mix.gather(0, owner[None])
    identity = torch.eye(len(terms.mix), dtype=torch.float64, device=owner.device)
    return BlockTerms(left[:, order], terms.right[:, order], identity, owner[order])


def block_terms(tensor: FactoredTensor, rank: int, *, sweeps: int = 200, seed: int = 0) -> BlockTerms:
    """Returns a BTD-(L, L, 1), computed by CPD-EPC (`cpd_epc`) and then Algorithms 1 to 3 of IrrAtt.

    CPD-EPC starts from random terms. Terms from `water_filled` would already belong to one slice each, and would never
    be shared.
    """
    return deflate(tensor, initial_blocks(cpd_epc(tensor, rank, start="random", sweeps=sweeps, finish=True, seed=seed)))


def deflate(tensor: FactoredTensor, start: BlockTerms) -> BlockTerms:
    """Fits each block in turn to the residual of the other blocks (IrrAtt, Algorithms 2 and 3 as published).

    Before each fit, the block's column of the mix is reset to the leading eigenvector of the Gram matrix of the
    residual's slices. So a block can move to another slice, and the error can rise.

    To save memory, the function never forms the slices of the residual. Each step computes the truncated SVD of their
    weighted sum, which is a single rows x columns matrix.
    """
    blocks, errors = start, [tensor.relative_error(*start.canonical.factors)]
    for _ in range(SWEEPS):
        for block, rank in enumerate(blocks.ranks):
            if rank:
                blocks = _refit(tensor, blocks, block)
        errors.append(tensor.relative_error(*blocks.canonical.factors))
    return replace(blocks, errors=tuple(errors))


def _refit(tensor: FactoredTensor, blocks: BlockTerms, block: int) -> BlockTerms:
    """Refits one block to the residual X', which is X minus the other blocks (IrrAtt, Algorithm 2).

    The function alternates two steps. The first step sums the slices of X', weighted by the mix, and takes `left` and
    `right` from the truncated SVD of this sum. The second step computes the mix by the best rank-one fit for fixed
    `left` and `right`.
    """
    in_block = blocks.owner == block
    rank = int(in_block.sum())
    others = blocks.left[:, ~in_block], blocks.right[:, ~in_block], blocks.canonical.mix[:, ~in_block]
    left, right, scale = blocks.left[:, in_block], blocks.right[:, in_block], torch.ones(1)
    mix = _leading_mix(tensor, others)
    for _ in range(SWEEPS):
        left, _, right = torch.linalg.svd(_mixed(tensor, others, mix), full_matrices=False)
        left, right = left[:, :rank], right[:rank].T
        # X'_(3) khatri-rao(left, right), [slices, rank]: the products of X minus the products of the other blocks.
        products = tensor.mix_products(tensor.project_left(left), tensor.project_right(right))
        products = products - others[2] @ ((others[0].T @ left) * (others[1].T @ right))
        directions, strength, coefficients = torch.linalg.svd(products, full_matrices=False)
        # The first singular pair is the best rank-one fit. It has a direction of the mix, and a factor for every term.
        mix, scale = directions[:, 0], strength[0] * coefficients[0]
    columns = torch.where(in_block)[0]
    return replace(
        blocks,
        left=blocks.left.index_copy(1, columns, left * scale),
        right=blocks.right.index_copy(1, columns, right),
        mix=blocks.mix.index_copy(1, torch.tensor([block], device=mix.device), mix[:, None]),
    )


def _leading_mix(tensor: FactoredTensor, others: Factors) -> Float[Tensor, "slices"]:
    """Returns the leading eigenvector of X'_(3) X'_(3)^T, computed from inner products. No slice of X' is formed."""
    # <X_g, X_h> = sum over d, e of (left_gd . left_he) (right_gd . right_he), which needs only products of factors.
    slices, inner, _ = tensor.left.shape
    stacked_left, stacked_right = tensor.left.flatten(0, 1), tensor.right.flatten(0, 1)
    products = (stacked_left @ stacked_left.T) * (stacked_right @ stacked_right.T)
    slice_gram = products.view(slices, inner, slices, inner).sum((1, 3))
    left, right, mix = others
    cross = tensor.mix_products(tensor.project_left(left), tensor.project_right(right)) @ mix.T
    # (X - T)(X - T)^T expanded into its four terms, where T are the other blocks.
    gram = slice_gram - cross - cross.T + mix @ ((left.T @ left) * (right.T @ right)) @ mix.T
    return torch.linalg.eigh(gram).eigenvectors[:, -1]


def _mixed(tensor: FactoredTensor, others: Factors, mix: Float[Tensor, "slices"]) -> Float[Tensor, "rows columns"]:
    """Returns X' x_3 mix^T, which is the sum of the residual's slices, weighted by `mix`."""
    left, right, other_mix = others
    weighted = (tensor.left * mix[:, None, None]).flatten(0, 1)
    return weighted.T @ tensor.right.flatten(0, 1) - (left * (mix @ other_mix)) @ right.T


def nonnegative_units(mix: Float[Tensor, "slices rank"]) -> Float[Tensor, "slices rank"]:
    """Projects a mix onto the matrices with nonnegative columns of unit length. Call it after each training step.

    For such a mix, S^H (S^H)^T (IrrAtt, Eq. 7) is diagonal if and only if each column has one nonzero entry, its owner.
    A column without a positive value becomes one-hot at its largest value.
    """
    positive = mix.clamp_min(0)
    largest = torch.zeros_like(mix).scatter(0, mix.argmax(0, keepdim=True), 1.0)
    return torch.where(positive.any(0), torch.nn.functional.normalize(positive, dim=0, eps=TINY), largest)


def ownership_penalty(mix: Float[Tensor, "slices rank"]) -> Float[Tensor, ""]:
    """Returns the training loss sum_r (|c_r|_1^2 / |c_r|_2^2 - 1) over the columns c_r of the mix.

    The penalty is zero if and only if each column has at most one nonzero value. It is at most rank * (slices - 1), and
    does not depend on the length of the columns.
    """
    # Columns of zeros are left out, because 0 / 0 would make the gradient NaN.
    square = mix.square().sum(0)
    nonzero = square > 0
    return (mix.abs().sum(0)[nonzero].square() / square[nonzero] - 1).sum()
