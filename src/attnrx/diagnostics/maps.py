"""The maps of the MLP: the directions of their outputs that carry the data."""

import torch

from attnrx.decompositions.low_rank import activation_aware, output_pca, plain_svd
from attnrx.diagnosis import MapDirections
from attnrx.diagnostics.redundancy import CentredMoment
from attnrx.shapes import Float, Tensor


class MapWatch:
    """The moments of the inputs or outputs of one linear map, on the side with fewer features.

    Memory is one square matrix of that side, independent of the number of images.
    """

    def __init__(self, inputs: int, outputs: int):
        self.on_inputs = inputs <= outputs
        self.moment = CentredMoment()

    def observe(self, inputs: Float[Tensor, "*batch inputs"], outputs: Float[Tensor, "*batch outputs"]) -> None:
        self.moment.add((inputs if self.on_inputs else outputs).flatten(0, -2))

    def read(self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, "outputs"] | None) -> MapDirections:
        """Returns the directions of the outputs by descending strength.

        The leading ones are the best map of every rank. The strength of a direction is the root of its mean square
        about the mean over all tokens.
        """
        weight = weight.detach().cpu().double()
        bias = None if bias is None else bias.detach().cpu().double()
        mean = self.moment.mean.cpu().double()
        covariance = self.moment.value.cpu().double() / max(self.moment.rows, 1)
        covariance = (covariance + covariance.mT) / 2  # rounding leaves it slightly asymmetric
        if self.on_inputs:
            found = activation_aware(weight, bias, covariance)
            mean = weight @ mean + (0.0 if bias is None else bias)
        else:
            found = output_pca(weight, bias, covariance)
        return MapDirections(found.strength, found.second.mT.contiguous(), mean)


def singular_directions(
    weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, "outputs"] | None
) -> MapDirections:
    """Returns the left singular vectors of the weight, in its precision or float32: the truncated SVD of every rank.

    The center is the bias, so that the bias is unchanged.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    found = plain_svd(weight.detach().cpu())
    center = weight.new_zeros(len(weight)) if bias is None else bias
    return MapDirections(found.strength, found.second.mT.to(dtype).contiguous(), center.detach().cpu().to(dtype))
