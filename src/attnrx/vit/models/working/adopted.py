"""Working copies of models, in which attnrx attention replaces the library's attention. Large batches run in chunks."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import fx, nn

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import copy_module, is_traced, joined, mapped, of_weights
from attnrx.support.shapes import Float, ImageBatch, Int, Tensor, TokenBatch
from attnrx.vit.attention import Attention, AttentionContext, Positions
from attnrx.vit.models.family import called_with_images
from attnrx.vit.models.observation_hooks import name_of_tokens, tokens_in, with_tokens
from attnrx.vit.models.parts.mlp import Pair
from attnrx.vit.models.parts.module_inputs import ModuleInputs, inputs_of
from attnrx.vit.models.parts.surroundings import Surroundings, answered
from attnrx.vit.models.parts.token_reduction import CallState, reduction_of
from attnrx.vit.models.working.token_hooks import NO_CHECKPOINTS, forward_pass, is_checkpointed
from attnrx.vit.spec import BIASES, INNER_NORMS, AttentionSpec

# The paths of the four projections inside attnrx attention, in the order of BIASES.
PROJECTION_PATHS = ("scores.query", "scores.key", "value", "output")
# Except on a CPU, the last layer is not shortened for batches with fewer tokens than this, counted over all images.
FEW_ON_A_GPU = 2048


@dataclass(frozen=True)
class Origin:
    """How a model's library created the model, and the model's input format.

    `arguments` contains the keyword arguments of timm's model function, or the transformers configuration, as JSON
    values. `preprocessing` contains the settings of the library's image transform under the library's own names, or {}
    if they are unknown. `replaced` describes, by path, submodules that were replaced after the model was created (see
    `replaced_parts`). An example is a new head, set by `model.head = nn.Linear(192, 10)`.
    """

    architecture: str
    arguments: Mapping[str, Any]
    input_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    replaced: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

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
    """Returns three values as integers: channels, height and width."""
    channels, height, width = (int(value) for value in values)
    return channels, height, width


class _AdapterCall(CallState):
    """The state of an adapter during a forward pass.

    `shortens` is true if `LastLayer` is active in this pass. `entered` then holds all input tokens of the block, and
    the norm before the attention.
    """

    # Attributes are set in every thread. torch.compile refuses attributes that are read from the class but set on an
    # instance.
    def __init__(self):
        self.shortens = False
        self.entered: tuple[Tensor, nn.Module | None] | None = None


class LastLayer:
    """A hook that runs the last block only for the tokens before the patches, which still attend to all tokens.

    The logits do not change, because a head that reads the class token needs no other outputs. The hook is active only
    in a `forward_pass` that requests it. The MACs in `attnrx.vit.costs` still count all tokens, as is usual in papers.
    """

    # A hook is used because the block's code belongs to the library and differs by class. If the block gets fewer
    # tokens, each of its operations except the attention computes fewer. `by_image` tells `chunked_forward` that the
    # hook does not need whole batches.
    by_image = True

    def __init__(self, block: nn.Module, attention: str, norm: str | None, after: nn.Module, prefix: int):
        """Registers the hook on the block.

        `attention` is the path of the adapter in the block, and `norm` the path of the norm before it (or None).
        `after` is the norm after the block. `prefix` is the number of tokens before the patches.
        """
        self.block, self.attention, self.norm, self.after, self.prefix = block, attention, norm, after, prefix
        block.register_forward_pre_hook(self, with_kwargs=True)

    @contextmanager
    def forward_pass(self, shortens: bool) -> Iterator[None]:
        """Turns the hook on or off for one forward pass inside this context, and resets its state at the end."""
        adapter: Any = self.block.get_submodule(self.attention)
        with adapter.call.setting(shortens=shortens, entered=None):
            yield

    @property
    def watched(self) -> bool:
        """Whether training or a hook may need the patch tokens of the last block."""
        return any(map(is_watched, (*self.block.modules(), self.after)))

    def __call__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Passes only the tokens before the patches to the block. The attention gets all tokens as keys and values."""
        # The adapter belongs to the called block. A replica that `DataParallel` made does not call `self.block`.
        tokens = tokens_in(args, kwargs)
        adapter: Any = block.get_submodule(self.attention)
        if not (adapter.call.shortens and adapter.attention.takes_few_queries(tokens)):
            return args, kwargs
        # The shortcut adds three operations to the block. On a GPU, it costs time if tokens are few.
        if tokens.device.type != "cpu" and AttentionContext.of(tokens).has_fewer_than(FEW_ON_A_GPU):
            return args, kwargs
        adapter.call.entered = tokens, None if self.norm is None else block.get_submodule(self.norm)
        queries = tokens[:, : self.prefix]
        return with_tokens(args, kwargs, queries)


