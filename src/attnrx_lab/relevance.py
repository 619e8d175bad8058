"""The relevance of patches by the attention of every layer, and the patches that a model keeps (SPOT, Section 8)."""

from collections import defaultdict

import torch
from torch import nn

from attnrx.show.reports.sampling import patches_left_by
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.models import evaluating, family_of, observing, reduction_of, token_run
from attnrx.vit.observation import Observation
from attnrx.vit.tokens import TokenLayout

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


def token_relevance(
    model: nn.Module, images: Float[Tensor, "images channels height width"]
) -> dict[str, Float[Tensor, "images layers patches"]]:
    """Returns the relevance of every patch by the attention of each layer, by source (see `RelevanceWatch`).

    The images must be normalized, and are run as one batch.

    Raises:
        InvalidInput: The model prunes or merges tokens.
    """
    if reduction_of(model) is not None:
        raise InvalidInput(
            "this model prunes or merges tokens, so its layers have different patches; give the original."
        )
    family, weight = family_of(model), next(model.parameters())
    watch = RelevanceWatch(family.token_layout(model), len(family.attention(model)))
    with evaluating([model]), observing(model, family, watch.observe):
        model(images.to(weight.device, weight.dtype))
    return watch.relevance()


def patches_left(
    model: nn.Module, images: Float[Tensor, "images channels height width"]
) -> Bool[Tensor, "images stages patches"]:
    """Returns the patches kept after each stage of a model with token reduction; the images are run as one batch.

    A patch that others were merged into counts as kept; a patch merged into another or fused into a new token does not.

    Raises:
        InvalidInput: The model prunes and merges no tokens.
    """
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("this model has no token policy; attach one first.")
    weight = next(model.parameters())
    return patches_left_by(reduction, token_run(model, images.to(weight.device, weight.dtype)), len(images))
