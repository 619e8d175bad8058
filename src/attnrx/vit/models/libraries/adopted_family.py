"""The base class of families that read, describe and rebuild the models of a library, and count their MACs."""

import importlib
import math
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from attnrx.support.arguments import user_code
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import evaluating, load_tensors_, random_images, tensors_of
from attnrx.support.records import from_dict, to_dict
from attnrx.support.shapes import Bool, Float, ImageBatch, Tensor
from attnrx.vit.attention import Attention
from attnrx.vit.costs import ModelCosts, PartCosts, layer_costs
from attnrx.vit.kernels.native_products import NativeLinear, native_
from attnrx.vit.maps import LINEAR_MAPS
from attnrx.vit.models.family import Family, LayerShapes, called_with_images, num_outputs
from attnrx.vit.models.libraries.attention_conversion import AttentionConversion
from attnrx.vit.models.libraries.library_models import LibraryModels
from attnrx.vit.models.observation_hooks import ModuleCall, counted_by_spec, recording_calls
from attnrx.vit.models.parts.mlp import (
    FusedMLP,
    LowRankLinear,
    Pair,
    halve_,
    hidden_units,
    keep_units_of_,
    map_at,
    rank_of,
    resize_linears_,
)
from attnrx.vit.models.parts.module_costs import bias_macs, classifier_macs, macs_by_part, mlp_costs, num_params
from attnrx.vit.models.parts.module_inputs import ATTRIBUTE, InputField, ModuleInputs
from attnrx.vit.models.parts.record import RECORD, TOKENS, Record
from attnrx.vit.models.parts.surroundings import DOUBTS, Cut, OfImages, Surroundings
from attnrx.vit.models.parts.token_reduction import reduction_of
from attnrx.vit.models.parts.vit_parts import (
    POOLINGS,
    Refusal,
    ViTParts,
    changed_linears,
    model_name,
    reading_parts,
    require_parts,
)
from attnrx.vit.models.working.adopted import Adapter, Adopted, LastLayer, Origin, OwnModel, PlainShape, aliased
from attnrx.vit.models.working.adoption_proof import (
    LAYERS,
    build_part,
    difference_in_structure,
    differing_parts,
    replaced_parts,
    require_equal_outputs,
)
from attnrx.vit.models.working.fused_block import fuse_
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import TokenLayout


