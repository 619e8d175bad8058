"""Matrix decompositions for pruning and low-rank factors. All functions work on plain tensors, not on models.

The module has four parts. The first finds balanced bases for a bilinear form, such as attention scores (see
`Balanced`). The second finds the most important output directions of a linear map. The third greedily removes hidden
units or heads, and refits the next linear map. The last distributes a total rank over layers and heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnrx.support.errors import InvalidInput
from attnrx.support.hardware import one_thread
from attnrx.support.shapes import Bool, Float, Tensor

__all__ = [
    "Balanced", "activation_aware", "balance", "break_even_rank", "compensated", "elimination_losses",
    "factor_directions", "output_pca", "pays", "plain_svd", "read_out", "svd_directions", "unit_losses", "water_fill",
]  # fmt: skip

# How asymmetric a Gram matrix may be, as a share of its largest entry. It is rarely exactly symmetric, because float32
# sums round.
TOLERANCE = 1e-5
# Singular values below this share of the form's scale count as zero. They are accurate to about d * 2e-16 of the scale,
# so dividing a row by a smaller one would leave only noise.
NULL_SHARE = 1e-13
# `read_out` counts kept features as duplicates if an eigenvalue of their correlations is below this share of the
# largest one. It counts a feature as constant if its energy is below this share of the energy that the feature
# combines.
COPY_SHARE = 1e-12
# The default penalty on changes of the MLP's second map, relative to a unit's mean variance. Of the values from 1e-4 to
# 0.3, this one has the smallest KL divergence on images from classes without calibration images
# (docs/results/hidden.md).
RIDGE = 0.1
# How many units `unit_losses` removes between two updates of its tables.
BLOCK = 64
# How many table rows of `unit_losses` one matrix product updates.
UPDATED = 512
# With 1,537 or 4,096 features, computing 256 rows of a Gram at once halves the time (2026-11-28, EPYC, two threads).
GRAM_BLOCK = 256
# Each removal increases the error by at least this multiple of the previous increase, so ties keep their order.
STEP = 1 + 1e-9
# This share of the mean variance is added to the diagonal of the heads' covariance. Without it, constant or duplicate
# features would make the covariance singular.
DAMPING = 1e-8

Weight = Float[Tensor, "outputs inputs"]
Directions = tuple[Float[Tensor, "most"], Float[Tensor, "most outputs"]]
"""Descending strengths, and their directions. At rank r, the error is the sum of all later squared strengths."""

Ranks = tuple[int, ...]


# Balanced directions: a bilinear form whose leading terms are the best low-rank form in a metric ----------------------


@dataclass(frozen=True)
class Balanced:
    """Bases of two feature spaces, and strengths for which left^T diag(strength) right = identity in every head.

    For two matrices old_left and old_right [d, width], the bilinear form old_left^T old_right is the sum over r of
    strength[r] * (left[r] @ old_left)^T (right[r] @ old_right). All directions together reproduce the form for any
    input. In the metric that the two Gram matrices define, the first r directions give the form's best approximation of
    rank r. The squared error of this approximation is the sum of the discarded squared strengths. Every smaller rank
    keeps fewer of the same directions, so one `Balanced` serves all ranks.

    `strength` is positive and in descending order. The first `rank[h]` directions of head h have unit energy: left[r]
    G_left left[r]^T = 1 for the left Gram matrix G_left, and likewise on the right. The remaining directions are null
    directions: their left or right side has no energy. In the metric, they contribute nothing to the form, but for
    other inputs they may. Their energy is not normalized. As a placeholder, their strength is 1e-13 of the form's
    scale. So both bases stay invertible, and the strengths stay in descending order.
    """

    left: Float[Tensor, "heads directions directions"]
    right: Float[Tensor, "heads directions directions"]
    strength: Float[Tensor, "heads directions"]
    rank: tuple[int, ...]


@one_thread()
def balance(left_gram: Float[Tensor, "heads d d"], right_gram: Float[Tensor, "heads d d"]) -> Balanced:
    """Returns balanced bases for the dot product of two random vectors, given their second moments (Gram matrices).

    Each Gram matrix is factored in float64 as G = R^T R. With the SVD R_left R_right^T = U diag(s) V^T, the directions
    are left = diag(1/s) V^T R_right and right = diag(1/s) U^T R_left. The method is square-root balanced truncation
    from model reduction (Moore, 1981). If the two vectors are drawn independently, the expected squared error is the
    sum of the discarded s^2 (Eckart and Young). No Gram matrix is inverted, so both matrices may be singular or zero,
    and may have any scale.

    Rounding errors of the Gram matrices dominate strengths below about 1e-8 of the form's scale. If you have samples of
    the vectors, use `svd_directions` instead. Raises InvalidInput if a Gram matrix is not finite or not symmetric.
    """
    return factor_directions(_gram_factor(left_gram), _gram_factor(right_gram))


def svd_directions(
    left_rows: Float[Tensor, "heads d left_width"], right_rows: Float[Tensor, "heads d right_width"]
) -> Balanced:
    """Returns the exact singular directions of left_rows^T right_rows, [left_width, right_width], for every head.

    The product itself is never formed. Each head needs two thin QR factorizations and one d x d SVD. Unlike Gram
    matrices, these do not lose small singular values to rounding. Apart from null directions, left @ left_rows and
    right @ right_rows have orthonormal rows.
    """
    left, right = (torch.linalg.qr(rows.detach().double().mT).R for rows in (left_rows, right_rows))
    return factor_directions(left, right)


@one_thread()
def factor_directions(
    left_factor: Float[Tensor, "heads left_samples d"], right_factor: Float[Tensor, "heads right_samples d"]
) -> Balanced:
    """Returns balanced bases as `balance` does, but from factors of the two Gram matrices, G = factor^T factor.

    For example, the rows of a factor may be samples of the random vector.

    Null directions complete each basis. If the rows of L and R are the other directions, and s their strengths, I - L^T
    diag(s) R projects onto the remaining space. The projector's singular vectors are rotated so that each vector, or
    its partner on the other side, has no energy in the metric. Finally, right = diag(1/strength) left^-T makes the
    identity hold up to rounding. The rounding error is usually about 1e-15, namely 2e-16 times the largest entry of
    |left|^T diag(strength) |right|. It is larger if the two Gram matrices differ by many orders of magnitude.
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
    # The heads are completed one by one, because they have different numbers of null directions.
    strength, full = floor[:, None].repeat(1, size), left.new_zeros(heads, size, size)
    ranks = significant.sum(-1).tolist()
    for head, rank in enumerate(ranks):
        strength[head, :rank] = values[head, :rank]
        full[head, :rank] = left[head, :rank]
        if rank < size:
            remaining = torch.eye(size, dtype=full.dtype, device=full.device)
            remaining -= (left[head, :rank].mT * values[head, :rank]) @ right[head, :rank]
            # The next `rows` span the projector's row space. A rotation then separates rows with left energy from rows
            # without. A row with left energy has no right energy, because the remaining form is zero in the metric.
            rows = torch.linalg.svd(remaining).U.mT[: size - rank]
            rows = torch.linalg.svd(left_factor[head] @ rows.mT, full_matrices=True).Vh @ rows
            # Dividing the rows by the root of the strength makes both sides equally large.
            full[head, rank:] = rows / floor[head].sqrt()
    # The largest entry of every row is made positive, so results agree between machines.
    largest = full.gather(-1, full.abs().argmax(-1, keepdim=True))
    full = full * torch.where(largest < 0, -1.0, 1.0).to(full.dtype)
    # The rows are scaled to unit length, which makes the inversion well conditioned.
    length = full.norm(dim=-1, keepdim=True)
    right = torch.linalg.inv(full / length).mT / length / strength[..., None]
    return Balanced(full, right, strength, tuple(ranks))


