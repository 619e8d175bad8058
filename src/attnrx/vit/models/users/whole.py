"""Users' own modules around a Vision Transformer: a backbone with a decoder, several outputs, a head of any class."""

import pkgutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.support.arguments import described, described_error, user_code
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import copy_module, outermost, random_images, tensors_of
from attnrx.support.records import from_dict, to_dict
from attnrx.support.shapes import Bool, Tensor
from attnrx.support.storage import require_finite_tensors
from attnrx.vit.costs import ModelCosts, PartCosts
from attnrx.vit.models.family import Family, LayerShapes, called_with_images
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily, num_params
from attnrx.vit.models.libraries.huggingface_family import saved_names
from attnrx.vit.models.observation_hooks import ModuleCall, counted_by_spec, evaluating, recording_calls
from attnrx.vit.models.parts.mlp import Pair
from attnrx.vit.models.parts.module_inputs import ATTRIBUTE, InputField, ModuleInputs, called, inputs_of
from attnrx.vit.models.parts.record import RECORD, TOKENS, Record, record_of
from attnrx.vit.models.parts.token_reduction import reduction_of
from attnrx.vit.models.parts.vit_parts import model_name, reading_parts, require_parts
from attnrx.vit.models.users.output_kinds import DOUBTS, kind_of_outputs
from attnrx.vit.models.users.reader import Factory, StructureFamily, class_name, created_by, imported_class, prove_units
from attnrx.vit.models.users.units import Cut, UnitsFamily, macs_by_part, separate_pairs
from attnrx.vit.models.working.adopted import Adopted, OwnModel, PlainShape, aliased, chunked_forward, remove_capturing_
from attnrx.vit.models.working.adoption_proof import (
    LIBRARIES,
    difference_of,
    not_finite,
    require_equal_attention,
    require_unchanged,
)
from attnrx.vit.models.working.token_hooks import TokenHook
from attnrx.vit.tokens import TokenLayout

IMAGE_METHODS = ("get_image_features", "encode_image")  # of models of images and texts
PROOF_PATCHES = 16  # the most patches per side of the images of a proof


@dataclass(frozen=True)
class Surroundings:
    """What is around the Vision Transformer of a whole module, as JSON values.

    `name` is "module:class" of the user's class, `factory` "module:function" of the function that creates it (None:
    the class, or its library), `path` that of the Vision Transformer, "" where it is the module itself, and `family`
    that of its library. `read_blocks` are the indices of the blocks whose patch tokens other parts than the next block
    read. `sizes` are the numbers per image of every tensor that is returned, by their places, `outputs` the name of the
    `OutputKind`, and `macs` the multiply-accumulates per image outside of the Vision Transformer. `creation` is how a
    library creates the module, if it does: its `library`, and `architecture` and `arguments` (`AdoptedFamily.create`).
    `by_class` is whether the class without arguments creates it. `call` is what images alone are given to: "forward",
    or one of IMAGE_METHODS where that needs other inputs too. `cuts` are the pairs of maps around the Vision
    Transformer of which units were removed, with the units that are left (`Cut`). `calls` is the number of images that
    the Vision Transformer gets for one input. `lengths` are the numbers of tokens of every sequence that a block gets
    for it, () for one sequence of all tokens per image. `head_calls` is how often its classifier runs for it, None for
    once per image. `inputs` are the fields of `ModuleInputs` where the module takes other
    inputs than images.
    """

    name: str
    factory: str | None
    path: str
    family: str
    read_blocks: tuple[int, ...]
    sizes: Mapping[str, int]
    outputs: str
    macs: int
    creation: Mapping[str, Any] | None = None
    by_class: bool = False
    call: str = "forward"
    cuts: tuple[Cut, ...] = ()
    calls: int = 1
    lengths: tuple[tuple[int, ...], ...] = ()
    head_calls: int | None = None
    inputs: tuple[tuple[Any, ...], ...] = ()

    @property
    def needed(self) -> str:
        """What `load` needs to create a saved module again, "" for nothing."""
        if self.factory is None and self.creation is not None:
            return ""
        if self.by_class:
            return f"import {self.name.partition(':')[0]} first"
        given = "..." if self.factory is None else repr(self.factory)
        return f"attnrx.load(folder, factory={given}) with a function that creates the module with any weights"


