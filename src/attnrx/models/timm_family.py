"""The family of timm's Vision Transformers: ViT, DeiT, DeiT III and DINOv2, adopted with attnrx attention."""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.errors import CheckpointError, InvalidInput, NotSupported, UnknownName
from attnrx.models.adopted import Adapter, Adopted, Origin, assembled, image_shape
from attnrx.models.adopted_family import AdoptedFamily, ModelPaths
from attnrx.models.unsupported_features import NOT_PLAIN, Refusal, changed_linears, features
from attnrx.serialization.hub import local_copies_if_unreachable
from attnrx.shapes import Float, ImageBatch, Tensor, TokenBatch

# Reasons why timm's other blocks and attention are unsupported; other classes are refused with their name.
BLOCKS: dict[str, str] = {
    "ParallelScalingBlock": "attention and MLP in parallel with common projections",
    "ParallelThingsBlock": "several parallel attention modules in one layer",
    "DiffParallelScalingBlock": "differential attention in parallel with the MLP",
}
ATTENTION: dict[str, str] = {
    "AttentionRope": "rotary positions",
    "DiffAttention": "differential attention",
    "RelPosAttention": "relative position bias",
    "TalkingHeadAttn": "talking heads",
}
CLASSIFIERS = ("head", "head_dist")
PATHS = ModelPaths(
    attention="attn",
    patches="patch_embed.proj",
    norm="norm",
    mlps=("Mlp",),
    heads=("norm", "fc_norm", *CLASSIFIERS),
    classifiers=CLASSIFIERS,
    pooled=("fc_norm",),
)
# Arguments of timm's factory that read files or access the hub.
FACTORY_ARGUMENTS = {"cache_dir", "checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"}