def _scale(left: Float[Tensor, "heads left_samples d"], right: Float[Tensor, "heads right_samples d"]) -> Tensor:
    """Returns an upper bound on each head's strengths, which is never zero and grows with the scale of the features."""
    energy_left, energy_right = left.square().sum(1), right.square().sum(1)
    both = (energy_left * energy_right).sqrt().sum(-1)
    total = (energy_left.sum(-1) * energy_right.sum(-1)).sqrt()
    either = energy_left.sum(-1) + energy_right.sum(-1)
    fallback = torch.where(total > 0, total, torch.where(either > 0, either, 1.0))
    return torch.where(both > 0, both, fallback)


def gram(rows: Float[Tensor, "rows features"]) -> Float[Tensor, "features features"]:
    """Returns the Gram matrix rows^T rows. For wide rows on a CPU, computes the upper blocks and mirrors them."""
    if rows.device.type != "cpu" or rows.shape[1] < 2 * GRAM_BLOCK:
        return rows.T @ rows
    product = rows.new_empty(rows.shape[1], rows.shape[1])
    for start in range(0, rows.shape[1], GRAM_BLOCK):
        block = slice(start, start + GRAM_BLOCK)
        part = rows[:, block].T @ rows[:, start:]
        product[block, start:], product[start:, block] = part, part.T
    return product


