"""Reads Vision Transformers of custom classes. A `Reader` names the parts of a model, or attnrx searches for them.

The search first finds attention modules by the names and shapes of their projections: a fused projection, four
projections, or `nn.MultiheadAttention`. Such modules occur in DINO, DINOv2, MAE and their descendants, vit-pytorch and
`nn.TransformerEncoder`. A forward pass of random images then records the order of module calls. The calls show where
the patches, the tokens before them, the norms and the MLPs are. If the converted model does not return the same outputs
as the original, attnrx refuses the model.
"""

import copy
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode

from attnrx.support.arguments import (
    COUNT,
    NATURAL,
    TEXT,
    described,
    each,
    either,
    number,
    optional,
    require_fields,
    user_code,
)
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import containing, copy_module, evaluating, outermost, random_images
from attnrx.support.records import from_dict, to_dict
from attnrx.support.shapes import Tensor, TokenBatch
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily, unsaved_buffers
from attnrx.vit.models.observation_hooks import ModuleCall, recording_calls
from attnrx.vit.models.parts.module_costs import num_params
from attnrx.vit.models.parts.module_inputs import ModuleInputs, called, inputs_of
from attnrx.vit.models.parts.record import Record
from attnrx.vit.models.parts.vit_parts import Refusal, ViTParts, last_linear, model_name, require_parts
from attnrx.vit.models.users.units import UnitsFamily
from attnrx.vit.models.working.adopted import Adopted, Origin, image_shape

# Attribute names under which classes store the number of heads.
HEADS = ("num_heads", "heads", "n_heads", "nhead", "n_head", "num_attention_heads", "h")


@dataclass(frozen=True)
class Reader:
    """Tells attnrx where the parts of your Vision Transformer are, by their paths.

    `input_shape` is the channels, height and width of an image. `blocks` is the path of the list of blocks. Three paths
    start at a block: `attention`, `norm_before` (the norm before the attention, or None) and `mlp`. `maps` are the
    paths of the two linear maps in the MLP. Pass `maps=None` for an MLP of any other kind, which attnrx then does not
    compress.

    `projections` are the attribute paths of the linear maps inside the attention module: either two maps (first query,
    key and value fused, then output), or four separate maps. `nn.MultiheadAttention` needs no paths. `heads` is the
    number of heads, or the name of the attention's attribute that stores it. `scale` is the factor by which the
    attention scores are multiplied, by default head_dim ** -0.5. If the attention returns a pair, set
    `returns_weights`. attnrx's attention then returns (output, None).

    `patches` is the convolution that computes the patch tokens. `norm` is the norm after the last block, and `head` the
    module after it (None if there is none). `prefix_tokens` is the number of tokens before the patches. A class token
    must come first. `pooling` is the input of the head: "class", "mean" (of the patches, after the norm), or any other
    name. With any other name, tokens cannot be pruned. `mean` and `std` are the image normalization, one value per
    channel. `arguments` are JSON values with which attnrx calls your class (or factory) to recreate the model.
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

    def parts(self, source: nn.Module) -> ViTParts:
        """Returns this reader's description of a model as `ViTParts`."""
        head = () if self.head is None else (self.head,)
        return ViTParts(
            blocks=self.blocks, attention=self.attention, patches=self.patches, norm=self.norm,
            heads=(self.norm, *head), classifiers=last_linear(source, self.head) if self.head else (),
            projections=self.projections, num_heads=self.heads, scale=self.scale,
            returns_weights=self.returns_weights, norm_before=self.norm_before, mlp=(self.mlp,),
            maps=tuple(f"{self.mlp}.{name}" for name in self.maps or ()),
            prefix_tokens=self.prefix_tokens, has_class_token=self.prefix_tokens > 0, pooling=self.pooling,
        )  # fmt: skip


Factory = Callable[..., nn.Module]


class ModuleModel(Adopted):
    """A working copy of a user's own Vision Transformer, with attnrx attention."""


