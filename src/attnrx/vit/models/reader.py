"""Vision Transformers that are read by the paths of their parts: the base of several families, and users' own."""

import copy
import json
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from attnrx.support.arguments import (
    COUNT,
    NATURAL,
    TEXT,
    described,
    described_error,
    each,
    either,
    number,
    optional,
    require_fields,
)
from attnrx.support.dataclass_records import from_dict, to_dict
from attnrx.support.errors import AttnrxError, InvalidInput, NotSupported, UserCodeError
from attnrx.support.modules import random_images
from attnrx.support.shapes import Tensor, TokenBatch
from attnrx.vit.attention import Attention
from attnrx.vit.models.adopted import Adapter, Adopted, Origin, RotationCache, attention_from_projections, image_shape
from attnrx.vit.models.adopted_family import AdoptedFamily, ModelParts, unsaved_buffers
from attnrx.vit.models.observation_hooks import evaluating, recording_calls
from attnrx.vit.models.units import unmixed
from attnrx.vit.models.unsupported_features import Refusal, unread_attention


@dataclass(frozen=True)
class Reader:
    """Where the parts of a Vision Transformer are, by their paths.

    `blocks` is the list of blocks. In a block are `attention`, `norm_before` (the norm before the attention; None if
    there is none) and `mlp`, which holds its two linear maps `maps` (None: another kind of MLP, which is not
    compressed). In the attention are `projections`: one map to query, key and value, and the output map; or the four
    maps; `nn.MultiheadAttention` needs none. `heads` is the number of heads, or the attribute of the attention that
    holds it; `scale` multiplies the scores, by default head_dim ** -0.5. `returns_weights`: whether the attention
    returns a pair, whose second element is None here.

    `patches` is the convolution that makes the patch tokens, `norm` the norm after the last block, `head` the module
    after it (None if there is none). `prefix_tokens` are before the patches, the class token first. `pooling` is what
    the head receives: "class", "mean" (of the patches, after the norm), or another name, for which tokens are not
    pruned. `mean` and `std` are those of the image normalization, one value per channel. `arguments` are those with
    which the class, or the factory, creates the model again: JSON values.
    """

    input_shape: tuple[int, int, int]
    blocks: str = "blocks"
    attention: str = "attn"
    projections: tuple[str, ...] = ("qkv", "proj")
    heads: int | str = "num_heads"
    scale: float | None = None
    returns_weights: bool = False
    norm_before: str | None = "norm1"
    mlp: str = "mlp"
    maps: tuple[str, str] | None = ("fc1", "fc2")
    patches: str = "patch_embed.proj"
    norm: str = "norm"
    head: str | None = "head"
    prefix_tokens: int = 1
    pooling: str = "class"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        pair = each(TEXT, "the paths of two linear maps", 2, 2)
        require_fields(
            self,
            input_shape=each(COUNT, "channels, height and width, e.g. (3, 224, 224)", 3, 3),
            projections=either("(query_key_value, output) or (query, key, value, output)", pair, each(TEXT, "", 4, 4)),
            heads=either("a number of 1 or more, or the name of an attribute", COUNT, TEXT),
            scale=optional(number(0.0, expected="a positive number")),
            maps=optional(pair),
            prefix_tokens=NATURAL,
        )
        if self.pooling == "class" and self.prefix_tokens < 1:
            raise InvalidInput(
                f"prefix_tokens={self.prefix_tokens} with pooling='class': give the number of tokens before the "
                "patches, the class token among them, or another pooling, e.g. 'mean'."
            )