class _OfImages(nn.Module):
    """A user's module, called with images alone where its forward needs other inputs too."""

    def __init__(self, module: nn.Module, around: Surroundings):
        super().__init__()
        self.module, self.around = module, around

    @property
    def attnrx_inputs(self) -> ModuleInputs | None:
        """What the module takes other than images."""
        return inputs_of(self.module) if self.around.call == "forward" else None

    def forward(self, images: Tensor) -> Any:
        return _answer(self.module, self.around.call, images)


def _answer(module: nn.Module, call: str, images: Tensor) -> Any:
    """Returns what a module returns for images alone, which are given to this method."""
    if call == "forward":
        return called(module, images)
    features = getattr(module, call)(images)
    return getattr(features, "pooler_output", features)


def _answer_by(call: str, module: nn.Module, images: Tensor) -> Any:
    return _answer(module, call, images)


class _OtherInputs(NotSupported):
    """A module does not take images alone, or returns something else for them than one entry per image."""


class Whole(_OfImages):
    """A working copy of a module of the user's own, `module`, in which the Vision Transformer has attnrx attention.

    Called with images it returns what the user's module returns. A module that needs more than images (a model of
    images and texts) returns its image features. `trunk` is the Vision Transformer in it as a model of its own, with
    the same weights, and `shape` the module without weights.
    """

    trunk: Adopted
    shape: PlainShape

    def __init__(self, module: nn.Module, trunk: Adopted, shape: PlainShape, around: Surroundings):
        super().__init__(module, around)
        self.tokens: nn.Module | None = None
        vars(self).update(trunk=trunk, shape=shape)  # weights have one name only

    def forward(self, images: Tensor) -> Any:
        """Returns what the user's module returns; a batch is computed in chunks on a CPU."""
        inputs = self.attnrx_inputs
        if inputs is None:
            self.trunk._require_images(images)
        return chunked_forward(self, self._forward_chunk, images, self.trunk._max_elements(images))

    def _forward_chunk(self, images: Tensor) -> Any:
        with self.forward_pass():
            return _answer(self.module, self.around.call, images)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The shape of one input: that of the images of the Vision Transformer, if the module takes such images."""
        inputs = self.attnrx_inputs
        return self.trunk.origin.input_shape if inputs is None else inputs.shape

    @property
    def output_sizes(self) -> Mapping[str, int]:
        """The numbers per image of every tensor that is returned, by their places."""
        return self.around.sizes

    def forward_pass(self) -> AbstractContextManager[None]:
        """Runs one forward pass in its context; patches are restored after the blocks whose patches are read."""
        return self.trunk.forward_pass(self.around.read_blocks)

    def weights_around(self) -> list[nn.Parameter]:
        """Returns the weights of all parts around the Vision Transformer."""
        others = self.module._modules.get(TOKENS) or nn.Identity()
        inside = {id(weight) for part in (self.trunk.source, others) for weight in part.parameters()}
        return [weight for weight in self.module.parameters() if id(weight) not in inside]

    def pairs_around(self) -> tuple[Pair, ...]:
        """Returns the pairs of maps around the Vision Transformer between which every unit, e.g. a channel of a
        decoder, is computed from itself alone; paths are those in `module`.
        """
        path = self.around.path
        if not path or self.around.call != "forward":
            return ()
        return separate_pairs(self.module, self.input_shape, path)[0]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "tokens" and "trunk" in vars(self):
            self.trunk.tokens = value  # its costs, features and forward passes are those with the policy


def _of_trunk(name: str) -> Any:
    """Returns the method of this name that is that of the library's family, for the Vision Transformer inside."""

    def method(self: "WholeFamily", model: nn.Module, *arguments: Any) -> Any:
        _, trunk, family = self._of(model)
        return getattr(family, name)(trunk, *arguments)

    method.__doc__ = getattr(AdoptedFamily, name).__doc__
    return method


