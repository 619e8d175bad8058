"""How images, spectrograms and videos enter the models of transformers: one class per kind of input."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from attnrx.support.shapes import Float, Tensor


class ImageInput:
    """Images of channels, height and width, cut into patches by the model."""

    def shape(self, config: Any) -> tuple[int, int, int]:
        """Returns the shape of one input in attnrx: three numbers, the first of which are the channels."""
        return config.num_channels, *_pair(config.image_size)

    def arguments(self, images: Float[Tensor, "batch channels height width"], config: Any) -> dict[str, Tensor]:
        """Returns the arguments of the model of transformers for inputs of this shape."""
        return {"pixel_values": images}

    def num_patches(self, config: Any, shape: tuple[int, int, int]) -> int:
        """Returns the number of patch tokens of one input."""
        (_, height, width), (down, right) = shape, _pair(config.patch_size)
        return (height // down) * (width // right)


class OrderedImageInput(ImageInput):
    """Images whose patches the model would shuffle by random noise (ViTMAE): increasing noise keeps their order."""

    def arguments(self, images: Float[Tensor, "batch channels height width"], config: Any) -> dict[str, Tensor]:
        # ViTMAE sorts the patches by this noise, also where it masks none (mask_ratio 0).
        count = self.num_patches(config, (images.shape[1], images.shape[2], images.shape[3]))
        noise = torch.arange(count, device=images.device, dtype=images.dtype)
        return {"pixel_values": images, "noise": noise.expand(images.shape[0], -1)}


class PatchInput(ImageInput):
    """Images that are cut into patches before they enter the model (SigLIP 2), as its image processor does it."""

    def shape(self, config: Any) -> tuple[int, int, int]:
        # SigLIP 2 takes any aspect ratio up to num_patches; attnrx models have one input shape, so the square of them.
        side = math.isqrt(config.num_patches) * config.patch_size
        return config.num_channels, side, side

    def arguments(self, images: Float[Tensor, "batch channels height width"], config: Any) -> dict[str, Tensor]:
        size = config.patch_size
        cut = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # batch, channels, down, size, right, size
        # On the CPU, because the model reads the grid of every image as Python integers.
        grid = torch.tensor([cut.shape[2], cut.shape[4]], device="cpu")
        # Channels last within a patch, the order of the linear patch embedding: [batch, patches, size * size *
        # channels].
        patches = cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        return {
            "pixel_values": patches,
            "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.long, device=images.device),
            "spatial_shapes": grid.expand(images.shape[0], -1),
        }


class SpectrogramInput(ImageInput):
    """Spectrograms [batch, 1, time, mel bins], with patches that may overlap (AST)."""

    def shape(self, config: Any) -> tuple[int, int, int]:
        return 1, config.max_length, config.num_mel_bins

    def arguments(self, images: Float[Tensor, "batch 1 time mel"], config: Any) -> dict[str, Tensor]:
        return {"input_values": images[:, 0]}

    def num_patches(self, config: Any, shape: tuple[int, int, int]) -> int:
        _, time, bins = shape
        # Patches overlap where a stride is smaller than the patch, so the side is not a multiple of the stride.
        sides = (time, config.time_stride), (bins, config.frequency_stride)
        return math.prod((side - config.patch_size) // stride + 1 for side, stride in sides)


class VideoInput(ImageInput):
    """Videos whose frames are one after the other along the channels: [batch, frames * channels, height, width]."""

    def shape(self, config: Any) -> tuple[int, int, int]:
        return config.num_frames * config.num_channels, *_pair(config.image_size)

    def arguments(self, images: Float[Tensor, "batch channels height width"], config: Any) -> dict[str, Tensor]:
        return {"pixel_values": images.unflatten(1, (config.num_frames, config.num_channels))}

    def num_patches(self, config: Any, shape: tuple[int, int, int]) -> int:
        # A patch of a video, a tubelet, spans several frames.
        return config.num_frames // config.tubelet_size * super().num_patches(config, shape)


def _pair(size: int | Iterable[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    first, second = size
    return int(first), int(second)