class ReaderAttention(Adapter):
    """attnrx attention in the place of an attention module that is called with tokens, or as nn.MultiheadAttention."""

    returns_weights = False
    batch_first = False  # nn.TransformerEncoderLayer then calls its parts, and no kernel that has their weights

    def forward(
        self, tokens: TokenBatch, key: Tensor | None = None, value: Tensor | None = None, **options: Any
    ) -> TokenBatch | tuple[TokenBatch, None]:
        """Returns the attention output; `key` and `value`, if given, are `tokens` [batch, tokens, width] themselves.

        Raises:
            NotSupported: A mask, or keys or values of other tokens are given.
        """
        # Blocks around nn.MultiheadAttention call it with (x, x, x).
        if any(side is not None and side is not tokens for side in (key, value)):
            raise NotSupported("attention to other tokens (key or value is not query) is not supported.")
        masks = [
            name for name in ("attn_mask", "key_padding_mask", "mask", "attn_bias") if options.get(name) is not None
        ]
        if masks or options.get("is_causal"):
            raise NotSupported(f"attention masks ({', '.join(masks) or 'is_causal'}) are not supported.")
        mixed = self.mixed(tokens)
        return (mixed, None) if self.returns_weights else mixed


class ReaderFamily(AdoptedFamily):
    """Models that a `Reader` describes; a subclass returns it, and how such a model is created."""

    adapter_type = ReaderAttention

    @abstractmethod
    def reader(self, source: nn.Module) -> Reader:
        """Returns where the parts of a model are."""

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields paths that the model lacks, and attention that is not read."""
        reader, named = self.reader(model), dict(model.named_modules())
        required = (reader.patches, reader.norm, reader.blocks, *(() if reader.head is None else (reader.head,)))
        lacking = [path for path in required if path not in named]
        if lacking:
            yield Refusal(f"it has no module {', '.join(lacking)}")
            return
        if not isinstance(named[reader.patches], nn.Conv2d):
            kind = type(named[reader.patches]).__name__
            yield Refusal(f"{reader.patches} is a {kind}, not the convolution that makes the patch tokens")
        blocks = tuple(named[reader.blocks].children())
        if not blocks:
            yield Refusal(f"{reader.blocks} has no blocks")
        for index, block in enumerate(blocks):
            inside = dict(block.named_modules())
            maps = () if reader.maps is None else tuple(f"{reader.mlp}.{name}" for name in reader.maps)
            norms = () if reader.norm_before is None else (reader.norm_before,)
            missing = [path for path in (reader.attention, *norms, reader.mlp, *maps) if path not in inside]
            if missing:
                yield Refusal(f"block {index} ({type(block).__name__}) has no module {', '.join(missing)}")
            else:
                yield from _unread(inside[reader.attention], reader)

    def adopt(self, model: nn.Module, *args: Any, **stated: Any) -> Adopted:
        adopted = super().adopt(model, *args, **stated)
        # Equal logits do not prove `prefix_tokens`, which a user states: the number is compared with a forward pass.
        images = next(adopted.parameters()).new_zeros(1, *adopted.origin.input_shape)
        first_block = self.blocks(adopted.source)[:1]
        with evaluating((adopted,)), recording_calls(first_block, lambda call: call.tokens.shape[1]) as counts:
            adopted(images)
        prefix, patches = self.reader(adopted.source).prefix_tokens, self.positions(adopted)
        if counts != [prefix + patches]:
            raise NotSupported(
                f"{adopted.origin.architecture} cannot be adopted: its blocks receive {counts[0]} tokens, and "
                f"prefix_tokens={prefix} with {patches} patches are {prefix + patches}."
            )
        self.prove_units(adopted)
        return adopted

    def prove_units(self, adopted: Adopted) -> None:
        source, pairs = adopted.source, adopted.pairs if self.has_plain_units(adopted) else ()
        with evaluating((source,)):
            separate = unmixed(source, pairs, random_images(source, adopted.origin.input_shape, 1))
        for index, pair in enumerate(pairs):
            if pair not in separate:
                raise NotSupported(
                    f"{adopted.origin.architecture} cannot be adopted: in block {index} more than an activation is "
                    f"between the maps {self.parts(source).maps} of the MLP, or their order is another one. State "
                    "maps=None in the reader for an MLP of another kind (e.g. with a gate), which is then not "
                    "compressed."
                )

    def parts(self, source: nn.Module) -> ModelParts:
        reader = self.reader(source)
        # Whatever class the blocks have here is an MLP: the reader states its path and its maps.
        blocks = source.get_submodule(reader.blocks).children() if reader.maps is not None else ()
        first, second = reader.maps or ("", "")
        # A head may be an MLP: its last linear map is the classifier.
        head = () if reader.head is None else (reader.head,)
        linears = [
            f"{name}.{path}".strip(".")
            for name in head
            for path, module in source.get_submodule(name).named_modules()
            if isinstance(module, nn.Linear)
        ]
        return ModelParts(
            blocks=reader.blocks, attention=reader.attention, patches=reader.patches, norm=reader.norm,
            mlp_classes=tuple({type(block.get_submodule(reader.mlp)).__name__ for block in blocks}),
            heads=(reader.norm, *head), classifiers=tuple(linears[-1:]), norm_before=reader.norm_before,
            mlp=(reader.mlp,), maps=(f"{reader.mlp}.{first}", f"{reader.mlp}.{second}"),
            prefix_tokens=reader.prefix_tokens, has_class_token=reader.prefix_tokens > 0, pooling=reader.pooling,
        )  # fmt: skip

    def output_kind(self, model: nn.Module) -> str:
        return "logits" if self.heads(model) else "embedding"

    def convert_attention(self, source: nn.Module, module: nn.Module) -> Attention:
        reader = self.reader(source)
        if isinstance(module, nn.MultiheadAttention):  # its fused projection is a parameter, not a module
            weights, biases = (
                [module.in_proj_weight, module.out_proj.weight],
                [module.in_proj_bias, module.out_proj.bias],
            )
        else:
            linears: list[Any] = [module.get_submodule(name) for name in reader.projections]
            weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        if len(weights) == 2:  # the rows of a fused projection: all queries, all keys, all values
            weights = [*weights[0].chunk(3), weights[1]]
            biases = [*([None] * 3 if biases[0] is None else biases[0].chunk(3)), biases[1]]
        name = "num_heads" if isinstance(module, nn.MultiheadAttention) else reader.heads
        heads = name if isinstance(name, int) else int(getattr(module, name))
        return attention_from_projections(
            weights, biases, heads, reader.scale or (weights[0].shape[0] // heads) ** -0.5
        )

    def adapter(self, source: nn.Module, module: nn.Module, attention: Attention, rotations: RotationCache) -> Adapter:
        adapter = super().adapter(source, module, attention, rotations)
        assert isinstance(adapter, ReaderAttention)
        # nn.MultiheadAttention returns a pair also where its weights are not requested.
        adapter.returns_weights = isinstance(module, nn.MultiheadAttention) or self.reader(source).returns_weights
        return adapter


def _unread(attention: nn.Module, reader: Reader) -> Iterator[Refusal]:
    """Yields why an attention module cannot be read."""
    kind = type(attention).__name__
    if isinstance(attention, nn.MultiheadAttention):
        if not attention.batch_first:
            yield Refusal("an nn.MultiheadAttention with batch_first=False", "Create it with batch_first=True.")
        # `in_proj_weight` is absent where keys or values have other widths; the other options append keys of no token.
        if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
            yield Refusal("an nn.MultiheadAttention with other widths of keys and values, or with added keys")
        yield from unread_attention(attention, ())
        return
    yield from unread_attention(attention, reader.projections, "State its projections in the reader.")
    if isinstance(reader.heads, str) and not hasattr(attention, reader.heads):
        yield Refusal(f"the attention {kind} has no attribute {reader.heads}", "State heads=NUMBER in the reader.")


Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class Blueprint:
    """How a module is read and created anew: `factory(**reader.arguments)` returns it with any weights.

    `name` is "module:class" of its class, by which a saved model finds it again.
    """

    reader: Reader
    factory: Factory
    name: str


class ModuleModel(Adopted):
    """A user's own Vision Transformer with attnrx attention."""


