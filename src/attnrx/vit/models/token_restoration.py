"""Restores the features of all patches in a model whose tokens are pruned or merged."""

from dataclasses import dataclass

import torch
from torch import nn

from attnrx.support.shapes import Float, Int, Tensor, TokenBatch
from attnrx.vit.tokens import gathered_rows


@dataclass
class RestorableStage:
    """The patch tokens before a stage, the remaining ones, and which of them represents each patch.

    The stage runs before the layer `layer`, counted from 1. `destinations` are the indices of the representatives among
    the remaining tokens, -1 for a pruned patch, which has none; `prunes` states whether there are such patches.
    `positions` are the indices of the remaining tokens among all patch tokens, where pruned ones are masked; None where
    they are removed.
    """

    layer: int
    before: Float[Tensor, "batch before width"]
    remaining: Float[Tensor, "batch left width"]
    destinations: Int[Tensor, "batch before"]
    prunes: bool = False
    positions: Int[Tensor, "batch left"] | None = None
    # Not a cached_property, whose lock in Python 3.11 compilers cannot trace.
    _sources: Tensor | None = None

    @property
    def sources(self) -> Int[Tensor, "batch before"]:
        """The index, among the remaining tokens, of the one whose updates each patch receives.

        It is the token that represents the patch; for a pruned patch, the remaining one of the most similar direction.
        """
        if self._sources is None:
            self._sources = self._found_sources()
        return self._sources

    def _found_sources(self) -> Int[Tensor, "batch before"]:
        if not self.prunes:
            return self.destinations.clamp(min=0)  # -1 for a patch that an earlier stage masked
        # Cosines of [before, remaining] pairs of patches. Computed on first use, for stages that are restored only.
        unit = nn.functional.normalize(self.remaining, dim=-1)
        similarity = nn.functional.normalize(self.before, dim=-1) @ unit.transpose(1, 2)
        return torch.where(self.destinations < 0, similarity.argmax(-1), self.destinations)

    def restored(
        self, patches: Float[Tensor, "batch after width"], num_layers: int
    ) -> Float[Tensor, "batch before width"]:
        """Returns the patches before the stage from those after it, at the output of the first `num_layers` layers.

        A patch is its source, plus a share of its difference from the source at the stage.
        """
        # patches[source] + share * (before - remaining[source]), with one gather: the sources of both are the same.
        remaining = patches if self.positions is None else gathered_rows(patches, self.positions)
        share = self.layer / num_layers
        change = torch.sub(remaining, self.remaining, alpha=share)
        return torch.add(gathered_rows(change, self.sources), self.before, alpha=share)


class TokenRestoration:
    """The restoration of all patches during one forward pass.

    A block adds an update to every token. A restored patch is the token that represents it, plus its difference from
    that token at the stage where it was merged or pruned: it receives the updates of that token, and keeps its
    difference, which a copy of the merged token loses. Later layers change differences, so that early ones count less:
    the difference before layer l has the weight l / n at the output of layer n. This weight has the smallest error of
    those measured (`benchmarks/dense_features.py`). Stages are undone from the last to the first, only for the blocks
    whose output is requested.

    The blocks pass the restored tokens to each other, so that every method of a library that runs them returns features
    of all patches: `leave` stores the present tokens after a block, and `enter` gives them to the next one.
    """

    def __init__(self, prefix: int):
        self.prefix = prefix
        self.stages: list[RestorableStage] = []
        self.present: TokenBatch | None = None

    def enter(self) -> TokenBatch | None:
        """Returns the present tokens for the next block; None where the previous output was not restored."""
        present, self.present = self.present, None  # once: the next block may follow an output that is not restored
        return present

    def leave(self, tokens: TokenBatch, num_layers: int) -> Float[Tensor, "batch all_tokens width"] | None:
        """Stores the output of the first `num_layers` blocks, and returns the tokens of all patches.

        Returns None where no patch is missing.
        """
        if not self.stages:
            return None
        self.present, patches = tokens, tokens[:, self.prefix :]
        for stage in reversed(self.stages):
            patches = stage.restored(patches, num_layers)
        return torch.cat([tokens[:, : self.prefix], patches], dim=1)

    @property
    def representatives(self) -> Int[Tensor, "batch patches"] | None:
        """The index, among the present patch tokens, of the one that represents each patch of the image.

        -1 for a pruned patch; None before the first stage.
        """
        # The destinations of each stage are among the tokens after it, which are the patches of the next one: they are
        # composed from the first stage to the last.
        representatives = None
        for stage in self.stages:
            after = stage.destinations
            if representatives is not None:
                # A patch that was pruned before has the index -1, which gather refuses.
                after = after.gather(1, representatives.clamp(min=0)).masked_fill(representatives < 0, -1)
            if stage.positions is not None:
                after = stage.positions.gather(1, after.clamp(min=0)).masked_fill(after < 0, -1)
            representatives = after
        return representatives