def checked_gram(gram: Float[Tensor, "*heads d d"]) -> Float[Tensor, "*heads d d"]:
    """Returns the matrix in float64, made exactly symmetric. Raises InvalidInput if it is not finite and symmetric."""
    gram = gram.detach().double()
    limit = TOLERANCE * (gram.abs().max() if gram.numel() else 0.0)
    if not bool(torch.isfinite(gram).all()) or bool(((gram - gram.mT).abs() > limit).any()):
        raise InvalidInput("a Gram matrix is not symmetric or not finite; give second moments, features^T features.")
    return (gram + gram.mT) / 2


def _gram_factor(gram: Float[Tensor, "heads d d"]) -> Float[Tensor, "heads d d"]:
    """Returns R with R^T R = gram. Factors the correlations, so badly scaled features keep their precision."""
    epsilon = torch.finfo(gram.dtype).eps
    gram = checked_gram(gram)
    if gram.numel() == 0:
        return gram
    # Rounding can make the diagonal slightly negative, e.g. if the Gram is a difference of moments.
    spread = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    unit = torch.where(spread > 0, 1 / spread, 0)
    values, vectors = torch.linalg.eigh(gram * unit[:, :, None] * unit[:, None, :])
    # Eigenvalues below `cut` are noise, because the correlations are rounded in the given Gram's precision.
    cut = gram.shape[-1] * epsilon * values.amax(-1, keepdim=True)
    root = torch.where(values > cut, values, 0).sqrt()
    return root[:, :, None] * vectors.mT * spread[:, None, :]


def read_out(
    directions: Balanced,
    keep: Bool[Tensor, "heads directions"],
    covariance: Float[Tensor, "features features"] | None = None,
) -> Float[Tensor, "features kept"]:
    """Returns the weight that restores the concatenated outputs of all heads from their kept directions.

    Head h keeps the features left[kept] @ o_h of its output o_h. Let K be the map from all heads' outputs o to the kept
    features. Without `covariance`, each head is restored separately, with the weight W0 = strength * right. With the
    `covariance` C of o (features ordered head by head), least squares refits the weight over all heads jointly: W = W0
    + (1 - W0 K) C K^T (K C K^T)^+. This weight minimizes E |o - W K o - constant|^2. If some kept features are
    duplicates, several weights reach the minimum, and the function returns the weight nearest to W0.
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
    # A constant feature has only rounding as energy, in proportion to the energy of the features that it combines.
    alive = energy > COPY_SHARE * (projections.square() @ covariance.diagonal().clamp_min(0))
    # The inverse is computed from correlations, because kept features differ in scale by many orders of magnitude.
    unit = torch.where(alive, energy.rsqrt(), 0)
    inverse = torch.linalg.pinv((moment + moment.mT) / 2 * torch.outer(unit, unit), rtol=COPY_SHARE, hermitian=True)
    return weight + (missed @ moved.mT * unit) @ inverse * unit


# Directions of the outputs of a linear map ----------------------------------------------------------------------------

# Let the rows of V be r orthonormal directions. Projecting the outputs of y = W x + b on them gives V^T (V W) x + b,
# which has two factors of rank r. With all directions, the result equals the original map for any input.


def plain_svd(weight: Weight) -> Directions:
    """Returns a weight's left singular vectors, the best directions in Frobenius norm (Eckart and Young, 1936)."""
    left, strength, _ = torch.linalg.svd(weight.detach().double(), full_matrices=False)
    return strength, left.mT


