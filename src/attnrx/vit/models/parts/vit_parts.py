"""Describes the parts of a Vision Transformer, e.g. by the paths of its blocks and attention projections."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from attnrx.support.arguments import described_error
from attnrx.support.errors import AttnrxError, InvalidInput, NotSupported, UserCodeError

# The remedy for attention or a block that the library itself computes differently. The user cannot change it.
NOT_PLAIN = "Only softmax attention of queries and keys, rotated or not, with or without a bias, can be adopted."

# Ways to pool tokens after which tokens can be pruned.
POOLINGS = ("class", "mean", "attention")


@dataclass(frozen=True)
class Refusal:
    """A reason why attnrx cannot load a model, with a remedy unless the reason itself contains one."""

    reason: str
    remedy: str = ""

    @property
    def is_of_class(self) -> bool:
        """Whether attnrx refuses the architecture itself. Otherwise, the user can change the refused part."""
        return self.remedy == NOT_PLAIN or self.reason.startswith(("the class ", "the block ", "the patch embedding "))


def changed_linears(module: nn.Module, names: tuple[str, ...]) -> Iterator[Refusal]:
    """Yields a refusal for every projection that is not a plain nn.Linear, e.g. because it is quantized."""
    for name in names:
        # Any other class is refused, even a subclass. Quantized and adapted maps, for example, compute something else.
        kind = type(module.get_submodule(name))
        if kind is not nn.Linear:
            shown = kind.__name__ if kind.__name__ != "Linear" else f"{kind.__module__}.Linear"
            yield Refusal(
                f"the projection {name} is a {shown}, not a plain Linear",
                "Merge adapters, undo quantization or parametrizations before adoption.",
            )


def unread_attention(attention: nn.Module, projections: tuple[str, ...], remedy: str = "") -> Iterator[Refusal]:
    """Yields refusals for an attention module if a path in `projections` is missing or is not a plain nn.Linear."""
    named = dict(attention.named_modules())
    missing = [path for path in projections if path not in named]
    if missing:
        yield Refusal(f"the attention {type(attention).__name__} has no module {', '.join(missing)}", remedy)
        return
    yield from changed_linears(attention, projections)


def model_name(model: nn.Module) -> str:
    """Returns the full name of a model's class."""
    return f"{type(model).__module__}.{type(model).__name__}"