class ModuleFamily(AdoptedFamily):
    """The family for Vision Transformers with a `Reader`. Loading a saved model calls its class or a factory.

    A saved model contains the name of its class, but no code. Import the class before you load the model, or pass a
    `factory`. A name in a file never causes attnrx to import a module or to call a function.
    """

    name = library = "module"
    model_type = ModuleModel

    def __init__(self, factory: Factory | None = None):
        self.factory = factory

    def marked(self, model: nn.Module, reader: Reader) -> nn.Module:
        """Returns a shallow copy of the model that stores the reader. Copies of this copy also store the reader."""
        return _with_reader(copy.copy(model), reader, self.factory or type(model))

    def adopts(self, model: nn.Module) -> bool:
        return "attnrx_reader" in vars(model)

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        return self.parts(model).refusals(model)

    def parts(self, source: nn.Module) -> ViTParts:
        return vars(source)["attnrx_reader"].parts(source)

    def origin(self, model: nn.Module) -> Origin:
        name, reader = class_name(model), vars(model)["attnrx_reader"]
        (_, height, width), convolution = reader.input_shape, model.get_submodule(reader.patches)
        down, right = convolution.stride  # type: ignore[misc]
        if height % down or width % right:  # type: ignore[operator]
            raise InvalidInput(f"patches of {down} x {right} do not tile {height} x {width}.")
        # The round trip through JSON raises errors for values that cannot be saved. It also turns tuples into lists,
        # as loading does.
        try:
            described = json.loads(json.dumps(to_dict(reader)))
        except (TypeError, InvalidInput) as error:
            raise NotSupported(f"the arguments of {name} cannot be saved as JSON ({error}).") from error
        return Origin(name, {"reader": described}, image_shape(reader.input_shape), reader.mean, reader.std)

    def create(self, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Creates the model by calling the factory or the imported class.

        Raises:
            NotSupported: The class has not been imported, and there is no factory.
            UserCodeError: The factory raised an exception.
        """
        reader: Reader = from_dict(arguments["reader"], (Reader,), "reader")
        factory = self.factory or imported_class(architecture)
        needed = "import it first, or give a function that creates it, attnrx.load(folder, factory=...)"
        model = created = created_by(factory, architecture, needed, reader.arguments)
        unsaved = [(path, name) for path, name, buffer in unsaved_buffers(model) if buffer.is_meta]
        if unsaved:  # only the module's own code computes their values, so it is created once more, with weights
            with torch.device("cpu"):
                created = created_by(factory, architecture, needed, reader.arguments)
        for path, name in unsaved:
            model.get_submodule(path)._buffers[name] = created.get_submodule(path)._buffers[name]
        return _with_reader(model, reader, factory)

    def refresh_(self, adopted: Adopted) -> None:
        # Uses the factory that created this model, because the family itself may have none.
        super(ModuleFamily, ModuleFamily(vars(adopted.trunk)["attnrx_factory"])).refresh_(adopted)

    def library_model(self, model: nn.Module) -> nn.Module:
        adopted = self._adopted(model)
        return ModuleFamily(vars(adopted.trunk)["attnrx_factory"])._created(adopted.origin)

    def prove(self, adopted: Adopted) -> None:
        """Raises NotSupported unless the blocks get `prefix_tokens` tokens and one more token per patch."""
        # Equal logits do not prove the `prefix_tokens` that a user states.
        images = next(adopted.parameters()).new_zeros(1, *adopted.origin.input_shape)
        first_block = self.blocks(adopted.trunk)[:1]
        with evaluating((adopted,)), recording_calls(first_block, lambda call: call.tokens.shape[1]) as counts:
            adopted(images)
        prefix, patches = self.parts(adopted.trunk).prefix_tokens, self.positions(adopted)
        if counts != [prefix + patches]:
            raise NotSupported(
                f"{adopted.origin.architecture} cannot be adopted: its blocks receive {counts[0]} tokens, and "
                f"prefix_tokens={prefix} with {patches} patches are {prefix + patches}."
            )


def _with_reader(model: nn.Module, reader: Reader, factory: Factory | None) -> nn.Module:
    # The reader is stored in __dict__, because shallow and deep copies of the model keep its entries.
    vars(model).update(attnrx_reader=reader, attnrx_factory=factory)
    return model


def created_by(
    factory: Factory | None, name: str, needed: str, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """Creates a user's module by calling its class or a factory.

    Args:
        factory: The class or the factory function, or None if there is neither.
        name: The name of the class, as "module:class".
        needed: The instruction in the error message if `factory` is None.
        arguments: The keyword arguments for the factory (`Reader.arguments`).

    Raises:
        NotSupported: There is no factory, and no imported class creates the module.
        InvalidInput: The factory did not return a module.
        UserCodeError: The factory raised an exception.
    """
    if factory is None:
        raise NotSupported(
            f"the class {name} of this model has not been imported, or does not create this model without arguments: "
            f"{needed}."
        )
    given = "" if arguments is None else f" with attnrx.Reader(arguments={dict(arguments)})"
    with user_code(f"the factory of {name}{given}"), torch.random.fork_rng(devices=[]):
        model = factory(**(arguments or {}))
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"the factory of {name} returned {described(model)}: give one that returns the model.")
    return model


def class_name(module: nn.Module) -> str:
    """Returns the name "module:class" of a module's class. Loading finds the class by this name."""
    return f"{type(module).__module__}:{type(module).__qualname__}"


def imported_class(name: str) -> type[nn.Module] | None:
    """Returns the nn.Module class with the name "module:class", or None if no such class has been imported."""
    # Only imported modules are searched, because a name from a file must not run the code of a module.
    module, _, path = name.partition(":")
    target: Any = sys.modules.get(module)
    for part in path.split("."):
        target = getattr(target, part, None)
    return target if isinstance(target, type) and issubclass(target, nn.Module) else None


# Finding the structure of a model.


@dataclass(frozen=True)
class Structure:
    """The structure that attnrx found in a Vision Transformer: its parts, input format and number of patches."""

    parts: ViTParts
    origin: Origin
    num_patches: int


class PairedBlock(nn.Module):
    """A transformer block built from an (attention, MLP) pair of a user's module.

    The attention and the MLP each have a residual connection.
    """

    def __init__(self, attention: nn.Module, norm: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm, self.attention, self.mlp = norm, attention, mlp

    def forward(self, tokens: TokenBatch) -> TokenBatch:
        tokens = self.attention(self.norm(tokens)) + tokens
        return self.mlp(tokens) + tokens


class TokensFirst(nn.Sequential):
    """Wraps a block that takes [batch, tokens, width], so that callers can pass [tokens, batch, width]."""

    @property
    def self_attn(self) -> Any:
        """The attention of the block. nn.TransformerEncoder reads this attribute from its first layer."""
        return self[0].self_attn

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self[0](input.transpose(0, 1), *args, **kwargs)
        if isinstance(output, tuple):
            return (output[0].transpose(0, 1), *output[1:])
        return output.transpose(0, 1)


class StructureModel(Adopted):
    """A working copy of a user's module in which attnrx found the structure of a Vision Transformer."""


class StructureFamily(AdoptedFamily):
    """The family for users' modules in which attnrx found the structure of a Vision Transformer.

    Such models are always treated as parts of users' modules (`Surroundings`). The record of a model stores three
    facts. `structure` describes the parts. `group` contains the paths of the blocks, and the path of the attention in a
    block. `rewritten` is true if the blocks were rewritten to take [batch, tokens, width].
    """

    name = "structure"
    library = ""
    model_type = StructureModel

    def adopts(self, model: nn.Module) -> bool:
        return "attnrx_structure" in vars(model)

    def require_supported(self, model: nn.Module) -> None:
        """Refuses no model, because the search finds only parts that attnrx supports."""

    def found(self, model: nn.Module) -> tuple[str, dict[str, Any]] | None:
        """Searches a module for a Vision Transformer, and returns its path and the facts about its structure.

        Returns None if the module contains no such structure.
        """
        group = _group_of(model)
        if group is None:
            return None
        copied, _, blocks, attention = _restructured(copy_module(model), group[:2])
        if any(piece.isdigit() for piece in attention.split(".")):  # a part of a list inside a block
            return None
        try:
            with evaluating([copied]):
                observed = _observed(copied, blocks, attention, group[2])
        except TypeError:
            if attention == group[1]:
                raise
            return None  # the model's own loop over the rewritten blocks takes more than tokens, e.g. a bias
        if observed is None:
            return None
        path, structure = observed
        structure = replace(
            structure, origin=replace(structure.origin, architecture=type(copied.get_submodule(path)).__name__)
        )
        return path, {"structure": structure, "group": group[:2], "rewritten": False}

    def stated_origin(
        self, model: nn.Module, path: str | None, facts: Mapping[str, Any], stated: Mapping[str, Any]
    ) -> Origin:
        return facts["structure"].origin

    def opened(self, module: nn.Module, path: str, facts: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, str]]:
        places: Mapping[str, str] = {}
        if not facts["rewritten"] and "group" in facts:
            module, places, _, _ = _restructured(module, facts["group"])
        parts: ViTParts = facts["structure"].parts
        expected = (parts.patches, *(f"{block}.{parts.attention}" for block in parts.blocks))
        require_parts(module, (path, *(f"{path}.{each}".strip(".") for each in expected)), model_name(module))
        vars(module.get_submodule(path))["attnrx_structure"] = facts["structure"]
        return module, places

    def in_blocks(self, module: nn.Module, path: str, facts: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, Any]]:
        module, _ = self.opened(module, path, facts)
        return module, {**facts, "rewritten": True}

    def viewed(self, model: nn.Module, record: Record) -> Adopted:
        return super().viewed(model, record) if record.facts["rewritten"] else self.working(model, record)

    def described_facts(self, created: nn.Module, description: Mapping[str, Any]) -> dict[str, Any]:
        structure: Structure = from_dict(description["structure"], (Structure, ViTParts, Origin), "structure")
        group = _group_of(created)
        return {"structure": structure, "rewritten": False, **({} if group is None else {"group": group[:2]})}

    def parts(self, source: nn.Module) -> ViTParts:
        return vars(source)["attnrx_structure"].parts

    def num_patches(self, source: nn.Module, input_shape: tuple[int, int, int]) -> int:
        found, (_, height, width) = vars(source)["attnrx_structure"], input_shape
        shape = found.origin.input_shape
        if isinstance(source.get_submodule(found.parts.patches), nn.Conv2d) and input_shape != shape:
            return super().num_patches(source, input_shape)
        return found.num_patches * height * width // (shape[1] * shape[2])

    def describe(self, model: nn.Module) -> dict[str, Any]:
        return {**super().describe(model), "structure": to_dict(self._adopted(model).facts["structure"])}

    def fit_created_(self, source: nn.Module, origin: Origin, before: Origin | None = None) -> None:
        """Changes nothing, because the model's own code must take the new image size (see `_resized`)."""

    def _resized_like(self, model: nn.Module, adopted: Adopted, before: Origin) -> nn.Module:
        """Returns the model unchanged, because its own code has to handle the new image size (see `_resized`)."""
        return model

    def _resized(self, source: nn.Module, origin: Origin, height: int, width: int) -> Origin:
        """Raises NotSupported if the model's code does not run at this image size. Otherwise, nothing is changed."""
        try:
            with evaluating([source]):
                source(random_images(source, (origin.input_shape[0], height, width), 1))
        except Exception:  # the code of a module raises errors of any type
            return super()._resized(source, origin, height, width)
        return origin