class AdoptedFamily(AttentionConversion, LibraryModels, Family):
    """The base class for families whose models come from other libraries.

    A subclass describes the parts of the library's models (`parts`), converts their attention (`projected`, `traits`,
    `adapter`), creates models, and lists unsupported features (`refusals`). A user's module that contains such a model
    belongs to the same family. In this case, `Adopted.around` describes the parts around the Vision Transformer, and
    the methods read the Vision Transformer itself from `Adopted.trunk`.

    Raises:
        NotSupported: A method needs a library that is not installed.
    """

    model_type: type[Adopted]

    @abstractmethod
    def parts(self, source: nn.Module) -> ViTParts:
        """Returns the paths and properties of a model's parts."""

    def adopts(self, model: nn.Module) -> bool:
        """Returns whether the model's class is defined in this library, without importing the library."""
        return type(model).__module__.split(".")[0] == self.library

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields every reason why attnrx cannot load the model. The model's weights are not read."""
        return iter(())

    def prove(self, adopted: Adopted) -> None:
        """Raises NotSupported if a working copy contradicts what the model's reader states about the model.

        Subclasses override this method to check statements that a comparison of outputs cannot confirm.
        """

    def origin(self, model: nn.Module) -> Origin:
        """Returns how the model was created, and the model's input format.

        Raises:
            NotSupported: The model does not store the arguments that created it, or they cannot be saved.
            InvalidInput: The normalization does not fit the model.
        """
        raise NotSupported(f"{model_name(model)} has no reader.")

    def origin_inside(self, model: nn.Module) -> Origin:
        """Returns the `Origin` of a model that is part of a user's module."""
        return self._stated(model, {})

    def blocks(self, source: nn.Module) -> tuple[nn.Module, ...]:
        """Returns the transformer blocks."""
        return tuple(map(source.get_submodule, self.block_paths(source)))

    def block_paths(self, source: nn.Module) -> tuple[str, ...]:
        """Returns the paths of the transformer blocks."""
        paths = self.parts(source).blocks
        if not isinstance(paths, str):
            return paths
        return tuple(f"{paths}.{name}" for name, _ in source.get_submodule(paths).named_children())

    def last_norm(self, source: nn.Module) -> nn.Module:
        """Returns the norm after the last block, or an identity if there is no such norm."""
        norm = self.parts(source).norm
        return dict(source.named_modules()).get(norm, nn.Identity()) if norm else nn.Identity()

    def stated_origin(
        self, model: nn.Module, path: str | None, facts: Mapping[str, Any], stated: Mapping[str, Any]
    ) -> Origin:
        """Returns the `Origin` of a library's model, or of the Vision Transformer at `path` in a user's module.

        For a library's model, `path` is None, and values in `stated` override the model's own values. `facts` are
        the facts in the model's `Record`.

        Raises:
            NotSupported: The model does not store how it was created.
            InvalidInput: The images are smaller than a patch.
        """
        return self._stated(model, stated) if path is None else self.origin_inside(model.get_submodule(path))

    def opened(self, module: nn.Module, path: str, facts: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, str]]:
        """Rewrites a module's blocks so that they take [batch, tokens, width].

        The module may be changed in place. A module whose blocks already take this shape is returned unchanged. The
        second result maps the new path of every part that moved to its former path.
        """
        return module, {}

    def in_blocks(self, module: nn.Module, path: str, facts: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, Any]]:
        """Returns the user's module with blocks that take [batch, tokens, width], and the facts for its record."""
        return module, facts

    def working(self, model: nn.Module, record: Record) -> Adopted:
        """Returns a working copy of a loaded model of this family.

        The copy has its own attention weights. All other weights share memory with the model.
        """
        return self.installed(model, *self.opened(aliased(model), record.path, record.facts), record)

    def installed(self, model: nn.Module, opened: nn.Module, places: Mapping[str, str], record: Record) -> Adopted:
        """Returns a working copy of a model. `opened` and `places` are the return values of the method `opened`."""
        origin = self.present_size(opened.get_submodule(record.path), record.origin)
        adopted = self.model_type(opened, origin, record.around, record.facts, places)
        adopted.training = model.training  # only for the wrapper, because every module inside keeps its own mode
        vars(adopted).update(plain=PlainShape(model), own=OwnModel(model))
        self._install_(adopted, self._converted_attention(adopted.trunk))
        return adopted

    def viewed(self, model: nn.Module, record: Record) -> Adopted:
        source = model.get_submodule(record.path)
        origin = self.present_size(source, record.origin)
        adopted = self.model_type(model, origin, record.around, record.facts)
        adopted.training = model.training
        vars(adopted)["pairs"] = self._found_pairs(source)
        adopted.tokens = reduction_of(model)
        return adopted

    def present_facts(self, adopted: Adopted) -> dict[str, Any]:
        """Returns the facts to store in a model's `Record`, besides its fields `origin` and `around`."""
        return dict(adopted.facts)

    def library_model(self, model: nn.Module) -> nn.Module:
        """Recreates a library's model, or returns the user's original module with small random weights."""
        adopted = self._adopted(model)
        if adopted.around is None:
            return self.created_again(adopted.origin)
        fresh: nn.Module = adopted.facts["shape"].fresh()
        takes_images = adopted.around.call == "forward" and adopted.attnrx_inputs is None
        return fresh if takes_images else OfImages(fresh, adopted.around.call)

    def created_again(self, origin: Origin) -> nn.Module:
        """Recreates a model from its origin with its own library. The result takes images and returns e.g. logits."""
        return self._created(origin)

    def _created(self, origin: Origin) -> nn.Module:
        """Creates a model with its own library, and then replaces the parts that `origin.replaced` lists."""
        created = self.create(origin.architecture, origin.arguments)
        blocks = self.parts(created).blocks
        for path, part in origin.replaced.items():
            if path not in dict(created.named_modules()) or f"{path}.".startswith(f"{blocks}."):
                raise InvalidInput(f"{origin.architecture} has no part {path!r:.80} outside its blocks to replace.")
            created.set_submodule(path, build_part(part))
        return created

    def without_weights(self, model: nn.Module) -> Adopted:
        """Returns a working copy of a model whose weights are on the meta device, without comparing outputs.

        Raises:
            NotSupported: The model has an unsupported feature.
            InvalidInput: The patches do not tile the images, or are larger than the images.
        """
        self.require_supported(model)
        return self.working(model, Record(self.name, self._stated(model, {})))

    def _converted_attention(self, source: nn.Module) -> list[Attention]:
        path, attention = self.parts(source).attention, []
        for number, block in enumerate(self.blocks(source), 1):
            with reading_parts(source, f"{path} of block {number}"):
                module = block.get_submodule(path)
                is_ours = isinstance(module, Adapter)
                attention.append(module.attention if is_ours else self.convert_attention(source, module))
        return attention

    def _install_(self, adopted: Adopted, attention: Sequence[Attention]) -> None:
        """Installs attnrx attention in every block, removes dropouts with rate 0, and prepares blocks for fast kernels.

        Models with class-token pooling also get the `LastLayer` shortcut.
        """
        source, blocks = adopted.trunk, self.blocks(adopted.trunk)
        parts = self.parts(source)
        vars(adopted)["plain_pairs"] = self._found_pairs(source)
        for block, new_attention in zip(blocks, attention, strict=True):
            self.place_attention_(source, block, new_attention)
            for path in parts.maps_of(block.get_submodule(parts.mlp[0]))[1:-1]:
                whole, _, half = path.rpartition(".")
                if half == "second" and isinstance(block.get_submodule(whole), nn.Linear):
                    halve_(block, whole)
            # A list is needed, because the loop replaces modules. One dropout may have several names.
            for name, part in list(block.named_modules(remove_duplicate=False)):
                # Even a call of an idle dropout takes as long as a small matrix product.
                if type(part) is nn.Dropout and part.p == 0:
                    block.set_submodule(name, nn.Identity().train(part.training))
                elif type(part) is nn.Linear:
                    native_(part)
            _fuse_mlp_(block, parts)
            fuse_(block)
        vars(adopted)["pairs"] = self._found_pairs(source)
        if blocks and parts.pooling == "class":  # all other poolings use the patches of the last block
            adopted.last = LastLayer(
                blocks[-1], parts.attention, parts.norm_before, self.last_norm(source), parts.prefix_tokens
            )

    def place_attention_(self, source: nn.Module, block: nn.Module, attention: Attention) -> Attention:
        """Replaces a block's attention module (the library's or attnrx's) by `attention`, and returns `attention`."""
        path = self.parts(source).attention
        module = block.get_submodule(path)
        if isinstance(module, Adapter):
            module.attention = attention.train(module.attention.training)
            return attention
        for name, norm in attention.inner_norms.items():
            if type(norm) is nn.Identity:  # the attention was built from a spec, which only names its norms
                attention.inner_norms[name] = self.traits(source, module)["inner_norms"][name]
        adapter = self.adapter(source, module, attention)
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            getattr(adapter, hooks).update(getattr(module, hooks))
        block.set_submodule(path, adapter.train(module.training))
        return attention

    def installed_(self, model: nn.Module, layer: int) -> Attention:
        """Returns the attnrx attention in a layer. A library's own attention is first converted and replaced."""
        source = self._adopted(model).trunk
        block = self.blocks(source)[layer]
        module = block.get_submodule(self.parts(source).attention)
        if isinstance(module, Adapter):
            return module.attention
        return self.place_attention_(source, block, self.convert_attention(source, module))

    def attention_and_mlp(self, model: nn.Module, layer: int) -> tuple[nn.Module, nn.Module]:
        source = self._adopted(model).trunk
        parts, block = self.parts(source), self.blocks(source)[layer]
        return block.get_submodule(parts.attention), block.get_submodule(parts.mlp[0])

    def restored_blocks(self, model: nn.Module) -> Container[int]:
        adopted = self._adopted(model)
        return self.answered_blocks(adopted) if adopted.around is None else adopted.around.read_blocks

    def answered_blocks(self, adopted: Adopted) -> Container[int]:
        """Returns the indices of the blocks after which the output needs all patch tokens, e.g. in a backbone."""
        return ()  # logits need no features of pruned patches

    def require_supported(self, model: nn.Module) -> None:
        """Raises NotSupported if the model has unsupported features, and lists all of them. No weights are read."""
        refusals = tuple(self.refusals(model))
        # MLPs are checked last. They cannot be found if other parts that the reader names are missing.
        refusals = refusals or tuple(self._changed_mlps(model))
        if refusals:
            # All layers yield the same reasons. The dict removes repetitions and keeps the order.
            reasons = ", ".join(dict.fromkeys(refusal.reason for refusal in refusals))
            remedies = dict.fromkeys(refusal.remedy for refusal in refusals if refusal.remedy)
            raise NotSupported(" ".join((f"{model_name(model)} is not supported: {reasons}.", *remedies)))

    def _changed_mlps(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields a refusal for every MLP layer that is an adapter or another replacement of a plain nn.Linear."""
        parts = self.parts(model)
        for block in self.blocks(model):
            named = dict(block.named_modules())
            maps = parts.maps_of(named.get(parts.mlp[0]))
            paths = (name if name in named else name.rpartition(".")[0] for name in maps)  # for halves, the whole map
            yield from changed_linears(block, tuple(dict.fromkeys(paths)))

    def block_names(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(self._named(model, path) for path in self.block_paths(self._adopted(model).trunk))

    def _named(self, model: nn.Module, path: str) -> str:
        """Converts a part's path in the Vision Transformer to its path in the model or working copy."""
        inside = "source" if isinstance(model, Adopted) else ""
        return ".".join(filter(None, (inside, self._adopted(model).path, path)))

    def attention(self, model: nn.Module) -> tuple[Attention, ...]:
        """Returns every layer's attention. For a library's own attention module, this is a converted copy."""
        return tuple(self._converted_attention(self._adopted(model).trunk))

    def set_attention_(self, model: nn.Module, layer: int, attention: Attention) -> None:
        source = self._adopted(model).trunk
        self.place_attention_(source, self.blocks(source)[layer], attention)

    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        adopted = self._adopted(model)
        maps = [[map_at(adopted.trunk, path) for path in (pair.first, pair.second)] for pair in adopted.pairs]
        # A `units.Convolution` stores its map in `linear`.
        return tuple(tuple(getattr(part, "linear", part) for part in pair) for pair in maps)  # type: ignore[misc]

    def has_plain_units(self, model: nn.Module) -> bool:
        adopted = self._adopted(model)
        for block, pair in zip(self.blocks(adopted.trunk), adopted.pairs, strict=False):
            mlp = map(block.get_submodule, self.parts(adopted.trunk).mlp)
            maps = (map_at(adopted.trunk, path) for path in (pair.first, pair.second, *pair.between))
            if sum(map(num_params, mlp)) > sum(map(num_params, maps)):  # e.g. a norm over all units
                return False
        return bool(adopted.pairs)

    def set_mlp_(self, model: nn.Module, layer: int, which: int, linear: nn.Module) -> None:
        """Replaces the first (`which=0`) or second (`which=1`) linear map of a layer's MLP, in place.

        Raises:
            NotSupported: The model has no MLPs with two linear maps.
        """
        adopted = self._adopted(model)
        if not adopted.pairs:
            raise NotSupported(f"{adopted.origin.architecture} has no MLPs of two linear maps.")
        path = (adopted.pairs[layer].first, adopted.pairs[layer].second)[which]
        if hasattr(adopted.trunk.get_submodule(path), "linear"):
            path = f"{path}.linear"
        adopted.trunk.set_submodule(path, linear.train(adopted.trunk.get_submodule(path).training))

    def _found_pairs(self, source: nn.Module) -> tuple[Pair, ...]:
        """Returns the paths of every MLP's linear maps, or () if any block has an MLP of an unsupported kind."""
        parts, pairs = self.parts(source), []
        for path in self.block_paths(source):
            mlp = source.get_submodule(f"{path}.{parts.mlp[0]}")
            is_fused = isinstance(mlp, FusedMLP)
            maps = tuple(f"{parts.mlp[0]}.{name}" for name in LINEAR_MAPS) if is_fused else parts.maps_of(mlp)
            if not maps:
                return ()
            first, *between, second = (f"{path}.{name}" for name in maps)
            pairs.append(Pair(first, second, tuple(between), path))
        return tuple(pairs)

    def keep_units_(self, model: nn.Module, layer: int, keep: Bool[Tensor, "units"]) -> None:
        adopted = self._adopted(model)
        for path in adopted.pairs[layer].between:
            if not bool(keep.any()):
                raise NotSupported(f"no unit of the MLP {adopted.pairs[layer].block} would be left; keep one or more.")
            keep_units_of_(adopted.trunk.get_submodule(path), keep)

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Returns the model's origin, every layer's attention spec, and every MLP's ranks and number of units."""
        adopted = self._adopted(model)
        origin, around = adopted.origin, adopted.around
        return {
            **{name: value for name, value in to_dict(origin, typed=False).items() if name != "replaced" or value},
            "attention": [to_dict(attention.spec) for attention in self.attention(model)],
            "mlp_ranks": [[rank_of(linear) for linear in pair] for pair in self.mlp(model)],
            "hidden_units": list(hidden_units(self.mlp(model))),
            # A library creates these buffers in its default type, but e.g. `model.half()` may have converted them.
            "buffer_dtypes": {
                f"source.{path}.{name}".replace("..", "."): str(buffer.dtype).removeprefix("torch.")
                for path, name, buffer in unsaved_buffers(adopted.trunk)
                if buffer.is_floating_point()
            },
            **({} if around is None else {"around": to_dict(around, typed=False)}),
        }

    def build(self, description: Mapping[str, Any]) -> Adopted:
        """Creates a model with its own library, and resizes its attention and MLPs as the description states.

        Raises:
            InvalidInput: The depth of the created model differs from the depth in the description.
        """
        return self.shaped(self._created(self.described_origin(description)), description)

    def built_inside(self, created: nn.Module, description: Mapping[str, Any]) -> Adopted:
        """Works like `build`, for a new instance of the user's module that contains the Vision Transformer.

        Raises:
            InvalidInput: The module has no model of this library at the described path.
        """
        around, facts = from_dict(description["around"], Surroundings), self.described_facts(created, description)
        path, origin = around.path, self.described_origin(description)
        if around.inputs:
            vars(created)[ATTRIBUTE] = ModuleInputs(tuple(InputField(*each) for each in around.inputs))
        plain = PlainShape(created)
        module, places = self.opened(created, path, facts)
        require_parts(module, (path,), around.name)
        source = module.get_submodule(path)
        if not self.has_class_of(source):
            raise InvalidInput(f"{path or 'the model'} of {around.name} is no model of {self.library}.")
        with torch.device("cpu"):
            self.fit_created_(source, origin)
        plain = plain if places else PlainShape(module)
        facts = {**facts, "shape": plain}
        for cut in around.cuts:
            Cut(*cut).shape_(module)
        return self.shaped(module, description, around, facts, places, plain)

    def has_class_of(self, part: nn.Module) -> bool:
        """Returns whether a part's class comes from the library or is a subclass of one of its classes."""
        return self.adopts(part) or any(
            base.__module__.split(".")[0] == self.library and base.__module__ != "timm.layers"
            for base in type(part).__mro__
        )

    def described_facts(self, created: nn.Module, description: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries of a description that the method `opened` needs after the module was created."""
        return {}

    def recreated(self, description: Mapping[str, Any], state: Mapping[str, Tensor], outputs: str | None) -> Adopted:
        """Recreates a working copy from a model's description and from weights with the library's names."""
        origin, linears = self.described_origin(description), description.get("linears", {})
        created = self.created_with(origin, linears, state, outputs)
        return self.working(created, vars(created)[RECORD])

    def created_with(
        self,
        origin: Origin,
        linears: Mapping[str, Sequence[int]],
        state: Mapping[str, Tensor],
        outputs: str | None = None,
    ) -> nn.Module:
        """Creates a model with its own library. Its weights share memory with the tensors in `state`.

        `linears` contains new sizes (inputs, outputs) for some linear maps, by path. These linear maps are resized
        before the weights are loaded.

        Raises:
            RuntimeError: The weights do not fit the model.
        """
        with torch.device("meta"):
            created = self.create(origin.architecture, origin.arguments)
        resize_linears_(created, linears)
        names = self.saved_names(created) if state.keys() != created.state_dict().keys() else {}
        load_tensors_(created, {names.get(name, name): tensor for name, tensor in state.items()})
        self._recompute_buffers_(created)
        self.state_format_(created, origin)
        vars(created)[RECORD] = Record(self.name, origin, outputs=outputs)
        weight = next(created.parameters())
        return created.to(weight.device, weight.dtype)  # for buffers that no file contains

    def _recompute_buffers_(self, created: nn.Module) -> None:
        """Computes buffers that are not saved with the weights, after a model was created on the meta device."""
        for path, name, buffer in unsaved_buffers(created):
            module = created.get_submodule(path)
            with torch.device("cpu"):
                computed = self.recomputed(module) if buffer.is_meta else None
            if computed is not None:
                module._buffers[name] = computed._buffers[name]

    def described_origin(self, description: Mapping[str, Any]) -> Origin:
        """Returns the origin in a model's description."""
        stated = {field.name: description[field.name] for field in fields(Origin) if field.name in description}
        return from_dict(stated, Origin)

    def shaped(
        self,
        created: nn.Module,
        description: Mapping[str, Any],
        around: Surroundings | None = None,
        facts: Mapping[str, Any] | None = None,
        places: Mapping[str, str] | None = None,
        plain: PlainShape | None = None,
    ) -> Adopted:
        """Resizes a created model's attention and MLPs as described, in place, and returns its working copy.

        Raises:
            InvalidInput: The model's depth differs from the depth in the description.
        """
        origin = self.described_origin(description)
        adopted = self.model_type(created, origin, around, facts, places)
        self._recompute_buffers_(adopted.trunk)
        self.state_format_(adopted.trunk, origin)
        vars(adopted)["plain"] = plain or PlainShape(created)
        self._shape_(adopted, description)
        return adopted

    def _shape_(self, adopted: Adopted, description: Mapping[str, Any]) -> None:
        blocks, specs = self.blocks(adopted.trunk), description["attention"]
        if len(blocks) != len(specs):
            name = adopted.origin.architecture
            raise InvalidInput(
                f"{name} has {len(blocks)} layers, and the model that was made from it {len(specs)}: "
                "blocks cannot be added or removed after a model is created. Create it with that number of blocks, "
                "e.g. depth=N of timm."
            )
        # `_install_` comes first, because it fuses the MLPs, which changes the paths of their maps.
        self._install_(adopted, [Attention(from_dict(spec, (AttentionSpec,))) for spec in specs])
        self._shape_mlps_(adopted, description)

    def _shape_mlps_(self, adopted: Adopted, description: Mapping[str, Any]) -> None:
        """Resizes a created model's MLPs as described, and converts its unsaved buffers to the described dtypes."""
        for name, dtype in description.get("buffer_dtypes", {}).items():
            owner, _, buffer = name.rpartition(".")
            module = adopted.trunk.get_submodule(owner.removeprefix("source").lstrip("."))
            module._buffers[buffer] = module.get_buffer(buffer).to(getattr(torch, dtype))
        created_units = hidden_units(self.mlp(adopted))
        shapes = zip(description["mlp_ranks"], description["hidden_units"], strict=True)
        for layer, (pair, hidden) in enumerate(shapes):
            if hidden != created_units[layer]:
                self.keep_units_(adopted, layer, torch.arange(created_units[layer], device="cpu") < hidden)
            for which, rank in enumerate(pair):
                linear: Any = self.mlp(adopted)[layer][which]
                inputs, outputs = (hidden, linear.out_features) if which else (linear.in_features, hidden)
                has_bias = linear.bias is not None
                if rank is not None:
                    self.set_mlp_(adopted, layer, which, LowRankLinear(inputs, outputs, rank, has_bias))
                elif hidden != created_units[layer]:
                    # When units are removed, their mean contribution moves into a bias of the second map.
                    self.set_mlp_(adopted, layer, which, NativeLinear(inputs, outputs, bias=has_bias or which == 1))

    def resize_(self, model: nn.Module, height: int, width: int) -> None:
        adopted = self._adopted(model)
        before, around, shape = adopted.origin, adopted.around, adopted.facts.get("shape")
        inside = (height, width) if around is None else self._size_inside(adopted, height, width)
        if around is not None:
            adopted.around = around = replace(around, image_size=() if inside == (height, width) else (height, width))
            if inside == before.input_shape[1:]:
                adopted.around = replace(around, sizes=output_sizes(adopted))
                return self.count_(adopted)
        self.resize_trunk_(adopted, *inside)
        if adopted.plain is not None:
            adopted.plain = PlainShape(self._resized_like(adopted.plain.copied(), adopted, before))
        adopted.own = None
        reduction = reduction_of(adopted)
        if reduction is not None:  # it keeps the same shares of the patches
            reduction.shape = self.token_shape(adopted, reduction.shape.heads)
            reduction.policy.counts(reduction.shape.layout.patches)  # raises an error if a share keeps no patch
        elif around is None:  # skipped with a policy, which is attached only after a model is built
            self.require_rebuilt(adopted)
        if around is not None and shape is not None:
            adopted.facts["shape"] = PlainShape(self._resized_like(shape.fresh(), adopted, before))
            adopted.around = replace(around, sizes=output_sizes(adopted))
            self.count_(adopted)

    def _size_inside(self, adopted: Adopted, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width of the Vision Transformer's input if the module gets images of this size.

        A user's module may resize or pad images before its Vision Transformer. If the Vision Transformer's input
        cannot be observed, the size of the images is returned.
        """
        path, (channels, *own) = self.parts(adopted.trunk).patches.split("."), adopted.input_shape
        first = 0 if adopted.path else 1
        parts = [adopted.trunk.get_submodule(".".join(path[:depth])) for depth in range(first, len(path) + 1)]

        def seen(*size: int) -> tuple[int, int] | None:
            shapes: list[torch.Size] = []

            def record(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
                tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
                shapes.extend(tensor.shape for tensor in tensors if tensor.ndim == 4)

            with ExitStack() as hooks, evaluating((adopted,)), suppress(Exception):  # if it does not take the size
                for part in parts:
                    hooks.enter_context(part.register_forward_pre_hook(record, with_kwargs=True))
                adopted.answer(random_images(adopted, (channels, *size), 1))
            return (shapes[0][-2], shapes[0][-1]) if shapes else None

        # A part may get something other than images, e.g. the features of a convolution. Its size then says nothing.
        shows_images = adopted.attnrx_inputs is None and seen(*own) == adopted.origin.input_shape[1:]
        return (seen(height, width) if shows_images else None) or (height, width)

    def resize_trunk_(self, adopted: Adopted, height: int, width: int) -> None:
        """Resizes the position embeddings of the Vision Transformer in place, and stores the new size."""
        name, channels = adopted.origin.architecture, adopted.origin.input_shape[0]
        if any(attention.spec.pair_bias for attention in self.attention(adopted)):
            raise NotSupported(
                f"{name} has a bias for every pair of tokens, which is that of one image size: create the model of its "
                f"library for {height} x {width}, and load that."
            )
        shape = (channels, height, width)
        convolution = adopted.trunk.get_submodule(self.parts(adopted.trunk).patches)
        down, right = getattr(convolution, "stride", (1, 1))[-2:]
        if height % down or width % right or not self.num_patches(adopted.trunk, shape):
            raise InvalidInput(f"patches of {down} x {right} of {name} do not tile images of {height} x {width}.")
        adopted.origin = replace(self._resized(adopted.trunk, adopted.origin, height, width), input_shape=shape)

    def _resized_like(self, model: nn.Module, adopted: Adopted, before: Origin) -> nn.Module:
        """Resizes a working copy's original model to the copy's image size, in place, and returns the model."""
        source = model.get_submodule(adopted.path)
        self.fit_created_(source, adopted.origin, before)
        self.state_format_(source, adopted.origin)
        return model

    def count_(self, adopted: Adopted) -> None:
        """Counts the token sequences of every block, and the MACs of all parts around the Vision Transformer.

        Both are counted in one forward pass of the user's module, and are stored in `adopted.around`.
        """
        around, parts = adopted.around, self.parts(adopted.trunk)
        assert around is not None
        layers = self.layers(adopted.trunk)[::2]
        with counted_by_spec(adopted, self), recording_calls(layers, _sequences) as recorded:
            macs = macs_by_part(adopted, random_images(adopted, adopted.input_shape)[:1])
        lengths = tuple(tuple(n for part, each in recorded if part is layer for n in each) for layer in layers)
        count = self.num_tokens(adopted)
        usual = all(each == parts.sequences(layer, count) * around.calls for layer, each in enumerate(lengths))
        adopted.around = replace(around, lengths=() if usual else lengths, head_calls=1, macs=0)
        # A classifier that runs once per image, on the tokens that it pools, has separate costs. Otherwise its MACs
        # count as MACs of the other parts.
        priced = self.costs(adopted).classifier_macs * around.calls
        inside = ".".join(filter(None, ("source", around.path)))
        is_priced = priced > 0 and priced == sum(macs.get(f"{inside}.{head}", 0) for head in parts.heads)
        adopted.around = replace(adopted.around, head_calls=None if is_priced else 0)
        adopted.around = replace(adopted.around, macs=macs[""] - self.costs(adopted).product_macs)

    def refresh_(self, adopted: Adopted) -> None:
        """Updates a working copy's origin with changes that the user made outside of the blocks after loading.

        Raises:
            NotSupported: The user replaced a part by a module that a saved folder cannot describe.
        """
        if adopted.plain is None:
            return
        model, origin = adopted.plain.model, replace(self.present_origin(adopted), replaced={})
        blocks = self.parts(model).blocks
        with torch.device("meta"):
            created = self.create(origin.architecture, origin.arguments)
            parts = differing_parts(model, created)
        own, others = len(self.blocks(model)), len(self.blocks(created))
        if own != others:
            raise NotSupported(
                f"{origin.architecture} cannot be saved: it has {own} blocks, and its library creates {others}. Create "
                f"it with {own} (e.g. depth={own} of timm), load the weights into that, and then attnrx.load it."
            )
        changed = {path: part for path, part in parts.items() if not f"{path}.".startswith(f"{blocks}.")}
        for path, part in changed.items():
            if part is None:
                kind = type(model.get_submodule(path)).__name__
                raise NotSupported(
                    f"{origin.architecture} cannot be saved: its part {path or 'itself'} ({kind}) is not the one that "
                    f"{self.library or 'its class'} creates. A folder can describe layers of torch.nn "
                    f"(Sequential, {', '.join(LAYERS)}); for another part load the model with a reader or a factory."
                )
        adopted.origin = replace(origin, replaced={path: part for path, part in changed.items() if part is not None})

    def present_size(self, source: nn.Module, origin: Origin) -> Origin:
        """Returns `origin` with the model's current image size, if the library's models store this size."""
        return origin

    def present_origin(self, adopted: Adopted) -> Origin:
        """Returns a model's origin, with arguments that are updated from the model's present attributes."""
        return adopted.origin

    def state_format_(self, source: nn.Module, origin: Origin) -> None:
        """Writes the input format to those attributes of a created or resized model from which the library reads it."""

    def fit_created_(self, source: nn.Module, origin: Origin, before: Origin | None = None) -> None:
        """Resizes a library's model inside a newly created user's module to the image size of `origin`.

        `before` is the created model's origin, which is read from the model by default.
        """
        before = before or self.origin_inside(source)
        if before.input_shape[1:] != origin.input_shape[1:]:
            self._resized(source, before, *origin.input_shape[1:])

    def _resized(self, source: nn.Module, origin: Origin, height: int, width: int) -> Origin:
        """Resizes the position embeddings in place, as the library does, and returns the resized model's origin.

        The returned origin may still have the earlier input shape.

        Raises:
            NotSupported: The library cannot resize this model's position embeddings.
        """
        _, *size = origin.input_shape
        raise NotSupported(
            f"{origin.architecture} takes images of {size[0]} x {size[1]} only, not of {height} x {width}: "
            f"{self.library} does not resize its position embeddings. Create it for that size, or give images of "
            f"{size[0]} x {size[1]}."
        )

    def token_layout(self, model: nn.Module) -> TokenLayout:
        """Returns where the patches are among the tokens, and how the model pools its tokens.

        Raises:
            NotSupported: Tokens cannot be pruned, e.g. because the head needs all of them.
        """
        adopted = self._adopted(model)
        parts, pooling = self.parts(adopted.trunk), self.parts(adopted.trunk).pooling
        if parts.grid_axis is not None:
            if pooling not in POOLINGS or len(parts.mlp) > 1:
                raise NotSupported(
                    f"{adopted.name} divides grids of tokens into sequences inside its blocks, so tokens can be "
                    "neither pruned nor merged: plan ranks (qk, vo) and hidden units."
                )
            return TokenLayout(0, self.positions(adopted), False, "mean", in_layers=True)
        usual, sequences = self.num_tokens(adopted), () if adopted.around is None else adopted.around.lengths
        if others := sorted({length for each in sequences for length in each} - {usual}):
            raise NotSupported(
                f"{adopted.name} gives its blocks sequences of {', '.join(map(str, others))} tokens, and an image "
                f"has {usual} with those before its patches; tokens can be pruned only where all sequences are these."
            )
        if pooling not in POOLINGS and adopted.around is not None and parts.prefix_tokens:
            pooling = "class"  # the parts around the model read restored patches, so their own pooling does not change
        if pooling not in POOLINGS:
            raise NotSupported(
                f"{adopted.origin.architecture} pools its tokens by {parts.pooling!r}; tokens can be pruned only where "
                "the head takes a token before the patches, the mean of the patches, or attention to them."
            )
        patches = self.positions(adopted) // parts.windows
        return TokenLayout(parts.prefix_tokens, patches, parts.has_class_token, pooling, parts.windows, parts.joined)

    def patch_features(self, model: nn.Module, images: ImageBatch) -> Float[Tensor, "batch patches features"]:
        adopted = self._adopted(model)
        return adopted.all_tokens(images)[:, self.parts(adopted.trunk).prefix_tokens :]

    def patch_embedding(self, model: nn.Module) -> nn.Module:
        source = self._adopted(model).trunk
        return source.get_submodule(self.parts(source).patches)

    def pooled_norm(self, model: nn.Module) -> nn.Module:
        return self.last_norm(self._adopted(model).trunk)

    def pooler(self, model: nn.Module) -> nn.Module | None:
        trunk = self._adopted(model).trunk
        path = self.parts(trunk).pooler
        return trunk.get_submodule(path) if path else None

    def heads(self, model: nn.Module) -> tuple[nn.Module, ...]:
        """Returns a model's classifiers, or () if the model is only a part of a user's module."""
        adopted = self._adopted(model)
        named = {} if adopted.path else dict(adopted.trunk.named_modules())
        heads = (named.get(name) for name in self.parts(adopted.trunk).classifiers)
        return tuple(head for head in heads if head is not None and num_outputs(head))

    def output_kind(self, model: nn.Module) -> str:
        adopted = self._adopted(model)
        return self.answer_kind(adopted) if adopted.around is None else adopted.around.outputs

    def output_doubt(self, model: nn.Module) -> str:
        around = self._adopted(model).around
        return "" if around is None else DOUBTS.get(around.outputs, "")

    def answer_kind(self, adopted: Adopted) -> str:
        """Returns the name of a library model's `OutputKind`."""
        return "logits" if self.heads(adopted) else "embedding"

    def caller(self, model: nn.Module) -> Callable[[nn.Module, ImageBatch], Any]:
        return called_with_images if isinstance(model, Adopted) else self._adopted(model).answering()

    def input_shape(self, model: nn.Module) -> tuple[int, int, int]:
        return self._adopted(model).input_shape

    def inputs(self, model: nn.Module) -> ModuleInputs | None:
        return self._adopted(model).attnrx_inputs

    def normalization(self, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
        adopted = self._adopted(model)
        channels, origin = adopted.input_shape[0], adopted.origin
        is_known = len(origin.mean) == channels  # if inputs are packed into one tensor, they are not normalized
        return (origin.mean, origin.std) if is_known else ((0.0,) * channels, (1.0,) * channels)

    def knows_normalization(self, model: nn.Module) -> bool:
        adopted = self._adopted(model)
        return adopted.around is None or bool(adopted.origin.preprocessing)

    def saved_names(self, model: nn.Module) -> Mapping[str, str]:
        return saved_names(model) if hasattr(model, "save_pretrained") else {}

    def positions(self, adopted: Adopted) -> int:
        """Returns the number of patches in an image of the model's input size."""
        return self.num_patches(adopted.trunk, adopted.origin.input_shape)

    def num_patches(self, source: nn.Module, input_shape: tuple[int, int, int]) -> int:
        """Returns the number of patches in an image or video of this shape. Pixels at the border may be left out."""
        patches: Any = source.get_submodule(self.parts(source).patches)
        channels, *size = input_shape
        sides = (channels // patches.in_channels, *size)[-len(patches.stride) :]
        pads = (0,) * len(sides) if isinstance(patches.padding, str) else patches.padding
        geometry = zip(sides, patches.kernel_size, patches.stride, pads, strict=True)
        return math.prod(max((side + 2 * pad - kernel) // stride + 1, 0) for side, kernel, stride, pad in geometry)

    def windows(self, model: nn.Module) -> int:
        adopted = self._adopted(model)
        return self.parts(adopted.trunk).windows

    def sequences(self, model: nn.Module) -> tuple[tuple[int, ...], ...]:
        adopted = self._adopted(model)
        around, parts, count = adopted.around, self.parts(adopted.trunk), self.num_tokens(adopted)
        if around is not None and around.lengths:
            return around.lengths
        calls = 1 if around is None else around.calls
        return tuple(parts.sequences(layer, count) * calls for layer in range(len(self.blocks(adopted.trunk))))

    def grid_axis(self, model: nn.Module) -> int | None:
        adopted = self._adopted(model)
        return self.parts(adopted.trunk).grid_axis

    def num_tokens(self, model: nn.Module) -> int:
        adopted = self._adopted(model)
        parts = self.parts(adopted.trunk)
        return self.positions(adopted) // parts.windows + parts.prefix_tokens

    def costs_with(self, model: nn.Module, shapes: LayerShapes) -> ModelCosts:
        """Returns the parameters and MACs that the model would have with these layer shapes.

        Every parameter of the model is counted in exactly one part. Parameters before the first layer, including tokens
        and position embeddings, count as patches. A layer's parameters outside its attention and MLP, such as
        LayerScale and relative positions, count as norms. All parts around the Vision Transformer count as part of
        the classifier.
        """
        adopted = self._adopted(model)
        plain, around = self.trunk_costs(adopted, shapes), adopted.around
        tokens, calls = plain.tokens, 1 if around is None else around.calls
        lengths = [self.parts(adopted.trunk).sequences(*each) * calls for each in enumerate(tokens)]
        if around is None:
            return plain.called(lengths, 1, 1)
        before, counts = self.num_tokens(adopted), None
        if self.grid_axis(adopted) is not None:
            # Only the attention has windows, padded by zeros. If no token is merged, the MLP runs on the image's own.
            lengths, counts, predictors = shapes.tokens.in_layers(self.sequences(adopted), calls * before)
            plain = replace(plain, predictors=replace(predictors, macs=predictors.macs // calls))
        elif around.lengths:  # a policy removes the same number of tokens from every sequence
            lengths = [[n - before + count for n in each] for count, each in zip(tokens, around.lengths, strict=True)]
        costs = plain.called(lengths, calls, calls if around.head_calls is None else around.head_calls, counts)
        outside = PartCosts(sum(weight.numel() for weight in weights_around(adopted)), around.macs)
        return replace(costs, classifier=costs.classifier + outside)

    def trunk_costs(self, adopted: Adopted, shapes: LayerShapes) -> ModelCosts:
        """Returns the costs of the Vision Transformer, without the parts around it."""
        source, blocks, maps = adopted.trunk, self.blocks(adopted.trunk), self.mlp(adopted)
        parts, tokens = self.parts(source), shapes.tokens
        positions = self.positions(adopted)
        classifier = sum(num_params(module) for module in self._heads(source))
        before = num_params(source) - classifier - sum(num_params(block) for block in blocks)
        mlps = [[block.get_submodule(name) for name in parts.mlp] for block in blocks]
        # MLPs of another kind are never changed.
        gates = [next((map_at(source, path) for path in pair.between), None) for pair in adopted.pairs]
        changes = list(zip(maps, shapes.mlp_ranks, shapes.hidden, gates, strict=True))
        changes = changes or [((), (), 0, None)] * len(blocks)
        return ModelCosts(
            patches=PartCosts(before, positions * source.get_submodule(parts.patches).weight.numel()),  # type: ignore[operator, union-attr]
            layers=tuple(
                layer_costs(
                    spec,
                    num_tokens,
                    mlp_costs(mlp, num_tokens, *change),
                    # Inner norms are parts of the attention, but its spec does not count them.
                    PartCosts(
                        num_params(block)
                        - sum(map(num_params, (*mlp, own.scores, own.value, own.output)))
                        + sum(own.spec.rows) * own.spec.num_distances
                    ),
                    num_tokens < positions,
                )
                for block, mlp, own, spec, change, num_tokens in zip(
                    blocks, mlps, self.attention(adopted), shapes.attention, changes, tokens.tokens, strict=True
                )
            ),
            embeddings=PartCosts(0, sum(map(bias_macs, blocks))),
            classifier=PartCosts(classifier),
            classifier_macs=self.head_macs(adopted, tokens.tokens[-1]),
            predictors=replace(tokens.predictors, macs=parts.windows * tokens.predictors.macs),
        )

    def _heads(self, source: nn.Module) -> list[nn.Module]:
        """Returns the classifiers, and the norms before them."""
        names = self.parts(source).heads
        return [module for name, module in source.named_modules() if name in names]

    def head_macs(self, adopted: Adopted, tokens: int) -> int:
        """Returns the classifiers' MACs for one image. Attention pooling attends to `tokens` tokens."""
        return sum(classifier_macs(head, tokens) for head in self._heads(adopted.trunk))

    def _stated(self, model: nn.Module, stated: Mapping[str, Any]) -> Origin:
        """Returns a model's origin, in which the values in `stated` override the model's own values."""
        origin = replace(self.origin(model), **stated)
        if not self.num_patches(model, origin.input_shape):
            height, width = origin.input_shape[1:]
            raise InvalidInput(f"images of {height} x {width} are smaller than a patch of {origin.architecture}.")
        return origin

    def _adapters(self, model: nn.Module) -> tuple[Adapter, ...]:
        source = self._adopted(model).trunk
        path = self.parts(source).attention
        return tuple(block.get_submodule(path) for block in self.blocks(source))  # type: ignore[misc]

    def _adopted(self, model: nn.Module) -> Adopted:
        return self._own(model)

    def require_rebuilt(self, adopted: Adopted) -> None:
        """Raises NotSupported if the library would create a model that differs from the working copy.

        If the user replaced parts outside the blocks, these parts are stored in the copy's origin.
        """
        because = (
            "a model rebuilt from its name and arguments differs, so it was changed after it was created; state the "
            "change in the arguments (e.g. num_classes=N of timm), and load the weights into that model. Outside the "
            f"blocks, parts may be replaced by layers of torch.nn: Sequential, {', '.join(LAYERS)}"
        )
        with torch.device("meta"):
            rebuilt = self.build(self.describe(adopted))
            replaced = replaced_parts(adopted.trunk, rebuilt.trunk)
            blocks = self.parts(adopted.trunk).blocks
            if replaced and not any(f"{path}.".startswith(f"{blocks}.") for path in replaced):
                adopted.origin = replace(adopted.origin, replaced=replaced)
                rebuilt = self.build(self.describe(adopted))
        difference = difference_in_structure(adopted, rebuilt)
        if difference:
            raise NotSupported(f"{adopted.origin.architecture} cannot be adopted: {because}. {difference}")
        rebuilt.load_state_dict(adopted.state_dict(), assign=True)  # shares the memory of the weights
        layers = (self.layers(adopted.trunk), self.layers(rebuilt.trunk))
        require_equal_outputs((adopted, rebuilt), layers, because)

    def layers(self, source: nn.Module) -> list[nn.Module]:
        """Returns one list with the attention module and the block of each layer, in the order of the layers."""
        path = self.parts(source).attention
        return [part for block in self.blocks(source) for part in (block.get_submodule(path), block)]


def unsaved_buffers(model: nn.Module) -> list[tuple[str, str, Tensor]]:
    """Returns the buffers that are not saved with the weights, as (module path, buffer name, buffer)."""
    return [
        (path, name, buffer)
        for path, module in model.named_modules()
        for name in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers[name]) is not None
    ]


def _fuse_mlp_(block: nn.Module, parts: ViTParts) -> None:
    """Replaces a library's MLP by a `FusedMLP` if it consists of only two linear maps and an activation."""
    name, *others = parts.mlp
    mlp = block.get_submodule(name)
    if others or not parts.compresses(mlp):
        return
    first, second = (path.removeprefix(f"{name}.") for path in parts.maps)
    inside = {child: part for child, part in mlp.named_children() if type(part) is not nn.Identity}
    activation = [part for child, part in inside.items() if child not in (first, second)]
    # Exactly these three parts are required. A dropout, gate or norm would be lost.
    if len(inside) == 3 and len(activation) == 1 and not any(True for _ in activation[0].parameters()):
        fused = FusedMLP(inside[first], activation[0], inside[second])
        block.set_submodule(name, fused.train(mlp.training))


def saved_names(model: nn.Module) -> Mapping[str, str]:
    """Maps the names of weights in files that `save_pretrained` writes to their names in the transformers model."""
    try:
        revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
        state = model.state_dict()
        owners = {id(tensor): name for name, tensor in state.items()}
        return {name: owners[id(tensor)] for name, tensor in revert(model, state).items() if id(tensor) in owners}
    except (ImportError, AttributeError):  # versions that save the model's own names
        return {}


def weights_around(adopted: Adopted) -> list[nn.Parameter]:
    """Returns the weights of all parts around the Vision Transformer, excluding a token policy's predictors."""
    others = adopted.source._modules.get(TOKENS) or nn.Identity()
    inside = {id(weight) for part in (adopted.trunk, others) for weight in part.parameters()}
    return [weight for weight in adopted.source.parameters() if id(weight) not in inside]


def output_sizes(adopted: Adopted) -> dict[str, int]:
    """Returns the number of values in each output, by name, for one image of the model's input size.

    Raises:
        NotSupported: The module does not take images of this size.
    """
    height, width = adopted.input_shape[1:]
    refused = f"{adopted.name} does not take images of {height} x {width} (for another size give image_size=...): it"
    with evaluating((adopted,)), user_code(refused, NotSupported):
        tensors = tensors_of(adopted(random_images(adopted, adopted.input_shape)[:1]))
    return {name: tensor[0].numel() for name, tensor in tensors.items()}


def _sequences(call: ModuleCall) -> tuple[nn.Module, list[int]]:
    """Returns the called module and the length of every token sequence in its input."""
    sequences, *sides, _ = call.tokens.shape  # a sequence may be a grid
    return call.module, [math.prod(sides)] * sequences
