"""Mixup and CutMix: blends or pastes pairs of images of a batch, with labels in the same shares."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from attnrx.data import Batch
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class Mixed:
    """A batch after mixing: image i has its own label with weight `share`, and its partner's with the rest."""

    images: Float[Tensor, "batch channels height width"]
    partners: Int[Tensor, "batch"] | None
    share: float


@dataclass(frozen=True)
class Mixing:
    """The parameters of the Beta(a, a) distribution of the mixing share, 0 to disable a method.

    mixup (Zhang et al., 2018, arXiv 1710.09412) blends whole images, CutMix (Yun et al., 2019, arXiv 1905.04899) pastes
    a rectangle; if both are enabled, one is chosen for each batch with equal probability. `chance` is the share of
    batches that are mixed. One share is drawn per batch, the same in every process; partners are the images of the same
    process in reverse order.
    """

    mixup: float = 0.8
    cutmix: float = 1.0
    chance: float = 1.0

    def __post_init__(self):
        if not (0 <= self.mixup < float("inf") and 0 <= self.cutmix < float("inf") and self.mixup + self.cutmix > 0):
            raise InvalidInput(f"{self}: give mixup and cutmix of 0 or more, at least one above 0; or omit mixing.")
        if not 0 < self.chance <= 1:
            raise InvalidInput(f"{self}: chance is a share of the batches and must lie in (0, 1].")

    def apply(self, batch: Batch, seed: int) -> Mixed:
        """Mixes a batch with random numbers from `seed`."""
        draw = np.random.default_rng(seed)
        mix, choose_cutmix = draw.random() < self.chance, draw.random() < (0.5 if self.mixup else 1.0)
        centre = draw.random(2)
        if not mix:
            return Mixed(batch.images, None, 1.0)
        paste = bool(self.cutmix) and choose_cutmix
        strength = self.cutmix if paste else self.mixup
        share = float(draw.beta(strength, strength))
        others, partners = batch.images.flip(0), batch.labels.flip(0)
        if not paste:
            return Mixed(torch.lerp(others, batch.images, share), partners, share)
        rows, columns = (_window(side, share, at) for side, at in zip(batch.images.shape[2:], centre, strict=True))
        images = batch.images.clone()
        images[:, :, rows, columns] = others[:, :, rows, columns]
        height, width = batch.images.shape[2:]
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        return Mixed(images, partners, 1 - area / (height * width))


def _window(side: int, share: float, at: float) -> slice:
    """Returns the extent, along one side, of a rectangle of relative area 1 - share around a random centre, clipped."""
    half, centre = round(side * math.sqrt(1 - share)) // 2, int(at * side)
    return slice(max(0, centre - half), min(side, centre + half))
