"""Vision Transformers of users' own classes, read without a `Reader`.

Blocks with attention of known parts (a fused projection, four projections, or `nn.MultiheadAttention`) are found by
their names and shapes: DINO, DINOv2, MAE and their descendants, vit-pytorch, `nn.TransformerEncoder`. One pass of
random images then shows the order of the calls: where patches, tokens before them, norms and MLPs are. Nothing is taken
for granted: a copy that returns something else is refused, as for every model.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.support.errors import NotSupported
from attnrx.support.modules import containing, copy_module, outermost, random_images
from attnrx.support.records import from_dict, to_dict
from attnrx.support.shapes import Tensor, TokenBatch
from attnrx.vit.models.adopted import Adopted, Origin
from attnrx.vit.models.adopted_family import AdoptedFamily
from attnrx.vit.models.observation_hooks import evaluating, recording_calls
from attnrx.vit.models.parts import ModelParts, model_name, require_parts
from attnrx.vit.models.units import UnitsFamily

HEADS = ("num_heads", "heads", "n_heads", "nhead", "n_head", "num_attention_heads", "h")


@dataclass(frozen=True)
class Structure:
    """Where the parts of a Vision Transformer are, by their paths, as they were found.

    `blocks` are paths in the model. In a block are `attention`, with its `projections`, `norm_before` it, and the two
    `maps` of the MLP, () where there are others; `mlp` is the module of these alone, "" if there is none. `patches` is
    the map that makes `num_patches` patches of an image of `shape`, `norm` what follows the last block, "" for nothing.
    """

    blocks: tuple[str, ...]
    attention: str
    projections: tuple[str, ...]
    heads: int
    scale: float | None
    returns_weights: bool
    norm_before: str | None
    mlp: str
    maps: tuple[str, ...]
    patches: str
    num_patches: int
    prefix_tokens: int
    norm: str
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class PairedBlock(nn.Module):
    """A block of attention and MLP that their owner holds as a pair, each with a residual connection."""

    def __init__(self, attention: nn.Module, norm: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm, self.attention, self.mlp = norm, attention, mlp

    def forward(self, tokens: TokenBatch) -> TokenBatch:
        tokens = self.attention(self.norm(tokens)) + tokens
        return self.mlp(tokens) + tokens


class PairedBlocks(nn.Module):
    """Blocks one after the other, and a norm: what vit-pytorch's Transformer computes."""

    def __init__(self, blocks: Sequence[nn.Module], norm: nn.Module):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(blocks), norm

    def forward(self, tokens: TokenBatch) -> TokenBatch:
        for block in self.layers:
            tokens = block(tokens)
        return self.norm(tokens)


class TokensFirst(nn.Sequential):
    """A block of [batch, tokens, width], its only part, that is called with [tokens, batch, width]."""

    def __getattr__(self, name: str) -> Any:
        # nn.TransformerEncoder reads parts of its first layer.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "0":
                raise
            return getattr(self[0], name)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self[0](input.transpose(0, 1), *args, **kwargs)
        if isinstance(output, tuple):
            return (output[0].transpose(0, 1), *output[1:])
        return output.transpose(0, 1)


class StructureModel(Adopted):
    """A Vision Transformer of a user's class with attnrx attention."""


