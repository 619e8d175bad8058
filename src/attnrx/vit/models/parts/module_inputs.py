"""Packs inputs that are not one batch of images (several tensors, texts or videos) into one tensor, and unpacks them.

attnrx passes one tensor [batch, channels, height, width] from the data to the model. `packed` flattens all tensors of a
data item, and concatenates them into one row of this tensor. `arguments` unpacks the row when the module is called. If
the module takes only one tensor of at least two axes, such as a video or a spectrogram, the tensor is not flattened.
All axes before the last two then become channels.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import mapped
from attnrx.support.shapes import Float, ImageBatch, Tensor

# The module attribute that holds its ModuleInputs. Copies of the module keep it.
ATTRIBUTE = "attnrx_inputs"


@dataclass(frozen=True)
class InputField:
    """Describes one tensor among the arguments of a module's forward.

    `path` is the position or name of the argument, followed by keys inside the argument. `shape` is the tensor's shape
    without the batch axis. `dtype` is its type, or "" for floating-point numbers of the model's type. For integers,
    `low` and `high` are the smallest and the largest value in the example batch. attnrx draws random inputs from this
    range.
    """

    path: tuple[int | str, ...]
    shape: tuple[int, ...]
    dtype: str = ""
    low: int = 0
    high: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModuleInputs:
    """Describes the inputs of a module's forward, with one field per tensor."""

    fields: tuple[InputField, ...]

    @classmethod
    def of(cls, given: Any) -> "ModuleInputs":
        """Describes the inputs in an example, i.e. a tensor, a tuple of arguments or a mapping of named arguments.

        Raises:
            InvalidInput: There is no tensor, a tensor has no batch axis, or a value is not a tensor.
        """
        found, sizes = [], set()
        for path, tensor in _tensors(given):
            if not tensor.ndim or tensor.is_complex():
                raise InvalidInput(f"inputs: {_named(path)} is {tensor.dtype} {list(tensor.shape)}; give one per item.")
            sizes.add(len(tensor))
            is_float = tensor.is_floating_point()
            low, high = (0, 0) if is_float or not tensor.numel() else (int(tensor.min()), int(tensor.max()))
            dtype = "" if is_float else str(tensor.dtype).removeprefix("torch.")
            found.append(InputField(path, tuple(tensor.shape[1:]), dtype, low, high))
        if len(sizes) != 1:
            raise InvalidInput(
                f"inputs: {'no tensor' if not sizes else f'tensors of {sorted(sizes)} items'}; return what the forward "
                "of the model takes, a tensor, a tuple or a mapping, with one entry per item in every tensor."
            )
        return cls(tuple(found))

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one item as attnrx stores it: channels, height and width."""
        if self.is_plain:
            *channels, height, width = self.fields[0].shape
            return math.prod(channels), height, width
        return 1, 1, sum(field.size for field in self.fields)

    def item(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the item's shape in the module, or () if it also has three axes there or is flattened by `packed`."""
        own = (*self.fields[0].shape[:-2], *shape[-2:])
        return own if self.is_plain and len(own) != 3 else ()

    @property
    def is_plain(self) -> bool:
        """Whether the module takes a single floating-point tensor with at least two axes per item."""
        return len(self.fields) == 1 and not self.fields[0].dtype and len(self.fields[0].shape) >= 2

    def packed(self, given: Any) -> ImageBatch:
        """Packs the arguments of a batch into one tensor.

        Raises:
            InvalidInput: The shapes or types differ from the shapes or types in the example.
        """
        tensors = {path: tensor.detach().cpu() for path, tensor in _tensors(given)}
        rows: list[Tensor] = []
        dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
        for field in self.fields:
            tensor = tensors.pop(field.path, None)
            fits = tensor is not None and tensor.is_floating_point() != bool(field.dtype)
            if tensor is None or not fits or tuple(tensor.shape[1:]) != field.shape:
                found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise InvalidInput(
                    f"inputs: {_named(field.path)} is {found}, in the first batch an item of it had the shape "
                    f"{list(field.shape)}; give every item the same shape."
                )
            # Floating-point types represent integers exactly only up to a limit. Here it is 2 / eps.
            if field.dtype and tensor.numel() and int(tensor.long().abs().max()) > 2 / torch.finfo(dtype).eps:
                raise InvalidInput(f"inputs: {_named(field.path)} has integers that {dtype} cannot hold exactly.")
            rows.append(tensor.to(dtype).reshape(len(tensor), -1))
        if tensors:
            raise InvalidInput(f"inputs: {_named(next(iter(tensors)))} was not in the first batch.")
        return torch.cat(rows, 1).unflatten(1, self.shape)

    # Methods for data sets whose items are mappings with named arguments.

    @property
    def name(self) -> str:
        return str(self.fields[0].path[0])

    @property
    def dimensions(self) -> int:
        return len(self.fields[0].shape) if self.is_plain else 3

    def images(self, inputs: Float[Tensor, "*sizes"], dimensions: int) -> Float[Tensor, "*sizes"]:
        own = self.fields[0].shape
        if not self.is_plain or len(own) == 3 or inputs.ndim != len(own) + dimensions - 3:
            return inputs
        return inputs.unsqueeze(-3) if len(own) == 2 else inputs.flatten(-len(own), -3)

    def image_in(self, fields: Mapping[str, Any]) -> Any:
        """Returns the model's input from an item of a dataset, or None if the item lacks an argument.

        Raises:
            InvalidInput: The shapes of the item's tensors differ from the example's.
        """
        if any(field.path[0] not in fields for field in self.fields):
            return None
        given = {str(field.path[0]): fields[str(field.path[0])] for field in self.fields}
        if self.is_plain:
            return given[self.name]
        tensors = dict(_tensors(given))
        if all(tensors[field.path].ndim == len(field.shape) for field in self.fields if field.path in tensors):
            return self.packed(mapped(lambda tensor: tensor[None], given))[0]  # one item
        return self.packed(given)

    def require_exportable(self, shape: Sequence[int]) -> None:
        """Raises NotSupported if the module takes several tensors, because exported files take only one."""
        if not self.is_plain:
            names = ", ".join(_named(field.path) for field in self.fields)
            raise NotSupported(
                f"a file takes one tensor of images, and this model takes {names}: export `.module` of the model with "
                "torch.onnx.export, or save the result without a file (onnx=False)."
            )

    def arguments(self, images: ImageBatch) -> tuple[list[Any], dict[str, Any]]:
        """Unpacks a batch into the positional and the named arguments of the module."""
        if self.is_plain:
            # The height and width may differ from the example's.
            channels = self.fields[0].shape[:-2]
            if len(channels) != 1:
                images = images.unflatten(1, channels) if channels else images[:, 0]
            parts = [images]
        else:
            sizes = [field.size for field in self.fields]
            rows = images.flatten(1).split(sizes, 1)
            parts = [part.reshape(len(images), *field.shape) for part, field in zip(rows, self.fields, strict=True)]
        tree: dict[Any, Any] = {}
        for field, part in zip(self.fields, parts, strict=True):
            value = part.round().to(getattr(torch, field.dtype)) if field.dtype else part
            *outer, last = field.path
            inside = tree
            for key in outer:
                inside = inside.setdefault(key, {})
            inside[last] = value
        positional = [_listed(tree[key]) for key in sorted(key for key in tree if isinstance(key, int))]
        return positional, {key: _listed(value) for key, value in tree.items() if isinstance(key, str)}

    def random(self, like: Tensor, count: int) -> Tensor:
        """Returns random inputs [count, *shape] in the dtype of `like`. Every call returns the same numbers.

        Floating-point numbers are normally distributed. Integers are in the example's range.
        """
        generator = torch.Generator().manual_seed(0)
        rows = []
        for field in self.fields:
            size = (count, field.size)
            if field.dtype:
                low = field.low if field.dtype != "bool" else field.high
                rows.append(torch.randint(low, field.high + 1, size, generator=generator).double())
            else:
                rows.append(torch.randn(size, generator=generator, dtype=torch.float64))
        return torch.cat(rows, 1).unflatten(1, self.shape).to(like)


