"""The block-term decomposition BTD-(L, L, 1): a term belongs to one block, and a block has one mix of the slices.

Blocks are fitted jointly (`tied_als`) or one at a time (`deflate`: Algorithms 2 and 3 as published, or with a warm
start whose error never increases).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.nn.functional import pad

from attnrx.decompositions.canonical import (
    Canonical,
    Factors,
    Trace,
    alternated,
    check_fit,
    check_sweeps,
    water_filled,
)
from attnrx.decompositions.error_preserving import CorrectionSchedule, cpd_epc
from attnrx.decompositions.factored import FactoredTensor, as_matrix, unit_columns
from attnrx.errors import InvalidInput, UnknownName
from attnrx.shapes import Float, Int, Tensor

FORMS = ("tied", "warm", "literal")


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
    normalized = terms.mix / peak.masked_fill(peak == 0, 1)
    energy = normalized.square().sum(0)
    order = owner.argsort(stable=True)
    return Fusion(
        owner=owner,
        ranks=tuple(torch.bincount(owner, minlength=len(terms.mix)).tolist()),
        order=order,
        reordered=normalized[:, order],
        off_block=torch.where(energy > 0, 1 - 1 / energy, 0),
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
    slices, most = len(tensor.left), tensor.slice_rank
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
    check_fit(tensor, start.left, start.right, start.mix)
    belongs = torch.eye(len(start.mix), dtype=torch.float64, device=start.owner.device)[:, start.owner]
    (left, right, mix), trace = alternated(tensor, (start.left, start.right, start.mix), sweeps, tolerance, belongs)
    mix, length = unit_columns(mix)
    return BlockTerms(left * length[start.owner], right, mix, start.owner, trace)


def block_terms(
    tensor: FactoredTensor,
    rank: int,
    *,
    form: str = "tied",
    start: str | Canonical = "best",
    schedule: CorrectionSchedule | None = None,
    seed: int = 0,
) -> BlockTerms:
    """Returns a BTD-(L, L, 1) with ranks from the fusion matrix: CPD-EPC, Algorithm 1, and one of FORMS.

    "tied" improves all blocks jointly (`tied_als`, with the least-squares options of the schedule); "warm" and
    "literal" improve one block at a time (`deflate`; "literal" follows Algorithms 2 and 3 as published). With the start
    "random" or "water_filling" the owners are those of the CPD-EPC from that start; a random start imposes no owners on
    the fit. "best" also improves the water-filled blocks and returns the result with the smaller error, so that "tied"
    and "warm" are never worse than water-filling; "literal", whose error can rise, uses only the random start.
    """
    schedule = schedule or CorrectionSchedule()
    if form not in FORMS:
        raise UnknownName("form", form, FORMS)
    is_best = start == "best"
    terms = cpd_epc(tensor, rank, start="random" if is_best else start, schedule=schedule, seed=seed)
    starts = [initial_blocks(terms)]
    if is_best and form != "literal":
        starts.append(water_filled_blocks(tensor, rank))
    if form == "tied":
        found = [tied_als(tensor, blocks, sweeps=schedule.sweeps, tolerance=schedule.tolerance) for blocks in starts]
    else:
        found = [deflate(tensor, blocks, literal=form == "literal") for blocks in starts]
    return min(found, key=lambda blocks: blocks.trace.errors[-1])


def deflate(
    tensor: FactoredTensor,
    start: BlockTerms,
    *,
    literal: bool = False,
    sweeps: int = 5,
    inner_sweeps: int = 5,
    tolerance: float = 0.0,
) -> BlockTerms:
    """Fits each block in turn to the residual of the others (Algorithm 3), by `inner_sweeps` of Algorithm 2.

    `literal` starts the mix of a block from the leading eigenvector of the residual every time, as in the published
    Algorithm 2: a block can move to another slice, and the error can rise. Otherwise the mix starts from its current
    value, and the error never increases. The trace has the error of every sweep, including increases. Stops after
    `sweeps`, or when a sweep changes the error by at most `tolerance` of itself.

    The slices are never formed, only their sum weighted by the mix of the block, one rows x columns matrix, because a
    step is its truncated SVD.
    """
    check_sweeps(sweeps, tolerance)
    check_fit(tensor, start.left, start.right, start.mix)
    if inner_sweeps < 1:
        raise InvalidInput(f"inner_sweeps={inner_sweeps}: a block needs at least one sweep.")
    blocks, errors, converged = start, [tensor.relative_error(*start.canonical.factors)], False
    for _ in range(sweeps):
        for block, rank in enumerate(blocks.ranks):
            if rank:
                blocks = _refit(tensor, blocks, block, literal, inner_sweeps)
        errors.append(tensor.relative_error(*blocks.canonical.factors))
        converged = abs(errors[-2] - errors[-1]) <= tolerance * errors[-2]
        if converged:
            break
    return replace(blocks, trace=Trace(tuple(errors), converged=converged))


def _refit(tensor: FactoredTensor, blocks: BlockTerms, block: int, literal: bool, inner_sweeps: int) -> BlockTerms:
    """Algorithm 2 for one block: alternates the truncated SVD of the slices of the residual X' (X minus the other
    blocks), summed by the mix, with the best rank-one fit of their products.
    """
    mine = blocks.owner == block
    others = blocks.left[:, ~mine], blocks.right[:, ~mine], blocks.canonical.mix[:, ~mine]
    mix = blocks.mix[:, block]
    if literal or not bool(mix.any()):
        mix = _leading_mix(tensor, others)
    left, right, scale = blocks.left[:, mine], blocks.right[:, mine], torch.ones_like(mix[:1])
    for _ in range(inner_sweeps):
        left, right = _leading(_mixed(tensor, others, mix / mix.norm()), int(mine.sum()))
        # X'_(3) khatri-rao(left, right)
        products = tensor.mix_products(tensor.project_left(left), tensor.project_right(right))
        products = products - others[2] @ ((others[0].T @ left) * (others[1].T @ right))
        directions, strength, coefficients = torch.linalg.svd(products, full_matrices=False)
        # The first singular pair is the best rank-one fit: a direction of the mix, and a factor of every term.
        mix, scale = directions[:, 0], strength[0] * coefficients[0]
    columns = torch.where(mine)[0]
    return replace(
        blocks,
        left=blocks.left.index_copy(1, columns, left * scale),
        right=blocks.right.index_copy(1, columns, right),
        mix=blocks.mix.index_copy(1, torch.tensor([block], device=mix.device), mix[:, None]),
    )


def _leading_mix(tensor: FactoredTensor, others: Factors) -> Float[Tensor, "slices"]:
    """Returns the leading eigenvector of X'_(3) X'_(3)^T, from the inner products <X_g, X_h> of the slices of X."""
    slices, inner, _ = tensor.left.shape
    stacked_left, stacked_right = tensor.left.flatten(0, 1), tensor.right.flatten(0, 1)
    products = (stacked_left @ stacked_left.T) * (stacked_right @ stacked_right.T)
    slice_gram = products.view(slices, inner, slices, inner).sum((1, 3))
    left, right, mix = others
    cross = tensor.mix_products(tensor.project_left(left), tensor.project_right(right)) @ mix.T
    gram = slice_gram - cross - cross.T + mix @ ((left.T @ left) * (right.T @ right)) @ mix.T
    return torch.linalg.eigh(gram).eigenvectors[:, -1]


def _mixed(tensor: FactoredTensor, others: Factors, mix: Float[Tensor, "slices"]) -> Float[Tensor, "rows columns"]:
    """Returns X' x_3 mix^T: the slices of the residual, summed with the weights of `mix`."""
    left, right, other_mix = others
    weighted = (tensor.left * mix[:, None, None]).flatten(0, 1)
    return weighted.T @ tensor.right.flatten(0, 1) - (left * (mix @ other_mix)) @ right.T


def _leading(matrix: Float[Tensor, "rows columns"], rank: int) -> tuple[Tensor, Tensor]:
    """Returns the leading singular vectors of both sides, padded with zero columns if the matrix has fewer."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    missing = max(rank - left.shape[1], 0)
    return pad(left[:, :rank], (0, missing)), pad(right[:rank].T, (0, missing))
