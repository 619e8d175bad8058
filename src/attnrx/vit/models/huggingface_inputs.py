"""How images, spectrograms and videos enter the models of transformers: one class per kind of input."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor


class ImageInput:
    """Images of channels, height and width, cut into patches by the model.

    `name` is the argument of the model of transformers, and `dimensions` are those of one input of it.
    """

    name, dimensions = "pixel_values", 3

    def images(self, inputs: Float[Tensor, "*sizes"], dimensions: int) -> Float[Tensor, "*sizes"]:
        """Returns inputs of transformers as inputs in attnrx, of `dimensions` axes: 3 for one input, 4 for a batch;
        others are returned as they are.
        """
        return inputs

    def require_exportable(self, shape: Sequence[int]) -> None:
        """Raises NotSupported if a model that takes inputs of this shape cannot be written as a file."""

    def image_in(self, fields: Mapping[str, Any]) -> Any:
        """Returns the input in a batch, or an item, with the arguments of the model of transformers; None without."""
        return fields.get(self.name)

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
    """Images that are cut into patches before they enter the model (SigLIP 2), as its image processor does it.

    Images of any aspect ratio have up to so many patches, the rest of which is padding: those are one channel
    [patches, features + 3] in attnrx, whose last columns are the mask of patches, and height and width in patches.
    """

    ABOUT = "pixel_attention_mask", "spatial_shapes"

    def shape(self, config: Any) -> tuple[int, int, int]:
        # SigLIP 2 takes any aspect ratio up to num_patches; attnrx models have one input shape, so the square of them.
        side = math.isqrt(config.num_patches) * config.patch_size
        return config.num_channels, side, side

    def image_in(self, fields: Mapping[str, Any]) -> Any:
        patches, mask, grid = (fields.get(name) for name in (self.name, *self.ABOUT))
        if patches is None or mask is None or grid is None:
            return patches
        patches, mask, grid = (torch.as_tensor(each) for each in (patches, mask, grid))
        columns = (mask[..., None], grid[..., None, :].expand(*mask.shape, 2))
        return torch.cat([patches, *(column.to(patches) for column in columns)], dim=-1).unsqueeze(-3)

    def arguments(self, images: Float[Tensor, "batch channels height width"], config: Any) -> dict[str, Tensor]:
        size = config.patch_size
        if self.is_padded(images.shape[1:], config):
            patches, mask, grid = images[:, 0].split((size * size * config.num_channels, 1, 2), dim=-1)
            # Rounded: half precision has all integers up to 2048.
            about = mask[..., 0].round().long(), grid[:, 0].round().long().cpu()
            return {self.name: patches, **dict(zip(self.ABOUT, about, strict=True))}
        cut = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # batch, channels, down, size, right, size
        # On the CPU, because the model reads the grid of every image as Python integers.
        grid = torch.tensor([cut.shape[2], cut.shape[4]], device="cpu")
        # Channels last within a patch, the order of the linear patch embedding: [batch, patches, size * size *
        # channels].
        patches = cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        mask = torch.ones(patches.shape[:2], dtype=torch.long, device=images.device)
        return {self.name: patches, **dict(zip(self.ABOUT, (mask, grid.expand(images.shape[0], -1)), strict=True))}

    def require_exportable(self, shape: Sequence[int]) -> None:
        if shape[0] == 1:
            raise NotSupported(
                "a model of padded patches resizes its position embeddings to the grid of every image, of which "
                "transformers reads the sides as Python integers: a file has one grid. Export the model that was "
                "loaded for square images, or save the result without a file (onnx=False)."
            )

    def is_padded(self, shape: Sequence[int], config: Any) -> bool:
        """Returns whether inputs of this shape are padded patches."""
        return shape[0] == 1 and shape[2] == config.patch_size**2 * config.num_channels + 3

    def num_patches(self, config: Any, shape: tuple[int, int, int]) -> int:
        return shape[1] if self.is_padded(shape, config) else super().num_patches(config, shape)


class SpectrogramInput(ImageInput):
    """Spectrograms [batch, 1, time, mel bins], with patches that may overlap (AST)."""

    name, dimensions = "input_values", 2

    def images(self, inputs: Float[Tensor, "*sizes"], dimensions: int) -> Float[Tensor, "*sizes"]:
        return inputs.unsqueeze(-3) if inputs.ndim == dimensions - 1 else inputs

    def shape(self, config: Any) -> tuple[int, int, int]:
        return 1, config.max_length, config.num_mel_bins

    def arguments(self, images: Float[Tensor, "batch 1 time mel"], config: Any) -> dict[str, Tensor]:
        return {self.name: images[:, 0]}

    def num_patches(self, config: Any, shape: tuple[int, int, int]) -> int:
        _, time, bins = shape
        # Patches overlap where a stride is smaller than the patch, so the side is not a multiple of the stride.
        sides = (time, config.time_stride), (bins, config.frequency_stride)
        return math.prod((side - config.patch_size) // stride + 1 for side, stride in sides)


class VideoInput(ImageInput):
    """Videos whose frames are one after the other along the channels: [batch, frames * channels, height, width]."""

    dimensions = 4

    def images(self, inputs: Float[Tensor, "*sizes"], dimensions: int) -> Float[Tensor, "*sizes"]:
        return inputs.flatten(-4, -3) if inputs.ndim == dimensions + 1 else inputs

    def shape(self, config: Any) -> tuple[int, int, int]:
        return config.num_frames * config.num_channels, *_pair(config.image_size)

    def arguments(self, images: Float[Tensor, "batch channels height width"], config: Any) -> dict[str, Tensor]:
        return {"pixel_values": images.unflatten(1, (config.num_frames, config.num_channels))}

    def num_patches(self, config: Any, shape: tuple[int, int, int]) -> int:
        # A patch of a video, a tubelet, spans several frames.
        if isinstance(config.tubelet_size, int):
            return config.num_frames // config.tubelet_size * super().num_patches(config, shape)
        sides = zip((config.num_frames, *shape[1:]), config.tubelet_size, strict=True)  # ViViT
        return math.prod(side // step for side, step in sides)


def _pair(size: int | Iterable[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    first, second = size
    return int(first), int(second)
