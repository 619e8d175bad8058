"""The base class of the families of other libraries: adopt, describe, rebuild, count costs."""

import math
from abc import abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, NotSupported, UnknownName
from attnrx.support.modules import copy_module, random_images
from attnrx.support.records import from_dict, to_dict
from attnrx.support.shapes import Bool, Float, ImageBatch, Tensor
from attnrx.support.storage import require_finite_tensors
from attnrx.vit.attention import Attention
from attnrx.vit.costs import ModelCosts, PartCosts, layer_costs
from attnrx.vit.kernels.native_products import NativeLinear, native_
from attnrx.vit.maps import LINEAR_MAPS
from attnrx.vit.models.checkpoint import read_weight_file
from attnrx.vit.models.family import Family, LayerShapes, num_outputs, require_ordinary_weights
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
    set_parameter_,
    write_linear_,
)
from attnrx.vit.models.parts.record import KEPT_HEADS, RECORD, TOKENS, Record
from attnrx.vit.models.parts.token_reduction import reduction_of
from attnrx.vit.models.parts.vit_parts import Refusal, ViTParts, changed_linears, model_name, reading_parts
from attnrx.vit.models.working.adopted import (
    INTERLEAVED,
    PROJECTION_PATHS,
    Adapter,
    Adopted,
    LastLayer,
    Origin,
    OwnModel,
    PairBias,
    PlainAttention,
    PlainShape,
    aliased,
    attention_from_projections,
    interleaved_rows,
)
from attnrx.vit.models.working.adoption_proof import (
    LAYERS,
    build_part,
    difference_in_structure,
    differing_parts,
    replaced_parts,
    require_equal_attention,
    require_equal_logits,
    require_plain_code,
    require_unchanged,
)
from attnrx.vit.models.working.fused_block import fuse_
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import TokenLayout

# The attributes of attention modules with the number of heads, and with the features of all of them.
HEAD_COUNTS = {"num_heads", "num_attention_heads", "heads"}
HEAD_WIDTHS = {"attn_dim", "all_head_size"}