def activation_aware(weight: Weight, moment: Float[Tensor, "inputs inputs"]) -> Directions:
    """Returns the output directions that minimize E |W x - W' x|^2 over inputs x with this second moment or covariance.

    W' is W, projected on the directions that are kept. The directions are the leading eigenvectors of W M W^T, where M
    is `moment`. M may be singular. Raises InvalidInput if M is not finite or not symmetric.
    """
    weight, moment = weight.detach().double(), checked_gram(moment)
    basis, inner = output_basis(weight)
    # The last argument bounds the entries of the outputs' moment. Their rounding is proportional to this bound.
    return _leading(basis, inner @ moment @ inner.mT, inner.square().sum() * moment.norm())


def output_pca(weight: Weight, covariance: Float[Tensor, "outputs outputs"]) -> Directions:
    """Returns the directions of `activation_aware`, computed from the second moment or covariance of the outputs W x.

    Outputs always lie in the range of W, so the components of `covariance` outside that range are discarded as noise.
    """
    weight, covariance = weight.detach().double(), checked_gram(covariance)
    basis, _ = output_basis(weight)
    return _leading(basis, basis.mT @ covariance @ basis, covariance.norm())


def pays(rank: int, outputs: int, inputs: int) -> bool:
    """Returns whether two factors of this rank have fewer entries and MACs than the matrix they replace."""
    return rank < break_even_rank(outputs, inputs)


def break_even_rank(outputs: int, inputs: int) -> float:
    """Returns the rank at which two factors cost as much as the matrix: outputs * inputs / (outputs + inputs)."""
    return outputs * inputs / (outputs + inputs)


def output_basis(weight: Weight) -> tuple[Float[Tensor, "outputs most"], Float[Tensor, "most inputs"]]:
    """Returns an orthonormal basis of a weight's output space, and the weight in that basis.

    If orthonormal directions are chosen within this space, a full set of them reproduces the weight exactly, for any
    data. Chosen in a larger space, the same number of directions could miss a part of the outputs.
    """
    outputs, inputs = weight.shape
    if outputs > inputs:
        basis, inner = torch.linalg.qr(weight)
        return basis, inner
    return torch.eye(outputs, dtype=weight.dtype, device=weight.device), weight


def _leading(basis: Tensor, moment: Tensor, bound: Tensor) -> Directions:
    """Returns the strengths and the eigenvectors of a moment that is expressed in a basis, strongest first.

    Strengths below the rounding error are set to zero. The estimate of this error assumes that the entries of the
    moment are as large as `bound`.
    """
    # The order is reversed, because eigh returns ascending eigenvalues.
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh((moment + moment.mT) / 2))
    rounding = len(moment) * torch.finfo(moment.dtype).eps * bound
    return torch.where(values > rounding, values, 0).sqrt(), (basis @ vectors).mT


# Greedy backward elimination: hidden units, with a compensation by the map that reads them, and heads -----------------


