"""What is known of the tokens while a batch passes through a model."""

from collections.abc import Sequence

import torch

from attnrx.attention import CapturedAttention
from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens import MapMoments


class TokenRun:
    """What is known of the tokens while one batch passes through the model; begun anew with every batch.

    `sizes` is None until the first token has left. `places` says which patch of the image every patch token is, -1 for
    those that a stage added, and `trail` what was left after each stage. `image_keys` are hashes of the images, for a
    reducer that needs them. In training, `sampled` is what a learned reducer
    drew at each stage: 1 for a patch that stays, 0 for one that leaves, with a gradient.
    """

    def __init__(self):
        self.sizes: Float[Tensor, "batch tokens"] | None = None
        self.places: Int[Tensor, "batch patches"] | None = None
        self.moments: MapMoments | None = None
        self.accumulated: Float[Tensor, "batch patches"] | None = None
        self.accumulated_layers = 0
        self.image_keys: Int[Tensor, " batch"] | None = None
        self.captures: list[CapturedAttention] = []
        self.trail: list[Int[Tensor, "batch kept"]] = []
        self.sampled: list[Float[Tensor, "batch patches"]] = []

    def begin(self) -> None:
        """Forgets the batch before."""
        self.__init__()

    @classmethod
    def joined(cls, parts: Sequence["TokenRun"]) -> "TokenRun":
        """Returns what is known of a batch whose images passed in parts; what layers showed has been used up."""
        found = cls()
        sizes = [part.sizes for part in parts if part.sizes is not None]
        places = [part.places for part in parts if part.places is not None]
        found.sizes = torch.cat(sizes) if sizes else None
        found.places = torch.cat(places) if places else None
        found.trail = [torch.cat(stage) for stage in zip(*(part.trail for part in parts), strict=True)]
        return found