# The search by names and shapes.


def _projections(part: nn.Module) -> tuple[str, ...] | None:
    """Returns an attention module's projection paths, () for nn.MultiheadAttention, or None for other modules."""
    if type(part) is nn.MultiheadAttention:
        plain = part.in_proj_weight is not None and part.bias_k is None and not part.add_zero_attn
        return () if plain else None
    if isinstance(part, nn.Sequential | nn.ModuleList) or _heads_of(part) is None:
        return None
    linears = {path: each for path, each in part.named_modules() if type(each) is nn.Linear}
    sides = [(each.in_features, each.out_features) for each in linears.values()]
    if len(linears) == 2:
        (width, fused), (inner, last) = sides
        return tuple(linears) if fused == 3 * inner and last == width else None
    if len(linears) != 4:
        return None
    names = [next((path for path in linears if _letter(path) == letter), "") for letter in "qkv"]
    output = [path for path in linears if path not in names]
    if "" in names or len(output) != 1:
        return None
    shapes = [linears[path].weight.shape for path in (*names, *output)]
    return (*names, *output) if len({*shapes[:3], shapes[3][::-1]}) == 1 else None


def _letter(path: str) -> str:
    """Returns the first letter of a projection's name without prefixes such as "to_", e.g. q for "to_query"."""
    name = re.sub(r"^(to|w|fc|in|linear|lin|proj)_?(?=[qkv](uery|ey|alue)?\b|[qkv]_)", "", path.split(".")[-1].lower())
    return name[:1]