class WholeFamily(Family):
    """Users' own modules that contain one Vision Transformer of a library, or are one with parts of their own.

    Everything about attention, MLPs and tokens is that of the library's family. A saved model holds the name of the
    class and never code: loading it creates the module by the class without arguments, if that has been imported, or by
    the `factory`.
    """

    name, library, model_type = "whole", "module", Whole

    def __init__(self, libraries: Mapping[str, AdoptedFamily], factory: Factory | None = None):
        self.libraries: dict[str, AdoptedFamily] = {family.name: family for family in libraries.values()}
        self.units, self.structure = UnitsFamily(), StructureFamily()
        self.families = {family.name: family for family in (*self.libraries.values(), self.units, self.structure)}
        self.factory = factory

    def trunks_of(self, model: nn.Module) -> list[tuple[str, AdoptedFamily]]:
        """Returns the paths and the families of the Vision Transformers in a module, the largest first."""

        def family_of(part: nn.Module) -> AdoptedFamily | None:
            families = (family for family in self.libraries.values() if _is_of(part, family))
            return next((family for family in families if not any(family.refusals(part))), None)

        return sorted(outermost(model, family_of), key=lambda each: -num_params(model.get_submodule(each[0])))

    def _creation(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Returns how a library creates a module, as far as the module states it."""
        library = next((each for each in self.libraries.values() if each.adopts(model)), None)
        with suppress(NotSupported):  # its arguments cannot be saved
            stated = None if library is None else library.creation(model)
            return stated and {"library": library.name, **stated}  # type: ignore[union-attr]

    def _by_library(self, creation: Mapping[str, Any]) -> nn.Module:
        return self.libraries[creation["library"]].create(creation["architecture"], creation["arguments"])

    def adopt(
        self,
        model: nn.Module,
        path: str,
        family: AdoptedFamily,
        rewritten: nn.Module | None = None,
        named: Mapping[str, Any] | None = None,
    ) -> Whole:
        """Returns a deep copy of a module whose Vision Transformer, at `path`, has attnrx attention in every layer.

        The copy returns what the module returns, which is checked on random images. `rewritten` is a copy that becomes
        the result, and may have other paths, by default one of the module itself. `named` is how a library creates the
        module, where that is known; the module itself is compared with what is created so.

        Raises:
            NotSupported: The outputs differ, are no tensors with one entry per image, or the Vision Transformer is
                called several times or never.
            InvalidInput: The module has no weights.
        """
        require_finite_tensors(model.state_dict(), model_name(model))
        original = copy_module(model)  # whose own code may change it in a forward pass
        module = aliased(original) if rewritten is None else rewritten
        source = module.get_submodule(path)
        with reading_parts(source, "its parts"):
            family.require_supported(source)
            origin = family.origin_inside(source)
            shape, trunk = PlainShape(module), family.model_type(source, origin)
            places = vars(source).pop("attnrx_places", {})
            vars(trunk).update(plain=PlainShape(original), own=OwnModel(original), places=places)
            trunk.training = model.training
            attention_path = family.parts(source).attention
            replaced = [block.get_submodule(attention_path) for block in family.blocks(source)]
            family._install_(trunk, family._converted_attention(source))
        model = original
        every = tuple(range(len(family.blocks(source))))
        make: Any = self.factory
        if make is not None:
            make = f"{make.__module__}:{make.__qualname__}" if hasattr(make, "__qualname__") else described(make)
        around = Surroundings(class_name(model), make, path, family.name, every, {}, "", 0)
        whole = Whole(module, trunk, shape, around)
        whole.training = model.training
        errors: list[_OtherInputs] = []
        if not path:  # the parts of a library's model have no code of a user's, or it is lost when the model is saved
            require_unchanged(model, partial(called, model), whole.input_shape)
        # A module whose inputs are stated is called with these alone.
        methods = IMAGE_METHODS if path and ATTRIBUTE not in vars(model) else ()
        for call in ("forward", *(name for name in methods if hasattr(model, name))):
            whole.around = replace(whole.around, call=call)
            images = _images_of_proof(model, whole, family)
            try:
                tensors = _proved(model, whole, family, images)
                break
            except _OtherInputs as error:
                errors.append(error)
        else:
            raise NotSupported(str(errors[0])) from errors[0]
        if every:
            run = partial(whole._forward_chunk, images)
            require_equal_attention(whole, run, replaced, family._adapters(trunk))
        prove_units(family, trunk)
        creation, kind = None, None
        if self.factory is None:
            creation = named or self._creation(model)
            if around.name.split(".")[0] not in LIBRARIES:  # whose classes make models of their default sizes
                kind = imported_class(around.name)
        creates = partial(_is_created, module=model, call=whole.around.call, images=images, expected=tensors)
        inputs = vars(model).get(ATTRIBUTE) if whole.around.call == "forward" else None
        whole.around = replace(
            whole.around,
            inputs=() if inputs is None else tuple(map(astuple, inputs.fields)),
            by_class=kind is not None and creates(kind),
            creation=creation if creation and creates(partial(self._by_library, creation)) else None,
            sizes=_output_sizes(whole),
            outputs=_kind(model, whole, images, tensors, _heads(family, whole)),
            read_blocks=_read_blocks(whole, family, images[:1]) if every else (),
        )
        self._count_(whole)
        if every:
            is_alike = False
            # Without hooks, where the last block may compute the class token alone.
            with evaluating((whole,)), suppress(Exception):  # e.g. a norm with one weight per token
                is_alike = not difference_of(tensors, tensors_of(whole._forward_chunk(images)))
            if not is_alike:
                # Its parts after the blocks need the tokens of all patches, though they read one token of them.
                whole.around = replace(whole.around, read_blocks=(*whole.around.read_blocks, every[-1]))
        vars(original)[RECORD] = Record(family.name, trunk.origin, whole.around)
        return whole

    def reads(self, record: Record | None) -> bool:
        return record is not None and record.around is not None

    def refresh_(self, whole: Whole) -> None:
        """States in a working copy that neither a library nor the class of its module creates it, where its user
        changed it after it was loaded.
        """
        around = whole.around
        if around.factory is not None or (not around.needed.startswith("import") and around.creation is None):
            return
        creates = partial(self._by_library, around.creation) if around.creation else imported_class(around.name)
        assert whole.trunk.plain is not None
        sizes = {name: tensor.shape for name, tensor in whole.trunk.plain.model.state_dict().items()}
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                created = {name: tensor.shape for name, tensor in creates().state_dict().items()}  # type: ignore[misc]
        except Exception:  # the code of a module raises errors of any type
            return
        inside = [f"{path}." for path in self._changed_paths(whole)]
        differs = {name for name in sizes.keys() | created.keys() if sizes.get(name) != created.get(name)}
        if any(not any(name.startswith(path) for path in inside) for name in differs):
            whole.around = replace(around, creation=None, by_class=False)

    def _changed_paths(self, whole: Whole) -> Iterator[str]:
        """Yields the paths of the parts that a prescription may have changed."""
        path, family = whole.around.path, self.families[whole.around.family]
        places = vars(whole.trunk).get("places", {})
        for block in family.block_paths(whole.trunk.source):
            inside = f"{path}.{block}".strip(".")
            yield from {inside, *(place for each, place in places.items() if each.startswith(f"{inside}."))}
        for pair in whole.trunk.pairs:
            yield from (f"{path}.{each}".strip(".") for each in (pair.first, pair.second, *pair.between))
        for first, second, between, _ in whole.around.cuts:
            yield from (first, second, *between)

    def viewed(self, model: nn.Module, record: Record) -> Whole:
        around, facts = record.around, record.facts
        family = self.families[around.family]
        if isinstance(family, UnitsFamily) or not facts.get("rewritten", True):
            return self.working(model, record)  # whose parts are others
        source = model.get_submodule(around.path)
        trunk = family.viewed(source, record)
        viewed = Whole(model, trunk, facts["shape"], around)
        viewed.training = model.training
        viewed.tokens = reduction_of(model)
        return viewed

    def working(self, model: nn.Module, record: Record) -> Whole:
        """Returns a working copy of a model with a record of this family."""
        around, facts = record.around, dict(record.facts)
        family: Any = self.families[around.family]
        module, places = aliased(model), dict[str, str]()
        if not facts.get("rewritten", True):
            module, places = family.restructured(module, facts)
            family.recall_(module, around.path, facts)
        source = module.get_submodule(around.path)
        trunk = family.model_type(source, record.origin)
        own = {name: facts[name] for name in ("pairs", "outer_macs", "head") if name in facts}
        vars(trunk).update(plain=PlainShape(model), own=OwnModel(model), places=places, **own)
        trunk.training = source.training
        family._install_(trunk, family._converted_attention(source))
        working = Whole(module, trunk, facts["shape"], around)
        working.training = model.training
        return working

    def resize_(self, model: nn.Module, height: int, width: int) -> None:
        whole, trunk, family = self._of(model)
        before, plain = trunk.origin, trunk.plain
        trunk.plain = None
        family.resize_inside_(trunk, height, width)
        trunk.plain = plain
        family.resize_plain_(trunk, before, height, width, whole.around.path)
        fresh = whole.shape.fresh()
        family.fit_created_(fresh.get_submodule(whole.around.path), trunk.origin, before)
        vars(whole)["shape"] = PlainShape(fresh)
        whole.around = replace(whole.around, sizes=_output_sizes(whole))
        self._count_(whole)

    def keep_units_around_(self, model: nn.Module, pair: Pair, keep: Bool[Tensor, "units"]) -> None:
        """Removes the units that are not kept of one of `Whole.pairs_around`, in place, without a compensation."""
        whole = self._of(model)[0]
        cut = Cut(pair.first, pair.second, pair.between, int(keep.sum()))
        cut.keep_(whole.module, keep)
        whole.trunk.own = None
        whole.around = replace(whole.around, cuts=(*whole.around.cuts, cut))
        self._count_(whole)

    def _count_(self, whole: Whole) -> None:
        """States how the module calls the Vision Transformer for an image, and the MACs of all else, as counted."""
        trunk, family = whole.trunk, self.families[whole.around.family]
        source, attention = trunk.source, family.parts(trunk.source).attention
        layers = [block.get_submodule(attention) for block in family.blocks(source)]
        with counted_by_spec(trunk, family), recording_calls(layers, _sequences) as recorded:
            macs = macs_by_part(whole, random_images(whole, whole.input_shape)[:1])
        lengths = tuple(tuple(n for part, each in recorded if part is layer for n in each) for layer in layers)
        usual = all(each == (family.num_tokens(trunk),) * whole.around.calls for each in lengths)
        whole.around = replace(whole.around, lengths=() if usual else lengths, head_calls=0, macs=0)
        # The classifier has a price where it runs once per image, on the tokens that it pools; else it is of the rest.
        priced = family.costs(trunk).classifier_macs * whole.around.calls
        inside = f"module.{whole.around.path}".rstrip(".")
        if priced and priced == sum(macs.get(f"{inside}.{head}", 0) for head in family.parts(source).heads):
            whole.around = replace(whole.around, head_calls=None)
        whole.around = replace(whole.around, macs=macs[""] - self.costs(whole).product_macs)

    def describe(self, model: nn.Module) -> dict[str, Any]:
        whole, trunk, family = self._of(model)
        return {**family.describe(trunk), "around": to_dict(whole.around, typed=False)}

    def build(self, description: Mapping[str, Any]) -> Whole:
        """Creates the user's module, and inserts attention and MLPs of the described ranks.

        Raises:
            NotSupported: The class has not been imported or needs arguments, and there is no factory.
            UserCodeError: The factory raised an exception.
            InvalidInput: What was created has another Vision Transformer.
        """
        around = from_dict(description["around"], Surroundings)
        family = self.families[around.family]
        if self.factory is None and around.creation is not None:
            create: Factory | None = partial(self._by_library, around.creation)
        else:
            create = self.factory or (imported_class(around.name) if around.by_class else None)
        # With values, also where a model is loaded on the meta device: the code of a module may read them.
        with torch.device("cpu"):
            module = created_by(create, around.name, around.needed)
        if around.inputs:
            vars(module)[ATTRIBUTE] = ModuleInputs(tuple(InputField(*each) for each in around.inputs))
        plain = PlainShape(module)
        module = family.recognize_(module, around.path, description)
        if around.inputs:
            vars(module)[ATTRIBUTE] = ModuleInputs(tuple(InputField(*each) for each in around.inputs))
        require_parts(module, (around.path,), around.name)
        source = module.get_submodule(around.path)
        if not _is_of(source, family):
            raise InvalidInput(f"{around.path or 'the model'} of {around.name} is no model of {family.library}.")
        origin = family.described_origin(description)
        with torch.device("cpu"):
            family.fit_created_(source, origin)
        shape = PlainShape(module)
        plain = plain if isinstance(family, StructureFamily) else shape  # a restructured module is another one
        for cut in around.cuts:
            Cut(*cut).shape_(module)
        places = vars(source).pop("attnrx_places", {})
        trunk = family.shaped(source, description)
        vars(trunk).update(plain=plain, places=places)
        return Whole(module, trunk, shape, around)

    def library_model(self, model: nn.Module) -> nn.Module:
        whole, _, _ = self._of(model)
        fresh = whole.shape.fresh()
        takes_images = whole.around.call == "forward" and whole.attnrx_inputs is None
        return fresh if takes_images else _OfImages(fresh, whole.around)

    def costs_with(self, model: nn.Module, shapes: LayerShapes) -> ModelCosts:
        whole, trunk, family = self._of(model)
        around, plain = whole.around, family.costs_with(trunk, shapes)
        before = family.num_tokens(trunk)
        full = around.lengths or ((before,) * around.calls,) * len(plain.layers)
        # A policy removes the same number of tokens from every sequence.
        lengths = [
            [length - before + layer.tokens for length in each] for layer, each in zip(plain.layers, full, strict=True)
        ]
        heads = around.calls if around.head_calls is None else around.head_calls
        costs = plain.called(lengths, around.calls, heads)
        outside = sum(weight.numel() for weight in whole.weights_around())
        classifier = PartCosts(costs.classifier.params + outside, costs.classifier.macs + around.macs)
        return replace(costs, classifier=classifier)

    def token_layout(self, model: nn.Module) -> TokenLayout:
        whole, trunk, family = self._of(model)
        usual = family.num_tokens(trunk)
        others = sorted({length for each in whole.around.lengths for length in each} - {usual})
        if others:
            raise NotSupported(
                f"{whole.around.name} gives its blocks sequences of {', '.join(map(str, others))} tokens, and an image "
                f"has {usual} with those before its patches; tokens can be pruned only where all sequences are these."
            )
        try:
            return family.token_layout(trunk)
        except NotSupported:
            parts = family.parts(trunk.source)
            if not parts.prefix_tokens:
                raise
            # All patches are restored where they are read, so that the pooling is that of the module itself.
            return TokenLayout(parts.prefix_tokens, family.positions(trunk), parts.has_class_token, "class")

    def restored_blocks(self, model: nn.Module) -> Container[int]:
        return self._of(model)[0].around.read_blocks

    reads_attention = _of_trunk("reads_attention")
    installed_ = _of_trunk("installed_")
    attention = _of_trunk("attention")
    specs = _of_trunk("specs")
    set_attention_ = _of_trunk("set_attention_")
    mlp = _of_trunk("mlp")
    set_mlp_ = _of_trunk("set_mlp_")
    has_plain_units = _of_trunk("has_plain_units")
    keep_units_ = _of_trunk("keep_units_")
    geometry = _of_trunk("geometry")
    patch_features = _of_trunk("patch_features")
    patch_embedding = _of_trunk("patch_embedding")
    pooled_norm = _of_trunk("pooled_norm")
    num_tokens = _of_trunk("num_tokens")

    def input_shape(self, model: nn.Module) -> tuple[int, int, int]:
        return self._of(model)[0].input_shape

    def normalization(self, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
        whole, trunk, family = self._of(model)
        channels, own = whole.input_shape[0], family.normalization(trunk)
        return own if len(own[0]) == channels else ((0.0,) * channels, (1.0,) * channels)

    def inputs(self, model: nn.Module) -> ModuleInputs | None:
        return self._of(model)[0].attnrx_inputs

    def block_names(self, model: nn.Module) -> tuple[str, ...]:
        whole, trunk, family = self._of(model)
        paths = (path.removeprefix("source") for path in family.block_names(trunk))
        inside = "module." if isinstance(model, Whole) else ""
        return tuple((f"{inside}{whole.around.path}".rstrip(".") + path).lstrip(".") for path in paths)

    def knows_normalization(self, model: nn.Module) -> bool:
        _, trunk, family = self._of(model)
        return family.knows_normalization(trunk) and bool(trunk.origin.preprocessing)

    def saved_names(self, model: nn.Module) -> Mapping[str, str]:
        return saved_names(model) if hasattr(model, "save_pretrained") else {}

    def caller(self, model: nn.Module) -> Callable[[nn.Module, Tensor], Any]:
        record = record_of(model)
        return called_with_images if record is None else partial(_answer_by, record.around.call)

    def output_kind(self, model: nn.Module) -> str:
        return self._of(model)[0].around.outputs

    def output_doubt(self, model: nn.Module) -> str:
        return DOUBTS.get(self.output_kind(model), "")

    def heads(self, model: nn.Module) -> tuple[nn.Module, ...]:
        """Returns the classifiers of a module without other parts around; those of others are not known."""
        whole, trunk, family = self._of(model)
        return () if whole.around.path else family.heads(trunk)

    def _of(self, model: nn.Module) -> tuple[Whole, Adopted, AdoptedFamily]:
        whole: Whole = self._own(model)
        return whole, whole.trunk, self.families[whole.around.family]


def needed_to_load(model: nn.Module) -> str:
    """Returns what `load` needs to create a saved model again, "" for nothing."""
    record = record_of(model)
    around = model.around if isinstance(model, Whole) else None if record is None else record.around
    return "" if around is None else around.needed


def _is_of(part: nn.Module, family: AdoptedFamily) -> bool:
    """Whether a part is a model of the family's library, or of a subclass of one."""
    return family.adopts(part) or any(
        base.__module__.split(".")[0] == family.library and base.__module__ != "timm.layers"
        for base in type(part).__mro__
    )


def named_function(name: str) -> Callable[..., nn.Module]:
    """Imports a function by "module:function", as the user gave it.

    Raises:
        InvalidInput: There is no such function.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(
            f"factory={name!r:.80} cannot be imported ({error}): give a function, or 'module:function' of one that "
            "creates the module."
        ) from error


def _is_created(create: Factory, module: nn.Module, call: str, images: Tensor, expected: Mapping[str, Tensor]) -> bool:
    """Whether a function creates the module, up to its weights, with which it has the expected outputs."""
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            created = create().to(images)
            vars(created).update({ATTRIBUTE: own} if (own := vars(module).get(ATTRIBUTE)) else {})
        created.load_state_dict(module.state_dict())
        # The text of a module shows what its outputs in evaluation do not, as rates of dropout.
        with evaluating((created,)):
            answer = tensors_of(_answer(created, call, images))
        return repr(created) == repr(module) and not difference_of(expected, answer)
    except Exception:  # the code of a module raises errors of any type
        return False


def _output_sizes(whole: Whole) -> dict[str, int]:
    """Returns the sizes of the outputs for one image of the size that the Vision Transformer takes, by their places.

    Raises:
        NotSupported: The module does not take such images.
    """
    height, width = whole.trunk.origin.input_shape[1:]
    with (
        evaluating((whole,)),
        user_code(f"{whole.around.name} does not take images of {height} x {width}: it", NotSupported),
    ):
        tensors = tensors_of(whole(random_images(whole, whole.input_shape)[:1]))
    return {name: tensor[0].numel() for name, tensor in tensors.items()}


def _images_of_proof(model: nn.Module, whole: Whole, family: AdoptedFamily) -> Tensor:
    """Returns two random images for the proof: small ones where the module interpolates its position embeddings, since
    a pass of a DINOv2 at its stated 518 x 518 pixels takes seven times that of 16 x 16 patches.
    """
    patches = whole.trunk.source.get_submodule(family.parts(whole.trunk.source).patches)
    stride = patches.stride if isinstance(patches, nn.Conv2d) and whole.attnrx_inputs is None else ()
    channels, *own = whole.trunk.origin.input_shape
    size = [min(PROOF_PATCHES * step, side) for step, side in zip(stride, own, strict=False)]
    if size not in ([], own):
        small = random_images(whole, (channels, *size))
        with evaluating((model,)), suppress(Exception):  # the code of a module raises errors of any type
            _answer(model, whole.around.call, small)
            return small
    return random_images(whole, whole.input_shape)


def _proved(model: nn.Module, whole: Whole, family: AdoptedFamily, images: Tensor) -> dict[str, Tensor]:
    """Returns the outputs of a module for two images, after they were compared with those of its copy.

    Raises:
        _OtherInputs: It does not take images alone.
        NotSupported: They differ, or are no tensors of real numbers with one entry per image.
    """
    name, answer = whole.around.name, partial(_answer, model, whole.around.call)
    source = whole.trunk.source  # of which a method other than `forward` may be called
    patches = source.get_submodule(family.parts(source).patches)

    def count(call: ModuleCall) -> int:  # the images of a call
        return len(call.tokens) if isinstance(call.tokens, Tensor) else len(images)

    with evaluating((model, whole)):
        try:
            expected = tensors_of(answer(images))
        except Exception as error:  # the code of a module raises errors of any type
            raise _OtherInputs(
                f"{name} cannot be adopted: with images of shape {tuple(images.shape)} it raises "
                f"{type(error).__name__}: {described_error(error)}. Of a module that takes other inputs give "
                "an example of them, attnrx.load(module, inputs=...), or one around it whose forward takes images."
            ) from error
        again, alone = tensors_of(answer(images)), tensors_of(answer(images[:1]))
        with recording_calls((patches,), count) as calls:
            actual = tensors_of(whole._forward_chunk(images))
    if not calls or sum(calls) % len(images):
        raise NotSupported(
            f"{name} cannot be adopted: for {len(images)} inputs it calls {whole.around.path or 'its parts'} with "
            f"{sum(calls)} images."
        )
    whole.around = replace(whole.around, calls=sum(calls) // len(images))
    if not expected or any(not tensor.ndim or len(tensor) != len(images) for tensor in expected.values()):
        shapes = {place: tuple(tensor.shape) for place, tensor in expected.items()}
        raise _OtherInputs(
            f"{name} cannot be adopted: for 2 images it returns {shapes or 'no tensor of real numbers'}, and every "
            "tensor must have one entry per image."
        )
    for place, tensor in expected.items():
        if problem := not_finite(tensor):
            raise NotSupported(f"{name} cannot be adopted: output {place}".rstrip() + f" has {problem}.")
    for found, size, when in ((again, len(images), "in every call"), (alone, 1, "in a batch than alone")):
        difference = difference_of({place: tensor[:size] for place, tensor in expected.items()}, found)
        if difference:
            raise NotSupported(f"{name} cannot be adopted: an image has other outputs {when}: {difference}.")
    difference = difference_of(expected, actual)
    if difference:
        raise NotSupported(
            f"{name} cannot be adopted: on random images {difference}. Its attention computes something else than "
            "plain softmax attention, or the module changes or replaces a part in its forward."
        )
    return expected


def _kind(
    model: nn.Module, whole: Whole, images: Tensor, tensors: Mapping[str, Tensor], heads: Sequence[nn.Linear]
) -> str:
    """Returns the name of the kind of outputs of a module; features that a method returns are an embedding."""
    call = whole.around.call
    if call != "forward" and all(tensor.ndim == 2 for tensor in tensors.values()):
        return "embedding"
    return kind_of_outputs(model, partial(_answer, model, call, images), tensors, heads, whole.around.name)


def _heads(family: AdoptedFamily, whole: Whole) -> list[nn.Linear]:
    """Returns the linear maps outside of the blocks."""
    inside = {id(part) for block in family.blocks(whole.trunk.source) for part in block.modules()}
    return [part for part in whole.module.modules() if isinstance(part, nn.Linear) and id(part) not in inside]


def _sequences(call: ModuleCall) -> tuple[nn.Module, list[int]]:
    """Returns a module and the number of tokens of every sequence in a call of it."""
    count, width = call.tokens.shape[-2:]
    return call.module, [count] * (call.tokens.numel() // (count * width))


def _read_blocks(whole: Whole, family: AdoptedFamily, images: Tensor) -> tuple[int, ...]:
    """Returns the blocks whose patch tokens are read by other parts than the next block, in a pass of the images.

    Its patches are changed for all parts but the next block, in a pass: the outputs show whether any part reads them.
    """
    blocks = family.blocks(whole.trunk.source)
    prefix = family.parts(whole.trunk.source).prefix_tokens
    present: dict[int, Tensor] = {}

    def change(index: int, scale: float, first: int, tokens: Tensor) -> Tensor:
        present[index] = tokens
        noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1)).to(tokens) * (1 + tokens.std())
        noise[:, :first] = 0
        return tokens + scale * noise

    def outputs(indices: Sequence[int], scale: float, first: int) -> dict[str, Tensor]:
        remove_capturing_(whole)  # so that the hooks of transformers are called after those below
        with ExitStack() as hooks:
            for index in indices:
                changed = TokenHook(partial(change, index, scale, first))
                hooks.enter_context(blocks[index].register_forward_hook(changed, with_kwargs=True))
                if index + 1 < len(blocks):
                    kept = TokenHook(lambda _, index=index: present[index])
                    hooks.enter_context(blocks[index + 1].register_forward_pre_hook(kept, with_kwargs=True))
            return tensors_of(_answer(whole.module, whole.around.call, images))

    def changes(indices: Sequence[int], first: int) -> bool:
        # With the same hooks both times, so that both have the same rounding.
        pair = outputs(indices, 0.0, first), outputs(indices, 1.0, first)
        return any(not torch.equal(tensor, pair[1][name]) for name, tensor in pair[0].items())

    *earlier, last = range(len(blocks))
    with evaluating((whole,)):
        if not changes([last], 0):  # a head of zeros reads nothing yet
            return tuple(range(len(blocks)))
        # All at once first: most modules read the last block alone.
        found = [index for index in earlier if changes([index], prefix)] if changes(earlier, prefix) else []
        return (*found, *([last] if changes([last], prefix) else []))