class StructureFamily(AdoptedFamily):
    """Vision Transformers whose structure was found; `WholeFamily` adopts them, as modules of users."""

    name = "structure"
    library = ""
    model_type = StructureModel

    def adopts(self, model: nn.Module) -> bool:
        return "attnrx_structure" in vars(model)

    def found(self, model: nn.Module) -> tuple[nn.Module, str] | None:
        """Returns a copy of a module in which the structure of a Vision Transformer was found, with the path of that;
        None where there is none.
        """
        if _group_of(model) is None:
            return None
        holder = nn.Sequential(copy_module(model))
        blocks, attention, projections = rewritten_(holder)
        if any(piece.isdigit() for piece in attention.split(".")):  # a part of a list inside a block
            return None
        with evaluating([holder]):
            structure = _observed(holder[0], blocks, attention, projections)
        if structure is None:
            return None
        path = next(containing([*structure.blocks, structure.patches]))
        source = holder[0].get_submodule(path)
        inside = partial(_inside, path)
        vars(source)["attnrx_structure"] = replace(
            structure,
            blocks=tuple(map(inside, structure.blocks)),
            patches=inside(structure.patches),
            norm=inside(structure.norm) if structure.norm.startswith(path) else "",
        )
        return holder[0], path

    def recognize_(self, module: nn.Module, path: str, description: Mapping[str, Any]) -> nn.Module:
        holder = nn.Sequential(module)
        if _group_of(module) is not None:
            rewritten_(holder)
        structure = from_dict(description["structure"], (Structure,), "structure")
        expected = (structure.patches, *(f"{block}.{structure.attention}" for block in structure.blocks))
        require_parts(holder[0], (path, *(f"{path}.{each}".strip(".") for each in expected)), model_name(module))
        vars(holder[0].get_submodule(path))["attnrx_structure"] = structure
        return holder[0]

    def parts(self, source: nn.Module) -> ModelParts:
        found = _structure(source)
        return ModelParts(
            blocks=found.blocks, attention=found.attention, patches=found.patches, norm=found.norm,
            projections=found.projections, num_heads=found.heads, scale=found.scale,
            returns_weights=found.returns_weights, norm_before=found.norm_before,
            mlp=(found.mlp,) if found.mlp else found.maps, maps=found.maps if len(found.maps) == 2 else (),
            prefix_tokens=found.prefix_tokens, has_class_token=found.prefix_tokens > 0,
            pooling="class" if found.prefix_tokens else "mean",
        )  # fmt: skip

    def num_patches(self, source: nn.Module, input_shape: tuple[int, int, int]) -> int:
        found = _structure(source)
        if isinstance(source.get_submodule(found.patches), nn.Conv2d) and input_shape != found.shape:
            return super().num_patches(source, input_shape)
        return found.num_patches * input_shape[1] * input_shape[2] // (found.shape[1] * found.shape[2])

    def origin(self, model: nn.Module) -> Origin:
        found = _structure(model)
        return Origin(type(model).__name__, {}, found.shape, found.mean, found.std)

    def describe(self, model: nn.Module) -> dict[str, Any]:
        return {**super().describe(model), "structure": to_dict(_structure(self._adopted(model).source))}

    def _resized(self, adopted: Adopted, height: int, width: int) -> Origin:
        """Changes nothing, where the code of the model takes images of any size."""
        try:
            with evaluating([adopted.source]):
                adopted.source(random_images(adopted.source, (adopted.origin.input_shape[0], height, width), 1))
        except Exception:  # the code of a module raises errors of any type
            return super()._resized(adopted, height, width)
        return adopted.origin


def _structure(source: nn.Module) -> Structure:
    return vars(source)["attnrx_structure"]


def _inside(path: str, inner: str) -> str:
    return inner.removeprefix(f"{path}.") if path else inner


# By names and shapes.


def _projections(part: nn.Module) -> tuple[str, ...] | None:
    """Returns the paths of the projections of an attention module, () of nn.MultiheadAttention; None of other parts."""
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
    """Returns which projection a name states: the first letter that is no part of a usual word around it."""
    name = re.sub(r"^(to|w|fc|in|linear|lin|proj)_?(?=[qkv](uery|ey|alue)?\b|[qkv]_)", "", path.split(".")[-1].lower())
    return name[:1]


def _heads_of(part: nn.Module) -> int | None:
    """Returns the number of heads that a part states."""
    values = [getattr(part, name, None) for name in HEADS]
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


def _group_of(model: nn.Module) -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    """Returns the paths of the blocks with the most weights that have attention, its path in a block, and its
    projections; None where there are none.
    """
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for path, projections in outermost(model, _projections):
        block = _block_around(model, path)
        if block is not None:
            pattern = re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", block)
            groups.setdefault((pattern, _inside(block, path), projections), []).append(block)
    sizes = {
        key: sum(parameter.numel() for path in blocks for parameter in model.get_submodule(path).parameters())
        for key, blocks in groups.items()
        if len(set(blocks)) == len(blocks)  # one attention in a block
    }
    if not sizes:
        return None
    key = max(sizes, key=lambda each: sizes[each])
    return tuple(groups[key]), key[1], key[2]


def _block_around(model: nn.Module, attention: str) -> str | None:
    """Returns the path of the smallest numbered part around an attention that has other linear maps too."""
    pieces = attention.split(".")
    for end in range(len(pieces) - 1, 0, -1):
        path = ".".join(pieces[:end])
        if not pieces[end - 1].isdigit():
            continue
        inside = (name for name, part in model.get_submodule(path).named_modules() if type(part) is nn.Linear)
        if any(not f"{path}.{name}".startswith(f"{attention}.") for name in inside):
            return path
    return None


