"""Watches of a pass over images: the outputs of the maps of the MLP, and their hidden units."""

import torch
from torch import nn

from attnrx.change.decompositions.hidden_units import unit_losses
from attnrx.change.decompositions.low_rank import activation_aware, output_pca, plain_svd
from attnrx.decide.diagnostics.diagnostic import CentredMoment
from attnrx.nouns.diagnosis import HiddenDiagnosis, MapDirections
from attnrx.support.shapes import Float, Tensor


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
        covariance = self.moment.covariance()
        if self.on_inputs:
            factors = activation_aware(weight, bias, covariance)
            mean = weight @ mean + (0.0 if bias is None else bias)
        else:
            factors = output_pca(weight, bias, covariance)
        return MapDirections(factors.strength, factors.second.mT.contiguous(), mean)


def singular_directions(
    weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, "outputs"] | None
) -> MapDirections:
    """Returns the left singular vectors of the weight, in its precision or float32: the truncated SVD of every rank.

    The center is the bias, so that the bias is unchanged.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    factors = plain_svd(weight.detach().cpu())
    center = weight.new_zeros(len(weight)) if bias is None else bias
    return MapDirections(factors.strength, factors.second.mT.to(dtype).contiguous(), center.detach().cpu().to(dtype))


def hidden_diagnosis(first: nn.Linear, second: nn.Linear, moment: CentredMoment | None) -> HiddenDiagnosis:
    """Returns the diagnosis of the hidden units between two linear maps; `moment` is that of the inputs of the second
    one, if it was measured.
    """
    weight = second.weight.detach().cpu().double().clone()  # not the model's own memory
    bias = weight.new_zeros(len(weight)) if second.bias is None else second.bias.detach().cpu().double().clone()
    after = weight.norm(dim=0)
    strength = {"weights": first.weight.detach().cpu().double().norm(dim=1) * after}
    if moment is None or not moment.rows:
        return HiddenDiagnosis(strength, weight, bias)
    covariance = moment.covariance()
    # The root mean square of what a unit adds to the outputs, without its mean, which the bias can take over.
    strength["activation"] = covariance.diagonal().clamp_min(0).sqrt() * after
    strength["centered"] = unit_losses(covariance, weight).sqrt()
    return HiddenDiagnosis(strength, weight, bias, covariance, moment.mean.cpu().double())
