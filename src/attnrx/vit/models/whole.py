"""Users' own modules around a Vision Transformer: a backbone with a decoder, several outputs, a head of any class."""

import copy
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.support.arguments import described, described_error, user_code
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import copy_module, outermost, random_images, tensors_of
from attnrx.support.records import fields_of, of_fields
from attnrx.support.shapes import Bool, Tensor
from attnrx.support.storage import require_finite_tensors
from attnrx.vit.costs import ModelCosts, PartCosts
from attnrx.vit.models.adopted import Adopted, chunked_forward
from attnrx.vit.models.adopted_family import AdoptedFamily, num_params
from attnrx.vit.models.adoption_proof import LIBRARIES, difference_of, require_unchanged
from attnrx.vit.models.family import Family, LayerShapes
from attnrx.vit.models.mlp import Pair
from attnrx.vit.models.module_inputs import ATTRIBUTE, Field, ModuleInputs, called, inputs_of
from attnrx.vit.models.observation_hooks import ModuleCall, evaluating, recording_calls
from attnrx.vit.models.parts import model_name, reading_parts, require_parts
from attnrx.vit.models.reader import Factory, StructureFamily, class_name, created_by, imported_class, prove_units
from attnrx.vit.models.substitute import Substitute, remove_capturing_
from attnrx.vit.models.token_hooks import TokenHook
from attnrx.vit.models.units import Cut, UnitsFamily, macs_by_part, separate_pairs
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
    the Vision Transformer gets for one input. `inputs` are the fields of `ModuleInputs` where the module takes other
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


class _OtherInputs(NotSupported):
    """A module does not take images alone, or returns something else for them than one entry per image."""