def _heads_of(part: nn.Module) -> int | None:
    """Returns the number of heads that a module stores in one of the attributes HEADS, or None if it stores none."""
    values = [getattr(part, name, None) for name in HEADS]
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


def _group_of(model: nn.Module) -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    """Returns the group of similar blocks with attention that has the most weights, or None if there is no group.

    The result contains the paths of the blocks, the path of the attention in a block, and the attention's projections.
    """
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for path, projections in outermost(model, _projections):
        block = _block_around(model, path)
        if block is not None:
            pattern = re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", block)
            groups.setdefault((pattern, path.removeprefix(f"{block}."), projections), []).append(block)
    sizes = {
        key: sum(num_params(model.get_submodule(path)) for path in blocks)
        for key, blocks in groups.items()
        if len(set(blocks)) == len(blocks)  # a block must have only one attention
    }
    if not sizes:
        return None
    key = max(sizes, key=lambda each: sizes[each])
    return tuple(groups[key]), key[1], key[2]


def _block_around(model: nn.Module, attention: str) -> str | None:
    """Returns the path of the innermost list item that contains this attention and other linear maps, or None."""
    pieces = attention.split(".")
    for end in range(len(pieces) - 1, 0, -1):
        path = ".".join(pieces[:end])
        if not pieces[end - 1].isdigit():
            continue
        inside = (name for name, part in model.get_submodule(path).named_modules() if type(part) is nn.Linear)
        if any(not f"{path}.{name}".startswith(f"{attention}.") for name in inside):
            return path
    return None