class TimmModel(Adopted):
    """A Vision Transformer of timm with attnrx attention, with the attributes that timm's training and validation loops
    use.
    """

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """The pretrained configuration with the model's input format, which `resolve_model_data_config` reads."""
        config = dict(getattr(self.source, "pretrained_cfg", None) or {})
        taken = {"input_size": self.origin.input_shape, "mean": self.origin.mean, "std": self.origin.std}
        return {**config, **taken, "num_classes": self.num_classes}

    default_cfg = pretrained_cfg  # its older name in timm

    @property
    def num_classes(self) -> int:
        return int(self.source.num_classes)  # type: ignore[arg-type]

    def forward_features(self, images: ImageBatch) -> Float[Tensor, "batch tokens features"]:
        """Returns the features of all tokens after the last norm, as timm does: [batch, prefix + patches, width].

        Pruned and merged patches are restored (`attnrx.models.TokenRestoration`).
        """
        return self.all_tokens(images)

    def forward_head(self, tokens: TokenBatch, pre_logits: bool = False) -> Tensor:
        """Returns the logits of all tokens, or the pooled features."""
        return self.source.forward_head(tokens, pre_logits)  # type: ignore[operator]

    def forward_intermediates(
        self,
        images: ImageBatch,
        indices: int | Sequence[int] | None = None,
        *,
        stop_early: bool = False,
        intermediates_only: bool = False,
        **options: Any,
    ) -> Any:
        """Returns features after several blocks, as timm does, with all its options.

        Pruned and merged patches are restored. `indices` are the last n blocks, or a list of blocks; None: all.
        """
        source: Any = self.source
        blocks, last = _timm("models._features").feature_take_indices(len(source.blocks), indices)
        if not intermediates_only:
            blocks = [*blocks, last if stop_early else len(source.blocks) - 1]
        with self.restoring(blocks):
            return source.forward_intermediates(
                images, indices, stop_early=stop_early, intermediates_only=intermediates_only, **options
            )

    def get_intermediate_layers(self, images: ImageBatch, n: int | Sequence[int] = 1, **options: Any) -> Any:
        """Returns features after several blocks, as timm does, in the form of DINO."""
        source: Any = self.source
        with self.restoring(_timm("models._features").feature_take_indices(len(source.blocks), n)[0]):
            return source.get_intermediate_layers(images, n, **options)

    def _last_tokens(self, images: Tensor) -> Tensor:
        source: Any = self.source
        with self.restoring((len(source.blocks) - 1,)):
            return source.forward_features(images)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the classifier by a fresh one, as timm does; this is saved with the model."""
        source: Any = self.source
        source.reset_classifier(num_classes, *(() if global_pool is None else (global_pool,)))
        arguments = {**self.origin.arguments, "num_classes": num_classes}
        if global_pool is not None:
            arguments["global_pool"] = global_pool
            self.last = None  # the new pooling may use all tokens
        self.origin = replace(self.origin, arguments=arguments)


class TimmAttention(Adapter):
    """attnrx attention with the call signature of a timm block; classifiers never use its two mask arguments."""

    def forward(self, x: TokenBatch, attn_mask: Tensor | None = None, is_causal: bool = False) -> TokenBatch:
        if attn_mask is not None or is_causal:
            raise NotSupported("attention masks (attn_mask, is_causal) are not supported in an adopted model.")
        return self.mixed(x)


class TimmFamily(AdoptedFamily):
    """`timm:NAME`, e.g. `timm:vit_tiny_patch16_224`, and any plain VisionTransformer instance of timm."""

    name = library = "timm"
    model_type = TimmModel
    adapter_type = TimmAttention

    def load(
        self, name: str, weights: Path | str | None = None, pretrained: bool | None = None, **arguments: Any
    ) -> Adopted:
        """Creates a model by its timm name and adopts it, in evaluation mode.

        The weights come from a file (safetensors or a torch checkpoint, with timm's names), are downloaded by timm, or
        are initialized from seed 0 with `pretrained=False`. `arguments` are passed to timm, e.g. `num_classes=10`,
        `img_size=160`.
        """
        if weights is not None and pretrained:
            raise InvalidInput(f"weights={str(weights)!r} and pretrained=True: choose one of them.")
        with torch.device("meta"):
            self.require_supported(_create(name, arguments))  # before anything is downloaded or read
        model = _create(name, arguments, pretrained=weights is None and pretrained is not False)
        if weights is not None:
            state = read_checkpoint(Path(weights))
            try:
                # As timm does for a pretrained file: position embeddings are resampled to the model's image size.
                state = _timm("models.vision_transformer").checkpoint_filter_fn(state, model)
                model.load_state_dict(state, strict=True)
            except Exception as error:  # timm's conversion and torch raise errors of many types
                raise CheckpointError(f"the weights in {weights} do not fit timm:{name} ({error}).") from error
        return self.adopt(model).eval()

    def initialized(self, name: str, **arguments: Any) -> nn.Module:
        return _create(name, arguments)

    def preprocessing(self, model: nn.Module) -> Callable[[Any], Tensor]:
        """Returns the evaluation transform of timm: resize, centre crop, normalization."""
        data = _timm("data")
        return data.create_transform(**data.resolve_model_data_config(model))

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields unsupported classes of models, blocks, attention or patch embeddings, and unsupported features."""
        vit, timm_layers = _timm("models.vision_transformer"), _timm("layers")
        known = (vit.VisionTransformer, _timm("models.deit").VisionTransformerDistilled)
        yield from features(model)
        if type(model) not in known:
            yield Refusal(
                f"the class {type(model).__name__} has no reader",
                "Of timm, attnrx adopts the classes VisionTransformer and VisionTransformerDistilled.",
            )
            return
        if type(model.patch_embed) is not timm_layers.PatchEmbed:
            yield Refusal(f"the patch embedding {type(model.patch_embed).__name__} is not a PatchEmbed")
        for block in self.layers(model):
            attention: Any = getattr(block, "attn", None)
            kind = type(block)
            if kind not in (vit.Block, vit.ResPostBlock):
                yield Refusal(BLOCKS.get(kind.__name__, f"the block {kind.__name__} has no reader"))
            elif type(attention) is not timm_layers.Attention:
                own = type(attention).__name__
                reason = ATTENTION.get(own)
                yield Refusal(reason, NOT_PLAIN) if reason else Refusal(f"the attention {own} has no reader")
            else:
                yield from changed_linears(attention, ("qkv", "proj"))
                if attention.attn_drop.p or attention.proj_drop.p:
                    yield Refusal("dropout inside attention (create it with attn_drop_rate=0 and proj_drop_rate=0)")

    def origin(self, model: nn.Module, stated: Mapping[str, Any]) -> Origin:
        """Reads the entrypoint and its arguments, which timm stores on every model that it creates."""
        facts: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
        if "architecture" not in facts:
            raise NotSupported(
                f"this {type(model).__name__} has no pretrained_cfg with an architecture. Create it with "
                "timm.create_model, which stores its arguments on the model, and load the weights into that."
            )
        name = facts["architecture"]
        # get_model_args omits the drop rates, which belong to the model when it is trained further.
        arguments = {**getattr(model, "_model_args", {}), **_timm("models").get_model_args(model)}
        try:
            arguments = json.loads(json.dumps(arguments))
        except TypeError as error:
            raise NotSupported(
                f"{name} was created with an argument that cannot be saved ({error}); timm accepts names of layers "
                "too, e.g. act_layer='gelu'."
            ) from error
        embedding: Any = model.patch_embed
        own = image_shape((embedding.proj.in_channels, *embedding.img_size))
        shape = image_shape(stated.get("input_shape") or own)
        if shape != own and not getattr(model, "dynamic_img_size", False):
            raise InvalidInput(f"{name} was created for images of {own}: create it with img_size={shape[1:]}.")
        mean, std = (tuple(stated.get(field) or facts[field]) for field in ("mean", "std"))
        return Origin(name, arguments, shape, mean, std)

    def class_names(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the names of the ImageNet classes if timm finds, by their number, that the model has them."""
        data = _timm("data")
        subset = data.infer_imagenet_subset(self._adopted(model).source)
        info = None if subset is None else data.ImageNetInfo(subset)
        return () if info is None else tuple(info.index_to_description(index) for index in range(info.num_classes()))

    def create(self, origin: Origin) -> nn.Module:
        """Calls timm's entrypoint with model arguments only."""
        forbidden = sorted(FACTORY_ARGUMENTS & origin.arguments.keys())
        if ":" in origin.architecture or forbidden:
            raise InvalidInput(
                f"timm:{origin.architecture} with {', '.join(forbidden) or 'the address of a hub'}: a saved model may "
                "have only a timm name and arguments of the model."
            )
        return _create(origin.architecture, origin.arguments)

    def paths(self, source: nn.Module) -> ModelPaths:
        return PATHS

    def output_kind(self, model: nn.Module) -> str:
        return "logits" if self.heads(model) else "embedding"

    def layers(self, source: nn.Module) -> tuple[nn.Module, ...]:
        return tuple(source.get_submodule("blocks").children())

    def own(self, attention: nn.Module) -> Attention:
        """Splits the fused projection into query, key and value."""
        theirs: Any = attention
        fused = (None,) * 3 if theirs.qkv.bias is None else theirs.qkv.bias.chunk(3)
        weights = (*theirs.qkv.weight.chunk(3), theirs.proj.weight)
        return assembled(weights, (*fused, theirs.proj.bias), theirs.num_heads, theirs.scale)

    def norm_before(self, layer: nn.Module) -> str | None:
        """Returns the first norm, unless the block is post-norm."""
        return "norm1" if type(layer) is _timm("models.vision_transformer").Block else None

    def prefix_tokens(self, source: nn.Module) -> int:
        return int(source.num_prefix_tokens)  # type: ignore[arg-type]

    def has_class_token(self, source: nn.Module) -> bool:
        return source.cls_token is not None

    def pooling(self, source: nn.Module) -> str:
        if source.pool_include_prefix:
            return f"{source.global_pool} with the tokens before the patches"
        return {"token": "class", "avg": "mean"}.get(str(source.global_pool), str(source.global_pool))


def _timm(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"timm.{module}")
    except ModuleNotFoundError as error:
        raise NotSupported(f"models of timm need the package timm ({error}): pip install timm.") from error


def _create(name: str, arguments: Mapping[str, Any], pretrained: bool = False) -> nn.Module:
    timm = _timm("models")
    plain = name.partition(".")[0]
    if ":" not in name and not timm.is_model(plain):
        raise UnknownName("timm model", name, timm.list_models())
    with local_copies_if_unreachable() if pretrained else nullcontext("") as unreachable:
        try:
            with torch.random.fork_rng(devices=[]):  # timm draws weights from the global generator
                torch.manual_seed(0)
                return timm.create_model(name, pretrained=pretrained, **arguments)
        except Exception as error:  # timm raises AssertionError, and its downloads errors of several packages
            if pretrained:
                reason = unreachable or f"{type(error).__name__}: {error}"
                raise CheckpointError(
                    f"timm could not load the weights of {name} ({reason}). Give a file with weights=..., or "
                    "pretrained=False for fresh weights."
                ) from error
            raise InvalidInput(f"timm cannot create {name} with {dict(arguments)}: {error}") from error


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Reads a weight file with timm, which loads tensors only and finds the state dict under the usual keys."""
    load = _timm("models").load_state_dict
    try:
        tensors = dict(load(str(path)))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a file with weights.") from error
    except Exception as error:  # the error for a file without weights depends on its format
        raise CheckpointError(f"{path} cannot be read as weights ({error}).") from error
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{path} holds values that are not tensors, so it is not a file with weights.")
    return tensors