class _Shape:
    """The user's module without weights, from which one with fresh weights is made; shared by all copies of a model."""

    def __init__(self, module: nn.Module):
        self.module = _with_weights(module, lambda weight: torch.empty_like(weight, device="meta"))
        remove_capturing_(self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shape":
        return self

    def fresh(self) -> nn.Module:
        """Returns the module with small random weights from seed 0."""
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = partial(torch.nn.init.normal_, std=0.02, generator=generator)
        return _with_weights(self.module, lambda weight: drawn(torch.empty_like(weight, device="cpu"))).eval()


def _with_weights(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns a copy of a module with other weights, made of each; the values of its buffers stay, since those that are
    not saved are computed by the code of the module.
    """
    weights = {id(each): nn.Parameter(make(each), each.requires_grad) for each in module.parameters()}
    return copy.deepcopy(module, weights)


class Whole(Substitute, _OfImages):
    """A module of the user's own, `module`, in which the Vision Transformer has attnrx attention.

    Called with images, or with any arguments of the user's module, it returns what that returns. A module that needs
    more than images (a model of images and texts) returns its image features for images alone. `trunk` is the Vision
    Transformer in it as a model of its own, with the same weights.
    """

    original_name = "module"
    trunk: Adopted
    shape: _Shape

    def __init__(self, module: nn.Module, trunk: Adopted, shape: _Shape, around: Surroundings):
        super().__init__(module, around)
        self.tokens: nn.Module | None = None
        vars(self).update(trunk=trunk, shape=shape)  # weights have one name only

    def forward(
        self,
        images: Any = None,
        *args: Any,
        # Named, because the Trainer of transformers passes the columns of its data that the signature names.
        pixel_values: Any = None,
        labels: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Returns what the user's module returns; a batch of images alone is computed in chunks on a CPU."""
        named = {"pixel_values": pixel_values, "labels": labels}
        kwargs.update((name, value) for name, value in named.items() if value is not None)
        inputs = self.attnrx_inputs
        is_own = inputs is not None and isinstance(images, Tensor) and images.shape[1:] != inputs.shape
        if args or kwargs or not isinstance(images, Tensor) or is_own:
            with self.forward_pass():
                return self.module(*(() if images is None else (images,)), *args, **kwargs)
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
        inside = set(map(id, self.trunk.source.parameters()))
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
        module = copy_module(model) if rewritten is None else rewritten
        source = module.get_submodule(path)
        with reading_parts(source, "its parts"):
            family.require_supported(source)
            origin = family.origin_inside(source)
            trunk = family.model_type(source, origin)
            trunk.training = model.training
            shape = _Shape(module)
            family._install_(trunk, family._converted_attention(source))
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
            outputs=_kind_of(family, whole, tensors),
            macs=_outer_macs(whole, family),
            read_blocks=_read_blocks(whole, family, images[:1]) if every else (),
        )
        if every:
            is_alike = False
            # Without hooks, where the last block may compute the class token alone.
            with evaluating((whole,)), suppress(Exception):  # e.g. a norm with one weight per token
                is_alike = not difference_of(tensors, tensors_of(whole._forward_chunk(images)))
            if not is_alike:
                # Its parts after the blocks need the tokens of all patches, though they read one token of them.
                whole.around = replace(whole.around, read_blocks=(*whole.around.read_blocks, every[-1]))
        return whole

    def resize_(self, model: nn.Module, height: int, width: int) -> None:
        whole, trunk, family = self._of(model)
        before = trunk.origin
        family.resize_inside_(trunk, height, width)
        fresh = whole.shape.fresh()
        family.fit_created_(fresh.get_submodule(whole.around.path), trunk.origin, before)
        vars(whole)["shape"] = _Shape(fresh)
        whole.around = replace(whole.around, sizes=_output_sizes(whole), macs=_outer_macs(whole, family))

    def keep_units_around_(self, model: nn.Module, pair: Pair, keep: Bool[Tensor, "units"]) -> None:
        """Removes the units that are not kept of one of `Whole.pairs_around`, in place, without a compensation."""
        whole, _, family = self._of(model)
        cut = Cut(pair.first, pair.second, pair.between, int(keep.sum()))
        cut.keep_(whole.module, keep)
        whole.around = replace(whole.around, cuts=(*whole.around.cuts, cut), macs=_outer_macs(whole, family))

    def describe(self, model: nn.Module) -> dict[str, Any]:
        whole, trunk, family = self._of(model)
        return {**family.describe(trunk), "around": fields_of(whole.around)}

    def build(self, description: Mapping[str, Any]) -> Whole:
        """Creates the user's module, and inserts attention and MLPs of the described ranks.

        Raises:
            NotSupported: The class has not been imported or needs arguments, and there is no factory.
            UserCodeError: The factory raised an exception.
            InvalidInput: What was created has another Vision Transformer.
        """
        around = of_fields(Surroundings, description["around"])
        family = self.families[around.family]
        if self.factory is None and around.creation is not None:
            create: Factory | None = partial(self._by_library, around.creation)
        else:
            create = self.factory or (imported_class(around.name) if around.by_class else None)
        # With values, also where a model is loaded on the meta device: the code of a module may read them.
        with torch.device("cpu"):
            module = created_by(create, around.name, around.needed)
        module = family.recognize_(module, around.path, description)
        if around.inputs:
            vars(module)[ATTRIBUTE] = ModuleInputs(tuple(Field(*each) for each in around.inputs))
        require_parts(module, (around.path,), around.name)
        source = module.get_submodule(around.path)
        if not _is_of(source, family):
            raise InvalidInput(f"{around.path or 'the model'} of {around.name} is no model of {family.library}.")
        origin = family.described_origin(description)
        with torch.device("cpu"):
            family.fit_created_(source, origin)
        shape = _Shape(module)
        for cut in around.cuts:
            Cut(*cut).shape_(module)
        return Whole(module, family.shaped(source, description), shape, around)

    def library_model(self, model: nn.Module) -> nn.Module:
        whole, _, _ = self._of(model)
        fresh = whole.shape.fresh()
        takes_images = whole.around.call == "forward" and whole.attnrx_inputs is None
        return fresh if takes_images else _OfImages(fresh, whole.around)

    def costs_with(self, model: nn.Module, shapes: LayerShapes) -> ModelCosts:
        whole, trunk, family = self._of(model)
        costs = family.costs_with(trunk, shapes).repeated(whole.around.calls)
        outside = sum(weight.numel() for weight in whole.weights_around())
        classifier = PartCosts(costs.classifier.params + outside, costs.classifier.macs + whole.around.macs)
        return replace(costs, classifier=classifier)

    def token_layout(self, model: nn.Module) -> TokenLayout:
        _, trunk, family = self._of(model)
        try:
            return family.token_layout(trunk)
        except NotSupported:
            parts = family.parts(trunk.source)
            if not parts.prefix_tokens:
                raise
            # All patches are restored where they are read, so that the pooling is that of the module itself.
            return TokenLayout(parts.prefix_tokens, family.positions(trunk), parts.has_class_token, "class")

    reads_attention = _of_trunk("reads_attention")
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
        return tuple(f"module.{whole.around.path}".rstrip(".") + path for path in paths)

    def knows_normalization(self, model: nn.Module) -> bool:
        _, trunk, family = self._of(model)
        return family.knows_normalization(trunk) and bool(trunk.origin.preprocessing)

    def output_kind(self, model: nn.Module) -> str:
        return self._of(model)[0].around.outputs

    def heads(self, model: nn.Module) -> tuple[nn.Module, ...]:
        """Returns the classifiers of a module without other parts around; those of others are not known."""
        whole, trunk, family = self._of(model)
        return () if whole.around.path else family.heads(trunk)

    def _of(self, model: nn.Module) -> tuple[Whole, Adopted, AdoptedFamily]:
        whole: Whole = self._own(model)
        return whole, whole.trunk, self.families[whole.around.family]


def needed_to_load(model: nn.Module) -> str:
    """Returns what `load` needs to create a saved model again, "" for nothing."""
    return model.around.needed if isinstance(model, Whole) else ""


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


def _kind_of(family: AdoptedFamily, whole: Whole, tensors: Mapping[str, Tensor]) -> str:
    """Returns the kind of the outputs by their shapes: one row per image is that of logits or an embedding."""
    if len(tensors) > 1:
        return "several"
    (tensor,) = tensors.values()
    if tensor.ndim != 2:
        return "map"
    if whole.around.call != "forward":
        return "embedding"
    sums = tensor.sum(1)
    if tensor.shape[1] > 1 and bool((tensor >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        raise NotSupported(
            f"{whole.around.name} returns probabilities: outputs are compared as logits. Remove the softmax at its end."
        )
    # Logits if a linear map with so many outputs is the last part, else features.
    linears = [part for part in whole.module.modules() if isinstance(part, nn.Linear)]
    inside = {id(part) for block in family.blocks(whole.trunk.source) for part in block.modules()}
    heads = [part for part in linears if id(part) not in inside and part.out_features == tensor.shape[1]]
    return "logits" if heads or (not whole.around.path and family.heads(whole.trunk)) else "embedding"


def _outer_macs(whole: Whole, family: AdoptedFamily) -> int:
    """Returns the MACs per image outside of the Vision Transformer, or of the parts of it that are read, counted in a
    forward pass.
    """
    source, path = whole.trunk.source, f"module.{whole.around.path}".rstrip(".")
    macs = macs_by_part(_OfImages(whole.module, whole.around), random_images(whole, whole.input_shape)[:1])
    if isinstance(family, StructureFamily):
        inside = [f"{path}.{part}" for part in (*family.block_paths(source), family.parts(source).patches)]
    else:  # its parts too: the module may call a method of it, and not the whole
        inside = [name for name in macs if f"{name}.".startswith(f"{path}.")]
    parts = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
    return macs[""] - sum(macs.get(name, 0) for name in parts)


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