def _restructured(
    module: nn.Module, group: tuple[tuple[str, ...], str]
) -> tuple[nn.Module, dict[str, str], tuple[str, ...], str]:
    """Rewrites the blocks of a group, in place, so that they take [batch, tokens, width].

    `group` contains the paths of the blocks, and the path of the attention in a block. The result contains the module,
    a mapping from the new path of every part that moved to its former path, and both entries of `group` with their new
    paths.
    """
    before = {id(part): path for path, part in module.named_modules()}
    holder = nn.Sequential(module)
    blocks, attention = rewritten_(holder, *group)
    after = holder[0].named_modules()
    places = {path: before[id(part)] for path, part in after if before.get(id(part), path) != path}
    return holder[0], places, blocks, attention


def rewritten_(holder: nn.Sequential, blocks: tuple[str, ...], attention: str) -> tuple[tuple[str, ...], str]:
    """Rewrites the blocks of the module in `holder`, in place, so that each is one module for [batch, tokens, width].

    Returns the new paths of the blocks in the module, and the new path of the attention in a block.
    """
    model: nn.Module = holder[0]
    first = model.get_submodule(blocks[0])
    if type(first) is nn.ModuleList:
        blocks, attention = _rewritten_pairs_(holder, blocks, attention)
    module: Any = holder[0].get_submodule(f"{blocks[0]}.{attention}")
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        for path in blocks:
            inner = holder[0].get_submodule(path)
            inner.get_submodule(attention).batch_first = True  # type: ignore[assignment]
            holder[0].set_submodule(path, TokensFirst(inner))
        blocks = tuple(f"{path}.0" for path in blocks)
    return blocks, attention


