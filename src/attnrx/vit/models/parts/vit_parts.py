"""Where the parts of a Vision Transformer are. Every family of another library states one such description."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from attnrx.support.arguments import described_error
from attnrx.support.errors import AttnrxError, InvalidInput, NotSupported, UserCodeError

# The remedy if a library's own attention, or its block, is of another kind. A user could not create it differently.
NOT_PLAIN = "Only softmax attention of queries and keys, rotated or not, with or without a bias, can be adopted."

# The kinds of pooling with which tokens can be pruned.
POOLINGS = ("class", "mean", "attention")


@dataclass(frozen=True)
class Refusal:
    """The reason why a model cannot be adopted, and a remedy if the reason does not include one."""

    reason: str
    remedy: str = ""

    @property
    def is_of_class(self) -> bool:
        """Whether attnrx cannot read the architecture at all. Otherwise the user can change the part or setting."""
        return self.remedy == NOT_PLAIN or self.reason.startswith(("the class ", "the block ", "the patch embedding "))


def changed_linears(module: nn.Module, names: tuple[str, ...]) -> Iterator[Refusal]:
    """Yields a refusal for every projection that is not a plain nn.Linear: adapted, quantized or parametrized."""
    for name in names:
        # Only the exact class, because a subclass may compute something else, and quantized or adapted maps do.
        kind = type(module.get_submodule(name))
        if kind is not nn.Linear:
            shown = kind.__name__ if kind.__name__ != "Linear" else f"{kind.__module__}.Linear"
            yield Refusal(
                f"the projection {name} is a {shown}, not a plain Linear",
                "Merge adapters, undo quantization or parametrizations before adoption.",
            )


def unread_attention(attention: nn.Module, projections: tuple[str, ...], remedy: str = "") -> Iterator[Refusal]:
    """Yields why an attention module is not read: a path in `projections` is missing or is not a plain nn.Linear."""
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
    """Where the parts of a model are, how many tokens it has besides the patches, and how it pools them.

    Paths in the model: `blocks` is the list of blocks, or a tuple with the path of every block. `patches` is the map
    that computes the patch tokens. `norm` is the norm after the last block, "" for none. `heads` are the classifiers
    with the norms before them, and `classifiers` are only the classifiers. Paths that a model lacks are skipped.

    Paths in a block: `attention`, `norm_before` (the norm before the attention, or None), `mlp` (the modules that form
    its MLP), and `maps` (the two linear maps of the MLP, or () for an MLP of another kind). The MLP is compressed only
    if nothing but an activation is between its maps. `mlp_classes` names the classes of `mlp[0]` to which this applies.
    With None, any class is allowed, and a pass of random images tests it. `gated` has, for each class of gated MLP,
    three paths: the map of its values, the map of its gate, and the map that reads their product. `PATH.first` and
    `PATH.second` are the halves of one map's outputs.

    Paths in the attention: `projections` is one map to query, key and value, and the output map, or four separate maps.
    `nn.MultiheadAttention` needs none. `num_heads` is the number of heads, or the attention's attribute for it. `scale`
    multiplies the scores. It is a number, the attribute that holds it, or None for head_dim ** -0.5. `returns_weights`
    tells whether the attention returns a pair. Its second element is None here.

    `prefix_tokens` come before the patches (class, distillation and register tokens). If the model has a class token,
    it is the first. `pooling` is "class", "mean", "attention", or another name for an unsupported kind of pooling.
    `pooler` is the attention that pools the tokens: an nn.MultiheadAttention or timm's AttentionPoolLatent.

    Blocks get [batch * windows, tokens, width]. The patches of an image are divided into `windows` of equal size, each
    with its own prefix tokens. In the blocks with the indices `joined`, every token attends to all windows, in
    sequences of windows * tokens. With `grid_axis`, blocks get grids of tokens with features on this axis: -1, or 1 if
    rows and columns follow. The attention then gets [batch, rows, columns, width], the grid of an image or of a window
    in it.
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
        """Returns the lengths of a layer's sequences per image, with `tokens` tokens per window."""
        return (tokens * self.windows,) if layer in self.joined else (tokens,) * self.windows

    def compresses(self, mlp: nn.Module | None) -> bool:
        """Returns whether only an activation is between the two maps of an MLP of this class."""
        return bool(self.maps) and (self.mlp_classes is None or type(mlp).__name__ in self.mlp_classes)

    def maps_of(self, mlp: nn.Module | None) -> tuple[str, ...]:
        """Returns the paths of the maps of an MLP of this class, with the gate between them, or () for other kinds."""
        gated = self.gated.get(type(mlp).__name__, ())
        return self.maps if not gated and self.compresses(mlp) else gated

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields a refusal for parts that the model lacks and for attention that cannot be read."""
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
            # `in_proj_weight` is absent if keys or values have other widths. The other options append keys that belong
            # to no token.
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
    """Returns the path of the last linear map in a part of a model, for example in an MLP, or () if there is none."""
    linears = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return tuple(name for name in linears if f"{name}.".startswith(f"{path}."))[-1:]


@contextmanager
def reading_parts(model: nn.Module, what: str) -> Iterator[None]:
    """Raises NotSupported, with the original error as its cause, if reading a model in the context raises an error.

    Such an error means that the model lacks parts of its class. If the model's code ends the process, UserCodeError is
    raised.
    """
    try:
        yield
    except AttnrxError:
        raise
    except SystemExit as stop:  # it would end the user's process, with an exit code that has another meaning
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
    """Raises InvalidInput if a newly created module lacks one of these parts."""
    named = dict(module.named_modules())
    missing = next((path for path in paths if path not in named), None)
    if missing is not None:
        raise InvalidInput(f"{name} was created without the part {missing!r:.80}.")