def unit_losses(
    covariance: Float[Tensor, "units units"], weight: Float[Tensor, "outputs units"], ridge: float = RIDGE
) -> Float[Tensor, "units"]:
    """Returns how much removing each unit increases the error, if units are eliminated greedily, one by one.

    `covariance` describes the units' activations, and `weight` is the linear map that reads them. Let P = (covariance +
    penalty)^-1. If unit u is removed and the remaining units compensate for it, the error grows by |w_u|^2 / P_uu
    (Optimal Brain Surgeon, Hassibi and Stork, 1993). The error is the mean squared error of the output plus the penalty
    on the weight change. Each removal updates the weights and P by a rank-one matrix. The returned increases grow
    strictly from one removal to the next, so the k largest increases belong to the k units that are removed last.

    Raises:
        InvalidInput: The ridge is not positive.
    """
    # Removing a unit eliminates it from `precision`. The rank-one updates of a block of removals are collected and then
    # applied by matrix products, as in blocked factorizations. The algorithm uses the weights only through their inner
    # products. So a block's rows stay in the cache, however many outputs the map has. Both tables are symmetric, so
    # only their upper halves are updated.
    precision = torch.cholesky_inverse(torch.linalg.cholesky(penalized(covariance, ridge)))
    products = gram(weight.detach().double())
    losses, left = torch.zeros(len(precision), dtype=torch.float64), torch.arange(len(precision))
    increase, is_left = torch.finfo(torch.float64).tiny, torch.ones(len(precision), dtype=torch.bool)
    while bool(is_left.any()):
        removed, errors, rows, changes = _eliminated(precision, products, is_left)
        for unit, loss in zip(removed, errors, strict=True):
            increase = max(loss, increase * STEP)
            losses[left[unit]] = increase
        is_left[removed] = False
        for start in range(0, len(precision), UPDATED):
            block = slice(start, start + UPDATED)
            precision[block, start:].addmm_(rows[:, block].T, rows[:, start:], alpha=-1)
            half = products[block, start:].addmm_(changes[:, block].T, rows[:, start:], alpha=-1)
            half.addmm_(rows[:, block].T, changes[:, start:], alpha=-1)
        # When a quarter of the units is gone, the rest is copied into smaller tables.
        if is_left.double().mean() <= 0.75:
            chosen = is_left.nonzero()[:, 0]
            precision, products = (each[chosen].index_select(1, chosen) for each in (precision, products))
            left, is_left = left[chosen], is_left[chosen]
    return losses


def _eliminated(
    precision: Float[Tensor, "units units"], products: Float[Tensor, "units units"], is_left: Bool[Tensor, "units"]
) -> tuple[list[int], list[float], Float[Tensor, "count units"], Float[Tensor, "count units"]]:
    """Chooses the next BLOCK units to remove. Returns the units, their errors, and low-rank updates of both tables.

    The updated tables are precision - rows^T rows, and products - changes^T rows - rows^T changes. The caller applies
    these updates as matrix products, which takes less time than `count` separate updates would.
    """
    gone, count = ~is_left, min(BLOCK, int(is_left.sum()))
    rows, changes = precision.new_zeros(count, len(precision)), precision.new_zeros(count, len(precision))
    # Every step updates only what the next choice needs: the diagonal of `precision`, and the squared weight norms.
    diagonal, squares = precision.diagonal().clone(), products.diagonal().clone()
    removed: list[int] = []
    losses: list[float] = []
    for step in range(count):
        errors = squares.clamp_min(0) / diagonal
        errors[gone] = torch.inf  # also replaces NaN, because the diagonals of removed units are zero
        unit = int(errors.argmin())
        loss, root = float(errors[unit]), diagonal[unit].sqrt()
        # This unit's row in each table, including the earlier updates of the block.
        earlier, factors = rows[:step], rows[:step, unit]
        row = (_row(precision, unit) - factors @ earlier) / root
        # w_j becomes w_j - row_j w_u / root, with the squared norm |w_j|^2 - 2 row_j (w_u . w_j) / root + row_j^2 loss.
        product = (_row(products, unit) - changes[:step, unit] @ earlier - factors @ changes[:step]) / root
        change = product - loss / 2 * row
        squares -= 2 * row * change
        diagonal -= row.square()
        removed.append(unit)
        losses.append(loss)
        gone[unit] = True
        rows[step], changes[step] = row, change
    return removed, losses, rows, changes


