"""Reads timm's Vision Transformers with one list of blocks, based on their modules, not on their class names."""

import copy
import importlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.foreign_files import open_timm
from attnrx.support.modules import of_weights
from attnrx.support.optional import installed_versions, required_module
from attnrx.support.preprocessing import ImageGeometry
from attnrx.support.shapes import Float, Int, Tensor, TokenBatch
from attnrx.vit.attention import Attention
from attnrx.vit.models.family import num_outputs
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.models.libraries.attention_conversion import DISTANCES
from attnrx.vit.models.parts.mlp import set_parameter_
from attnrx.vit.models.parts.vit_parts import NOT_PLAIN, Refusal, ViTParts, unread_attention
from attnrx.vit.models.working.adopted import (
    HALVES,
    INTERLEAVED,
    Adapter,
    Adopted,
    Origin,
    PairBias,
    image_shape,
    one_node,
)

NO_BLOCKS = "Of timm, attnrx adopts models with one list of blocks, whose attention is attn."
IN_GRIDS = "VisionTransformerSAM"  # its blocks are called with grids of tokens
POST_NORM = ("ResPostBlock", "EvaBlockPostNorm", "ResPostRelPosBlock")
# The submodules and parameters of an attention module that attnrx can read.
ATTENTION_PARTS = {"qkv", "q_proj", "k_proj", "v_proj", "proj", "q_norm", "k_norm", "norm", "rel_pos"}
ATTENTION_PARAMETERS = {"q_bias", "v_bias", "relative_position_bias_table", *DISTANCES}
INNER_NORM_PATHS = {"query_norm": "q_norm", "key_norm": "k_norm", "output_norm": "norm"}
# Models may be created with layer classes from these modules. LAYER is the key under which such a class is saved.
LAYER_MODULES, LAYER = ("torch.nn", "timm.layers"), "layer class"
CLASSIFIERS = ("head", "head_dist")
FUSED, SEPARATE = ("qkv", "proj"), ("q_proj", "k_proj", "v_proj", "proj")
GATED = {"SwiGLU": ("mlp.fc1_x", "mlp.fc1_g", "mlp.fc2"), "GluMlp": ("mlp.fc1.first", "mlp.fc1.second", "mlp.fc2")}
# Arguments with which timm's factory would read files or access the hub.
FACTORY_ARGUMENTS = {"cache_dir", "checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"}


class TimmModel(Adopted):
    """A working copy of a timm Vision Transformer."""

    @property
    def takes_any_size(self) -> bool:
        source: Any = self.trunk
        return bool(getattr(source, "dynamic_img_size", False)) and not any(map(_has_bias, source.blocks))

    def _last_tokens(self, images: Tensor) -> Tensor:
        source: Any = self.trunk
        with self.forward_pass((len(source.blocks) - 1,)):
            return source.forward_features(images)


class TableBias(nn.Module):
    """A relative position bias as a table with one row per relative position (Liu et al., 2021; Bao et al., 2022)."""

    def __init__(self, table: nn.Parameter, index: Int[Tensor, "..."]):
        super().__init__()
        self.relative_position_bias_table = table
        self.index = index  # not a buffer, because timm does not save its index with the weights either

    def forward(self) -> Float[Tensor, "1 heads tokens tokens"]:
        return of_weights(self, None, self._pairs)

    def _pairs(self) -> Tensor:
        table = self.relative_position_bias_table
        # Reorders [pairs, heads] to [1, heads, tokens, tokens]. The result is made contiguous once, not at every use.
        count = math.isqrt(self.index.numel())
        return table[self.index.flatten().to(table.device)].view(1, count, count, -1).permute(0, 3, 1, 2).contiguous()