@dataclass(frozen=True)
class OrderedImages(ModuleInputs):
    """The inputs of ViTMAE, which sorts patches by random noise. attnrx passes noise that keeps their order."""

    patch: tuple[int, int]

    def arguments(self, images: ImageBatch) -> tuple[list[Any], dict[str, Tensor]]:
        # Even if no patches are masked (mask_ratio 0), ViTMAE sorts them by this noise.
        count = (images.shape[2] // self.patch[0]) * (images.shape[3] // self.patch[1])
        noise = torch.arange(count, device=images.device, dtype=images.dtype)
        return [], {"pixel_values": images, "noise": noise.expand(images.shape[0], -1)}


@dataclass(frozen=True)
class PatchInputs(ModuleInputs):
    """The inputs of models that take images already cut into patches, such as SigLIP 2.

    SigLIP 2's image processor cuts images of any aspect ratio into patches, and pads the list of patches to a fixed
    length. attnrx stores the padded list as one channel [patches, features + 3]. Its last three columns hold the
    padding mask, the image's height in patches, and its width in patches.
    """

    ABOUT: ClassVar = ("pixel_attention_mask", "spatial_shapes")
    size: int
    """The side of a patch in pixels."""

    def image_in(self, fields: Mapping[str, Any]) -> Any:
        patches, mask, grid = (fields.get(name) for name in (self.name, *self.ABOUT))
        if patches is None or mask is None or grid is None:
            return patches
        patches, mask, grid = (torch.as_tensor(each) for each in (patches, mask, grid))
        columns = (mask[..., None], grid[..., None, :].expand(*mask.shape, 2))
        return torch.cat([patches, *(column.to(patches) for column in columns)], dim=-1).unsqueeze(-3)

    def arguments(self, images: ImageBatch) -> tuple[list[Any], dict[str, Tensor]]:
        if self.is_padded(images.shape[1:]):
            patches, mask, grid = images[:, 0].split((self.features, 1, 2), dim=-1)
            # The values are rounded before they become integers. Half precision represents all integers up to 2048.
            mask, grid = mask[..., 0].round().long(), grid[:, 0].round().long().cpu()
        else:
            cut = images.unflatten(3, (-1, self.size)).unflatten(2, (-1, self.size))  # ..., down, size, right, size
            # The grid is on the CPU, because the model reads every image's grid as Python integers.
            grid = torch.tensor([cut.shape[2], cut.shape[4]], device="cpu").expand(images.shape[0], -1)
            # Channels come last within a patch, as the linear patch embedding expects: [batch, patches, features].
            patches = cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
            mask = torch.ones(patches.shape[:2], dtype=torch.long, device=images.device)
        return [], {self.name: patches, **dict(zip(self.ABOUT, (mask, grid), strict=True))}

    def require_exportable(self, shape: Sequence[int]) -> None:
        if shape[0] == 1:
            raise NotSupported(
                "a model of padded patches resizes its position embeddings to the grid of every image, of which "
                "transformers reads the sides as Python integers: a file has one grid. Export the model that was "
                "loaded for square images, or save the result without a file (onnx=False)."
            )

    @property
    def features(self) -> int:
        """The number of values in one patch."""
        return self.size**2 * self.fields[0].shape[0]

    def is_padded(self, shape: Sequence[int]) -> bool:
        """Returns whether inputs of this shape are padded patches, as an image processor returns them."""
        return shape[0] == 1 and shape[2] == self.features + 3


def _pair(size: int | Iterable[int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def inputs_of_config(config: Any) -> ModuleInputs:
    """Returns a description of the inputs of a model with this transformers configuration.

    Most models take images. AST takes spectrograms [batch, time, mel bins], video models take [batch, frames, channels,
    height, width], and SigLIP 2 takes patches.
    """
    if hasattr(config, "num_mel_bins"):
        return ModuleInputs((InputField(("input_values",), (config.max_length, config.num_mel_bins)),))
    if config.model_type.startswith("siglip2"):
        # SigLIP 2 takes any aspect ratio up to num_patches, but attnrx needs one input shape. It uses a square.
        side = math.isqrt(config.num_patches) * config.patch_size
        return PatchInputs((InputField(("pixel_values",), (config.num_channels, side, side)),), config.patch_size)
    frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
    fields = (InputField(("pixel_values",), (*frames, config.num_channels, *_pair(config.image_size))),)
    return OrderedImages(fields, _pair(config.patch_size)) if config.model_type == "vit_mae" else ModuleInputs(fields)


def inputs_of(module: nn.Module) -> ModuleInputs | None:
    """Returns the `ModuleInputs` of a module that does not take images, or None for a module that takes images.

    A description that is stored on the module has priority. Otherwise, video inputs are described from the module's
    transformers configuration.
    """
    if (own := vars(module).get(ATTRIBUTE)) is not None:
        return own
    config: Any = getattr(module, "config", None)
    config = getattr(config, "vision_config", None) or config
    names = ("num_frames", "frames_per_clip"), ("num_channels", "in_chans"), ("image_size", "crop_size")
    shape = [next((getattr(config, name) for name in some if hasattr(config, name)), None) for some in names]
    name = getattr(module, "main_input_name", "")
    if not all(isinstance(size, int) for size in shape) or not str(name).startswith("pixel_values"):
        return None
    return ModuleInputs((InputField((str(name),), (*shape, shape[-1])),))  # type: ignore[arg-type]


def called(module: nn.Module, images: Tensor) -> Any:
    """Calls a module with one tensor [batch, channels, height, width] and returns its output.

    If the module does not take images, its arguments are first unpacked from the tensor.
    """
    inputs = inputs_of(module)
    if inputs is None:
        return module(images)
    positional, named = inputs.arguments(images)
    return module(*positional, **named)


def _tensors(given: Any, path: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], Tensor]]:
    if isinstance(given, Tensor):
        yield path or (0,), given
    elif given is None:
        return
    elif isinstance(given, Mapping) or hasattr(given, "keys"):
        for key in given:
            yield from _tensors(given[key], (*path, str(key)))
    elif isinstance(given, tuple | list):
        for key, value in enumerate(given):
            yield from _tensors(value, (*path, key))
    else:
        raise InvalidInput(f"inputs: {_named(path)} is of type {type(given).__name__}; give tensors.")


def _listed(value: Any) -> Any:
    """Converts nested dictionaries whose keys are integers to lists."""
    if not isinstance(value, dict):
        return value
    items = {key: _listed(part) for key, part in value.items()}
    return [items[key] for key in sorted(items)] if all(isinstance(key, int) for key in items) else items


def _named(path: tuple[int | str, ...]) -> str:
    return ".".join(map(str, path)) or "what was returned"
