"""Token statistics of the current batch."""

from collections.abc import Sequence

import torch

from attnrx.attention import CapturedAttention
from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens import MapMoments


class TokenRun:
    """Token statistics of one batch during a forward pass; reset at every batch.

    `sizes` is None until a token is pruned. `patch_indices` holds the index of every patch token in the image, -1 for
    tokens added by a stage; `trail` holds those indices after each stage. `image_keys` are hashes of the images, for
    reducers that need them. In training, `sampled` holds the mask sampled at each stage: 1 for a kept patch, 0 for a
    pruned one, with a gradient.
    """

    def __init__(self):
        self.sizes: Float[Tensor, "batch tokens"] | None = None
        self.patch_indices: Int[Tensor, "batch patches"] | None = None
        self.moments: MapMoments | None = None
        self.accumulated: Float[Tensor, "batch patches"] | None = None
        self.accumulated_layers = 0
        self.image_keys: Int[Tensor, " batch"] | None = None
        self.captures: list[CapturedAttention] = []
        self.trail: list[Int[Tensor, "batch kept"]] = []
        self.sampled: list[Float[Tensor, "batch patches"]] = []

    def begin(self) -> None:
        """Resets all fields."""
        self.__init__()

    @classmethod
    def joined(cls, runs: Sequence["TokenRun"]) -> "TokenRun":
        """Returns the statistics of a chunked batch, without captured attention, which no later stage uses."""
        found = cls()
        sizes = [run.sizes for run in runs if run.sizes is not None]
        indices = [run.patch_indices for run in runs if run.patch_indices is not None]
        found.sizes = torch.cat(sizes) if sizes else None
        found.patch_indices = torch.cat(indices) if indices else None
        found.trail = [torch.cat(stage) for stage in zip(*(run.trail for run in runs), strict=True)]
        return found
