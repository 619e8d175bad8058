"""Training-time changes of the images: random crops and mirroring, drawn once for a whole batch."""

import math
from dataclasses import dataclass

import torch

from attnrx.errors import InvalidInput
from attnrx.shapes import Bool, Float, Int, Tensor, UInt8

ATTEMPTS = 10  # tries at a crop that fits inside the picture, as torchvision's RandomResizedCrop makes
RATIO = (3 / 4, 4 / 3)  # widths over heights that such a crop may have

Box = tuple[int, int, int, int]  # top, left, height, width


@dataclass(frozen=True)
class Draws:
    """The random numbers of one batch: drawn on the CPU, so that every device and every process sees the same."""

    shift: Int[Tensor, "batch 2"]
    mirror: Bool[Tensor, "batch"]
    window: Float[Tensor, "batch attempts 4"]

    def part(self, images: slice | list[int]) -> "Draws":
        """Returns the numbers of some of the images."""
        return Draws(self.shift[images], self.mirror[images], self.window[images])


@dataclass(frozen=True)
class Augmentation:
    """Random crop from `padding` black pixels around the image, and mirroring of half the images.

    With `area` the crop is instead a random window holding that share of the picture, resized to the model's input;
    it needs the whole pictures, so only splits that stream can do it.
    """

    padding: int = 4
    flip: bool = True
    area: tuple[float, float] | None = None

    def __post_init__(self):
        if self.padding < 0:
            raise InvalidInput(f"Augmentation(padding={self.padding}): padding counts pixels and cannot be negative.")
        if self.area is not None and not 0 < self.area[0] <= self.area[1] <= 1:
            raise InvalidInput(f"Augmentation(area={self.area}): area is a range of shares, 0 < low <= high <= 1.")

    def draw(self, count: int, generator: torch.Generator) -> Draws:
        """Draws the random numbers of `count` images; every knob draws, so that none changes the numbers of another."""
        return Draws(
            shift=torch.randint(0, 2 * self.padding + 1, (count, 2), generator=generator),
            mirror=(torch.rand(count, generator=generator, dtype=torch.float32) < 0.5) & self.flip,
            window=torch.rand(count, ATTEMPTS if self.area else 0, 4, generator=generator, dtype=torch.float32),
        )

    def apply(
        self, images: UInt8[Tensor, "batch channels height width"], draws: Draws
    ) -> UInt8[Tensor, "batch channels height width"]:
        """Crops and mirrors a batch on its own device by one gather."""
        batch, channels, height, width = images.shape
        device = images.device
        shift, mirror = draws.shift.to(device), draws.mirror.to(device)
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        down = shift[:, :1] + torch.arange(height, device=device)
        across = torch.arange(width, device=device).expand(batch, width)
        across = shift[:, 1:] + torch.where(mirror[:, None], across.flip(1), across)
        image = torch.arange(batch, device=device)[:, None, None, None]
        channel = torch.arange(channels, device=device)[None, :, None, None]
        return padded[image, channel, down[:, None, :, None], across[:, None, None, :]]

    def box(self, height: int, width: int, window: Float[Tensor, "attempts 4"]) -> Box:
        """Returns the window of one picture: the first attempt that fits inside, else the largest central one."""
        low, high = self.area or (1.0, 1.0)
        for share, ratio, down, across in window.tolist():
            area = height * width * (low + share * (high - low))
            shape = math.exp(math.log(RATIO[0]) + ratio * (math.log(RATIO[1]) - math.log(RATIO[0])))
            rows, columns = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
            if 0 < rows <= height and 0 < columns <= width:
                return int(down * (height - rows + 1)), int(across * (width - columns + 1)), rows, columns
        rows = min(height, round(width / RATIO[0]))
        columns = min(width, round(height * RATIO[1]))
        return (height - rows) // 2, (width - columns) // 2, rows, columns
