"""A model of another library whose attention was replaced by ours."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.errors import InvalidInput, NotSupported
from attnrx.models.chunked_forward import chunked_forward
from attnrx.models.last_layer import LastLayer
from attnrx.models.observation_hooks import evaluating
from attnrx.shapes import Float, Tensor
from attnrx.spec import BIASES, AttentionSpec

PLACES: dict[str, str] = {"query": "scores.query", "key": "scores.key", "value": "value", "output": "output"}


@dataclass(frozen=True)
class Origin:
    """How the model was made by its own library, and what its images must be like.

    `arguments` are JSON values: the keyword arguments of timm's entrypoint, or the configuration of transformers.
    """

    architecture: str
    arguments: Mapping[str, Any]
    input_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self):
        if len(self.input_shape) != 3 or min(self.input_shape) < 1:
            raise InvalidInput(f"input_shape {self.input_shape}: give channels, height and width, each 1 or more.")
        channels = self.input_shape[0]
        if len(self.mean) != channels or len(self.std) != channels or not all(value > 0 for value in self.std):
            raise InvalidInput(
                f"{self.architecture} has {channels} channels, but is normalized with mean={self.mean} and "
                f"std={self.std}: give one mean and one positive std for each channel."
            )


def image_shape(values: Iterable[int]) -> tuple[int, int, int]:
    """Channels, height and width as integers."""
    channels, height, width = (int(value) for value in values)
    return channels, height, width


class Adopted(nn.Module):
    """A foreign model, `source`, with our attention in every layer; gives its logits."""

    def __init__(self, source: nn.Module, origin: Origin):
        super().__init__()
        self.source = source
        self.origin = origin
        self.tokens: nn.Module | None = None
        self.last: LastLayer | None = None

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Returns the logits, or the pooled features where the model has no classifier."""
        if images.shape[1:] != self.origin.input_shape:
            channels, height, width = self.origin.input_shape
            raise InvalidInput(
                f"images of shape {tuple(images.shape)}: {self.origin.architecture} wants [batch, {channels}, "
                f"{height}, {width}]. Load the data with image_size={height}."
            )
        return chunked_forward(self, self._answered, images, self._largest)

    @cached_property
    def _largest(self) -> int:
        """Numbers that an image makes of itself inside an MLP four times as wide as the tokens."""
        convolution = next((part for part in self.source.modules() if isinstance(part, nn.Conv2d)), None)
        if convolution is None:
            return 0
        (height, width), (down, right) = self.origin.input_shape[1:], convolution.stride
        return 4 * convolution.out_channels * (height // down) * (width // right)

    def _answered(self, images: Tensor) -> Tensor:
        """Returns the logits; the last block computes the class token alone where the head reads nothing else."""
        if self.last is None or self.last.watched:
            return self.logits(images)
        self.last.at_work = True
        try:
            return self.logits(images)
        finally:
            self.last.at_work = False

    def logits(self, images: Tensor) -> Tensor:
        """Runs the source on images of the right shape."""
        return self.source(images)


class Adapter(nn.Module):
    """Stands where the attention of a foreign layer stood, and passes on to ours.

    Where its layer is given some tokens alone, `among` holds all those that they attend to, for one call.
    """

    def __init__(self, attention: Attention):
        super().__init__()
        self.attention = attention
        self.among: Tensor | None = None

    def mixed(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        """Returns what our attention gives."""
        among = self.among
        if among is None:
            return self.attention(tokens)
        self.among = None
        return self.attention(tokens, among)


def assembled(
    weights: Mapping[str, Tensor], biases: Mapping[str, Tensor | None], heads: int, scale: float
) -> Attention:
    """Returns our dense attention from four projections ("query", "key", "value", "output"), copying their tensors.

    The rows of query, key and value, and the columns of output, are sorted by heads.
    """
    rows, width = weights["query"].shape
    present = tuple(name for name in BIASES if biases[name] is not None)
    ranks = (rows // heads,) * heads
    spec = AttentionSpec("dense", width, ranks[0], ranks, tuple(range(heads)), float(scale), ranks[0], biases=present)
    with torch.device("meta"):
        attention = Attention(spec)
    tensors = {f"{place}.weight": weights[name] for name, place in PLACES.items()}
    tensors |= {f"{PLACES[name]}.bias": own for name, own in biases.items() if own is not None}
    # Copies, because the parts of a fused projection would share one storage.
    attention.load_state_dict({name: tensor.detach().clone() for name, tensor in tensors.items()}, assign=True)
    for name, parameter in attention.named_parameters():
        parameter.requires_grad_(tensors[name].requires_grad)
    return attention


def require_same(first: Adopted, second: Adopted, because: str) -> None:
    """Runs both models on the same random images, and refuses unless the logits agree to the precision of their type.

    The limit is the square root of the machine epsilon, relative to the largest logit: rounding is far below it, and a
    forgotten norm, bias or scale far above. The epsilon is float32's or larger, since some attention computes its
    softmax in float32.
    """
    parameter = next(first.parameters())
    if parameter.is_meta:
        raise InvalidInput(f"{first.origin.architecture} has no weights yet; load them before adopting it.")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, *first.origin.input_shape, generator=generator, dtype=torch.float64).to(parameter)
    with evaluating((first, second)):
        one, other = first(images), second(images)
    epsilon = max(torch.finfo(one.dtype).eps, torch.finfo(torch.float32).eps)
    limit = epsilon**0.5 * max(1.0, float(one.abs().max()))
    difference = float((one - other).abs().max())
    if not difference <= limit:  # NaN too
        raise NotSupported(
            f"{first.origin.architecture} cannot be adopted: {because}. On random images the logits differ by "
            f"{difference:.3g}, and rounding explains {limit:.3g}."
        )