@dataclass(frozen=True)
class ViTParts:
    """Describes where the parts of a model are, which tokens precede the patches, and how the model pools its tokens.

    The first attributes are paths in the model. `blocks` is the path of the list of blocks, or a tuple with the path of
    every block. `patches` is the layer that computes the patch tokens. `norm` is the norm after the last block, or ""
    if there is none. `heads` are the classifiers and the norms before them, and `classifiers` are only the classifiers.
    Paths in `heads` and `classifiers` that a model lacks are skipped.

    Four attributes are paths in a block: `attention`, `norm_before` (the norm before the attention, or None), `mlp`
    (the modules of the MLP) and `maps` (the two linear maps of the MLP, or () for an MLP of an unsupported kind).

    An MLP without a gate is compressed only if its two linear maps have only an activation between them. `mlp_classes`
    names the classes of `mlp[0]` with this structure. If `mlp_classes` is None, any class is allowed, and a forward
    pass of random images tests the MLP. `gated` maps each class of gated MLPs to the paths of its three linear maps:
    values, gate and output. `PATH.first` and `PATH.second` denote the halves of one linear map's outputs.

    `projections` are the attribute paths of the linear maps inside the attention module: either two maps (first query,
    key and value fused, then output), or four separate maps. `nn.MultiheadAttention` needs no paths. `num_heads` is the
    number of heads, or the name of the attention's attribute that stores it. `scale` is the factor by which the
    attention scores are multiplied: a number, the name of an attribute, or None for head_dim ** -0.5. If the attention
    returns a pair, set `returns_weights`. attnrx's attention then returns (output, None).

    `prefix_tokens` is the number of tokens before the patches (class, distillation and register tokens). If there is a
    class token, it must come first. `pooling` is "class", "mean", "attention", or a name for an unsupported kind of
    pooling. `pooler` is the path of the attention that pools the tokens: an nn.MultiheadAttention or timm's
    AttentionPoolLatent.

    Blocks get tokens of the shape [batch * windows, tokens, width]. The patches of an image are divided into `windows`
    windows of equal size, each with its own prefix tokens. In the blocks with the indices `joined`, every token attends
    to all windows of its image. The sequence length there is windows * tokens.

    If blocks take grids of tokens, `grid_axis` is the feature axis: -1 for features last, or 1 for features first. The
    attention then gets [batch, rows, columns, width], which is the grid of an image or of one window.
    """

    blocks: str | tuple[str, ...]
    attention: str
    patches: str
    norm: str
    heads: tuple[str, ...] = ()
    classifiers: tuple[str, ...] = ()
    projections: tuple[str, ...] = ("qkv", "proj")
    num_heads: int | str = "num_heads"
    scale: float | str | None = None
    returns_weights: bool = False
    norm_before: str | None = None
    mlp: tuple[str, ...] = ("mlp",)
    mlp_classes: tuple[str, ...] | None = None
    maps: tuple[str, ...] = ("mlp.fc1", "mlp.fc2")
    gated: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    prefix_tokens: int = 0
    has_class_token: bool = False
    pooling: str = "class"
    pooler: str = ""
    windows: int = 1
    joined: tuple[int, ...] = ()
    grid_axis: int | None = None

    def sequences(self, layer: int, tokens: int) -> tuple[int, ...]:
        """Returns the lengths of a layer's token sequences per image, if each window has `tokens` tokens."""
        return (tokens * self.windows,) if layer in self.joined else (tokens,) * self.windows

    def compresses(self, mlp: nn.Module | None) -> bool:
        """Returns whether an MLP of this class has only an activation between its two linear maps."""
        return bool(self.maps) and (self.mlp_classes is None or type(mlp).__name__ in self.mlp_classes)

    def maps_of(self, mlp: nn.Module | None) -> tuple[str, ...]:
        """Returns the paths of an MLP's linear maps, including a gate, or () for MLPs of an unsupported class."""
        gated = self.gated.get(type(mlp).__name__, ())
        return self.maps if not gated and self.compresses(mlp) else gated

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields refusals for parts that the model lacks, and for attention that cannot be read."""
        assert isinstance(self.blocks, str)
        named = dict(model.named_modules())
        required = dict.fromkeys((self.patches, self.norm, self.blocks, *self.heads))
        lacking = [path for path in required if path not in named]
        if lacking:
            yield Refusal(f"it has no module {', '.join(lacking)}")
            return
        if not isinstance(named[self.patches], nn.Conv2d):
            kind = type(named[self.patches]).__name__
            yield Refusal(f"{self.patches} is a {kind}, not the convolution that makes the patch tokens")
        blocks = tuple(named[self.blocks].children())
        if not blocks:
            yield Refusal(f"{self.blocks} has no blocks")
        for index, block in enumerate(blocks):
            inside = dict(block.named_modules())
            norms = () if self.norm_before is None else (self.norm_before,)
            missing = [path for path in (self.attention, *norms, *self.mlp, *self.maps) if path not in inside]
            if missing:
                yield Refusal(f"block {index} ({type(block).__name__}) has no module {', '.join(missing)}")
            else:
                yield from self._unread(inside[self.attention])

    def _unread(self, attention: nn.Module) -> Iterator[Refusal]:
        """Yields the reasons why an attention module cannot be read."""
        if isinstance(attention, nn.MultiheadAttention):
            if not attention.batch_first:
                yield Refusal("an nn.MultiheadAttention with batch_first=False", "Create it with batch_first=True.")
            # PyTorch has no `in_proj_weight` if keys or values have other widths. The other two options append keys
            # that belong to no token.
            if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
                yield Refusal("an nn.MultiheadAttention with other widths of keys and values, or with added keys")
            yield from unread_attention(attention, ())
            return
        yield from unread_attention(attention, self.projections, "State its projections in the reader.")
        if isinstance(self.num_heads, str) and not hasattr(attention, self.num_heads):
            kind = type(attention).__name__
            yield Refusal(
                f"the attention {kind} has no attribute {self.num_heads}", "State heads=NUMBER in the reader."
            )


def last_linear(model: nn.Module, path: str) -> tuple[str, ...]:
    """Returns the path of the last linear map in a part of a model, e.g. in a head, or () if there is none."""
    linears = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return tuple(name for name in linears if f"{name}.".startswith(f"{path}."))[-1:]


@contextmanager
def reading_parts(model: nn.Module, what: str) -> Iterator[None]:
    """Converts every error that occurs while attnrx reads a model (inside the context) to NotSupported.

    Such an error means that the model lacks a part that its class should have. The original error is stored as the
    cause.

    Raises:
        NotSupported: Reading the model raised an error.
        UserCodeError: The model's code tried to end the process.
    """
    try:
        yield
    except AttnrxError:
        raise
    except SystemExit as stop:  # would end the user's process, with an exit code that has another meaning
        raise UserCodeError(f"the code of {model_name(model)} ended the process (SystemExit: {stop}).") from stop
    except Exception as error:  # a missing attribute, a part of another class, a weight of another shape ...
        part = getattr(error, "obj", None)  # the part that lacks the attribute
        path = next((path for path, each in model.named_modules() if each is part), "")
        where = f" of {path}" if path else ""
        raise NotSupported(
            f"{model_name(model)} is not supported: reading {what}{where} raised {type(error).__name__}: "
            f"{described_error(error)}. A part was replaced or removed after the model was created, or has weights of "
            "another shape. Undo the change, or state the parts in a reader (attnrx.Reader)."
        ) from error


def require_parts(module: nn.Module, paths: Sequence[str], name: str) -> None:
    """Raises InvalidInput if a newly created module lacks one of the parts at `paths`."""
    named = dict(module.named_modules())
    missing = next((path for path in paths if path not in named), None)
    if missing is not None:
        raise InvalidInput(f"{name} was created without the part {missing!r:.80}.")
