"""Block terms fitted one at a time: Algorithms 2 and 3 as published, and a warm start whose error never rises."""

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from attnrx.decompositions.block_term import BlockTerms, check_blocks, initial_blocks, tied_als, water_filled_blocks
from attnrx.decompositions.canonical import Canonical, Trace, check_sweeps
from attnrx.decompositions.error_preserving import CorrectionSchedule, cpd_epc
from attnrx.decompositions.factored import FactoredTensor
from attnrx.errors import InvalidInput, UnknownName
from attnrx.shapes import Bool, Float, Tensor

FORMS = ("tied", "warm", "literal")


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
    is_best = isinstance(start, str) and start == "best"
    terms = cpd_epc(tensor, rank, start="random" if is_best else start, schedule=schedule, seed=seed)
    starts = [initial_blocks(terms)]
    if is_best and form != "literal":
        starts.append(water_filled_blocks(tensor, rank))
    return min(
        (_improved(tensor, blocks, form, schedule) for blocks in starts), key=lambda found: found.trace.errors[-1]
    )


def _improved(tensor: FactoredTensor, start: BlockTerms, form: str, schedule: CorrectionSchedule) -> BlockTerms:
    if form == "tied":
        return tied_als(tensor, start, sweeps=schedule.sweeps, tolerance=schedule.tolerance)
    return deflate(tensor, start, literal=form == "literal")


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
    check_blocks(tensor, start)
    if inner_sweeps < 1:
        raise InvalidInput(f"inner_sweeps={inner_sweeps}: a block needs at least one sweep.")
    blocks, gram, errors, converged = start, _slice_gram(tensor), [], False
    errors.append(tensor.relative_error(*start.canonical.factors))
    for _ in range(sweeps):
        for block, rank in enumerate(blocks.ranks):
            if rank:
                blocks = _refit(_Residual(tensor, blocks, block, gram), literal, inner_sweeps)
        errors.append(tensor.relative_error(*blocks.canonical.factors))
        converged = abs(errors[-2] - errors[-1]) <= tolerance * errors[-2]
        if converged:
            break
    return replace(blocks, trace=Trace(tuple(errors), converged=converged))


@dataclass(frozen=True)
class _Residual:
    """X' = X minus all blocks but one (Algorithm 3), through products only."""

    tensor: FactoredTensor
    blocks: BlockTerms
    block: int
    slice_gram: Float[Tensor, "slices slices"]

    @property
    def others(self) -> Bool[Tensor, "rank"]:
        return self.blocks.owner != self.block

    @property
    def other_factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The terms of the other blocks, as three factors."""
        others = self.others
        return self.blocks.left[:, others], self.blocks.right[:, others], self.blocks.canonical.mix[:, others]

    def leading_mix(self) -> Float[Tensor, "slices"]:
        """The leading eigenvector of X'_(3) X'_(3)^T."""
        left, right, mix = self.other_factors
        cross = self.products(left, right, of_tensor=True) @ mix.T
        gram = self.slice_gram - cross - cross.T + mix @ ((left.T @ left) * (right.T @ right)) @ mix.T
        return torch.linalg.eigh(gram).eigenvectors[:, -1]

    def mixed(self, mix: Float[Tensor, "slices"]) -> Float[Tensor, "rows columns"]:
        """X' x_3 mix^T: the slices of the residual, summed with the weights of `mix`."""
        left, right, others = self.other_factors
        weighted = (self.tensor.left * mix[:, None, None]).flatten(0, 1)
        return weighted.T @ self.tensor.right.flatten(0, 1) - (left * (mix @ others)) @ right.T

    def products(
        self, left: Float[Tensor, "rows some"], right: Float[Tensor, "columns some"], of_tensor: bool = False
    ) -> Float[Tensor, "slices some"]:
        """X'_(3) khatri-rao(left, right); of the tensor itself with `of_tensor`."""
        whole = self.tensor.mix_products(self.tensor.project_left(left), self.tensor.project_right(right))
        if of_tensor:
            return whole
        other_left, other_right, other_mix = self.other_factors
        return whole - other_mix @ ((other_left.T @ left) * (other_right.T @ right))


def _refit(residual: _Residual, literal: bool, inner_sweeps: int) -> BlockTerms:
    """Algorithm 2: alternates the truncated SVD of the mixed slices with the best rank-one fit of their products."""
    blocks, block = residual.blocks, residual.block
    mine = ~residual.others
    mix = blocks.mix[:, block]
    if literal or not bool(mix.any()):
        mix = residual.leading_mix()
    left, right, scale = blocks.left[:, mine], blocks.right[:, mine], torch.ones_like(mix[:1])
    for _ in range(inner_sweeps):
        left, right = _leading(residual.mixed(mix / mix.norm()), int(mine.sum()))
        directions, strength, coefficients = torch.linalg.svd(residual.products(left, right), full_matrices=False)
        mix, scale = directions[:, 0], strength[0] * coefficients[0]
    columns = torch.where(mine)[0]
    return replace(
        blocks,
        left=blocks.left.index_copy(1, columns, left * scale),
        right=blocks.right.index_copy(1, columns, right),
        mix=blocks.mix.index_copy(1, torch.tensor([block], device=mix.device), mix[:, None]),
    )


def _leading(matrix: Float[Tensor, "rows columns"], rank: int) -> tuple[Tensor, Tensor]:
    """Returns the leading singular vectors of both sides, padded with zero columns if the matrix has fewer."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    missing = max(rank - left.shape[1], 0)
    return pad(left[:, :rank], (0, missing)), pad(right[:rank].T, (0, missing))


def _slice_gram(tensor: FactoredTensor) -> Float[Tensor, "slices slices"]:
    """Returns the inner products <X_g, X_h> of the slices."""
    slices, inner, _ = tensor.left.shape
    left, right = tensor.left.flatten(0, 1), tensor.right.flatten(0, 1)
    return ((left @ left.T) * (right @ right.T)).view(slices, inner, slices, inner).sum((1, 3))
