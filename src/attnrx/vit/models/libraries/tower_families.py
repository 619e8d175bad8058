"""The families for torchvision's VisionTransformer and open_clip's image towers."""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attnrx.support.errors import NotSupported, UnknownName
from attnrx.support.optional import required_module
from attnrx.support.preprocessing import IMAGENET, ImageGeometry
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.models.parts.vit_parts import Refusal, ViTParts, last_linear
from attnrx.vit.models.working.adopted import Adopted, Origin, image_shape

# Arguments of VisionTransformer that the model stores as attributes. The other arguments are read from its blocks.
ARGUMENTS = ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout", "num_classes", "representation_size")


class TorchvisionModel(Adopted):
    """A working copy of torchvision's VisionTransformer."""


class TorchvisionFamily(AdoptedFamily):
    """The family for torchvision's VisionTransformer, given as a module or by name (e.g. `torchvision:vit_b_16`)."""

    name = library = "torchvision"
    model_type = TorchvisionModel
    takes_weights = True
    size_argument = "image_size"

    def parts(self, source: nn.Module) -> ViTParts:
        return ViTParts(
            blocks="encoder.layers", attention="self_attention", norm_before="ln_1", maps=("mlp.0", "mlp.3"),
            patches="conv_proj", norm="encoder.ln", heads=("encoder.ln", "heads"),
            classifiers=last_linear(source, "heads"), prefix_tokens=1, has_class_token=True,
        )  # fmt: skip

    def names(self) -> Sequence[str]:
        models = _torchvision("models")
        return models.list_models(module=models)

    def make(self, name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
        return _torchvision("models").get_model(name, weights="DEFAULT" if pretrained else None, **arguments)

    def input_format(self, name: str) -> dict[str, Any]:
        transform = _torchvision("models").get_model_weights(name).DEFAULT.transforms()
        settings = {"resize_size": transform.resize_size[0], "interpolation": transform.interpolation.value}
        return {"mean": tuple(transform.mean), "std": tuple(transform.std), "preprocessing": settings}

    def geometry(self, model: nn.Module) -> ImageGeometry:
        """Returns how the pretrained weights' transform, or torchvision's usual transform, resizes and crops images."""
        channels, size, _ = self._adopted(model).origin.input_shape
        # In torchvision's presets, 256 pixels are cropped to 224.
        settings = {"resize_size": size * 256 // 224, "interpolation": "bilinear"} | dict(
            self._adopted(model).origin.preprocessing
        )
        target = settings["resize_size"]
        return ImageGeometry((size, size), channels, "shortest_edge", (target, target), settings["interpolation"])

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields refusals for classes other than VisionTransformer, and for models that lack expected parts."""
        name = type(model).__name__
        if name != "VisionTransformer":
            yield Refusal(f"the class {name} has no reader", "Of torchvision, attnrx adopts VisionTransformer.")
            return
        yield from self.parts(model).refusals(model)

    def origin(self, model: nn.Module) -> Origin:
        """Returns an origin with the constructor arguments that the model stores, and ImageNet's mean and std."""
        stored: dict[str, Any] = {name: getattr(model, name) for name in ARGUMENTS}
        blocks: Any = self.blocks(model)
        arguments = {**stored, "num_layers": len(blocks), "num_heads": blocks[0].num_heads, "attention_dropout": 0.0}
        size = stored["image_size"]  # torchvision's models take only square images of three channels
        return Origin("VisionTransformer", arguments, image_shape((3, size, size)), *IMAGENET)

    def _resized(self, source: Any, origin: Origin, height: int, width: int) -> Origin:
        if height != width:
            raise NotSupported(f"torchvision's VisionTransformer takes square images only, not {height} x {width}.")
        interpolate = _torchvision("models.vision_transformer").interpolate_embeddings
        name, before = "encoder.pos_embedding", source.encoder.pos_embedding
        resized = interpolate(height, source.patch_size, {name: before.detach()})[name].contiguous()
        source.encoder.pos_embedding = nn.Parameter(resized, requires_grad=before.requires_grad)
        settings, size_before = dict(origin.preprocessing), source.image_size
        source.image_size, source.seq_length = height, resized.shape[1]
        if "resize_size" in settings:
            settings["resize_size"] = math.ceil(settings["resize_size"] * height / size_before)
        arguments = {**origin.arguments, "image_size": height}
        return replace(origin, arguments=arguments, preprocessing=settings)

    def create(self, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
        if architecture == "VisionTransformer":
            return _torchvision("models").VisionTransformer(**arguments)
        return self.initialized(architecture, **arguments)


def _torchvision(module: str) -> Any:
    return required_module(f"torchvision.{module}", "", "a model of torchvision", "torchvision")


# The mean and std of CLIP's images (open_clip's OPENAI_DATASET_MEAN and OPENAI_DATASET_STD).
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Class names of the towers' activations and norms.
ACTIVATIONS = ("GELU", "QuickGELU")
NORMS = ("LayerNorm", "LayerNormFp32")


class OpenClipModel(Adopted):
    """A working copy of open_clip's image tower. It returns the projected embedding."""

    def answering(self) -> Callable[[nn.Module, torch.Tensor], Any]:
        return _embedding if self.around is None else super().answering()


def _embedding(tower: nn.Module, images: torch.Tensor) -> torch.Tensor:
    # With output_tokens=True, a tower returns the embedding and the tokens.
    output = tower(images)
    return output[0] if isinstance(output, tuple) else output


class OpenClipFamily(AdoptedFamily):
    """The family for open_clip image towers, given as a module or by name (`open_clip:NAME`, random weights)."""

    name = "open_clip"
    library = "open_clip"
    model_type = OpenClipModel

    def parts(self, source: nn.Module) -> ViTParts:
        tower: Any = source
        pooling = {"tok": "class", "avg": "mean"}.get(tower.pool_type, str(tower.pool_type))
        # With final_ln_after_pool, the tower computes the mean before the last norm.
        pooling = "mean without a norm" if tower.final_ln_after_pool and pooling == "mean" else pooling
        is_attention = tower.attn_pool is not None  # in CoCa, whose first query returns the embedding
        # The head is a projection that is stored as a parameter, so it is not listed here (`head_macs`).
        return ViTParts(
            blocks="transformer.resblocks", attention="attn", norm_before="ln_1", maps=("mlp.c_fc", "mlp.c_proj"),
            patches="conv1", norm="attn_pool.ln_k" if is_attention else "ln_post",
            heads=("attn_pool", "ln_post") if is_attention else ("ln_post",), prefix_tokens=1, has_class_token=True,
            pooling="attention" if is_attention else pooling, pooler="attn_pool.attn" if is_attention else "",
        )  # fmt: skip

    def answered_blocks(self, adopted: Adopted) -> Container[int]:
        source: Any = adopted.trunk
        # After a pooling by attention, the returned tokens belong to its queries, not to patches.
        return (len(self.block_paths(source)) - 1,) if source.output_tokens and source.attn_pool is None else ()

    def names(self) -> Sequence[str]:
        return _open_clip("").list_models()

    def make(self, name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
        """Creates only the image tower of this model. `arguments` override fields of the tower's configuration."""
        config = _open_clip("").get_model_config(name)
        fields, quick_gelu = {**config["vision_cfg"], **arguments}, config.get("quick_gelu", False)
        # `_build_vision_tower` is private, but the public constructors would also create the text tower.
        return _open_clip(".model")._build_vision_tower(config["embed_dim"], fields, quick_gelu)

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields refusals for classes other than VisionTransformer, and for unsupported blocks and features."""
        name = type(model).__name__
        if name != "VisionTransformer":
            yield Refusal(f"the class {name} has no reader", "Of open_clip, attnrx adopts VisionTransformer.")
            return
        tower: Any = model
        for block in self.blocks(model):
            if type(block).__name__ != "ResidualAttentionBlock":
                yield Refusal(f"the block {type(block).__name__} has no reader")
                return
        if tower.attn_pool is not None and tower.attn_pool_contrastive is not None:
            yield Refusal("two poolings by attention", "A tower with attentional_pool=True is adopted.")
        kinds = type(tower.transformer.resblocks[0].mlp.gelu).__name__, type(tower.ln_post).__name__
        if kinds[0] not in ACTIVATIONS or kinds[1] not in NORMS:
            yield Refusal(f"the activation {kinds[0]} or the norm {kinds[1]} of another library")
        yield from self.parts(model).refusals(model)

    def origin(self, model: nn.Module) -> Origin:
        """Returns an origin with the model's constructor arguments and its stored mean and std (by default CLIP's)."""
        tower: Any = model
        block = tower.transformer.resblocks[0]
        # A missing LayerScale is an identity. Its initial value is not stored, but the weights replace it anyway.
        scale = getattr(block.ls_1, "gamma", None)
        arguments = {
            "image_size": list(tower.image_size), "patch_size": list(tower.patch_size),
            "width": tower.transformer.width, "layers": tower.transformer.layers, "heads": block.attn.num_heads,
            "mlp_ratio": block.mlp.c_fc.out_features / block.mlp.c_fc.in_features,
            "ls_init_value": None if scale is None else 1.0, "output_dim": tower.output_dim,
            "no_ln_pre": isinstance(tower.ln_pre, nn.Identity), "pool_type": tower.pool_type,
            "final_ln_after_pool": tower.final_ln_after_pool, "act_layer": type(block.mlp.gelu).__name__,
            "norm_layer": type(tower.ln_post).__name__,
        }  # fmt: skip
        if tower.attn_pool is not None:
            queries, heads = len(tower.attn_pool.query), tower.attn_pool.attn.num_heads
            arguments |= {"attentional_pool": True, "attn_pooler_queries": queries, "attn_pooler_heads": heads}
        # open_clip.create_model stores this configuration on the tower.
        found = getattr(tower, "preprocess_cfg", None) or {}
        mean, std = (tuple(found.get(name) or own) for name, own in zip(("mean", "std"), CLIP, strict=True))
        settings = {name: found[name] for name in ("interpolation", "resize_mode", "fill_color") if name in found}
        return Origin("VisionTransformer", arguments, image_shape((3, *tower.image_size)), mean, std, settings)

    def geometry(self, model: nn.Module) -> ImageGeometry:
        """Returns how open_clip's transform for inference resizes and crops images."""
        settings = self._adopted(model).origin.preprocessing
        channels, *size = self._adopted(model).origin.input_shape
        proportional = "shortest_edge" if size[0] == size[1] else "cover"
        resize = {"squash": "exact", "longest": "contain"}.get(settings.get("resize_mode", "shortest"), proportional)
        fill = (settings.get("fill_color", 0),) if resize == "contain" else (0,)
        filter_ = settings.get("interpolation", "bicubic")
        return ImageGeometry(tuple(size), channels, resize, tuple(size), filter_, fill=fill)  # type: ignore[arg-type]

    def create(self, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
        if architecture != "VisionTransformer":
            return self.initialized(architecture, **arguments)
        # A saved model contains class names. Only the names listed above are looked up in the library.
        towers, arguments = _open_clip(".transformer"), dict(arguments)
        for field, names in (("act_layer", ACTIVATIONS), ("norm_layer", NORMS)):
            name = arguments[field]
            if name not in names:
                raise UnknownName(f"{field} of open_clip", name, names)
            arguments[field] = nn.GELU if name == "GELU" else getattr(towers, name)
        return towers.VisionTransformer(**{**arguments, "image_size": tuple(arguments["image_size"])})

    def head_macs(self, adopted: Adopted, tokens: int) -> int:
        """Returns the MACs of the attention pooling and of the projection (a parameter, not a module)."""
        projection: Any = adopted.trunk.proj
        return super().head_macs(adopted, tokens) + (0 if projection is None else projection.numel())


def _open_clip(module: str) -> Any:
    return required_module(f"open_clip{module}", "", "a model of open_clip", "open_clip_torch")
