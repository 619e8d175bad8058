"""Token relevance: the attention that every patch receives in each layer, by which token reducers keep patches."""

from collections import defaultdict

import torch

from attnrx.observation import Observation
from attnrx.shapes import Float, Tensor
from attnrx.tokens import TokenLayout

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
        maps = observation.attention[..., self.layout.prefix :].detach()
        if self.layout.class_token:
            self._seen[CLASS_ATTENTION][layer].append(maps[:, :, 0].mean(1).double().cpu())
        self._seen[RECEIVED][layer].append(maps.sum(2).mean(1).double().cpu())

    def relevance(self) -> dict[str, Float[Tensor, "images layers patches"]]:
        """Returns the relevance by source; NaN in a layer that computed nothing."""
        found = {}
        for name, layers in self._seen.items():
            known = next(torch.cat(batches) for batches in layers if batches)
            found[name] = torch.stack([torch.cat(own) if own else known * torch.nan for own in layers], dim=1)
        return found


def running_mean(relevance: Float[Tensor, "*more layers patches"]) -> Float[Tensor, "*more layers patches"]:
    """Returns the mean over layers 1..l for every l (Section 8); unknown layers are excluded."""
    known = ~relevance.isnan()
    return relevance.nan_to_num(0.0).cumsum(-2) / known.cumsum(-2)
