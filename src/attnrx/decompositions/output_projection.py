"""Output projections with fewer features per head: directions of every head, then a joint refit of the weight."""

from dataclasses import dataclass

import torch

from attnrx.decompositions.balanced import Balanced, balance
from attnrx.decompositions.grams import checked_gram, require_finite
from attnrx.errors import InvalidInput
from attnrx.shapes import Bool, Float, Tensor

# Kept features are duplicates if the eigenvalues of their correlations are below this share of the largest one, or if
# their energy is below this share of the energy of the features that they combine.
COPY_SHARE = 1e-12


@dataclass(frozen=True)
class Circuit:
    """An output projection y = weight @ o + bias of `heads` concatenated head outputs o, and the statistics of o.

    `covariance` is E (o - mean)(o - mean)^T over all heads together, features ordered head by head. Stored in float64.
    Raises InvalidInput for shapes that do not match, and for statistics that are not finite or symmetric.
    """

    weight: Float[Tensor, "width features"]
    bias: Float[Tensor, "width"] | None
    covariance: Float[Tensor, "features features"]
    mean: Float[Tensor, "features"]
    heads: int

    def __post_init__(self):
        width, features = self.weight.shape
        shapes = [tuple(part.shape) for part in (self.covariance, self.mean, self.bias) if part is not None]
        expected = [(features, features), (features,), (width,)][: len(shapes)]
        if shapes != expected or self.heads < 1 or features % self.heads:
            raise InvalidInput(
                f"an output projection of {features} features needs a covariance and a mean of as many, a bias of "
                f"{width}, and heads that divide the features, found {shapes} and {self.heads} heads."
            )
        for name in ("weight", "bias", "mean"):
            values = getattr(self, name)
            if values is not None:
                require_finite(values, f"{name} of the readout")
                object.__setattr__(self, name, values.detach().double())
        object.__setattr__(self, "covariance", checked_gram(self.covariance[None], "covariance of the heads")[0])

    @property
    def size(self) -> int:
        return self.mean.shape[0] // self.heads

    @property
    def energy(self) -> float:
        """The mean squared distance of y from its mean: the error of a projection that keeps only the mean."""
        return float((self.weight @ self.covariance @ self.weight.mT).trace())


@dataclass(frozen=True)
class Readout:
    """An output projection of fewer features: y' = weight @ p + bias, where p concatenates projection[h] @ o[h].

    `error` is E |y - y'|^2 over the statistics of the fit. The projection of a head is linear and can be folded into
    the rows of its value projection.
    """

    projection: tuple[Float[Tensor, "_ size"], ...]
    weight: Float[Tensor, "width kept"]
    bias: Float[Tensor, "width"]
    error: float


def readout_directions(circuit: Circuit) -> Balanced:
    """Returns the directions of every head, balanced between the covariance of its output and its columns of W.

    The first r directions of a head are the best rank r for W^h o_h alone, with the sum of the discarded squared
    strengths as error. Errors of different heads need not add up, because heads are correlated; `read_out` uses that.
    """
    parts = circuit.weight.unflatten(1, (circuit.heads, -1)).transpose(0, 1)
    blocks = circuit.covariance.unflatten(0, (circuit.heads, -1)).unflatten(2, (circuit.heads, -1))
    return balance(blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1), parts.mT @ parts)


def read_out(
    circuit: Circuit, directions: Balanced, keep: Bool[Tensor, "heads directions"], *, joint: bool = True
) -> Readout:
    """Keeps some directions of every head and refits W by least squares over all heads jointly.

    With K the concatenated kept projections and W0 the weight of every head fitted alone, W' = W0 + (W - W0 K) C K^T (K
    C K^T)^+ is a minimum of E |W o - W' K o - constant|^2, the one nearest to W0 if kept features are duplicates: so
    nothing changes if everything is kept. The bias matches the mean. With `joint=False`, W' = W0. Raises InvalidInput
    for directions or `keep` of another shape than the circuit.
    """
    shape = (circuit.heads, circuit.size)
    if tuple(directions.strength.shape) != shape or tuple(keep.shape) != shape:
        raise InvalidInput(
            f"directions and keep must be {list(shape)}, [heads, directions], "
            f"found {list(directions.strength.shape)} and {list(keep.shape)}."
        )
    kept = keep.flatten()  # one row of the block-diagonal projection per direction, head by head
    projections = torch.block_diag(*directions.left)[kept]
    back = directions.strength[..., None] * directions.right
    weight = circuit.weight @ torch.block_diag(*back).mT[:, kept]
    missed = circuit.weight - weight @ projections
    if joint:
        weight = weight + _regression(missed, projections, circuit.covariance)
        missed = circuit.weight - weight @ projections
    constant = missed @ circuit.mean
    bias = constant if circuit.bias is None else circuit.bias + constant
    error = float((missed @ circuit.covariance @ missed.mT).trace().clamp_min(0))
    own = tuple(rows[stays] for rows, stays in zip(directions.left, keep, strict=True))
    return Readout(own, weight, bias, error)


def _regression(
    target: Float[Tensor, "width features"], given: Float[Tensor, "kept features"], covariance: Tensor
) -> Float[Tensor, "width kept"]:
    """Returns T C K^T (K C K^T)^+, on correlations: kept features differ in scale by many orders of magnitude."""
    if given.shape[0] == 0:
        return target.new_zeros(target.shape[0], 0)
    moved = given @ covariance
    moment = moved @ given.mT
    energy = moment.diagonal().clamp_min(0)
    # The energy of a constant feature is rounding, in proportion to the energy of the features that it combines.
    alive = energy > COPY_SHARE * (given.square() @ covariance.diagonal().clamp_min(0))
    unit = torch.where(alive, energy.rsqrt(), 0)
    inverse = torch.linalg.pinv((moment + moment.mT) / 2 * torch.outer(unit, unit), rtol=COPY_SHARE, hermitian=True)
    return (target @ moved.mT * unit) @ inverse * unit