class AdoptedFamily(Family):
    """A family of models of another library: adoption by proof, description, rebuilding, costs.

    A subclass states where the parts of the library's models are (`parts`), how their attention is converted
    (`projected`, `traits`, `adapter`) and how they are created, and lists unsupported features (`refusals`).

    Raises:
        NotSupported: By methods that need the library, where it is not installed.
    """

    library: str
    """The package of the library."""
    model_type: type[Adopted]
    adapter_type: type[Adapter] = PlainAttention
    takes_weights = False
    """Whether `load` takes the weights of a file, or downloads them."""
    size_argument = ""
    """The argument of the library for the side of images, of families that take weights."""

    @abstractmethod
    def parts(self, source: nn.Module) -> ViTParts:
        """Returns where the parts of a model are."""

    def adopts(self, model: nn.Module) -> bool:
        """Returns whether the model comes from this library, so that `adopt` accepts or refuses it; imports nothing."""
        return type(model).__module__.split(".")[0] == self.library

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields every reason why the model cannot be adopted, without reading its weights."""
        return iter(())

    def origin(self, model: nn.Module) -> Origin:
        """Returns how the model was created and its input format.

        Raises:
            NotSupported: The model does not state how it was created, or in values that cannot be saved.
            InvalidInput: The normalization does not fit the model.
        """
        raise NotSupported(f"{model_name(model)} has no reader.")

    def origin_inside(self, model: nn.Module) -> Origin:
        """Returns the origin of a model inside a user's own module, which creates it."""
        return self._stated(model, {})

    def create(self, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Creates a model of the library, read or not, without pretrained weights; `origin` or `creation` states how.

        Raises:
            UnknownName: The library has no such model.
            InvalidInput: The arguments are not those of a model.
            NotSupported: The model is of no library.
        """
        raise NotSupported(f"{architecture} is created by the code of its user.")

    def creation(self, model: nn.Module) -> dict[str, Any] | None:
        """Returns the `architecture` and the `arguments` with which `create` creates a model of any class of the
        library; None where the model does not state them.

        Raises:
            NotSupported: They cannot be saved.
        """
        return None

    def recognize_(self, module: nn.Module, path: str, description: Mapping[str, Any]) -> nn.Module:
        """Returns a module of a user's, which contains a model of this family at `path`, as it was adopted."""
        return module

    def recomputed(self, module: nn.Module) -> nn.Module | None:
        """Returns a module with the values of a module's unsaved buffers; None where its library computes none."""
        return None

    def convert_attention(self, source: nn.Module, module: nn.Module) -> Attention:
        """Returns attnrx attention with the weights of an attention module of `source`."""
        parts = self.parts(source)
        weights, biases = self.projected(source, module)
        kept_heads = vars(module).get(KEPT_HEADS)  # of a module that has lost some
        heads = self._num_heads(module, parts) if kept_heads is None else len(kept_heads)
        scale = getattr(module, parts.scale) if isinstance(parts.scale, str) else parts.scale
        scale = scale or (weights[0].shape[0] // heads) ** -0.5
        attention = attention_from_projections(weights, biases, heads, scale, **self.traits(source, module))
        if kept_heads is not None:
            attention.spec = attention.scores.spec = replace(attention.spec, heads=kept_heads)
        return attention

    def write_attention_(self, source: nn.Module, module: nn.Module, adapter: Adapter) -> None:
        """Writes the weights of attnrx attention into an attention module of `source`, which may have more heads; the
        inverse of `convert_attention`, as far as the module can hold them.

        Raises:
            NotSupported: It cannot.
        """
        attention, parts = adapter.attention, self.parts(source)
        spec, rotary = attention.spec, self.traits(source, module).get("rotary")
        if attention.spec.form not in ("dense", "rotary") or len({*spec.ranks, *spec.value_dims}) > 1:
            raise NotSupported("heads of other forms or sizes")
        sides = [attention.get_submodule(path) for path in PROJECTION_PATHS]
        weights: list[Any] = [side.weight for side in sides]
        biases: list[Any] = [side.bias for side in sides]
        if rotary == INTERLEAVED and spec.ranks:
            order = interleaved_rows(len(spec.heads), spec.ranks[0]).argsort()
            for side in (0, 1):
                weights[side] = weights[side][order.to(weights[side].device)]
                biases[side] = None if biases[side] is None else biases[side][order.to(weights[side].device)]
        self.write_projections_(source, module, weights, biases)
        for name, norm in attention.inner_norms.items():
            own = self.traits(source, module)["inner_norms"][name]
            for (path, target), parameter in zip(own.named_parameters(), norm.parameters(), strict=True):
                value = parameter
                if rotary == INTERLEAVED and name in ("query_norm", "key_norm"):
                    value = parameter[interleaved_rows(1, len(parameter)).argsort().to(parameter.device)]
                set_parameter_(own, path, value, target.requires_grad)
        bias: Any = self.pair_bias(module)
        if bias is not None and adapter.pair_bias is not None:
            own: Any = adapter.pair_bias
            bias, own = (each.source if isinstance(each, PairBias) else each for each in (bias, own))
            state = dict(own.named_parameters())
            for path, target in list(bias.named_parameters()):
                owner, _, name = path.rpartition(".")
                holder = bias.get_submodule(owner)
                # The tables of timm are parameters of the attention module itself.
                holder = module if not owner and getattr(module, name, None) is target else holder
                set_parameter_(holder, name, state[path], target.requires_grad)
        if spec.heads != tuple(range(self._num_heads(module, parts))):
            self.keep_heads_(module, spec.heads, spec.head_dim)

    def _num_heads(self, module: nn.Module, parts: ViTParts) -> int:
        """Returns the number of heads that an attention module states."""
        name = "num_heads" if isinstance(module, nn.MultiheadAttention) else parts.num_heads
        return name if isinstance(name, int) else int(getattr(module, name))

    def keep_heads_(self, module: nn.Module, heads: tuple[int, ...], head_dim: int) -> None:
        """States in an attention module that it has these heads alone, whose weights were written."""
        vars(module)[KEPT_HEADS] = heads
        for part in module.modules():
            own = vars(part)
            for name in HEAD_COUNTS & own.keys():
                setattr(part, name, len(heads))
            for name in HEAD_WIDTHS & own.keys():
                setattr(part, name, len(heads) * head_dim)

    def write_projections_(
        self, source: nn.Module, module: nn.Module, weights: list[Tensor], biases: list[Tensor | None]
    ) -> None:
        """Writes the weights and biases of query, key, value and output into a module; the inverse of `projected`.

        Weights are [rows, width], the output's [width, rows]; biases are [rows] and [width], or None.
        """
        part: Any = module
        if isinstance(module, nn.MultiheadAttention):
            if None in biases and any(bias is not None for bias in biases):
                raise NotSupported("biases of some projections alone")
            set_parameter_(module, "in_proj_weight", torch.cat(weights[:3]), part.in_proj_weight.requires_grad)
            if part.in_proj_bias is not None:
                joint = torch.cat([bias for bias in biases[:3] if bias is not None])
                set_parameter_(module, "in_proj_bias", joint, part.in_proj_bias.requires_grad)
            write_linear_(part.out_proj, weights[3], biases[3])
            return
        linears: list[Any] = [module.get_submodule(name) for name in self.parts(source).projections]
        if len(linears) == 2:
            fused = None if biases[0] is None else torch.cat([bias for bias in biases[:3] if bias is not None])
            write_linear_(linears[0], torch.cat(weights[:3]), fused)
            write_linear_(linears[1], weights[3], biases[3])
            return
        for linear, weight, bias in zip(linears, weights, biases, strict=True):
            write_linear_(linear, weight, bias)

    def projected(self, source: nn.Module, module: nn.Module) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns the weights and the biases of query, key, value and output of an attention module."""
        part: Any = module
        if isinstance(module, nn.MultiheadAttention):  # its fused projection is a parameter, not a module
            weights: list[Any] = [part.in_proj_weight, part.out_proj.weight]
            biases: list[Any] = [part.in_proj_bias, part.out_proj.bias]
        else:
            linears: list[Any] = [module.get_submodule(name) for name in self.parts(source).projections]
            weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        if len(weights) == 2:  # the rows of a fused projection: all queries, all keys, all values
            weights = [*weights[0].chunk(3), weights[1]]
            biases = [*([None] * 3 if biases[0] is None else biases[0].chunk(3)), biases[1]]
        return weights, biases

    def traits(self, source: nn.Module, module: nn.Module) -> dict[str, Any]:
        """Returns what `attention_from_projections` needs besides the projections: rotation, bias of pairs, norms."""
        return {}

    def adapter(self, source: nn.Module, module: nn.Module, attention: Attention) -> Adapter:
        """Returns the module that replaces an attention module of `source` and calls `attention`."""
        parts = self.parts(source)
        adapter = self.adapter_type(attention, parts.prefix_tokens, self.pair_bias(module))
        # nn.MultiheadAttention returns a pair also where its weights are not requested.
        adapter.returns_weights = parts.returns_weights or isinstance(module, nn.MultiheadAttention)
        return adapter

    def pair_bias(self, module: nn.Module) -> nn.Module | None:
        """Returns a module that computes the bias of pairs, [1, heads, tokens, tokens], of an attention module."""
        return None

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
        """Returns the norm after the last block; an identity where a model has none."""
        norm = self.parts(source).norm
        return dict(source.named_modules()).get(norm, nn.Identity()) if norm else nn.Identity()

    def adopt(self, model: nn.Module, **stated: Any) -> Adopted:
        """Returns a deep copy of the model with attnrx attention in every layer; the model itself is not changed.

        Two properties are checked on random images first: the copy returns the logits of the model, and so does a model
        rebuilt from the description of the copy. Activations that its parts keep are detached.

        Args:
            model: The model of the library.
            **stated: Fields of `Origin` that override what the model states: `mean` and `std` of the normalization,
                `preprocessing`, the settings of the library's transform of pictures.

        Raises:
            NotSupported: The model has an unsupported feature, named in the message, an attribute that cannot be
                copied, adapters, or weights that are computed from other tensors.
            InvalidInput: The model was adopted already, or has no weights.
        """
        if isinstance(model, Adopted):
            raise InvalidInput(f"{model.origin.architecture} was adopted already.")
        require_plain_code(model)
        self.require_supported(model)
        require_ordinary_weights(model)
        require_finite_tensors(model.state_dict(), model_name(model))
        origin = self._stated(model, stated)
        model = copy_module(model)  # whose own code may change it in a forward pass
        vars(model)[RECORD] = Record(self.name, origin)
        wrapped = self.model_type(model, origin)
        require_unchanged(model, wrapped, origin.input_shape)
        adopted = self._installed(model, origin)
        self._require_equal(
            (wrapped, adopted),
            "its attention computes something else than plain softmax attention, or its heads, its scale or the order "
            "of its projections are not those that were read",
        )
        images = random_images(adopted, origin.input_shape)
        originals = [block.get_submodule(self.parts(model).attention) for block in self.blocks(model)]
        require_equal_attention(adopted, partial(adopted, images), originals, self._adapters(adopted))
        # A model that was changed after its creation would be saved, and loaded as another one.
        self._require_rebuilt(adopted)
        return adopted

    def _installed(self, model: nn.Module, origin: Origin) -> Adopted:
        """Returns a working copy of a model, which has memory of its own for the weights of the attention alone."""
        adopted = self.model_type(aliased(model), origin)
        adopted.training = model.training  # of the wrapper only: every module inside keeps its own mode
        self._install_(adopted, self._converted_attention(adopted.source))
        vars(adopted).update(plain=PlainShape(model), own=OwnModel(model))
        return adopted

    def viewed(self, model: nn.Module, record: Record) -> Adopted:
        adopted = self.model_type(model, self.present_size(model, record.origin))
        adopted.training = model.training
        vars(adopted)["pairs"] = self._found_pairs(model)
        adopted.tokens = reduction_of(model)
        return adopted

    def facts(self, adopted: Adopted) -> Mapping[str, Any]:
        """Returns what the record of a model needs besides its origin, for `working`."""
        return {}

    def working(self, model: nn.Module, record: Record) -> Adopted:
        """Returns a working copy of a model with a record of this family."""
        return self._installed(model, self.present_size(model, record.origin))

    def library_model(self, model: nn.Module) -> nn.Module:
        """Creates the model with its own library, which keeps that library's attention."""
        return self._created(self._adopted(model).origin)

    def _created(self, origin: Origin) -> nn.Module:
        """Creates the model with its own library, and replaces the parts that were replaced in it."""
        created = self.create(origin.architecture, origin.arguments)
        blocks = self.parts(created).blocks
        for path, part in origin.replaced.items():
            if path not in dict(created.named_modules()) or f"{path}.".startswith(f"{blocks}."):
                raise InvalidInput(f"{origin.architecture} has no part {path!r:.80} outside its blocks to replace.")
            created.set_submodule(path, build_part(part))
        return created

    def initialized(self, name: str, *, pretrained: bool = False, **arguments: Any) -> nn.Module:
        """Returns the library's model of this name with weights from seed 0, or none on the meta device.

        With `pretrained`, which families may lack (`takes_weights`), the library downloads the weights.

        Raises:
            UnknownName: The library has no model of this name.
            InvalidInput: The library takes no such arguments.
            CheckpointError: The weights or the configuration cannot be read or downloaded.
            NotSupported: The library is not installed, or the models are of no library.
        """
        if not self.has(name) and (names := self.names()):
            raise UnknownName(f"{self.library} model", name, names)
        with torch.random.fork_rng(devices=[]):  # libraries draw weights from the global generator
            torch.manual_seed(0)
            try:
                return self.make(name, pretrained, arguments)
            except AttnrxError:
                raise
            except Exception as error:  # errors of several packages and types
                if pretrained:
                    raise CheckpointError(
                        f"{self.library} could not load the weights of {name} ({type(error).__name__}: {error}). Give "
                        "a file with weights=..., or pretrained=False for fresh weights."
                    ) from error
                raise InvalidInput(f"{self.library} cannot create {name} with {arguments}: {error}") from error

    def names(self) -> Sequence[str]:
        """Returns the names of the library's models; () where it has no list of them."""
        return ()

    def has(self, name: str) -> bool:
        """Returns whether the library lists a model of this name."""
        return name in self.names()

    def make(self, name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
        """Calls the library for `initialized`, which names it in errors.

        Raises:
            CheckpointError: The configuration cannot be read.
            NotSupported: The models are of no library.
        """
        raise NotSupported(f"models of the family {self.name} have no names: {name!r:.80}.")

    def instance(
        self, name: str, *, weights: Path | str | None = None, pretrained: bool | None = None, **arguments: Any
    ) -> nn.Module:
        """Returns the library's model of this name with weights.

        Args:
            name: The name in the library.
            weights: A file with the weights under the library's names (`read_weight_file`), also of a model that was
                fine-tuned to another number of classes or size of images; by default the library downloads them.
            pretrained: False initializes the weights from seed 0 instead.
            **arguments: Arguments of the library for this model, e.g. `num_classes=10` of timm.

        Raises:
            InvalidInput: Both `weights` and `pretrained=True` were given, or wrong arguments.
            UnknownName: The library has no model of this name.
            CheckpointError: The weights cannot be read or downloaded, or do not fit the model.
        """
        if weights is not None and pretrained:
            raise InvalidInput(f"weights={str(weights)!r} and pretrained=True: choose one of them.")
        state = None if weights is None else read_weight_file(Path(weights))
        if state is not None:
            arguments = self._changes_in(state, name, arguments) | arguments
        model = self.initialized(name, pretrained=weights is None and pretrained is not False, **arguments)
        if state is not None:
            try:
                model.load_state_dict(self.fitted(state, model), strict=True)
            except Exception as error:  # the conversions of libraries and torch raise errors of many types
                raise CheckpointError(f"the weights in {weights} do not fit {self.name}:{name} ({error}).") from error
        return model

    def _changes_in(self, state: Mapping[str, Tensor], name: str, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Returns the arguments for the weights of a model that was fine-tuned to other classes, or to another size.

        Raises:
            CheckpointError: The positions are those of patches that form no square.
        """
        with torch.device("meta"):
            model = self.initialized(name, **arguments)
        published, changes = model.state_dict(), dict[str, int]()
        both = [(path, published[path].shape, tensor.shape) for path, tensor in state.items() if path in published]
        # The linear maps with other rows and the same columns: the classifiers, of which distilled models have two.
        rows = {own[0] for _, other, own in both if len(own) == 2 and own[0] != other[0] and own[1:] == other[1:]}
        # Or one that the published model lacks.
        rows = rows or {len(own) for path, own in state.items() if path not in published and own.ndim == 2}
        if len(rows) == 1:
            changes["num_classes"] = rows.pop()
        # Tables [1, tokens, width] of other tokens: the positions.
        tables = [
            (path, other[1], own[1])
            for path, other, own in both
            if len(own) == len(other) == 3 and own[0] == other[0] == 1 and own[1] != other[1] and own[2] == other[2]
        ]
        if tables and self.size_argument:
            path, tokens, own = tables[0]
            patches: Any = model.get_submodule(self.parts(model).patches)
            # Without the tokens before the patches, if these have positions.
            count = own - (tokens - self.num_patches(model, self.origin_inside(model).input_shape))
            side = math.isqrt(max(count, 0))
            if not count or side * side != count:
                raise CheckpointError(
                    f"{path} of the weights has {own} tokens, of which no square grid is left: create the model of "
                    f"{self.library} for the size of its images, load the weights into it, and then attnrx.load it."
                )
            changes[self.size_argument] = side * patches.stride[0]
        return changes

    def fitted(self, state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Returns the tensors of a weight file as the library converts them for this model."""
        return state

    def input_format(self, name: str) -> dict[str, Any]:
        """Returns the input format of the downloaded weights, as `adopt` takes it; {} where the model holds it."""
        return {}

    def fresh(self, name: str, **arguments: Any) -> Adopted:
        """Adopts a model with fresh weights; on the meta device, where its logits cannot be checked, it has none.

        Raises:
            InvalidInput: The patches do not tile the images, or are larger.
        """
        model = self.initialized(name, **arguments)
        if not next(model.parameters()).is_meta:
            return self.adopt(model).eval()
        self.require_supported(model)
        return self._installed(model, self._stated(model, {}))

    def _converted_attention(self, source: nn.Module) -> list[Attention]:
        path, attention = self.parts(source).attention, []
        for number, block in enumerate(self.blocks(source), 1):
            with reading_parts(source, f"{path} of block {number}"):
                module = block.get_submodule(path)
                is_ours = isinstance(module, Adapter)
                attention.append(module.attention if is_ours else self.convert_attention(source, module))
        return attention

    def _install_(self, adopted: Adopted, attention: Sequence[Attention]) -> None:
        """Sets the attention of every block, removes dropout of rate 0, packs linear maps, and enables the shortcut of
        `LastLayer` for models with class-token pooling.
        """
        source, blocks = adopted.source, self.blocks(adopted.source)
        parts = self.parts(source)
        vars(adopted)["plain_pairs"] = self._found_pairs(source)
        for block, new_attention in zip(blocks, attention, strict=True):
            self.place_attention_(source, block, new_attention)
            for path in parts.maps_of(block.get_submodule(parts.mlp[0]))[1:-1]:
                whole, _, half = path.rpartition(".")
                if half == "second" and isinstance(block.get_submodule(whole), nn.Linear):
                    halve_(block, whole)
            # A list, because the loop replaces modules; with duplicates, because one dropout may have several names.
            for name, part in list(block.named_modules(remove_duplicate=False)):
                # Calling a dropout takes as long as a small matrix product.
                if type(part) is nn.Dropout and part.p == 0:
                    block.set_submodule(name, nn.Identity().train(part.training))
                elif type(part) is nn.Linear:
                    native_(part)
            _fuse_mlp_(block, parts)
            fuse_(block)
        vars(adopted)["pairs"] = self._found_pairs(source)
        if blocks and parts.pooling == "class":  # every other pooling uses the patches of the last block
            adopted.last = LastLayer(
                blocks[-1], parts.attention, parts.norm_before, self.last_norm(source), parts.prefix_tokens
            )

    def place_attention_(self, source: nn.Module, block: nn.Module, attention: Attention) -> Attention:
        """Puts attnrx attention in the place of a block's own, or of the one that is there; returns it."""
        path = self.parts(source).attention
        module = block.get_submodule(path)
        if isinstance(module, Adapter):
            module.attention = attention.train(module.attention.training)
            return attention
        for name, norm in attention.inner_norms.items():
            if type(norm) is nn.Identity:  # built from a spec, which names norms and does not contain them
                attention.inner_norms[name] = self.traits(source, module)["inner_norms"][name]
        adapter = self.adapter(source, module, attention)
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            getattr(adapter, hooks).update(getattr(module, hooks))
        block.set_submodule(path, adapter.train(module.training))
        return attention

    def installed_(self, model: nn.Module, layer: int) -> Attention:
        """Returns the attention of a layer, which takes the place of the library's own in the model."""
        source = self._adopted(model).source
        block = self.blocks(source)[layer]
        module = block.get_submodule(self.parts(source).attention)
        if isinstance(module, Adapter):
            return module.attention
        return self.place_attention_(source, block, self.convert_attention(source, module))

    def restored_blocks(self, model: nn.Module) -> Container[int]:
        return ()  # logits need no features of pruned patches

    def require_supported(self, model: nn.Module) -> None:
        """Raises NotSupported with every unsupported feature of the model; does not read its weights."""
        refusals = tuple(self.refusals(model))
        # After the others: without the parts that a reader names there are no MLPs.
        refusals = refusals or tuple(self._changed_mlps(model))
        if refusals:
            # Every layer yields the same reasons; a dict removes repetitions and keeps the order.
            reasons = ", ".join(dict.fromkeys(refusal.reason for refusal in refusals))
            remedies = dict.fromkeys(refusal.remedy for refusal in refusals if refusal.remedy)
            raise NotSupported(" ".join((f"{model_name(model)} is not supported: {reasons}.", *remedies)))

    def _changed_mlps(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields the maps of MLPs that are not a plain nn.Linear, e.g. adapters around one."""
        parts = self.parts(model)
        for block in self.blocks(model):
            named = dict(block.named_modules())
            maps = parts.maps_of(named.get(parts.mlp[0]))
            paths = (name if name in named else name.rpartition(".")[0] for name in maps)  # of halves their map
            yield from changed_linears(block, tuple(dict.fromkeys(paths)))

    def block_names(self, model: nn.Module) -> tuple[str, ...]:
        inside = "source." if isinstance(model, Adopted) else ""
        return tuple(f"{inside}{path}" for path in self.block_paths(self._adopted(model).source))

    def attention(self, model: nn.Module) -> tuple[Attention, ...]:
        """Returns the attention of every layer; a copy of the library's own where that is in its place."""
        return tuple(self._converted_attention(self._adopted(model).source))

    def set_attention_(self, model: nn.Module, layer: int, attention: Attention) -> None:
        source = self._adopted(model).source
        self.place_attention_(source, self.blocks(source)[layer], attention)

    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        adopted = self._adopted(model)
        maps = [[map_at(adopted.source, path) for path in (pair.first, pair.second)] for pair in adopted.pairs]
        # The linear map of a `units.Convolution`.
        return tuple(tuple(getattr(part, "linear", part) for part in pair) for pair in maps)  # type: ignore[misc]

    def has_plain_units(self, model: nn.Module) -> bool:
        adopted = self._adopted(model)
        for block, pair in zip(self.blocks(adopted.source), adopted.pairs, strict=False):
            mlp = map(block.get_submodule, self.parts(adopted.source).mlp)
            maps = (map_at(adopted.source, path) for path in (pair.first, pair.second, *pair.between))
            if sum(map(num_params, mlp)) > sum(map(num_params, maps)):  # e.g. a norm over all units
                return False
        return bool(adopted.pairs)

    def set_mlp_(self, model: nn.Module, layer: int, which: int, linear: nn.Module) -> None:
        """Replaces one of the two linear maps of one layer's MLP in place.

        Raises:
            NotSupported: The model has no MLPs of two linear maps.
        """
        adopted = self._adopted(model)
        if not adopted.pairs:
            raise NotSupported(f"{adopted.origin.architecture} has no MLPs of two linear maps.")
        path = (adopted.pairs[layer].first, adopted.pairs[layer].second)[which]
        if hasattr(adopted.source.get_submodule(path), "linear"):
            path = f"{path}.linear"
        adopted.source.set_submodule(path, linear.train(adopted.source.get_submodule(path).training))

    def _found_pairs(self, source: nn.Module) -> tuple[Pair, ...]:
        """Returns the maps of the MLP of every block, () where a block has another kind."""
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
            keep_units_of_(adopted.source.get_submodule(path), keep)

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Returns how the model was created, the spec of every layer's attention, and the ranks of its MLP."""
        origin = self._adopted(model).origin
        return {
            **{name: value for name, value in to_dict(origin, typed=False).items() if name != "replaced" or value},
            "attention": [to_dict(attention.spec) for attention in self.attention(model)],
            "mlp_ranks": [[rank_of(linear) for linear in pair] for pair in self.mlp(model)],
            "hidden_units": list(hidden_units(self.mlp(model))),
            # A library creates these buffers anew, in its default type, which `model.half()` may have changed.
            "buffer_dtypes": {
                f"{path}.{name}".lstrip("."): str(buffer.dtype).removeprefix("torch.")
                for path, name, buffer in unsaved_buffers(model)
                if buffer.is_floating_point()
            },
        }

    def build(self, description: Mapping[str, Any]) -> Adopted:
        """Creates the described model with its own library, then inserts attention and MLPs of the described ranks.

        Raises:
            InvalidInput: The library creates a model of another depth.
        """
        return self.shaped(self._created(self.described_origin(description)), description)

    def recreated(self, description: Mapping[str, Any], state: Mapping[str, Tensor], outputs: str | None) -> Adopted:
        """Returns a working copy of the model of an origin with the weights of the library's files."""
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
        """Creates a model with its own library, which gets these weights and shares their memory.

        `linears` are the inputs and outputs of linear maps that are replaced before, by their paths.

        Raises:
            RuntimeError: The weights do not fit; nothing of their size was allocated.
        """
        with torch.device("meta"):
            created = self.create(origin.architecture, origin.arguments)
        resize_linears_(created, linears)
        names = self.saved_names(created) if state.keys() != created.state_dict().keys() else {}
        created.load_state_dict({names.get(name, name): tensor for name, tensor in state.items()}, assign=True)
        self._recompute_buffers_(created)
        self.state_format_(created, origin)
        vars(created)[RECORD] = Record(self.name, origin, outputs=outputs)
        weight = next(created.parameters())
        return created.to(weight.device, weight.dtype)  # buffers that no file has

    def _recompute_buffers_(self, created: nn.Module) -> None:
        """Computes the buffers that are not saved of a model that was created on the meta device."""
        for path, name, buffer in unsaved_buffers(created):
            module = created.get_submodule(path)
            with torch.device("cpu"):
                computed = self.recomputed(module) if buffer.is_meta else None
            if computed is not None:
                module._buffers[name] = computed._buffers[name]

    def described_origin(self, description: Mapping[str, Any]) -> Origin:
        """Returns the origin of a described model."""
        stated = {field.name: description[field.name] for field in fields(Origin) if field.name in description}
        return from_dict(stated, Origin)

    def shaped(self, created: nn.Module, description: Mapping[str, Any]) -> Adopted:
        """Inserts attention and MLPs of the described ranks into the library's model, which is changed.

        Raises:
            InvalidInput: It has another depth.
        """
        origin = self.described_origin(description)
        self._recompute_buffers_(created)
        self.state_format_(created, origin)
        adopted = self.model_type(created, origin)
        vars(adopted)["plain"] = PlainShape(created)
        blocks, specs = self.blocks(adopted.source), description["attention"]
        if len(blocks) != len(specs):
            raise InvalidInput(
                f"{origin.architecture} has {len(blocks)} layers, and the model that was made from it {len(specs)}: "
                "blocks cannot be added or removed after a model is created. Create it with that number of blocks, "
                "e.g. depth=N of timm."
            )
        # Before the MLPs are replaced: their paths are those after `_install_`, which fuses them.
        self._install_(adopted, [Attention(from_dict(spec, (AttentionSpec,))) for spec in specs])
        self._shape_mlps_(adopted, description)
        return adopted

    def _shape_mlps_(self, adopted: Adopted, description: Mapping[str, Any]) -> None:
        """Gives the MLPs of a created model the described ranks and units, and the unsaved buffers their types."""
        for name, dtype in description.get("buffer_dtypes", {}).items():
            owner, _, buffer = name.rpartition(".")
            module = adopted.get_submodule(owner)
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
                    # The second map has a bias after units were removed: the mean of what they gave.
                    self.set_mlp_(adopted, layer, which, NativeLinear(inputs, outputs, bias=has_bias or which == 1))

    def resize_(self, model: nn.Module, height: int, width: int) -> None:
        adopted = self._adopted(model)
        self.resize_inside_(adopted, height, width)
        if reduction_of(adopted) is None:  # a policy is attached after a model is built
            self._require_rebuilt(adopted)

    def resize_inside_(self, adopted: Adopted, height: int, width: int) -> None:
        """Does the same for a model that is part of a user's module, which creates it."""
        name, channels = adopted.origin.architecture, adopted.origin.input_shape[0]
        if any(attention.spec.pair_bias for attention in self.attention(adopted)):
            raise NotSupported(
                f"{name} has a bias for every pair of tokens, which is that of one image size: create the model of its "
                f"library for {height} x {width}, and load that."
            )
        shape = (channels, height, width)
        convolution = adopted.source.get_submodule(self.parts(adopted.source).patches)
        down, right = getattr(convolution, "stride", (1, 1))[-2:]
        if height % down or width % right or not self.num_patches(adopted.source, shape):
            raise InvalidInput(f"patches of {down} x {right} of {name} do not tile images of {height} x {width}.")
        before = adopted.origin
        adopted.origin = replace(self._resized(adopted, height, width), input_shape=shape)
        self.resize_plain_(adopted, before, height, width)
        adopted.own = None
        reduction = reduction_of(adopted)
        if reduction is not None:  # it keeps the same shares of the patches
            reduction.shape = self.token_shape(adopted, reduction.shape.heads)
            reduction.policy.counts(reduction.shape.layout.patches)  # raises an error where a share keeps no patch

    def resize_plain_(self, adopted: Adopted, before: Origin, height: int, width: int, path: str = "") -> None:
        """Resizes what a working copy was made of in the same way; the model is at `path` in it."""
        if adopted.plain is not None:
            plain = adopted.plain.copied()
            source = plain.get_submodule(path)
            self._resized(self.model_type(source, before), height, width)
            self.state_format_(source, adopted.origin)
            adopted.plain = PlainShape(plain)

    def refresh_(self, adopted: Adopted) -> None:
        """States in the origin of a working copy what its user changed after it was loaded, outside of the blocks.

        Raises:
            NotSupported: A part was replaced by one that a saved folder cannot describe.
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
        """Returns the origin with the size of images that the model takes now, where its library states that."""
        return origin

    def present_origin(self, adopted: Adopted) -> Origin:
        """Returns the origin of a model with the arguments that its own attributes state now."""
        return adopted.origin

    def state_format_(self, source: nn.Module, origin: Origin) -> None:
        """States the input format in a model that was created or resized, where its library reads it."""

    def fit_created_(self, source: nn.Module, origin: Origin, before: Origin | None = None) -> None:
        """Makes the library's own model, which a user's module created, take images of the size of `origin`; `before`
        is the origin of the created one, by default as it states.
        """
        before = before or self.origin_inside(source)
        if before.input_shape[1:] != origin.input_shape[1:]:
            self._resized(self.model_type(source, before), *origin.input_shape[1:])

    def _resized(self, adopted: Adopted, height: int, width: int) -> Origin:
        """Resizes the position embeddings in place as the library does it; returns how such a model is created.

        The origin may have the input shape of before.

        Raises:
            NotSupported: The library does not resize those of this model.
        """
        _, *size = adopted.origin.input_shape
        raise NotSupported(
            f"{adopted.origin.architecture} takes images of {size[0]} x {size[1]} only, not of {height} x {width}: "
            f"{self.library} does not resize its position embeddings. Create it for that size, or give images of "
            f"{size[0]} x {size[1]}."
        )

    def token_layout(self, model: nn.Module) -> TokenLayout:
        """Returns where the patches are among the tokens, and how the model pools them.

        Raises:
            NotSupported: The head needs all tokens.
        """
        adopted = self._adopted(model)
        parts = self.parts(adopted.source)
        if parts.pooling not in ("class", "mean"):
            raise NotSupported(
                f"{adopted.origin.architecture} pools its tokens by {parts.pooling!r}; tokens can be pruned only where "
                "the head takes a token before the patches, or the mean of the patches."
            )
        return TokenLayout(parts.prefix_tokens, self.positions(adopted), parts.has_class_token, parts.pooling)

    def patch_features(self, model: nn.Module, images: ImageBatch) -> Float[Tensor, "batch patches features"]:
        adopted = self._adopted(model)
        return adopted.all_tokens(images)[:, self.parts(adopted.source).prefix_tokens :]

    def patch_embedding(self, model: nn.Module) -> nn.Module:
        source = self._adopted(model).source
        return source.get_submodule(self.parts(source).patches)

    def pooled_norm(self, model: nn.Module) -> nn.Module:
        return self.last_norm(self._adopted(model).source)

    def heads(self, model: nn.Module) -> tuple[nn.Module, ...]:
        named = dict(self._adopted(model).source.named_modules())
        heads = (named.get(name) for name in self.parts(self._adopted(model).source).classifiers)
        return tuple(head for head in heads if head is not None and num_outputs(head))

    def output_kind(self, model: nn.Module) -> str:
        return "logits" if self.heads(model) else "embedding"

    def positions(self, adopted: Adopted) -> int:
        """Returns the number of patches of an image."""
        return self.num_patches(adopted.source, adopted.origin.input_shape)

    def num_patches(self, source: nn.Module, input_shape: tuple[int, int, int]) -> int:
        """Returns the number of patches of an image of this shape, or of a video; a border is not read."""
        patches: Any = source.get_submodule(self.parts(source).patches)
        channels, *size = input_shape
        sides = (channels // patches.in_channels, *size)[-len(patches.stride) :]
        pads = (0,) * len(sides) if isinstance(patches.padding, str) else patches.padding
        geometry = zip(sides, patches.kernel_size, patches.stride, pads, strict=True)
        return math.prod(max((side + 2 * pad - kernel) // stride + 1, 0) for side, kernel, stride, pad in geometry)

    def num_tokens(self, model: nn.Module) -> int:
        adopted = self._adopted(model)
        return self.positions(adopted) + self.parts(adopted.source).prefix_tokens

    def costs_with(self, model: nn.Module, shapes: LayerShapes) -> ModelCosts:
        """Returns the costs; all parameters before the first layer (tokens and position embeddings too) count as
        patches, those of a layer outside attention and MLP (LayerScale too) as its norms. The parameters therefore add
        up to those of the model.
        """
        adopted = self._adopted(model)
        source, blocks, maps = adopted.source, self.blocks(adopted.source), self.mlp(adopted)
        parts, tokens = self.parts(source), shapes.tokens
        positions = self.positions(adopted)
        classifier = sum(num_params(module) for module in self._heads(source))
        before = num_params(source) - classifier - sum(num_params(block) for block in blocks)
        mlps = [[block.get_submodule(name) for name in parts.mlp] for block in blocks]
        # Where MLPs are of another kind, nothing in them changes.
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
                    # Inner norms of the attention are not counted by its spec.
                    PartCosts(num_params(block) - sum(map(num_params, (*mlp, own.scores, own.value, own.output)))),
                )
                for block, mlp, own, spec, change, num_tokens in zip(
                    blocks, mlps, self.attention(adopted), shapes.attention, changes, tokens.tokens, strict=True
                )
            ),
            embeddings=PartCosts(0, sum(map(bias_macs, blocks))),
            classifier=PartCosts(classifier),
            classifier_macs=self.head_macs(adopted, tokens.tokens[-1]),
            predictors=tokens.predictors,
        )

    def _heads(self, source: nn.Module) -> list[nn.Module]:
        """Returns the classifiers and the norms before them."""
        names = self.parts(source).heads
        return [module for name, module in source.named_modules() if name in names]

    def head_macs(self, adopted: Adopted, tokens: int) -> int:
        """Returns the MACs of the classifiers on one image; a pooling by attention attends to `tokens` tokens."""
        return sum(classifier_macs(head, tokens) for head in self._heads(adopted.source))

    def _stated(self, model: nn.Module, stated: Mapping[str, Any]) -> Origin:
        """Returns the origin of a model, in which the values in `stated` have precedence."""
        origin = replace(self.origin(model), **stated)
        if not self.num_patches(model, origin.input_shape):
            height, width = origin.input_shape[1:]
            raise InvalidInput(f"images of {height} x {width} are smaller than a patch of {origin.architecture}.")
        return origin

    def _adapters(self, model: nn.Module) -> tuple[Adapter, ...]:
        source = self._adopted(model).source
        path = self.parts(source).attention
        return tuple(block.get_submodule(path) for block in self.blocks(source))  # type: ignore[misc]

    def _adopted(self, model: nn.Module) -> Adopted:
        return self._own(model)

    def _require_rebuilt(self, adopted: Adopted) -> None:
        because = (
            "a model rebuilt from its name and arguments differs, so it was changed after it was created; state the "
            "change in the arguments (e.g. num_classes=N of timm), and load the weights into that model. Outside the "
            f"blocks, parts may be replaced by layers of torch.nn: Sequential, {', '.join(LAYERS)}"
        )
        with torch.device("meta"):
            rebuilt = self.build(self.describe(adopted))
            replaced = replaced_parts(adopted.source, rebuilt.source)
            blocks = self.parts(adopted.source).blocks
            if replaced and not any(f"{path}.".startswith(f"{blocks}.") for path in replaced):
                adopted.origin = replace(adopted.origin, replaced=replaced)
                rebuilt = self.build(self.describe(adopted))
        difference = difference_in_structure(adopted, rebuilt)
        if difference:
            raise NotSupported(f"{adopted.origin.architecture} cannot be adopted: {because}. {difference}")
        rebuilt.load_state_dict(adopted.state_dict(), assign=True)  # shares the weights, without a copy
        self._require_equal((adopted, rebuilt), because)

    def _require_equal(self, models: tuple[Adopted, Adopted], because: str) -> None:
        parts = self.parts(models[1].source)
        require_equal_logits(models, because, self.block_names(models[1]), parts.attention)


def unsaved_buffers(model: nn.Module) -> list[tuple[str, str, Tensor]]:
    """Returns the buffers that are not saved with the weights, with the path of their module and their name in it."""
    return [
        (path, name, buffer)
        for path, module in model.named_modules()
        for name in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers[name]) is not None
    ]


def _fuse_mlp_(block: nn.Module, parts: ViTParts) -> None:
    """Replaces the library's MLP by one with the same parts, if it is one module without other ones."""
    name, *others = parts.mlp
    mlp = block.get_submodule(name)
    if others or not parts.compresses(mlp):
        return
    first, second = (path.removeprefix(f"{name}.") for path in parts.maps)
    inside = {child: part for child, part in mlp.named_children() if type(part) is not nn.Identity}
    activation = [part for child, part in inside.items() if child not in (first, second)]
    # Exactly two maps and an activation without parameters: a dropout, a gate or a norm between them would be lost.
    if len(inside) == 3 and len(activation) == 1 and not any(True for _ in activation[0].parameters()):
        fused = FusedMLP(inside[first], activation[0], inside[second])
        block.set_submodule(name, fused.train(mlp.training))


def num_params(module: nn.Module) -> int:
    """Returns the number of parameters of a module, without those of its token policy."""
    tokens = module._modules.get(TOKENS)
    others = 0 if tokens is None else num_params(tokens)
    return sum(parameter.numel() for parameter in module.parameters()) - others


def matrix_entries(module: nn.Module) -> int:
    """Returns the entries of all linear maps in a module: its MACs for one token."""
    return sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))


def bias_macs(block: nn.Module) -> int:
    """Returns the MACs of timm's MLPs that compute the bias of all pairs of tokens from their distances."""
    mlps = (part for part in block.modules() if hasattr(part, "rel_coords_log"))
    return sum(matrix_entries(part) * (part.rel_coords_log.numel() // 2) for part in mlps)  # type: ignore[operator, union-attr]


def classifier_macs(head: nn.Module, tokens: int) -> int:
    """Returns the MACs of a classifier on one token; a pooling by attention has one query and keys of all tokens."""
    total = matrix_entries(head)
    for part in head.modules():
        if isinstance(part, nn.MultiheadAttention):
            # Its fused projection of query, key and value is a parameter and no Linear, so `matrix_entries` lacks it.
            width = part.embed_dim
            total += (1 + 2 * tokens) * width**2 + 2 * tokens * width
        elif type(part).__name__ == "AttentionPoolLatent":
            latent: Any = part  # one query
            # `matrix_entries` has its projections of one token; keys and values are of all tokens, and both products
            # come on top.
            total += (tokens - 1) * latent.kv.weight.numel() + tokens * latent.kv.out_features
    return total


def mlp_costs(
    mlp: Sequence[nn.Module],
    tokens: int,
    maps: tuple[Any, ...],
    ranks: tuple[int | None, ...],
    hidden: int,
    gate: Any = None,
) -> PartCosts:
    """Returns the costs of the modules of an MLP with its `maps`, if given, in these ranks (None: one matrix), with
    `hidden` features between them; `gate` is the map of the gate of a gated MLP.
    """
    changed = []
    if maps:
        first, second = maps
        changed = [(first, ranks[0], first.in_features, hidden), (second, ranks[1], hidden, second.out_features)]
    if gate is not None:
        changed.append((gate, None, gate.in_features, hidden))
    # What the maps have is replaced in the costs of the modules, so that further parts (a norm) stay counted.
    params, entries = sum(map(num_params, mlp)), sum(map(matrix_entries, mlp))
    for linear, rank, inputs, outputs in changed:
        new, before = inputs * outputs if rank is None else rank * (inputs + outputs), matrix_entries(linear)
        has_bias = num_params(linear) > before
        params += new + outputs * has_bias - num_params(linear)
        entries += new - before
    return PartCosts(params, tokens * entries)