class Adopted(nn.Module):
    """A working copy of a model (`source`), with attnrx attention in every layer of its Vision Transformer.

    `trunk` is the Vision Transformer. If a user's module also has other parts, `around` describes them, and `trunk` is
    a submodule of `source`. Otherwise `trunk` and `source` are the same module. A working copy of a library's model
    returns logits, and a working copy of a user's module returns the module's own outputs. attnrx's functions compute
    with working copies and return models of the library's own classes (see `working_copy.py`).
    """

    pairs: tuple[Pair, ...] = ()
    """The paths in `trunk` of every MLP's maps, or () if any block has an MLP of an unsupported kind."""
    plain: "PlainShape | None" = None
    """The model from which this working copy was made, without weights."""
    own: "OwnModel | None" = None
    """The model from which this working copy was made, until the weights of the two differ."""

    def __init__(
        self,
        source: nn.Module,
        origin: Origin,
        around: Surroundings | None = None,
        facts: Mapping[str, Any] | None = None,
        places: Mapping[str, str] | None = None,
    ):
        """Stores a model and the known facts about it.

        `facts` are taken from the model's `Record`. `places` maps paths in `source` to paths in the user's module, for
        submodules whose paths differ between the two.
        """
        super().__init__()
        self.source = source
        self.origin, self.around = origin, around
        self.facts, self.places = dict(facts or {}), dict(places or {})
        self.tokens: nn.Module | None = None
        self.last: LastLayer | None = None

    @property
    def path(self) -> str:
        """The Vision Transformer's path in `source`."""
        return "" if self.around is None else self.around.path

    @property
    def trunk(self) -> nn.Module:
        """The Vision Transformer in `source`."""
        return self.source if self.around is None else self.source.get_submodule(self.around.path)

    @property
    def name(self) -> str:
        """The model's name in messages."""
        return self.origin.architecture if self.around is None else self.around.name

    @property
    def attnrx_inputs(self) -> ModuleInputs | None:
        """A description of the inputs that a user's module takes, or None if the model takes images."""
        has_inputs = self.around is not None and self.around.call == "forward"
        return inputs_of(self.source) if has_inputs else None

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The shape of one input without the batch axis. For images, it is (channels, height, width)."""
        inputs, (channels, *size) = self.attnrx_inputs, self.origin.input_shape
        height, width = size if self.around is None else self.around.image_size or size
        return (channels, height, width) if inputs is None else inputs.shape

    @property
    def output_sizes(self) -> Mapping[str, int]:
        """The number of values per image in each tensor that a user's module returns, by the tensor's name."""
        return {} if self.around is None else self.around.sizes

    def forward(self, images: ImageBatch) -> Any:
        """Returns the logits, the pooled features if there is no classifier, or the output of a user's module."""
        images = self.entering(images)
        return chunked_forward(self, self._forward_chunk, images, self._max_elements(images))

    def entering(self, images: ImageBatch) -> ImageBatch:
        """Checks the images, and returns them in the format that the model takes.

        Raises:
            InvalidInput: The model does not take images of this size.
        """
        if self.attnrx_inputs is None:
            self._require_images(images)
        return images

    def answering(self) -> Callable[[nn.Module, Tensor], Any]:
        """Returns a function `compute(module, images)` that calls `source`, or a copy of it, with images.

        For a library's model, the function returns one row of outputs per image. For a user's module, it returns the
        module's own output.
        """
        return called_with_images if self.around is None else partial(answered, self.around.call)

    @property
    def takes_any_size(self) -> bool:
        """Whether the library resizes the position embeddings to the image size in every forward pass.

        The costs, plans and exported files of such a model still assume the image size in `origin.input_shape`.
        """
        return False

    @property
    def patching(self) -> tuple[int, int, int] | None:
        """The embedding width, the patch height and the patch width, or None if no convolution embeds the patches."""
        # The first convolution computes the patches and has the width of the model.
        convolution = next((part for part in self.trunk.modules() if isinstance(part, nn.Conv2d)), None)
        return None if convolution is None else (len(convolution.weight), *convolution.stride)  # type: ignore[return-value]

    def _require_images(self, images: ImageBatch) -> None:
        """Raises InvalidInput if the model does not accept images of this shape."""
        expected, patching = self.input_shape, self.patching
        is_other = images.ndim == 4 and images.shape[1] == expected[0] and images.shape[1:] != expected
        if is_other and patching is not None and self.takes_any_size:
            sides = zip(images.shape[2:], patching[1:], strict=True)
            if all(side >= patch and side % patch == 0 for side, patch in sides):
                return
        require_images(images, expected, self.name)

    def _max_elements(self, images: ImageBatch) -> int:
        """Estimates the number of elements per image in the largest activation, assuming an MLP ratio of 4."""
        if self.patching is None:
            return 0
        width, down, right = self.patching
        return 4 * width * (images.shape[2] // down) * (images.shape[3] // right)

    def answer(self, images: Tensor) -> Any:
        """Returns the output of `source` for images [batch, channels, height, width], in a single chunk."""
        return self.answering()(self.source, images)

    def _forward_chunk(self, images: Tensor) -> Any:
        with self.forward_pass():
            outputs = self.answer(images)
        if self.around is None and (not isinstance(outputs, Tensor) or outputs.ndim != 2):
            is_tensor = isinstance(outputs, Tensor)
            found = f"the shape {tuple(outputs.shape)}" if is_tensor else f"a {type(outputs).__name__}"
            raise NotSupported(
                f"{self.origin.architecture} returns {found} for {len(images)} images, not one row of logits or "
                f"features per image. Load a model that pools its tokens (of timm e.g. with global_pool='avg') and "
                "returns one tensor."
            )
        return outputs

    @contextmanager
    def forward_pass(self, restored_blocks: Collection[int] | None = None) -> Iterator[None]:
        """Prepares the model for one forward pass inside the context, and clears the state of the pass at the end.

        If tokens are pruned or merged, all patches are restored only after the blocks in `restored_blocks`. By default,
        these are the blocks whose outputs are read by other parts of a user's module. Outside of this context, all
        patches are restored after every block. If `restored_blocks` is empty and the head needs only the class token,
        the last block computes only the tokens before the patches.

        Raises:
            NotSupported: Tokens are pruned or merged under gradient checkpointing.
        """
        if restored_blocks is None:  # logits need no features of pruned patches
            restored_blocks = () if self.around is None else self.around.read_blocks
        reduction, last = reduction_of(self), self.last
        recomputed = is_checkpointed(self.trunk)
        if recomputed and reduction is not None:
            raise NotSupported(NO_CHECKPOINTS)
        shortens = last is not None and not restored_blocks and not last.watched and not recomputed
        with nullcontext() if last is None else last.forward_pass(shortens), forward_pass(self, restored_blocks):
            yield

    def all_tokens(self, images: ImageBatch) -> Float[Tensor, "batch tokens features"]:
        """Returns the final features, as the library computes them, of the prefix tokens and of all patch tokens."""
        self._require_images(images)
        return chunked_forward(self, self._last_tokens, images, self._max_elements(images))

    def _last_tokens(self, images: Tensor) -> Tensor:
        raise NotSupported(f"{self.origin.architecture} has no method that returns the features of all patches.")


class Adapter(nn.Module):
    """A module that replaces a layer's attention module and calls attnrx attention.

    `prefix` is the number of tokens before the patches. `pair_bias` computes the layer's bias per pair of tokens, if
    the layer has one. If `returns_weights` is true, the block expects a tuple of outputs and attention weights. The
    adapter then returns None for the weights.
    """

    returns_weights = False

    def __init__(self, attention: Attention, prefix: int, pair_bias: nn.Module | None = None):
        super().__init__()
        self.attention, self.prefix, self.pair_bias = attention, prefix, pair_bias
        self.call = _AdapterCall()

    def __prepare_scriptable__(self) -> "Adapter":
        raise NotSupported(
            "torch.jit.script reads no attention of attnrx: trace the model with torch.jit.trace or torch.export, or "
            "write a file with attnrx.export(model, path)."
        )

    def mixed(self, tokens: TokenBatch, positions: Positions | None = None) -> TokenBatch:
        """Returns attention outputs for tokens [batch, tokens, width] or a grid [batch, rows, columns, width]."""
        if tokens.ndim == 4:
            return self.mixed(tokens.flatten(1, 2), positions).view_as(tokens)
        if self.call.entered is None:
            return self.attention(tokens, None, positions)
        (entered, norm), self.call.entered = self.call.entered, None  # used once: the next call has other images
        # The block has normalized only the queries. Keys and values need the norm of all tokens.
        return self.attention(tokens, entered if norm is None else norm(entered), positions)

    def positions(self, rotation: tuple[Tensor, Tensor] | None, *biases: Tensor | None) -> Positions | None:
        """Returns the rotary cosines and sines [images, patches, heads, pairs] and the sum of all biases, if any."""
        layer_bias = None if self.pair_bias is None else self.pair_bias()
        present = [bias for bias in (layer_bias, *biases) if bias is not None]
        if rotation is None and not present:
            return None
        total = sum(present[1:], present[0]) if present else None
        if total is not None and total.ndim == 3:
            total = total[None]  # [images, heads, tokens, tokens]
        return Positions(self.prefix, *(rotation or ()), bias=total)


def one_node(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates an adapter's `forward` so that `torch.fx` records each call as one node, like `nn.MultiheadAttention`.

    Tracing inside the adapter would fail, because attnrx attention reads input shapes, which `torch.fx` does not know.
    """

    @wraps(forward)
    def called(adapter: Adapter, *args: Any, **kwargs: Any) -> Any:
        proxy = next((value for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy)), None)
        if proxy is None:
            return forward(adapter, *args, **kwargs)
        tracer: Any = proxy.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(adapter), args, kwargs)

    return called


class PlainAttention(Adapter):
    """attnrx attention for blocks that pass only tokens, or that pass query, key and value to nn.MultiheadAttention."""

    batch_first = False  # makes nn.TransformerEncoderLayer call its parts, not a kernel that reads their weights

    @one_node
    def forward(
        self, tokens: TokenBatch | None = None, key: Tensor | None = None, value: Tensor | None = None, **options: Any
    ) -> TokenBatch | tuple[TokenBatch, None]:
        """Returns the attention output. `key` and `value` must be None or the same tensor as `tokens`.

        Tokens are [batch, tokens, width]. If a block passes all arguments by name, the tokens are the argument
        `hidden_states` or `query`. If the call has neither of these names, the tokens are the first argument.

        Raises:
            NotSupported: The block passes a mask, or keys or values from other tokens.
        """
        entering: Tensor = options.pop(name_of_tokens(options)) if tokens is None else tokens
        # Blocks call nn.MultiheadAttention with (x, x, x).
        if any(side is not None and side is not entering for side in (key, value)):
            raise NotSupported("attention to other tokens (key or value is not query) is not supported.")
        masks = [
            name for name in ("attn_mask", "key_padding_mask", "mask", "attn_bias") if options.get(name) is not None
        ]
        if masks or options.get("is_causal"):
            raise NotSupported(f"attention masks ({', '.join(masks) or 'is_causal'}) are not supported.")
        mixed = self.mixed(entering)
        return (mixed, None) if self.returns_weights else mixed


class PairBias(nn.Module):
    """A bias for every pair of tokens, which a library's module computes."""

    def __init__(self, source: nn.Module, compute: Callable[[], Tensor]):
        """Stores `compute`, a bound method or partial function of the module. Copies bind it to their own module."""
        super().__init__()
        self.source, self.compute = source, compute

    def forward(self, *_: Any, **__: Any) -> Float[Tensor, "1 heads tokens tokens"]:
        """Returns the bias of all token pairs, and ignores all arguments, including the window size."""
        return of_weights(self, None, self.compute)


INTERLEAVED, HALVES = "interleaved", "halves"
"""The layouts of rotary pairs in a head's rows: (0, 1), (2, 3), ... or (0, d/2), (1, d/2 + 1), ..."""


def attention_from_projections(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    heads: int,
    scale: float,
    *,
    rotary: str | None = None,
    pair_bias: bool = False,
    inner_norms: Mapping[str, nn.Module] | None = None,
    distances: tuple[Tensor, Tensor] | None = None,
) -> Attention:
    """Returns attnrx attention with copies of a layer's four projections: query, key, value and output.

    The weight rows of query, key and value, and the weight columns of the output, must be grouped by head.

    Args:
        weights: The weights of the four projections, each [rows, width] except the output's, which is [width, rows].
        biases: The biases of the four projections, [rows] or [width], or None for a projection without a bias.
        heads: The number of attention heads.
        scale: The factor by which the scores are multiplied.
        rotary: The order of the rows in rotary embeddings, INTERLEAVED or HALVES. None means no rotary embeddings.
        pair_bias: Whether a bias per pair of tokens is added to the scores.
        inner_norms: The library's modules that normalize queries, keys or outputs, by name (INNER_NORMS).
        distances: Position vectors for row and column distances, each [distances, head_dim]. All heads share them.

    Raises:
        NotSupported: The shapes do not fit heads of equal size.
    """
    rows, width = weights[0].shape
    shapes = [tuple(weight.shape) for weight in weights]
    if rows % heads or shapes != [(rows, width)] * 3 + [(width, rows)]:
        raise NotSupported(
            f"attention with {heads} heads and projections of queries, keys, values and outputs of the shapes {shapes} "
            "is not supported: the first three must have equal shapes, and as many rows in every head."
        )
    ranks, norms = (rows // heads,) * heads, dict(inner_norms or {})
    present = tuple(name for name, bias in zip(BIASES, biases, strict=True) if bias is not None)
    spec = AttentionSpec(
        "rotary" if rotary else "axial" if distances else "dense", width, ranks[0], ranks, tuple(range(heads)),
        float(scale), ranks[0], biases=present, pair_bias=pair_bias,
        inner_norms=tuple(name for name in INNER_NORMS if name in norms),
        window=None if distances is None else ((len(distances[0]) + 1) // 2, (len(distances[1]) + 1) // 2),
    )  # fmt: skip
    # The attention is built on the meta device, because load_state_dict(assign=True) replaces the weights anyway.
    with torch.device("meta"):
        attention = Attention(spec)
    weights, biases = list(weights), list(biases)
    # No score changes if query and key rows are permuted together. So the rows are brought into the layout HALVES, the
    # only one that the attention forms support. Values are not rotated and keep their order.
    if rotary == INTERLEAVED:
        order, by_head = interleaved_rows(1, ranks[0]), interleaved_rows(heads, ranks[0])
        for side in (0, 1):
            bias = biases[side]
            weights[side], biases[side] = weights[side][by_head], None if bias is None else bias[by_head]
        for name in norms.keys() & {"query_norm", "key_norm"}:  # they have one parameter per direction
            norms[name] = copy.deepcopy(norms[name])
            for parameter in norms[name].parameters():
                parameter.data = parameter.data[order.to(parameter.device)].clone()
    tensors = {f"{path}.weight": weight for path, weight in zip(PROJECTION_PATHS, weights, strict=True)}
    named_biases = zip(PROJECTION_PATHS, biases, strict=True)
    tensors |= {f"{path}.bias": bias for path, bias in named_biases if bias is not None}
    if distances is not None:
        names = ("scores.down", "scores.right")
        tensors |= {name: table.mT.repeat(heads, 1) for name, table in zip(names, distances, strict=True)}
    # The tensors are cloned, because slices of a fused projection share one storage.
    attention.load_state_dict({name: tensor.detach().clone() for name, tensor in tensors.items()}, assign=True)
    for name, parameter in attention.named_parameters():  # frozen weights stay frozen
        parameter.requires_grad_(tensors[name].requires_grad)
    # Inner norms are the library's own modules with their weights, so they are added after the weights are loaded.
    attention.inner_norms.update({name: norms[name] for name in spec.inner_norms})
    attention.pack_()
    return attention


def interleaved_rows(heads: int, rank: int) -> Int[Tensor, "rows"]:
    """Returns the row indices that convert rotary pairs from the layout INTERLEAVED to the layout HALVES."""
    order = torch.cat([torch.arange(0, rank, 2), torch.arange(1, rank, 2)])
    return torch.cat([head * rank + order for head in range(heads)])


WARM = 16 * 2**20
"""The most bytes per CPU thread that the largest activation should have.

Larger activations do not fit into the cache. The operating system also allocates them again, page by page, in every
operation, which takes longer than launching the operations several times. Smaller chunks cost time, too, because every
product packs its weight again. With 8 MiB, a ViT-S/14 with a decoder took 4 % longer at batch 8
(docs/results/dense.md).
"""


def chunked_forward(model: nn.Module, run: Callable[[Tensor], Any], images: ImageBatch, largest: int) -> Any:
    """Returns `run(images)`, computed in several chunks of the batch if possible.

    The batch is split only on a CPU, if no gradients are recorded and no hook needs the whole batch. Each call of `run`
    is a separate forward pass, which returns one or more tensors. `largest` is the number of elements per image in the
    largest activation. The model must treat the images of a batch independently, as models do in evaluation mode.
    """
    # Token reducers and some backends fail on empty batches. So a black image runs, and its output row is removed.
    if not (is_traced() or model.training or len(images)):
        return mapped(lambda output: output[:0], run(images.new_zeros(1, *images.shape[1:])))
    context = AttentionContext.of(images.flatten(2))
    if not context.free_on_cpu or largest < 1:
        return run(images)
    chunk_size = max(context.threads * WARM // (largest * images.element_size()), 1)
    reduction = reduction_of(model)
    if (
        len(images) <= chunk_size
        or (reduction is not None and reduction.call.runs is not None)  # token statistics are recorded per batch
        or any(is_watched(part) or (isinstance(part, Attention) and part.backend.watches) for part in model.modules())
    ):
        return run(images)
    # All chunks have equal sizes, because a small last chunk would pack the weights for only a few images.
    num_chunks = -(-len(images) // chunk_size)
    return joined([run(chunk) for chunk in images.split(-(-len(images) // num_chunks))])


class PlainShape:
    """A template of a model, with its weights on the meta device. All copies of a working copy share the template."""

    def __init__(self, model: nn.Module):
        self.model = with_weights(model, lambda weight: torch.empty_like(weight, device="meta"))
        remove_capturing_(self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlainShape":
        return self

    def copied(self) -> nn.Module:
        """Returns a copy of the model with its weights on the meta device."""
        return copy.deepcopy(self.model)

    def fresh(self) -> nn.Module:
        """Returns a copy of the model with small random weights from seed 0, in evaluation mode."""
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = partial(torch.nn.init.normal_, std=0.02, generator=generator)
        return with_weights(self.model, lambda weight: drawn(torch.empty_like(weight, device="cpu"))).eval()


class OwnModel:
    """Holds the model from which a working copy was made. Copies of the working copy get an empty holder."""

    def __init__(self, model: nn.Module | None):
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnModel":
        return OwnModel(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnModel, (None,)


def with_weights(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns a copy of a module in which each parameter is replaced by `make(parameter)`.

    Buffers keep their values, because only the module's own code can compute non-persistent buffers again.
    """
    weights = {id(each): nn.Parameter(make(each), each.requires_grad) for each in module.parameters()}
    return copy_module(module, weights)


def aliased(model: nn.Module) -> nn.Module:
    """Returns a copy of a module whose parameters share the original's memory, so do not change them in place."""
    return with_weights(model, lambda weight: weight.detach())


def remove_capturing_(model: nn.Module) -> None:
    """Removes the hooks with which transformers captures hidden states. transformers installs them again if needed.

    The hooks would otherwise stay, and they cannot be pickled.
    """
    for part in model.modules():
        vars(part).pop("_output_capturing_hooks_installed", None)
        for key in [key for key, hook in part._forward_hooks.items() if is_capturing(hook)]:
            del part._forward_hooks[key]


def is_capturing(hook: Any) -> bool:
    """Returns whether a hook was added by transformers to capture hidden states. It captures them only on request."""
    return getattr(hook, "__name__", "") == "output_capturing_hook"


def require_images(images: ImageBatch, expected: tuple[int, int, int], name: str) -> None:
    """Raises InvalidInput if images do not have the expected channels, height and width."""
    if images.shape[1:] != expected:
        channels, height, width = expected
        size = height if height == width else (height, width)
        raise InvalidInput(
            f"images of shape {tuple(images.shape)}: {name} takes [batch, {channels}, {height}, {width}]. Load the "
            f"data with image_size={size}, or the model for the images: attnrx.load(model, image_size=...)."
        )


def is_watched(module: nn.Module) -> bool:
    """Returns whether a module is in training mode, or has hooks that may need all images and tokens.

    Hooks with a true attribute `by_image` do not count, because they treat images independently and accept any number
    of tokens.
    """
    if module.training or not (module._forward_hooks or module._forward_pre_hooks):
        return module.training
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(getattr(hook, "by_image", False) or is_capturing(hook) for hook in hooks)
