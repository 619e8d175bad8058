"""A model of another library whose attention was replaced by attnrx attention."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.errors import InvalidInput, NotSupported
from attnrx.models.chunked_forward import chunked_forward, require_images
from attnrx.models.observation_hooks import evaluating
from attnrx.models.token_hooks import reduction_of
from attnrx.shapes import Float, ImageBatch, Logits, Tensor, TokenBatch
from attnrx.spec import BIASES, AttentionSpec

# The projections in attnrx attention, in the order of BIASES.
PROJECTION_PATHS = ("scores.query", "scores.key", "value", "output")


@dataclass(frozen=True)
class Origin:
    """How the model was created by its own library, and its input format.

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
    """Returns channels, height and width as integers."""
    channels, height, width = (int(value) for value in values)
    return channels, height, width


class LastLayer:
    """A hook before the last block: only the tokens before the patches pass through it, and they attend to all tokens.

    The logits do not change. The shortcut is active only while `at_work` is True, which the model sets during its
    forward pass. The MACs of a model (`attnrx.costs`) count all tokens, as papers do.
    """

    by_image = True

    def __init__(self, block: nn.Module, attention: str, norm: str | None, after: nn.Module, prefix: int):
        """Registers the hook.

        `attention` and `norm` are the paths, inside the block, of its adapter and of the norm before it; `after` is the
        norm after the block, `prefix` the number of tokens before the patches.
        """
        self.block, self.attention, self.norm, self.after, self.prefix = block, attention, norm, after, prefix
        self.at_work = False
        block.register_forward_pre_hook(self, with_kwargs=True)

    @property
    def watched(self) -> bool:
        """Whether the patch tokens of the last block are needed: for training, or by a hook."""
        for module in (*self.block.modules(), self.after):
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            if module.training or not all(getattr(hook, "by_image", False) for hook in hooks):
                return True
        return False

    def __call__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Passes the tokens before the patches to the block, and all tokens to the attention as key/value tokens."""
        tokens = args[0] if args else kwargs["hidden_states"]  # timm passes them by position, transformers by name
        adapter: Any = block.get_submodule(self.attention)
        own: Attention = adapter.attention
        # A head of rank 0 has no backend, and not every backend takes fewer queries than keys.
        if not (self.at_work and all(own.spec.ranks or (0,)) and own.plan(tokens).backend.takes_few_queries):
            return args, kwargs
        adapter.key_value_tokens = tokens if self.norm is None else block.get_submodule(self.norm)(tokens)
        queries = tokens[:, : self.prefix]
        return ((queries, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": queries})


class Adopted(nn.Module):
    """A model of another library, `source`, with attnrx attention in every layer; returns its logits."""

    def __init__(self, source: nn.Module, origin: Origin):
        super().__init__()
        self.source = source
        self.origin = origin
        self.tokens: nn.Module | None = None
        self.last: LastLayer | None = None

    def forward(self, images: ImageBatch) -> Logits:
        """Returns the logits, or the pooled features where the model has no classifier."""
        require_images(images, self.origin.input_shape, self.origin.architecture)
        return chunked_forward(self, self._forward_chunk, images, self._max_elements)

    @cached_property
    def _max_elements(self) -> int:
        """Elements per image of the largest activation, taken as the hidden layer of an MLP of ratio 4."""
        convolution = next((part for part in self.source.modules() if isinstance(part, nn.Conv2d)), None)
        if convolution is None:
            return 0
        (height, width), (down, right) = self.origin.input_shape[1:], convolution.stride
        return 4 * convolution.out_channels * (height // down) * (width // right)

    def _forward_chunk(self, images: Tensor) -> Tensor:
        with self.restoring(()):
            return self.logits(images)

    @contextmanager
    def restoring(self, blocks: Collection[int]) -> Iterator[None]:
        """Restores the tokens of all patches after these blocks only, where tokens are pruned or merged.

        Outside of the context they are restored after all blocks. Where no block is given, the last block computes only
        the class token if the head uses no other token.
        """
        reduction, last = reduction_of(self), self.last
        if last is not None:
            last.at_work = not blocks and not last.watched
        try:
            with nullcontext() if reduction is None else reduction.restoring(blocks):
                yield
        finally:
            if last is not None:
                last.at_work = False

    def all_tokens(self, images: ImageBatch) -> Float[Tensor, "batch tokens features"]:
        """Returns the library's last features of the tokens before the patches and of all patches."""
        require_images(images, self.origin.input_shape, self.origin.architecture)
        return chunked_forward(self, self._last_tokens, images, self._max_elements)

    def _last_tokens(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, images: Tensor) -> Tensor:
        """Returns the logits of images of the right shape."""
        return self.source(images)


class Adapter(nn.Module):
    """Replaces the attention module of a layer and calls attnrx attention.

    `key_value_tokens` holds the key/value tokens of the next call where its queries are a subset of them; else None.
    """

    def __init__(self, attention: Attention):
        super().__init__()
        self.attention = attention
        self.key_value_tokens: Tensor | None = None

    def mixed(self, tokens: TokenBatch) -> TokenBatch:
        key_value_tokens = self.key_value_tokens
        if key_value_tokens is None:
            return self.attention(tokens)
        self.key_value_tokens = None
        return self.attention(tokens, key_value_tokens)


def assembled(weights: Sequence[Tensor], biases: Sequence[Tensor | None], heads: int, scale: float) -> Attention:
    """Returns dense attnrx attention with copies of four projections: query, key, value, output.

    The rows of query, key and value, and the columns of output, are sorted by head.
    """
    rows, width = weights[0].shape
    ranks = (rows // heads,) * heads
    present = tuple(name for name, bias in zip(BIASES, biases, strict=True) if bias is not None)
    spec = AttentionSpec("dense", width, ranks[0], ranks, tuple(range(heads)), float(scale), ranks[0], biases=present)
    with torch.device("meta"):
        attention = Attention(spec)
    tensors = {f"{path}.weight": weight for path, weight in zip(PROJECTION_PATHS, weights, strict=True)}
    named_biases = zip(PROJECTION_PATHS, biases, strict=True)
    tensors |= {f"{path}.bias": bias for path, bias in named_biases if bias is not None}
    # Cloned, because the slices of a fused projection share one storage.
    attention.load_state_dict({name: tensor.detach().clone() for name, tensor in tensors.items()}, assign=True)
    for name, parameter in attention.named_parameters():
        parameter.requires_grad_(tensors[name].requires_grad)
    return attention


def require_equal_logits(first: Adopted, second: Adopted, because: str) -> None:
    """Raises NotSupported unless both models return the same logits for the same random images, up to rounding.

    The limit is the square root of the machine epsilon, relative to the largest logit: rounding is far below it, and a
    missing norm, bias or scale far above. The epsilon is at least that of float32, because some attention computes its
    softmax in float32.
    """
    parameter = next(first.parameters())
    if parameter.is_meta:
        raise InvalidInput(f"{first.origin.architecture} has no weights; load them before adopting the model.")
    generator = torch.Generator().manual_seed(0)
    shape = (2, *first.origin.input_shape)
    images = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(parameter)
    with evaluating((first, second)):
        expected, actual = first(images), second(images)
    epsilon = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps)
    limit = epsilon**0.5 * max(1.0, float(expected.abs().max()))
    difference = float((expected - actual).abs().max())
    if not difference <= limit:  # also true for NaN
        raise NotSupported(
            f"{first.origin.architecture} cannot be adopted: {because}. On random images the logits differ by "
            f"{difference:.3g}; rounding explains at most {limit:.3g}."
        )
