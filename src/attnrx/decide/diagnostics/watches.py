"""Watches of a pass over images: the outputs of the maps of the MLP, and the attention that every patch receives."""

from collections import defaultdict

import torch
from torch import nn

from attnrx.change.decompositions.hidden_units import unit_losses
from attnrx.change.decompositions.low_rank import activation_aware, output_pca, plain_svd
from attnrx.decide.diagnostics.redundancy import CentredMoment
from attnrx.nouns.diagnosis import HiddenDiagnosis, MapDirections
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.observation import Observation
from attnrx.vit.tokens import TokenLayout


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


CLASS_ATTENTION, RECEIVED = "class_attention", "attention_received"


class RelevanceWatch:
    """Stores the relevance of every patch in every layer, averaged over its heads; memory grows with the images.

    "class_attention" is the attention of the class token to a patch, if there is one, and "attention_received" that of
    all tokens together: the scores of the reducers of these names while no token is pruned.
    """

    def __init__(self, layout: TokenLayout, depth: int):
        self.layout, self.depth = layout, depth
        self._seen: dict[str, list[list[Tensor]]] = defaultdict(lambda: [[] for _ in range(depth)])

    def observe(self, layer: int, observation: Observation) -> None:
        # [batch, heads, queries, patches]; the class token is query 0.
        maps = observation.attention[..., self.layout.prefix :].detach()
        if self.layout.class_token:
            # On the CPU in every batch, because the memory grows with the images.
            self._seen[CLASS_ATTENTION][layer].append(maps[:, :, 0].mean(1).double().cpu())
        self._seen[RECEIVED][layer].append(maps.sum(2).mean(1).double().cpu())

    def relevance(self) -> dict[str, Float[Tensor, "images layers patches"]]:
        """Returns the relevance by source; NaN in a layer that computed nothing."""
        by_source = {}
        for name, layers in self._seen.items():
            # A layer without heads observes nothing; its rows take their shape from another layer.
            observed_layer = next(torch.cat(batches) for batches in layers if batches)
            by_source[name] = torch.stack(
                [torch.cat(parts) if parts else observed_layer * torch.nan for parts in layers], dim=1
            )
        return by_source


def running_mean(relevance: Float[Tensor, "*more layers patches"]) -> Float[Tensor, "*more layers patches"]:
    """Returns the mean over layers 1..l for every l (SPOT, Section 8); unknown layers are excluded."""
    is_observed = ~relevance.isnan()
    return relevance.nan_to_num(0.0).cumsum(-2) / is_observed.cumsum(-2)
