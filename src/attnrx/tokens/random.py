"""The control: patches chosen by chance."""

from dataclasses import dataclass

import torch
from torch import nn

from attnrx.shapes import Float, Tensor
from attnrx.tokens.reducer import Selecting
from attnrx.tokens.seen import Seen


@dataclass(frozen=True)
class Random(Selecting):
    """Keeps random patches, others in every image of a batch; the same at every stage, so that none comes back."""

    seed: int = 0

    def relevance(self, seen: Seen, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Gives every patch of the image its number, by its place."""
        generator = torch.Generator().manual_seed(self.seed)
        most = int(seen.places.max()) + 1
        numbers = torch.rand(len(seen.places), most, generator=generator, dtype=torch.float32).to(seen.places.device)
        return numbers.gather(1, seen.places.clamp(min=0))
