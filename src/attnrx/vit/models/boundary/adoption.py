"""Adopts models: replaces the attention layers in a working copy, and checks that the copy computes the same outputs.

A model is either a library's model, which the library can create again, or a user's module. Such a module contains the
Vision Transformer at some path, and may have other parts around it (`Surroundings`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.support.arguments import described, described_error
from attnrx.support.errors import AttnrxError, InvalidInput, NotSupported
from attnrx.support.modules import copy_module, evaluating, random_images, tensors_of
from attnrx.support.shapes import Tensor
from attnrx.support.storage import require_finite_tensors
from attnrx.vit.models.boundary.whole import created_by_library, library_creation
from attnrx.vit.models.families import LIBRARIES, family_of, known_family, require_no_supported_part, trunks_of
from attnrx.vit.models.family import require_ordinary_tensors
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily, output_sizes
from attnrx.vit.models.observation_hooks import ModuleCall, recording_calls
from attnrx.vit.models.parts.module_inputs import ATTRIBUTE, ModuleInputs
from attnrx.vit.models.parts.record import RECORD, Record
from attnrx.vit.models.parts.surroundings import IMAGE_METHODS, Surroundings, answered
from attnrx.vit.models.parts.vit_parts import model_name, reading_parts
from attnrx.vit.models.users.output_kinds import kind_of_outputs
from attnrx.vit.models.users.reader import Factory, StructureFamily, class_name, imported_class
from attnrx.vit.models.users.units import UnitsFamily, unmixed
from attnrx.vit.models.working.adopted import Adopted, PlainShape, aliased, remove_capturing_
from attnrx.vit.models.working.adoption_proof import (
    PLAIN_PACKAGES,
    difference_of,
    differing_block,
    first_not_finite,
    not_finite,
    outputs_of,
    require_equal_attention,
    require_plain_code,
    require_unchanged,
)
from attnrx.vit.models.working.token_hooks import TokenHook

PROOF_PATCHES = 16  # images for a proof have at most this many patches per side
OTHER_ATTENTION = (
    "its attention computes something else than plain softmax attention, its heads, its scale or the order of its "
    "projections are not those that were read, or it changes or replaces a part in its forward"
)


class _NotCalled(NotSupported):
    """Raised if a module never calls a Vision Transformer inside it, e.g. because it only calls its blocks."""


class _OtherInputs(NotSupported):
    """Raised if a module cannot be called with images alone, or does not return one entry per image."""


def adopted_instance(
    model: nn.Module, factory: Factory | None, inputs: Any = None, image_size: tuple[int, int] | None = None
) -> nn.Module:
    """Returns a working copy of a module of any class, or the module itself if it belongs to a known family.

    `factory` is a function that creates the module again. If the module cannot be called with images alone, `inputs` is
    an example of its inputs. `image_size` is passed to `adopt`.

    Raises:
        NotSupported: The module has an unsupported feature, or attnrx can read no part of it.
        InvalidInput: The module has no weights, or the inputs are not tensors.
    """
    if known_family(model) is not None:
        return model
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):  # attnrx does not manage its replicas
        raise NotSupported(
            f"{model_name(model)} is not supported, but the {type(model.module).__name__} in it is: give "
            "model.get_submodule('module')."
        )
    if inputs is None:
        return adopt_any(model, factory, image_size=image_size)
    # The inputs are stored on a shallow copy, so the user's model is unchanged. Copies of the copy keep them.
    marked = copy(model)
    vars(marked)[ATTRIBUTE] = ModuleInputs.of(inputs)
    return adopt_any(marked, factory)


def adopt_any(
    model: nn.Module,
    factory: Factory | None = None,
    creation: Mapping[str, Any] | None = None,
    image_size: tuple[int, int] | None = None,
    **stated: Any,
) -> nn.Module:
    """Adopts the largest part of a module that attnrx can read.

    If the module is not a supported library model, attnrx tries the Vision Transformers inside it, starting with the
    largest. If there are none, or if the module uses only parts of them, attnrx searches for transformer blocks by the
    names and shapes of their parts, and then tries to read only the MLPs. `creation` describes how a library creates
    the model. `image_size` is passed to `adopt` for a user's module. `stated` contains fields of the model's `Origin`
    that cannot be read from the model itself.

    Raises:
        NotSupported: The module has an unsupported feature, or attnrx can read no part of it.
    """
    takes_images = ATTRIBUTE not in vars(model)
    library = next((each for each in LIBRARIES.values() if takes_images and each.adopts(model)), None)
    if library is None and takes_images:
        require_no_supported_part(model)
    require_plain_code(model)
    require_ordinary_tensors(model)
    refusals = () if library is None else tuple(library.refusals(model))
    inside = partial(adopt, factory=factory, creation=creation, image_size=image_size)  # as a user's module
    units = partial(inside, UnitsFamily(), model, "")
    attempts: Sequence[Callable[[], Any]]
    # The error should describe the model itself, not an attempt to read only a part of it.
    shown = 0
    trunks = trunks_of(model) if library is None or refusals else []
    if trunks:
        # Only the first trunk that the module calls is adopted. The others stay unchanged.
        attempts = [partial(inside, family, model, path) for path, family in trunks]
    elif library is None:
        attempts, shown = (
            [*_structured(model, inside), units, *([partial(family_of, model)] if takes_images else [])],
            -1,
        )
    elif any(refusal.is_of_class for refusal in refusals):
        attempts, shown = [units, partial(adopt, library, model)], -1
    else:  # the second attempt is for a model that its library cannot create again, e.g. with a user's own part
        attempts = [partial(adopt, library, model, **stated), partial(inside, library, model, "")]
    errors: list[AttnrxError] = []
    for attempt in attempts:
        try:
            return attempt()
        except AttnrxError as error:
            if not errors and not isinstance(error, NotSupported):
                raise
            errors.append(error)
    if trunks and all(isinstance(error, _NotCalled) for error in errors):
        for attempt in (*_structured(model, inside), units):  # the module calls the parts of a trunk by itself
            with suppress(NotSupported):
                return attempt()
    if shown and len(errors) > 1:
        # The last error says what you can load instead. The error before it says why this model cannot be read.
        raise NotSupported(f"{errors[-1]} Tried on it: {errors[-2]}") from errors[-2]
    raise errors[0]


def _structured(model: nn.Module, inside: Callable[..., nn.Module]) -> list[Callable[[], nn.Module]]:
    """Returns an attempt to adopt the transformer blocks that are found by their parts, if there are any."""
    structure = StructureFamily()
    found = structure.found(model)
    return [] if found is None else [partial(inside, structure, model, found[0], facts=found[1])]


def adopt(
    family: AdoptedFamily,
    model: nn.Module,
    path: str | None = None,
    *,
    facts: Mapping[str, Any] | None = None,
    factory: Factory | None = None,
    creation: Mapping[str, Any] | None = None,
    image_size: tuple[int, int] | None = None,
    **stated: Any,
) -> Adopted:
    """Returns a working copy of a model with attnrx attention in every layer. The model itself is not changed.

    As a check, attnrx compares the outputs of the model and the copy on random images, and the outputs of every
    attention layer and its replacement. A library's model (`path` is None) is also created again from its description,
    and compared with the copy. For a user's module, forward passes measure what the parts around the Vision Transformer
    cost, and find out which tokens they read and what they return. Activations that the module stores are detached.

    Args:
        family: The family of the Vision Transformer.
        model: The library's model, or the user's module that contains one.
        path: The path of the Vision Transformer in a user's module, or "" for the module itself. None for a model that
            its library creates again.
        facts: Facts about the structure of a user's module, as found by `StructureFamily.found`.
        factory: The function that creates a user's module.
        creation: A description of how a library creates the user's module, if this is known.
        image_size: The height and width of the images that a user's module takes. You only need it if the module's
            Vision Transformer was created for another size. If the module refuses this size, the Vision Transformer's
            size is used.
        **stated: Fields of `Origin` that replace the library model's values: `mean` and `std` of the image
            normalization, and `preprocessing`, the settings of the library's image transform.

    Raises:
        NotSupported: The model has an unsupported feature (the message names it), an attribute that cannot be copied,
            adapters, or weights that are computed from other tensors. Also raised if the outputs of the model and the
            copy differ, if they are not tensors with one entry per image, or if the Vision Transformer is never called.
        InvalidInput: The model was adopted already, or has no weights.
    """
    if isinstance(model, Adopted):
        raise InvalidInput(f"{model.origin.architecture} was adopted already.")
    require_plain_code(model)
    with reading_parts(model, "its parts"):
        family.require_supported(model.get_submodule(path or ""))
    require_ordinary_tensors(model)
    require_finite_tensors(model.state_dict(), model_name(model))
    facts = dict(facts or {})
    origin = family.stated_origin(model, path, facts, stated)
    original = copy_module(model)  # a copy, because a forward pass of the model's own code may change the model
    around = None
    if path is not None:
        facts["shape"] = PlainShape(original)
        around = Surroundings(class_name(model), factory and _function_name(factory), path, (), {}, "", 0)
    with reading_parts(model, "its parts"):
        opened, places = family.opened(aliased(original), path or "", facts)
        trunk = opened.get_submodule(path or "")
        layers = family.layers(trunk)  # before their attention is replaced
        if around is not None:
            around = replace(around, read_blocks=tuple(range(len(layers) // 2)))  # all, until passes show which
        require_ordinary_tensors(opened, [f"{path or ''}.{each}".strip(".") for each in family.block_paths(trunk)])
        working = family.installed(original, opened, places, Record(family.name, origin, around, facts))
    if not path:  # the model as a whole, whose added code would be lost when it is saved
        require_unchanged(original, partial(working.answering(), original), working.input_shape)
    images, expected = _proved(family, original, working, image_size)
    if layers:
        run = partial(working._forward_chunk, images)
        adapters = family.layers(working.trunk)[::2]
        require_equal_attention(working, run, layers[::2], adapters)
    prove_units(family, working)
    family.prove(working)
    if around is None:
        # A model that was changed after its creation would be created differently when it is loaded.
        family.require_rebuilt(working)
    else:
        _measure_(family, original, working, images, expected, factory, creation)
    vars(original)[RECORD] = Record(family.name, working.origin, working.around, family.present_facts(working))
    if working.around is not None and working.around.image_size:
        family.resize_(working, *working.around.image_size)
    return working


def _function_name(factory: Factory) -> str:
    make: Any = factory
    return f"{make.__module__}:{make.__qualname__}" if hasattr(make, "__qualname__") else described(make)


def _proved(
    family: AdoptedFamily, original: nn.Module, working: Adopted, image_size: tuple[int, int] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Checks that a model and its working copy agree on random images, and returns the images and the model's outputs.

    For a user's module, the working copy also stores which method of the module takes images, and their size.
    """
    candidates, errors = [working.around], list[_OtherInputs]()
    if (around := working.around) is not None:
        # If the user stated the inputs, they are the inputs of `forward`, so no other method is tried.
        methods = IMAGE_METHODS if around.path and ATTRIBUTE not in vars(original) else ()
        candidates += [replace(around, call=name) for name in methods if hasattr(original, name)]
        if image_size is not None and image_size != working.origin.input_shape[1:]:
            candidates = [replace(around, image_size=image_size), *candidates]
    for each in candidates:
        working.around = each
        images = _images_of_proof(family, original, working)
        try:
            return images, _compared(family, original, working, images)
        except _OtherInputs as error:
            errors.append(error)
    raise NotSupported(str(errors[0])) from errors[0]