def _row(table: Float[Tensor, "units units"], unit: int) -> Float[Tensor, "units"]:
    """Returns a row of a symmetric table from its upper half."""
    return torch.cat([table[:unit, unit], table[unit, unit:]])


def compensated(
    covariance: Float[Tensor, "units units"],
    weight: Float[Tensor, "outputs units"],
    keep: Bool[Tensor, "units"],
    ridge: float = RIDGE,
) -> Float[Tensor, "outputs kept"]:
    """Returns the weight of the kept units that best approximates the output of all units.

    The weight minimizes a mean squared error plus a penalty. Means are subtracted from the outputs before they are
    compared. The penalty is the squared change of the kept weights, times `ridge`, times the mean variance of the
    units.

    Raises:
        InvalidInput: The ridge is not positive.
    """
    penalty, weights = penalized(covariance, ridge), weight.detach().double()
    if not bool(keep.any()):
        return weights[:, keep]
    # `removed` is the removed units' contribution, projected on the kept units. The penalty is only on the diagonal.
    columns = penalty[:, keep]
    removed = weights[:, ~keep] @ columns[~keep]
    factor = torch.linalg.cholesky(columns[keep])
    return weights[:, keep] + torch.cholesky_solve(removed.mT, factor).mT


def penalized(covariance: Float[Tensor, "units units"], ridge: float) -> Float[Tensor, "units units"]:
    """Returns the covariance with a penalty on its diagonal: `ridge` times the mean variance.

    Raises:
        InvalidInput: The ridge is not positive, or the covariance is not symmetric or not finite.
    """
    moments = checked_gram(covariance)
    if not ridge > 0:
        raise InvalidInput(f"ridge={ridge}: give a positive number, e.g. {RIDGE}.")
    scale = moments.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny ** 0.5)
    moments.diagonal().add_(ridge * scale)  # `moments` is a new tensor
    return moments


def elimination_losses(
    covariance: Float[Tensor, "features features"], gram: Float[Tensor, "units size size"]
) -> Float[Tensor, "units"]:
    """Returns how much removing each unit increases the error, if units are eliminated greedily, one by one.

    A unit is a group of features, e.g. a head. `gram` holds W^T W for each unit, where W holds the unit's columns of
    the next linear map. Let P be the inverse of `covariance`, the covariance of the concatenated features of all units.
    If the removed features S are estimated from the other features by the best affine map, the covariance of the
    estimation error is (P_SS)^-1 (the block form of Optimal Brain Surgeon). So removing units costs the sum of
    tr(gram_u ((P_SS)^-1)_uu) over the removed units u. Every step removes the unit whose removal costs least. The
    returned increases grow strictly in that order, so the k largest increases belong to the k units that are removed
    last.
    """
    units, size = gram.shape[:2]
    moments, weights = checked_gram(covariance), checked_gram(gram)
    tiny = torch.finfo(torch.float64).tiny
    scale = moments.diagonal().mean().clamp_min(tiny)
    precision = torch.linalg.inv(moments + DAMPING * scale * torch.eye(len(moments), dtype=moments.dtype))
    features = torch.arange(len(moments)).unflatten(0, (units, size))
    # There are few heads, so every candidate is evaluated from scratch, without updating the inverse.
    losses, removed, error, increase = torch.zeros(units, dtype=torch.float64), [], 0.0, tiny
    while len(removed) < units:
        errors = {
            unit: _error(precision, weights, features, [*removed, unit]) for unit in range(units) if unit not in removed
        }
        weakest = min(errors, key=lambda unit: errors[unit])
        increase = max(errors[weakest] - error, increase * STEP)
        losses[weakest], error = increase, errors[weakest]
        removed.append(weakest)
    return losses