def _rewritten_pairs_(holder: nn.Sequential, blocks: Sequence[str], attention: str) -> tuple[tuple[str, ...], str]:
    """Replaces a module that loops over (attention, MLP) pairs by a sequence of blocks, in place."""
    model: nn.Module = holder[0]
    above = blocks[0].rpartition(".")[0]  # the list
    path = above.rpartition(".")[0]
    owner = model.get_submodule(path)
    norms = [part for name, part in owner.named_children() if f"{path}.{name}".strip(".") != above]
    made = []
    for block in blocks:
        pair: Any = model.get_submodule(block)
        inside = attention.partition(".")[2]  # "", or a path inside a wrapper with a norm, e.g. "fn"
        part = pair[0].get_submodule(inside)
        wrapper = pair[0]
        norm = getattr(wrapper, "norm", nn.Identity())
        if isinstance(part, nn.Sequential):  # attnrx replaced the module's own attention by a norm and an attention
            norm, part = part
        elif wrapper is part and hasattr(part, "norm"):
            part.norm = nn.Identity()
        made.append(PairedBlock(part, norm, pair[1]).train(wrapper.training))
    # Computes the same as vit-pytorch's Transformer, which calls the pairs one after the other, and then a norm.
    parts = OrderedDict(layers=nn.Sequential(*made), norm=norms[0] if norms else nn.Identity())
    replaced = nn.Sequential(parts).train(owner.training)
    holder.set_submodule(f"0.{path}".rstrip("."), replaced)
    return tuple(f"{path}.layers.{index}".lstrip(".") for index in range(len(made))), "attention"


# The search by the order of calls.


def _observed(
    model: nn.Module, blocks: tuple[str, ...], attention: str, projections: tuple[str, ...]
) -> tuple[str, Structure] | None:
    """Runs the module on random images, and returns the path and structure of the Vision Transformer in it.

    Returns None if the calls do not show the structure of a Vision Transformer.
    """
    inputs = inputs_of(model)
    try:
        origin = UnitsFamily().origin_inside(model) if inputs is None else _packed_origin(model, inputs)
    except NotSupported:
        return None
    images = random_images(model, origin.input_shape, 3)
    named = {part: path for path, part in model.named_modules()}
    # The function mode makes PyTorch's transformers call their parts, which their fast path would skip.
    with BaseTorchFunctionMode(), recording_calls(named, lambda call: call) as found:
        called(model, images)
    # The calls are sorted by when they end.
    paths = [named[call.module] for call in found]
    calls = dict(zip(paths, found, strict=True))
    layers = [f"{block}.{attention}" for block in blocks]
    if any(paths.count(path) != 1 for path in (*blocks, *layers)):
        return None
    given, sequences = ([calls[path].tokens for path in some] for some in (blocks, layers))
    layout = _layout_of(given, sequences)
    if layout is None:
        return None
    (pooling, prefix, grid_axis), tokens, attended = layout, given[0], calls[layers[0]]
    num_patches = tokens[0].numel() // sequences[0].shape[-1] - prefix
    start = next(index for index, path in enumerate(paths) if path.startswith(f"{blocks[0]}."))
    patches = [named[call.module] for call in found[:start] if _makes(call, len(tokens) * num_patches)]
    if not patches or not num_patches:
        return None
    module: Any = attended.module
    heads = module.num_heads if isinstance(module, nn.MultiheadAttention) else _heads_of(module)
    scale = getattr(module, "scale", None)
    norms = [(named[call.module], call) for call in found if hasattr(call.module, "normalized_shape")]
    before = [path for path, call in norms if call.output is attended.tokens and path.startswith(f"{blocks[0]}.")]
    after = [path for path, call in norms if call.tokens is calls[blocks[-1]].output_tokens]
    maps, mlp = _mlp_of(calls[blocks[0]].module, attention)
    own = [path for path in maps if paths.count(f"{blocks[0]}.{path}") == 1]
    maps = maps if len(own) == len(maps) else ()
    # A module that does not take images must be called as a whole, so its path is "".
    path = next(containing([*blocks, patches[-1]])) if inputs is None else ""
    parts = ViTParts(
        blocks=tuple(block.removeprefix(f"{path}.") for block in blocks), attention=attention,
        patches=patches[-1].removeprefix(f"{path}."),
        norm=after[0].removeprefix(f"{path}.") if after and after[0].startswith(path) else "",
        projections=projections, num_heads=heads or 0, scale=scale if isinstance(scale, float) else None,
        returns_weights=isinstance(attended.output, tuple),
        norm_before=before[0].removeprefix(f"{blocks[0]}.") if before else None,
        mlp=(mlp,) if mlp else maps, maps=maps if len(maps) == 2 else (),
        prefix_tokens=prefix, has_class_token=prefix > 0, pooling=pooling, grid_axis=grid_axis,
    )  # fmt: skip
    return path, Structure(parts, origin, num_patches)