def _compared(family: AdoptedFamily, original: nn.Module, working: Adopted, images: Tensor) -> dict[str, Tensor]:
    """Returns a model's outputs for two images, after checking that the working copy has the same outputs.

    Raises:
        _OtherInputs: The model needs more than images, or does not return one entry per image.
        NotSupported: The outputs differ, or are not finite.
    """
    name, answer = working.name, partial(working.answering(), original)
    patches = working.trunk.get_submodule(family.parts(working.trunk).patches)

    def count(call: ModuleCall) -> int:  # the number of images, also if a method other than `forward` was called
        return len(call.tokens) if isinstance(call.tokens, Tensor) else len(images)

    with evaluating((original, working)):
        try:
            expected = tensors_of(answer(images))
        except Exception as error:  # the code of a module raises errors of any type
            raise _OtherInputs(
                f"{name} cannot be adopted: with images of shape {tuple(images.shape)} it raises "
                f"{type(error).__name__}: {described_error(error)}. For images of another size give the size, "
                "attnrx.load(module, image_size=...). For other inputs give an example of them, "
                "attnrx.load(module, inputs=...), or a module around it whose forward takes images."
            ) from error
        # A user's code may draw random numbers, or mix images of a batch. Both would change the outputs of these calls.
        passes = {} if working.around is None else {"in every call": images, "in a batch than alone": images[:1]}
        others = {when: tensors_of(answer(each)) for when, each in passes.items()}
        with recording_calls((patches,), count) as calls:
            actual = outputs_of(working, images, OTHER_ATTENTION)
    if working.around is not None:
        if not calls or sum(calls) % len(images):
            raise (NotSupported if calls else _NotCalled)(
                f"{name} cannot be adopted: for {len(images)} inputs it calls {working.path or 'its parts'} with "
                f"{sum(calls)} images."
            )
        working.around = replace(working.around, calls=sum(calls) // len(images))
    if not expected or any(not tensor.ndim or len(tensor) != len(images) for tensor in expected.values()):
        shapes = {place: tuple(tensor.shape) for place, tensor in expected.items()}
        raise _OtherInputs(
            f"{name} cannot be adopted: for 2 images it returns {shapes or 'no tensor of real numbers'}, and every "
            "tensor must have one entry per image."
        )
    # A found structure's blocks do not exist in the module itself.
    has_blocks = not isinstance(family, StructureFamily)
    trunks = (original.get_submodule(working.path), working.trunk) if has_blocks else ()
    layers = [family.layers(trunk) for trunk in trunks]
    for place, tensor in expected.items():
        if problem := not_finite(tensor):
            where = first_not_finite((original, partial(answer, images)), layers[0] if layers else ())
            raise NotSupported(f"{name} cannot be adopted: output {place}".rstrip() + f" has {problem}.{where}")
    for when, found in others.items():
        size = len(passes[when])
        if difference := difference_of({place: tensor[:size] for place, tensor in expected.items()}, found):
            raise NotSupported(f"{name} cannot be adopted: an image has other outputs {when}: {difference}.")
    if difference := difference_of(expected, actual):
        runs = ((original, partial(answer, images)), (working, partial(working._forward_chunk, images)))
        because, where = differing_block(runs, layers, OTHER_ATTENTION)
        raise NotSupported(f"{name} cannot be adopted: {because}. On random images {difference}.{where}")
    return expected


def _measure_(
    family: AdoptedFamily,
    original: nn.Module,
    working: Adopted,
    images: Tensor,
    expected: Mapping[str, Tensor],
    factory: Factory | None,
    creation: Mapping[str, Any] | None,
) -> None:
    """Runs a user's module, and stores facts about the parts around its Vision Transformer in the working copy."""
    around = working.around
    assert around is not None
    kind = None
    if factory is None:
        creation = creation or library_creation(original)
        if around.name.split(".")[0] not in PLAIN_PACKAGES:  # library classes would create models of default sizes
            kind = imported_class(around.name)
    creates = partial(_is_created, module=original, call=around.call, images=images, expected=expected)
    inputs = vars(original).get(ATTRIBUTE) if around.call == "forward" else None
    # Blocks that take grids always return all tokens. So nobody has to know which of them are read, and the passes that
    # find out would take a third of the time to load a SAM.
    depth = 0 if family.grid_axis(working) is not None else len(around.read_blocks)
    working.around = around = replace(
        around,
        inputs=() if inputs is None else tuple(map(astuple, inputs.fields)),
        by_class=kind is not None and creates(kind),
        creation=creation if factory is None and creation and creates(partial(created_by_library, creation)) else None,
        sizes=output_sizes(working),
        outputs=_kind(family, original, working, images, expected),
        read_blocks=_read_blocks(family, working, images[:1]) if depth else around.read_blocks,
    )
    family.count_(working)
    around = working.around
    if not depth:
        return
    is_alike = False
    # No hooks are registered here, so the last block may compute only the class token.
    with evaluating((working,)), suppress(Exception):  # e.g. a norm with one weight per token
        is_alike = not difference_of(expected, tensors_of(working._forward_chunk(images)))
    if not is_alike:
        # Parts after the blocks may read only one token, but they still need the tokens of all patches.
        working.around = replace(around, read_blocks=(*around.read_blocks, depth - 1))


def _is_created(create: Factory, module: nn.Module, call: str, images: Tensor, expected: Mapping[str, Tensor]) -> bool:
    """Returns whether `create` returns an equal module that has the expected outputs once the weights are loaded."""
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            created = create().to(images)
            vars(created).update({ATTRIBUTE: own} if (own := vars(module).get(ATTRIBUTE)) else {})
        created.load_state_dict(module.state_dict())
        # The text of a module also shows settings that do not change outputs in evaluation mode, e.g. dropout rates.
        with evaluating((created,)):
            answer = tensors_of(answered(call, created, images))
        return repr(created) == repr(module) and not difference_of(expected, answer)
    except Exception:  # the code of a module raises errors of any type
        return False


def _images_of_proof(family: AdoptedFamily, original: nn.Module, working: Adopted) -> Tensor:
    """Returns two random images for the proof. They are small if the module and its working copy accept small images.

    Small images save time. For example, DINOv2 interpolates its position embeddings, and takes seven times as long for
    its usual 518 x 518 pixels as for images of 16 x 16 patches. The working copy of a SAM refuses small images, because
    it does not interpolate relative positions.
    """
    if working.around is not None and working.around.image_size:
        return random_images(working, working.input_shape)
    patches = working.trunk.get_submodule(family.parts(working.trunk).patches)
    stride = patches.stride if isinstance(patches, nn.Conv2d) and working.attnrx_inputs is None else ()
    channels, *own = working.origin.input_shape
    size = [min(PROOF_PATCHES * step, side) for step, side in zip(stride, own, strict=False)]
    if size not in ([], own):
        small = random_images(working, (channels, *size))
        with evaluating((original, working)), suppress(Exception):  # the code of a module raises errors of any type
            working.answering()(original, small)
            working._forward_chunk(small)
            return small
    return random_images(working, working.input_shape)


def _kind(
    family: AdoptedFamily, original: nn.Module, working: Adopted, images: Tensor, tensors: Mapping[str, Tensor]
) -> str:
    """Returns the name of a module's `OutputKind`. Vectors from a method other than `forward` count as an embedding."""
    around = working.around
    if around is not None and around.call != "forward" and all(tensor.ndim == 2 for tensor in tensors.values()):
        return "embedding"
    inside = {id(part) for block in family.blocks(working.trunk) for part in block.modules()}
    heads = [part for part in working.source.modules() if isinstance(part, nn.Linear) and id(part) not in inside]
    return kind_of_outputs(original, partial(working.answering(), original, images), tensors, heads, working.name)


def _read_blocks(family: AdoptedFamily, working: Adopted, images: Tensor) -> tuple[int, ...]:
    """Returns the indices of blocks whose patch tokens are read by another part than the next block, e.g. a decoder.

    To test a block, its output is changed at the patch tokens, but the next block still gets the original output. If
    the model's outputs then change, another part reads these tokens.
    """
    blocks = family.blocks(working.trunk)
    prefix = family.parts(working.trunk).prefix_tokens
    present: dict[int, Tensor] = {}

    def change(index: int, scale: float, first: int, tokens: Tensor) -> Tensor:
        present[index] = tokens
        noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1)).to(tokens) * (1 + tokens.std())
        noise[:, :first] = 0
        return tokens + scale * noise

    def outputs(indices: Sequence[int], scale: float, first: int) -> dict[str, Tensor]:
        remove_capturing_(working)  # transformers' own hooks must run after the hooks below
        with ExitStack() as hooks:
            for index in indices:
                changed = TokenHook(partial(change, index, scale, first))
                hooks.enter_context(blocks[index].register_forward_hook(changed, with_kwargs=True))
                if index + 1 < len(blocks):
                    kept = TokenHook(lambda _, index=index: present[index])
                    hooks.enter_context(blocks[index + 1].register_forward_pre_hook(kept, with_kwargs=True))
            return tensors_of(working.answer(images))

    def changes(indices: Sequence[int], first: int) -> bool:
        # The same hooks run in both passes, so both round in the same way.
        pair = outputs(indices, 0.0, first), outputs(indices, 1.0, first)
        return any(not torch.equal(tensor, pair[1][name]) for name, tensor in pair[0].items())

    *earlier, last = range(len(blocks))
    with evaluating((working,)):
        if not changes([last], 0):  # e.g. a head of zeros, which would hide what it reads
            return tuple(range(len(blocks)))
        # All earlier blocks are tested together first, because most modules read only the last block.
        found = [index for index in earlier if changes([index], prefix)] if changes(earlier, prefix) else []
        return (*found, *([last] if changes([last], prefix) else []))


def prove_units(family: AdoptedFamily, adopted: Adopted) -> None:
    """Raises NotSupported if an MLP mixes its hidden units, e.g. with a norm. MLPs of known classes are not tested."""
    source, parts = adopted.trunk, family.parts(adopted.trunk)
    pairs = adopted.pairs if parts.mlp_classes is None and family.has_plain_units(adopted) else ()
    if not pairs:
        return
    with evaluating((source,)):
        separate = unmixed(source, pairs, random_images(source, adopted.origin.input_shape, 1))
    for index, pair in enumerate(pairs):
        if pair not in separate:
            raise NotSupported(
                f"{adopted.origin.architecture} cannot be adopted: in block {index} more than an activation is "
                f"between the maps {parts.maps} of the MLP, or their order is another one. State maps=None in the "
                "reader for an MLP of another kind (e.g. with a gate), which is then not compressed."
            )