def rewritten_(holder: nn.Sequential) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Makes every block of the module in the holder one part that is called with [batch, tokens, width]; returns the
    paths of the blocks in the module, that of the attention in a block, and those of its projections.
    """
    model: nn.Module = holder[0]
    group = _group_of(model)
    assert group is not None
    blocks, attention, projections = group
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
    return blocks, attention, projections


def _rewritten_pairs_(holder: nn.Sequential, blocks: Sequence[str], attention: str) -> tuple[tuple[str, ...], str]:
    """Replaces the owner of a list of pairs of attention and MLP by blocks that are called."""
    model: nn.Module = holder[0]
    above = blocks[0].rpartition(".")[0]  # the list
    path = above.rpartition(".")[0]
    owner = model.get_submodule(path)
    norms = [part for name, part in owner.named_children() if f"{path}.{name}".strip(".") != above]
    made = []
    for block in blocks:
        pair: Any = model.get_submodule(block)
        inside = attention.partition(".")[2]  # "" or, in a wrapper with a norm, e.g. "fn"
        part = pair[0].get_submodule(inside)
        wrapper = pair[0]
        norm = getattr(wrapper, "norm", nn.Identity())
        if wrapper is part and hasattr(part, "norm"):
            part.norm = nn.Identity()
        made.append(PairedBlock(part, norm, pair[1]).train(wrapper.training))
    replaced = PairedBlocks(made, norms[0] if norms else nn.Identity()).train(owner.training)
    holder.set_submodule(f"0.{path}".rstrip("."), replaced)
    return tuple(f"{path}.layers.{index}".lstrip(".") for index in range(len(made))), "attention"


# By the order of calls.


def _observed(
    model: nn.Module, blocks: tuple[str, ...], attention: str, projections: tuple[str, ...]
) -> Structure | None:
    """Runs the module with random images, and returns its structure as the calls show it; None where they do not."""
    try:
        origin = UnitsFamily().origin_inside(model)
    except NotSupported:
        return None
    images = random_images(model, origin.input_shape, 3)
    named = {part: path for path, part in model.named_modules()}
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no parts
    try:
        with recording_calls(named, lambda call: call) as found:
            model(images)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    # The path, the first tensor, and the output of every call, as it ends.
    order = [(named[call.module], call.tokens, call.output_tokens) for call in found]
    pairs = [isinstance(call.output, tuple) for call in found if named[call.module].endswith(f".{attention}")]
    calls = {path: (entered, left) for path, entered, left in order}
    paths = [path for path, _, _ in order]
    layers = [(block, f"{block}.{attention}") for block in blocks]
    if any(paths.count(path) != 1 for layer in layers for path in layer):
        return None
    tokens = calls[blocks[0]][0]
    if any(not isinstance(calls[path][0], Tensor) or calls[path][0].shape != tokens.shape for path in sum(layers, ())):
        return None
    if tokens.ndim != 3 or len(tokens) != 3:
        return None
    is_same = (tokens == tokens[:1]).flatten(2).all(2).all(0)
    prefix = int(is_same.sum())
    if not bool(is_same[:prefix].all()):  # tokens of no patch behind the patches
        return None
    num_patches = tokens.shape[1] - prefix
    start = next(index for index, path in enumerate(paths) if path.startswith(f"{blocks[0]}."))
    before = [path for path in paths[:start] if _makes(model, path, calls, num_patches)]
    if not before or not num_patches:
        return None
    block: nn.Module = model.get_submodule(blocks[0])
    module: Any = block.get_submodule(attention)
    heads = module.num_heads if isinstance(module, nn.MultiheadAttention) else _heads_of(module)
    scale = getattr(module, "scale", None)
    norm_before = next(
        (_inside(blocks[0], path) for path, _, left in order
         if path.startswith(f"{blocks[0]}.") and left is calls[layers[0][1]][0] and _is_norm(model, path)),
        None,
    )  # fmt: skip
    norm = next((path for path, entered, _ in order if entered is calls[blocks[-1]][1] and _is_norm(model, path)), "")
    maps, mlp = _mlp_of(block, attention)
    own = [path for path in maps if paths.count(f"{blocks[0]}.{path}") == 1]
    return Structure(
        blocks, attention, projections, heads or 0, scale if isinstance(scale, float) else None, pairs[0], norm_before,
        mlp, tuple(own) if len(own) == len(maps) else (), before[-1], num_patches, prefix, norm,
        origin.input_shape, origin.mean, origin.std,
    )  # fmt: skip


def _makes(model: nn.Module, path: str, calls: Mapping[str, Any], count: int) -> bool:
    """Whether a part is a convolution or a linear map that makes so many patches of an image."""
    part, output = model.get_submodule(path), calls[path][1]
    if not isinstance(part, nn.Conv2d | nn.Linear) or not isinstance(output, Tensor):
        return False
    features = output.shape[1] if isinstance(part, nn.Conv2d) else output.shape[-1]
    return output.numel() == 3 * count * features


def _is_norm(model: nn.Module, path: str) -> bool:
    return hasattr(model.get_submodule(path), "normalized_shape")


def _mlp_of(block: nn.Module, attention: str) -> tuple[tuple[str, ...], str]:
    """Returns the linear maps of a block outside its attention, and the module that contains two alone, "" for none."""
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