def _layout_of(given: Sequence[Any], sequences: Sequence[Any]) -> tuple[str, int, int | None] | None:
    """Returns the pooling, the number of tokens before the patches, and the feature axis of a grid (or None).

    `given` are the inputs of the blocks for three images, and `sequences` are the inputs of their attention modules.
    The result is None if the layout is unknown, e.g. because the blocks attend to sequences of different lengths.
    """
    for some in (given, sequences):
        if any(not isinstance(each, Tensor) or each.shape != some[0].shape for each in some):
            return None
    tokens, before = sequences[0], given[0]
    if tokens.ndim != 3 or not len(tokens) or len(tokens) % 3:  # an image may have several sequences
        return None
    if before.shape == tokens.shape:
        is_same = (before == before[:1]).flatten(2).all(2).all(0)
        prefix = int(is_same.sum())
        # Tokens that are equal in all images are not patches. If they follow the patches, the layout is unknown.
        return ("class" if prefix else "mean", prefix, None) if bool(is_same[:prefix].all()) else None
    # The blocks divide their inputs into sequences, such as windows of a grid or channels of a series.
    axes = [axis for axis in (3, 1) if before.ndim == 4 and before.shape[axis] == tokens.shape[-1]]
    pooling = "parts that make sequences of them"
    return (pooling, 0, axes[0] if axes else None) if axes or before.ndim == 3 else None


def _packed_origin(model: nn.Module, inputs: ModuleInputs) -> Origin:
    zeros, ones = ((each,) * inputs.shape[0] for each in (0.0, 1.0))  # other inputs are not normalized
    return Origin(type(model).__name__, {}, inputs.shape, zeros, ones)


def _makes(call: ModuleCall, count: int) -> bool:
    """Returns whether a call of a convolution or linear map computed `count` patch tokens in total."""
    convolutions = nn.Conv1d | nn.Conv2d | nn.Conv3d
    if not isinstance(call.module, convolutions | nn.Linear) or not isinstance(call.output, Tensor):
        return False
    return call.output.numel() == count * call.output.shape[1 if isinstance(call.module, convolutions) else -1]


def _mlp_of(block: nn.Module, attention: str) -> tuple[tuple[str, ...], str]:
    """Returns the paths of a block's linear maps outside its attention, and the path of the MLP that contains them.

    The path of the MLP is "" unless the MLP has exactly two linear maps and no other weights.
    """
    maps = tuple(
        path for path, part in block.named_modules() if type(part) is nn.Linear and not path.startswith(f"{attention}.")
    )
    if len(maps) != 2:
        return maps, ""
    first, second = (block.get_submodule(path) for path in maps)
    mlp = next(containing(maps))
    inside = list(block.get_submodule(mlp).parameters()) if mlp else []
    is_alone = len(inside) == len([*first.parameters(), *second.parameters()])
    return maps, mlp if is_alone else ""
