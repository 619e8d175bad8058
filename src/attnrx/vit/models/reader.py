"""Vision Transformers of users' own, whose parts a `Reader` states."""

import copy
import json
import sys
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
from attnrx.vit.models.adopted import Adopted, Origin, image_shape
from attnrx.vit.models.adopted_family import AdoptedFamily, unsaved_buffers
from attnrx.vit.models.observation_hooks import evaluating, recording_calls
from attnrx.vit.models.parts import ModelParts, Refusal, last_linear


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

    def parts(self, source: nn.Module) -> ModelParts:
        """Returns where the parts of a model are that this describes."""
        head = () if self.head is None else (self.head,)
        return ModelParts(
            blocks=self.blocks, attention=self.attention, patches=self.patches, norm=self.norm,
            heads=(self.norm, *head), classifiers=last_linear(source, self.head) if self.head else (),
            projections=self.projections, num_heads=self.heads, scale=self.scale,
            returns_weights=self.returns_weights, norm_before=self.norm_before, mlp=(self.mlp,),
            maps=tuple(f"{self.mlp}.{name}" for name in self.maps or ()),
            prefix_tokens=self.prefix_tokens, has_class_token=self.prefix_tokens > 0, pooling=self.pooling,
        )  # fmt: skip


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


class ModuleFamily(AdoptedFamily):
    """Any Vision Transformer with a `Reader`; its class is created again when a model is loaded.

    A saved model holds the name of the class and never code. The class must have been imported when such a model is
    loaded; otherwise the `factory` is used. Nothing is imported or called by a name in a file.
    """

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
        adopted = self.adopt(_with_blueprint(copy.copy(model), blueprint))  # a shallow copy: the model stays as it is
        # Equal logits do not prove `prefix_tokens`, which a user states: the number is compared with a forward pass.
        images = next(adopted.parameters()).new_zeros(1, *adopted.origin.input_shape)
        first_block = self.blocks(adopted.source)[:1]
        with evaluating((adopted,)), recording_calls(first_block, lambda call: call.tokens.shape[1]) as counts:
            adopted(images)
        prefix, patches = self.parts(adopted.source).prefix_tokens, self.positions(adopted)
        if counts != [prefix + patches]:
            raise NotSupported(
                f"{adopted.origin.architecture} cannot be adopted: its blocks receive {counts[0]} tokens, and "
                f"prefix_tokens={prefix} with {patches} patches are {prefix + patches}."
            )
        return adopted

    def adopts(self, model: nn.Module) -> bool:
        return "attnrx_blueprint" in vars(model)

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        return self.parts(model).refusals(model)

    def parts(self, source: nn.Module) -> ModelParts:
        return vars(source)["attnrx_blueprint"].reader.parts(source)

    def origin(self, model: nn.Module) -> Origin:
        blueprint: Blueprint = vars(model)["attnrx_blueprint"]
        reader = blueprint.reader
        (_, height, width), convolution = reader.input_shape, model.get_submodule(reader.patches)
        down, right = convolution.stride  # type: ignore[misc]
        if height % down or width % right:  # type: ignore[operator]
            raise InvalidInput(f"patches of {down} x {right} do not tile {height} x {width}.")
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
        unsaved = [(path, name) for path, name, buffer in unsaved_buffers(model) if buffer.is_meta]
        if unsaved:  # the module itself computes their values: it is created once more, on the CPU
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                computed = factory(**own)
            for path, name in unsaved:
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