class ModuleFamily(ReaderFamily):
    """Any Vision Transformer with a `Reader`; its class is created again when a model is loaded.

    A saved model holds the name of the class and never code. The class must have been imported when such a model is
    loaded; otherwise the `factory` is used. Nothing is imported or called by a name in a file.
    """

    shapes_are_stated = True

    name = library = "module"
    model_type = ModuleModel

    def __init__(self, factory: Factory | None = None):
        self.factory = factory

    def read(self, model: nn.Module, reader: Reader) -> Adopted:
        """Adopts a model whose parts the reader names.

        Raises:
            NotSupported: The model lacks a part that the reader names, or differs from what it states.
        """
        kind = type(model)
        blueprint = Blueprint(reader, self.factory or kind, f"{kind.__module__}:{kind.__qualname__}")
        return self.adopt(_with_blueprint(copy.copy(model), blueprint))  # a shallow copy: the model stays as it is

    def adopts(self, model: nn.Module) -> bool:
        return "attnrx_blueprint" in vars(model)

    def reader(self, source: nn.Module) -> Reader:
        return vars(source)["attnrx_blueprint"].reader

    def origin(self, model: nn.Module) -> Origin:
        blueprint: Blueprint = vars(model)["attnrx_blueprint"]
        reader = blueprint.reader
        # A round trip: it fails for what JSON cannot hold, and turns tuples into lists, as loading will.
        try:
            described = json.loads(json.dumps(to_dict(reader)))
        except (TypeError, InvalidInput) as error:
            raise NotSupported(f"the arguments of {blueprint.name} cannot be saved as JSON ({error}).") from error
        return Origin(blueprint.name, {"reader": described}, image_shape(reader.input_shape), reader.mean, reader.std)

    def create(self, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Creates the class from its arguments, or calls the factory.

        Raises:
            NotSupported: The class has not been imported, and there is no factory.
            UserCodeError: The factory raised an exception.
        """
        reader: Reader = from_dict(arguments["reader"], (Reader,), "reader")
        factory, own = self.factory or imported_class(architecture), dict(reader.arguments)
        if factory is None:
            raise NotSupported(
                f"the class {architecture} of this model has not been imported: import it first, or give a "
                "function that creates it, attnrx.load(folder, factory=...)."
            )
        model = created_by(factory, architecture, own)
        unsaved = unsaved_buffers(model, meta=True)
        if unsaved:  # the module itself computes their values: it is created once more, on the CPU
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                computed = factory(**own)
            for path, buffers in unsaved.items():
                for name in buffers:
                    model.get_submodule(path)._buffers[name] = computed.get_submodule(path)._buffers[name]
        return _with_blueprint(model, Blueprint(reader, factory, architecture))

    def library_model(self, model: nn.Module) -> nn.Module:
        adopted = self._adopted(model)
        return ModuleFamily(vars(adopted.source)["attnrx_blueprint"].factory)._created(adopted.origin)


def created_by(factory: Factory, name: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Returns the module that a class or a factory of the user's creates.

    Raises:
        InvalidInput: It takes other arguments, or returns no module.
        UserCodeError: It raised an exception.
    """
    try:
        model = factory(**(arguments or {}))
    except AttnrxError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and arguments is not None:
            raise InvalidInput(
                f"{name} could not be created again with {arguments}: {error}. Give its arguments, "
                "attnrx.Reader(arguments={...}, ...), or a factory that needs none: attnrx.load(..., factory=...)."
            ) from error
        raise UserCodeError(f"the factory of {name} raised {type(error).__name__}: {described_error(error)}") from error
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"the factory of {name} returned {described(model)}: give one that returns the model.")
    return model


def _with_blueprint(model: nn.Module, blueprint: Blueprint) -> nn.Module:
    # In __dict__, which shallow and deep copies of the model have too.
    vars(model)["attnrx_blueprint"] = blueprint
    return model


def imported_class(name: str) -> type[nn.Module] | None:
    """Returns an imported class of modules by its name "module:class"; None where there is none."""
    # Only modules that are imported already: a name from a file must not run the code of a module.
    module, _, path = name.partition(":")
    target: Any = sys.modules.get(module)
    for part in path.split("."):
        target = getattr(target, part, None)
    return target if isinstance(target, type) and issubclass(target, nn.Module) else None