class TimmAttention(Adapter):
    """attnrx attention that timm's blocks can call. Masks are refused, because timm's classifiers pass none."""

    layout: str = INTERLEAVED

    @one_node
    def forward(
        self,
        x: TokenBatch,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        shared_rel_pos_bias: Tensor | None = None,
        shared_rel_pos: Tensor | None = None,
    ) -> TokenBatch:
        """Returns the attention output for tokens `x`. The arguments are the same as in timm's attention.

        `rope` contains sines and cosines, [patches, 2 * head_dim], optionally with leading axes for images or heads.
        The shared position biases are [1, heads, tokens, tokens].

        Raises:
            NotSupported: A mask is passed.
        """
        if attn_mask is not None or is_causal:
            raise NotSupported("attention masks (attn_mask, is_causal) are not supported in an adopted model.")
        rotation = None
        if rope is not None:  # concatenated, [(images, heads,) patches, sines and cosines]
            table = rope if rope.ndim == 4 else rope[(None,) * (4 - rope.ndim)]
            pairs = table.shape[-1] // 4
            # The table lists the angle of each pair twice: side by side, or once in each half of a row.
            one_of_two = slice(0, pairs) if self.layout == HALVES else slice(None, None, 2)
            sin, cos = (side[..., one_of_two].transpose(1, 2) for side in table.chunk(2, -1))
            rotation = cos, sin
        # BEiT passes its shared bias as shared_rel_pos_bias, VisionTransformerRelPos as shared_rel_pos.
        biases = (shared_rel_pos_bias, shared_rel_pos) if self.attention.spec.pair_bias else ()
        return self.mixed(x, self.positions(rotation, *biases))

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Stops timm's `set_input_size`, which calls this method in models with relative position biases.

        Raises:
            NotSupported: Always.
        """
        raise NotSupported(
            "attention that attnrx replaced has biases of pairs of tokens for one size: call set_input_size before the "
            "model is made smaller, or create the model with img_size=..."
        )


class TimmFamily(AdoptedFamily):
    """The family for timm models with one list of blocks, given as a module or by name (`timm:NAME`)."""

    name = library = "timm"
    model_type = TimmModel
    takes_weights = True
    size_argument = "img_size"
    adapter_type = TimmAttention

    def fitted(self, state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        # Like timm does for a pretrained file, this resamples position embeddings to the model's image size.
        return importlib.import_module(type(model).__module__).checkpoint_filter_fn(state, model)

    def names(self) -> Sequence[str]:
        return _timm("models").list_models()

    def has(self, name: str) -> bool:
        # A name may also be a hub address, or end in the tag of pretrained weights.
        return ":" in name or bool(_timm("models").is_model(name.partition(".")[0]))

    def make(self, name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
        _timm("models")  # if timm is not installed, the error names attnrx's extra
        return open_timm(name, pretrained, **arguments)

    def geometry(self, model: nn.Module) -> ImageGeometry:
        """Returns how timm's evaluation transform (`timm.data.create_transform`) resizes and crops images."""
        adopted = self._adopted(model)
        facts = {**(getattr(adopted.trunk, "pretrained_cfg", None) or {}), **adopted.origin.preprocessing}
        facts |= {"input_size": adopted.input_shape, "mean": adopted.origin.mean, "std": adopted.origin.std}
        settings = _timm("data").resolve_data_config(pretrained_cfg=facts)
        channels, *size = adopted.input_shape
        target = tuple(math.floor(side / settings["crop_pct"]) for side in size)
        resize, fill = "shortest_edge" if target[0] == target[1] else "cover", (0,)
        if settings["crop_mode"] == "squash":
            resize = "exact"
        elif settings["crop_mode"] == "border":
            resize, fill = "contain", tuple(round(255 * level) for level in settings["mean"])
        return ImageGeometry(tuple(size), channels, resize, target, settings["interpolation"], fill=fill)  # type: ignore[arg-type]

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields refusals for blocks and attention that attnrx cannot read, and for unsupported features."""
        blocks, embedding = getattr(model, "blocks", None), getattr(model, "patch_embed", None)
        is_read = hasattr(model, "num_prefix_tokens") or type(model).__name__ == IN_GRIDS
        if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not is_read:
            yield Refusal(f"the class {type(model).__name__} has no reader", NO_BLOCKS)
            return
        if type(embedding).__name__ != "PatchEmbed":
            yield Refusal(f"the patch embedding {type(embedding).__name__} is not a PatchEmbed")
        for block in blocks:
            attention, kind = getattr(block, "attn", None), type(block).__name__
            if not isinstance(attention, nn.Module):
                yield Refusal(f"the block {kind} has no attention module attn")
                continue
            # Unread parts with parameters would change the output. Other differences (a scale, an option of the forward
            # pass) show up when the logits are compared.
            submodules = {part for part, module in attention.named_children() if any(True for _ in module.parameters())}
            parameters = {part for part, _ in attention.named_parameters(recurse=False)}
            unread = sorted((submodules - ATTENTION_PARTS) | (parameters - ATTENTION_PARAMETERS))
            if unread:
                name = type(attention).__name__
                yield Refusal(f"the attention {name} has parts that are not read ({', '.join(unread)})", NOT_PLAIN)
            is_fused = getattr(attention, "qkv", None) is not None
            yield from unread_attention(attention, FUSED if is_fused else SEPARATE)

    def origin(self, model: nn.Module) -> Origin:
        """Returns the origin, i.e. timm's model function and its arguments, which timm stores in the model."""
        creation, facts = self.creation(model), getattr(model, "pretrained_cfg", None) or {}
        if creation is None:
            raise NotSupported(
                f"this {type(model).__name__} has no pretrained_cfg with an architecture. Create it with "
                "timm.create_model, which stores its arguments on the model, and load the weights into that."
            )
        name, arguments = creation["architecture"], creation["arguments"]
        shape, mean, std = _shape(model), tuple(facts["mean"]), tuple(facts["std"])
        if len(mean) != shape[0]:  # timm keeps the statistics of the pretrained images
            raise InvalidInput(
                f"{name} was created for images of {shape[0]} channels, and its pretrained_cfg has mean={mean}: state "
                f"the statistics of your images before loading it, e.g. model.pretrained_cfg.update(mean="
                f"{(0.5,) * shape[0]}, std={(0.5,) * shape[0]})."
            )
        data = _timm("data").resolve_data_config(pretrained_cfg=facts)
        settings = {field: data[field] for field in ("crop_pct", "crop_mode", "interpolation")}
        return Origin(name, arguments, shape, mean, std, settings)

    def creation(self, model: nn.Module) -> dict[str, Any] | None:
        facts = getattr(model, "pretrained_cfg", None) or {}
        if "architecture" not in facts:
            return None
        # get_model_args omits drop rates, but a model needs them for further training.
        arguments = {**getattr(model, "_model_args", {}), **_timm("models").get_model_args(model)}
        try:
            arguments = json.loads(json.dumps({key: _described_layer(value) for key, value in arguments.items()}))
        except TypeError as error:
            raise NotSupported(
                f"{facts['architecture']} was created with an argument that cannot be saved ({error}). Layers can be "
                "classes of torch.nn and timm.layers, with keywords (functools.partial), and activations and norms "
                "names, e.g. act_layer='gelu'. For a class of your own give attnrx.load(model, "
                "reader=attnrx.Reader(...))."
            ) from error
        return {"architecture": facts["architecture"], "arguments": arguments}

    def _resized(self, source: nn.Module, origin: Origin, height: int, width: int) -> Origin:
        if getattr(source, "dynamic_img_size", False):  # timm resamples embeddings in every forward pass
            return origin
        if not hasattr(source, "set_input_size"):
            return super()._resized(source, origin, height, width)
        source.set_input_size(img_size=(height, width))  # type: ignore[operator]
        return replace(origin, arguments={**origin.arguments, "img_size": [height, width]})

    def present_origin(self, adopted: Adopted) -> Origin:
        present = self.creation(adopted.trunk)  # arguments may have changed, e.g. by `reset_classifier`
        return adopted.origin if present is None else replace(adopted.origin, arguments=present["arguments"])

    def present_size(self, source: nn.Module, origin: Origin) -> Origin:
        model: Any = source
        shape = _shape(model)  # may differ after `set_input_size`. A dynamic size changes with every batch
        is_other = shape != origin.input_shape and not getattr(model, "dynamic_img_size", False)
        return replace(origin, input_shape=shape) if is_other else origin

    def state_format_(self, source: nn.Module, origin: Origin) -> None:
        model: Any = source
        config = getattr(model, "pretrained_cfg", None)
        if config is not None:  # `timm.data.resolve_model_data_config` reads this configuration
            stated = {"input_size": origin.input_shape, "mean": origin.mean, "std": origin.std}
            model.pretrained_cfg = model.default_cfg = {**config, **origin.preprocessing, **stated}

    def stated_origin(
        self, model: nn.Module, path: str | None, facts: Mapping[str, Any], stated: Mapping[str, Any]
    ) -> Origin:
        if path is None and type(model).__name__ == IN_GRIDS:
            raise NotSupported(f"{IN_GRIDS} has a neck after its blocks, so it is adopted as a whole module.")
        return super().stated_origin(model, path, facts, stated)

    def origin_inside(self, model: nn.Module) -> Origin:
        """Returns the origin of a model inside a user's module.

        If the user called the model's constructor directly, or its arguments cannot be saved, the origin has no
        arguments.
        """
        _timm("models")  # raises an error if timm is too old
        try:
            return super().origin_inside(model)
        except NotSupported:
            shape, facts = _shape(model), getattr(model, "pretrained_cfg", None) or {}
            half = (0.5,) * shape[0]
            mean, std = (tuple(facts.get(name) or half) for name in ("mean", "std"))
            return Origin(type(model).__name__, {}, shape, mean, std)

    def class_names(self, model: nn.Module) -> tuple[str, ...]:
        """Returns ImageNet's class names, or () if timm knows no ImageNet subset with this number of classes."""
        data, heads = _timm("data"), self.heads(model)
        # The number is read from the head, because `num_classes` does not change when a user replaces the head.
        subset = data.infer_imagenet_subset({"num_classes": num_outputs(heads[0])}) if heads else None
        info = None if subset is None else data.ImageNetInfo(subset)
        return () if info is None else tuple(info.index_to_description(index) for index in range(info.num_classes()))

    def create(self, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Creates a timm model from its name and from arguments that describe only the model itself.

        Other arguments, such as paths of weights, are refused. A config.json may come from an untrusted source, so
        loading it must not read other files or connect to a hub.
        """
        forbidden = sorted(FACTORY_ARGUMENTS & arguments.keys())
        if ":" in architecture or forbidden:
            raise InvalidInput(
                f"timm:{architecture} with {', '.join(forbidden) or 'the address of a hub'}: a saved model may "
                "have only a timm name and arguments of the model."
            )
        return self.initialized(architecture, **{key: _layer(value) for key, value in arguments.items()})

    def recomputed(self, module: nn.Module) -> nn.Module | None:
        # timm's module recomputes tables of rotary embeddings and indices of biases by this method. It runs on a copy,
        # because the module's own parameters stay on the meta device until the weights are assigned.
        if not hasattr(module, "init_non_persistent_buffers"):
            return None
        computed: Any = copy.deepcopy(module).to_empty(device="cpu")
        computed.init_non_persistent_buffers()
        return computed

    def parts(self, source: nn.Module) -> ViTParts:
        model: Any = source
        pooling = {"token": "class", "avg": "mean"}.get(str(model.global_pool), str(model.global_pool))
        is_attention = type(getattr(model, "attn_pool", None)).__name__ == "AttentionPoolLatent"
        if is_attention:
            pooling = "attention"
        elif getattr(model, "pool_include_prefix", False):
            pooling = f"{model.global_pool} with the tokens before the patches"
        post_norm = any(type(block).__name__ in POST_NORM for block in model.blocks)
        own = next((block.attn for block in model.blocks if not isinstance(block.attn, Adapter)), None)
        is_fused = getattr(own, "qkv", None) is not None
        return ViTParts(
            blocks="blocks", attention="attn", patches="patch_embed.proj", norm="norm", mlp_classes=("Mlp",),
            gated=GATED, heads=("norm", "fc_norm", "attn_pool", *CLASSIFIERS), classifiers=CLASSIFIERS,
            projections=FUSED if is_fused else SEPARATE, scale="scale",
            norm_before=None if post_norm else "norm1", prefix_tokens=int(getattr(model, "num_prefix_tokens", 0)),
            has_class_token=getattr(model, "cls_token", None) is not None, pooling=pooling,
            pooler="attn_pool" if is_attention else "",
            grid_axis=-1 if type(model).__name__ == IN_GRIDS else None,
        )  # fmt: skip

    def projected(self, source: nn.Module, module: nn.Module) -> tuple[list[Tensor], list[Tensor | None]]:
        attention: Any = module
        weights, biases = super().projected(source, module)
        if getattr(attention, "q_bias", None) is not None:  # in BEiT and EVA, whose key bias is a buffer of zeros
            biases[:3] = attention.q_bias, None, attention.v_bias
        groups = getattr(attention, "num_kv_groups", 1)
        # Grouped heads share keys and values. Repeating them is exact, and gives every head its own rows, as a spec
        # requires.
        sides: list[Any]
        for sides in (weights, biases) if groups > 1 else ():
            for side, rows in enumerate(sides[1:3], 1):
                if rows is not None:
                    heads = rows.unflatten(0, (attention.num_kv_heads, -1))
                    sides[side] = heads.repeat_interleave(groups, dim=0).flatten(0, 1)
        return weights, biases

    def write_projections_(
        self, source: nn.Module, module: nn.Module, weights: list[Tensor], biases: list[Tensor | None]
    ) -> None:
        """Writes the query, key, value and output projections into an attention module, in timm's layout."""
        attention: Any = module
        groups = getattr(attention, "num_kv_groups", 1)
        sides: list[Any]
        for sides in (weights, biases) if groups > 1 else ():
            for side, rows in enumerate(sides[1:3], 1):
                if rows is not None:
                    sides[side] = rows.unflatten(0, (attention.num_kv_heads, groups, -1))[:, 0].flatten(0, 1)
        if getattr(attention, "q_bias", None) is not None:  # in BEiT and EVA, whose key bias is a buffer of zeros
            for name, bias in (("q_bias", biases[0]), ("v_bias", biases[2])):
                if bias is None:
                    raise NotSupported("an attention without its biases")
                set_parameter_(module, name, bias, getattr(attention, name).requires_grad)
            biases[:3] = None, None, None
        super().write_projections_(source, module, weights, biases)

    def traits(self, source: nn.Module, module: nn.Module) -> dict[str, Any]:
        # If all layers share a bias, the bias belongs to the model, which passes it to every block.
        shared = getattr(source, "rel_pos_bias", None) or getattr(source, "shared_rel_pos", None)
        norms = {name: getattr(module, path, None) for name, path in INNER_NORM_PATHS.items()}
        return {
            "rotary": None if getattr(source, "rope", None) is None else _layout(module),
            "pair_bias": shared is not None or self.pair_bias(module) is not None,
            "inner_norms": {name: norm for name, norm in norms.items() if not isinstance(norm, nn.Identity | None)},
        }

    def adapter(self, source: nn.Module, module: nn.Module, attention: Attention) -> Adapter:
        adapter: Any = super().adapter(source, module, attention)
        adapter.layout = _layout(module)
        return adapter

    def pair_bias(self, module: nn.Module) -> nn.Module | None:
        table = getattr(module, "relative_position_bias_table", None)
        if table is not None:
            return TableBias(table, module.relative_position_index)  # type: ignore[arg-type]
        bias = getattr(module, "rel_pos", None)
        if bias is None:
            return None
        table = getattr(bias, "relative_position_bias_table", None)
        return PairBias(bias, bias.get_bias) if table is None else TableBias(table, bias.relative_position_index)

    def head_macs(self, adopted: Adopted, tokens: int) -> int:
        # A VisionTransformer's pooling by attention may skip the tokens before the patches.
        excludes = getattr(adopted.trunk, "pool_include_prefix", True) is False
        return super().head_macs(adopted, tokens - self.parts(adopted.trunk).prefix_tokens if excludes else tokens)


def _described_layer(value: Any) -> Any:
    """Converts a class from torch.nn or timm.layers, or a partial of it, to JSON. Other values are unchanged."""
    kind: Any
    kind, keywords = (value.func, value.keywords) if isinstance(value, partial) and not value.args else (value, {})
    for module in LAYER_MODULES if isinstance(kind, type) else ():
        if getattr(importlib.import_module(module), kind.__name__, None) is kind:
            return {LAYER: f"{module}:{kind.__name__}", "keywords": dict(keywords)}
    return value


def is_layer(value: Any) -> bool:
    """Returns whether a value is a class description that `_described_layer` returned."""
    return isinstance(value, Mapping) and value.keys() == {LAYER, "keywords"}


def _layer(value: Any) -> Any:
    """Converts a description from `_described_layer` back to a class or partial. Other values are unchanged."""
    if not is_layer(value):
        return value
    module, _, name = str(value[LAYER]).partition(":")
    # Only classes from these modules are allowed, because a config.json may come from anywhere.
    kind = getattr(importlib.import_module(module), name, None) if module in LAYER_MODULES else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise InvalidInput(f"{LAYER} {value[LAYER]!r:.80} is no class of layers of {' or '.join(LAYER_MODULES)}.")
    return partial(kind, **value["keywords"]) if value["keywords"] else kind


def _shape(model: Any) -> tuple[int, int, int]:
    # The patch embedding has the real size. `img_size` in timm.create_model may differ from the pretrained size.
    return image_shape((model.patch_embed.proj.in_channels, *model.patch_embed.img_size))


def _has_bias(block: Any) -> bool:
    """Returns whether a block adds a relative position bias to its attention scores."""
    names = "relative_position_bias_table", "rel_pos"
    attention = block.attn
    if isinstance(attention, Adapter):
        return attention.attention.spec.pair_bias
    return any(getattr(attention, name, None) is not None for name in names)


def _layout(attention: nn.Module) -> str:
    return HALVES if getattr(attention, "rotate_half", False) else INTERLEAVED


def _timm(module: str) -> ModuleType:
    imported, models = (required_module(f"timm.{name}", "", "a model of timm", "timm") for name in (module, "models"))
    if not hasattr(models, "get_model_args"):  # added in the oldest version that attnrx's extra accepts
        found = installed_versions("timm").get("timm", "an older version")
        raise NotSupported(
            f"models of timm need timm 1.0.31 or newer, and {found} is installed: pip install -U 'attnrx[timm]'."
        )
    return imported