def _error(precision: Tensor, weights: Tensor, features: Tensor, removed: list[int]) -> float:
    rows = features[removed].flatten()
    left = torch.linalg.inv(precision[rows[:, None], rows])
    size = features.shape[1]
    # The diagonal blocks of the removed units, [size, size, removed]. `gram` is per unit, so other blocks do not count.
    blocks = left.unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2)
    return float((blocks.permute(2, 0, 1) * weights[removed]).sum())


# Rank allocation ------------------------------------------------------------------------------------------------------


def water_fill(
    strengths: Sequence[Float[Tensor, "_ _"]], total: int, *, multiple: int = 1, minimum: int = 0
) -> tuple[Ranks, ...]:
    """Returns the ranks of all units in all layers that minimize the sum of the discarded squared strengths.

    `strengths` has one tensor [units, directions] per layer, with values of any sign and in any order. A unit is, for
    example, a head. Layers may have different numbers of directions. A unit of rank r keeps its r strongest directions.
    Pass one layer to allocate within it, or all layers to allocate over the model.

    The ranks sum to `total`. Every rank is a multiple of `multiple`, which must divide every layer's number of
    directions. Every rank is also at least `minimum`, rounded up to a multiple. Every further direction of a unit adds
    at most as much energy as the direction before. So it is optimal to select the directions that add most (an exchange
    argument). On a tie, the earlier layer, unit or index is preferred. Raises InvalidInput if the total is out of
    range, or `multiple` does not divide the directions.
    """
    for strength in strengths:
        require_directions(strength.shape[1], multiple, minimum)
    # [units, steps]: the energy that each step of `multiple` directions adds, in descending order along a unit.
    energies = [each.detach().cpu().double().square().sort(dim=1, descending=True).values for each in strengths]
    layers = [each.unflatten(1, (-1, multiple)).sum(-1) if each.shape[1] else each for each in energies]
    # From here on, ranks are counted in steps of `multiple`. Every unit gets `floor` steps before gains are compared.
    floor, units = -(-minimum // multiple), sum(len(layer) for layer in layers)
    require_total(total, multiple, units * floor * multiple, sum(layer.numel() for layer in layers) * multiple)
    gains = [layer[:, floor:] for layer in layers]
    # An empty tensor comes first, because `cat` needs at least one.
    order = torch.cat([torch.empty(0), *(layer.flatten() for layer in gains)]).argsort(descending=True, stable=True)
    # Gains decrease along a unit, so the selected steps are the unit's first ones. Counting them gives the rank.
    selection = torch.zeros_like(order).index_fill(0, order[: total // multiple - units * floor], 1)
    parts = selection.split([layer.numel() for layer in gains])
    counts = [floor + part.view(layer.shape).sum(1) for part, layer in zip(parts, gains, strict=True)]
    return tuple(tuple((count * multiple).tolist()) for count in counts)


def require_total(total: int, multiple: int, least: int, largest: int) -> None:
    """Raises InvalidInput if a total rank is out of range or not a multiple of `multiple`."""
    if multiple < 1 or total % multiple or not least <= total <= largest:
        raise InvalidInput(
            f"a total rank of {total} in multiples of {multiple} is not possible: give a multiple between {least} and "
            f"{largest}."
        )


def require_directions(directions: int, multiple: int, minimum: int) -> None:
    """Raises InvalidInput if `multiple` does not divide the number of directions, or `minimum` exceeds this number."""
    if multiple < 1 or directions % multiple or not 0 <= minimum <= directions:
        raise InvalidInput(
            f"ranks in multiples of {multiple} and at least {minimum} are not possible with {directions} directions: "
            f"the multiple must divide them, and the minimum must be in 0 to {directions}."
        )
