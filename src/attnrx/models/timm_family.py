"""The family of timm's Vision Transformers: ViT, DeiT, DeiT III and DINOv2, adopted with attnrx attention."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.errors import CheckpointError, InvalidInput, NotSupported, UnknownName
from attnrx.models.adopted import Adapter, Adopted, AdoptedFamily, Origin, Parts, assembled, changed_linears
from attnrx.optional import required_module
from attnrx.serialization.hub import local_copies_if_unreachable
from attnrx.shapes import Tensor, TokenBatch

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

    @property
    def num_classes(self) -> int:
        return int(self.source.num_classes)  # type: ignore[arg-type]


class TimmAttention(Adapter):
    """attnrx attention with the call signature of a timm block; classifiers never use its two mask arguments."""

    def forward(self, x: TokenBatch, attn_mask: Tensor | None = None, is_causal: bool = False) -> TokenBatch:
        if attn_mask is not None or is_causal:
            raise NotSupported("attention masks (attn_mask, is_causal) are not supported in an adopted model.")
        return self.mixed(x)


class TimmFamily(AdoptedFamily):
    """`timm:NAME`, e.g. `timm:vit_tiny_patch16_224`, and any plain VisionTransformer instance of timm."""

    name = library = "timm"
    adoptable = "Of timm, attnrx adopts VisionTransformer and VisionTransformerDistilled with their plain blocks."
    model_type = TimmModel
    adapter_type = TimmAttention
    attention_name, attention_path = "attn", "attn.attention"
    mlp_types = ("Mlp",)
    classifier_names = ("head", "head_dist")
    head_names = ("norm", "fc_norm", *classifier_names)
    pooled_names = ("fc_norm",)

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

    def refusals(self, model: Any) -> Iterator[str]:
        """Yields unsupported classes of models, blocks, attention or patch embeddings, and dropout."""
        vit, timm_layers = _timm("models.vision_transformer"), _timm("layers")
        if type(model) not in (vit.VisionTransformer, _timm("models.deit").VisionTransformerDistilled):
            yield f"the class {type(model).__name__} has no reader"
            return
        if type(model.patch_embed) is not timm_layers.PatchEmbed:
            yield f"the patch embedding {type(model.patch_embed).__name__} is not a PatchEmbed"
        for block in model.blocks:
            attention: Any = getattr(block, "attn", None)
            if type(block) not in (vit.Block, vit.ResPostBlock) or type(attention) is not timm_layers.Attention:
                yield f"the block {type(block).__name__} with {type(attention).__name__} has no reader"
            else:
                yield from changed_linears(attention, ("qkv", "proj"))
                if attention.attn_drop.p or attention.proj_drop.p:
                    yield "dropout inside attention (create it with attn_drop_rate=0 and proj_drop_rate=0)"

    def origin(self, model: Any) -> Origin:
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
        shape = (model.patch_embed.proj.in_channels, *model.patch_embed.img_size)
        return Origin(name, arguments, shape, tuple(facts["mean"]), tuple(facts["std"]))

    def create(self, origin: Origin) -> nn.Module:
        """Calls timm's entrypoint with model arguments only."""
        forbidden = sorted(FACTORY_ARGUMENTS & origin.arguments.keys())
        if ":" in origin.architecture or forbidden:
            raise InvalidInput(
                f"timm:{origin.architecture} with {', '.join(forbidden) or 'the address of a hub'}: a saved model may "
                "have only a timm name and arguments of the model."
            )
        return _create(origin.architecture, origin.arguments)

    def own(self, attention: Any) -> Attention:
        """Splits the fused projection into query, key and value."""
        fused = (None,) * 3 if attention.qkv.bias is None else attention.qkv.bias.chunk(3)
        weights = (*attention.qkv.weight.chunk(3), attention.proj.weight)
        return assembled(weights, (*fused, attention.proj.bias), attention.num_heads, attention.scale)

    def parts(self, source: Any) -> Parts:
        blocks, pooled = tuple(source.blocks), str(source.global_pool)
        if source.pool_include_prefix:
            pooled = f"{pooled} with the tokens before the patches"
        return Parts(
            blocks=blocks,
            patches=source.patch_embed.proj,
            last_norm=source.norm,
            # The other supported block is post-norm.
            norm_before="norm1" if type(blocks[-1]) is _timm("models.vision_transformer").Block else None,
            prefix=int(source.num_prefix_tokens),
            class_token=source.cls_token is not None,
            pooled={"token": "class", "avg": "mean"}.get(pooled, pooled),
            resizes=bool(source.dynamic_img_size),
        )


def _timm(module: str) -> ModuleType:
    return required_module(f"timm.{module}", "timm", "a model of timm")


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
    except Exception as error:  # the error for a file without weights depends on its format
        raise CheckpointError(f"{path} cannot be read as weights ({error}).") from error
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{path} holds values that are not tensors, so it is not a file with weights.")
    return tensors
