"""The family for transformers' Vision Transformers, with or without a classifier.

For every supported model class, `READERS` contains a `ModelReader` with the paths of the model's parts.
"""

import inspect
import json
import math
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, NotSupported, UnknownName
from attnrx.support.foreign_files import model_from, open_pretrained
from attnrx.support.optional import required_module
from attnrx.support.preprocessing import ImageGeometry
from attnrx.support.shapes import ImageBatch, Tensor, TokenBatch
from attnrx.support.storage import read_json
from attnrx.vit.attention import Attention
from attnrx.vit.models.family import num_outputs
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.models.parts.module_inputs import ModuleInputs, PatchInputs, inputs_of_config
from attnrx.vit.models.parts.vit_parts import Refusal, ViTParts, unread_attention
from attnrx.vit.models.working.adopted import HALVES, Adapter, Adopted, Origin, PairBias, image_shape, one_node

CLASS_TOKEN = "class token"
MAPS = "feature_maps"  # a backbone's output. As it has several maps, a backbone is adopted as a whole module
# Names of embedding parameters and of modules in the classes of READERS. Each class has only some of them.
PREFIX = ("cls_token", "distillation_token", "register_tokens", "class_embedding", "detection_tokens")
NORMS_BEFORE = ("layernorm_before", "norm1", "layer_norm1")
HEADS = ("classifier", "cls_classifier", "distillation_classifier")
CLASSIFIERS = (*HEADS, "classifier.dense")
OTHER_HEADS = ("fc_norm", "visual_projection", "class_labels_classifier", "bbox_predictor", "neck", "head")
GATED = ("mlp.up_proj", "mlp.gate_proj", "mlp.down_proj")
# Answers of models that do not return one field of transformers' output. Every function returns [batch, features].
ANSWERS: Mapping[str, Callable[[Any], Tensor]] = {
    CLASS_TOKEN: lambda output: output.last_hidden_state[:, 0],
    "mean": lambda output: output.last_hidden_state.mean(1),
    # For every detection token, its class logits and then its box.
    "detections": lambda output: torch.cat([output.logits, output.pred_boxes], dim=-1).flatten(1),
    "depth": lambda output: output.predicted_depth.flatten(1),
}


# Where most classes have their parts, inside the body of a model.
LAYOUT = ViTParts(
    "layers", "attention", "embeddings.patch_embeddings.projection", "layernorm", classifiers=CLASSIFIERS,
    projections=("q_proj", "k_proj", "v_proj", "o_proj"), returns_weights=True,
)  # fmt: skip


@dataclass(frozen=True)
class ModelReader:
    """Describes the parts of a transformers model class, its token pooling, and the output that attnrx uses.

    `layout` contains the paths of the parts inside the body, i.e. the module with the embeddings and the layers.
    `answer` names the field of the model's output that attnrx uses, or is a name in ANSWERS. `windowed` names two
    configuration fields: the number of windows per side of an image, and the indices of the blocks that attend within
    windows. `embeddings` is the name of the body's submodule that computes the tokens.
    """

    layout: ViTParts = LAYOUT
    pooling: str = "class"
    answer: str = "logits"
    takes_any_size: bool = False
    windowed: tuple[str, str] | None = None
    embeddings: str = "embeddings"

    def windows(self, config: Any) -> tuple[int, tuple[int, ...]]:
        """Returns the number of windows in an image, and the indices of the blocks that attend to all windows."""
        if not self.windowed:
            return 1, ()
        side, blocks = (getattr(config, name) for name in self.windowed)
        joined = tuple(index for index in range(config.num_hidden_layers) if index not in blocks)
        return (side * side, joined) if side > 1 else (1, ())

    def answer_of(self, output: Any) -> Tensor:
        """Returns the part of a model's output that attnrx uses, [batch, classes or features]."""
        return ANSWERS[self.answer](output) if self.answer in ANSWERS else output[self.answer]

    def body_path(self, source: nn.Module) -> str:
        """Returns the path of the body, i.e. the module with the embeddings and the layers."""
        return next((path for path, part in source.named_modules() if self.embeddings in part._modules), "")

    def body_of(self, source: nn.Module) -> Any:
        return source.get_submodule(self.body_path(source))

    def inputs(self, source: nn.Module) -> ModuleInputs:
        """Returns a description of the inputs of a model. The model must have this reader's class."""
        return inputs_of_config(self.body_of(source).config)

    def parts(self, source: nn.Module) -> ViTParts:
        """Returns the paths and properties of a model's parts. The model must have this reader's class."""
        path, layout = self.body_path(source), self.layout
        body: Any = source.get_submodule(path)
        blocks, norm, patches, head, pooler = (
            f"{path}.{name}".strip(".") for name in (layout.blocks, layout.norm, layout.patches, "head", "pooler")
        )
        norm = norm if layout.norm else ""
        # Token parameters are [1, tokens, width]. CLIP's class embedding is [width].
        tokens = body.get_submodule(self.embeddings).named_parameters(recurse=False)
        prefix_tokens = sum(token.shape[1] if token.ndim == 3 else 1 for name, token in tokens if name in PREFIX)
        last_block = list(source.get_submodule(blocks).children())[-1:]
        # The class names of a block and of its MLP start with the same word, e.g. ViT. A block may be of a subclass.
        kinds = [kind for block in last_block for kind in type(block).__mro__ if "transformers." in kind.__module__]
        word = kinds[0].__name__.removesuffix("Layer").removesuffix("Encoder") if kinds else ""
        pooling = self.pooling
        if not getattr(source.config, "use_mean_pooling", True):
            # BEiT and Data2Vec then pool their first token, the class token. VideoMAE has none and pools a patch.
            pooling = "class" if pooling == "mean" else "the first patch"
        windows, joined = self.windows(body.config)
        return replace(
            layout, blocks=blocks, patches=patches, norm=norm, windows=windows, joined=joined,
            mlp_classes=layout.mlp_classes or (f"{word}MLP", f"{word}Mlp", f"{word}Intermediate"),
            gated=dict.fromkeys((f"{word}SwiGLUFFN", f"{word}GatedMLP"), GATED),
            heads=(*HEADS, *OTHER_HEADS, *filter(None, (norm, head, pooler))),
            num_heads=body.config.num_attention_heads,
            norm_before=next((name for block in last_block for name in NORMS_BEFORE if hasattr(block, name)), None),
            prefix_tokens=prefix_tokens, has_class_token=prefix_tokens > 0, pooling=pooling,
            pooler=f"{head}.attention" if pooling == "attention" else "",
        )  # fmt: skip


DINO = replace(LAYOUT, blocks="encoder.layer")
DINO3 = replace(
    LAYOUT, blocks="model.layer", patches="embeddings.patch_embeddings", norm="norm",
    maps=("mlp.up_proj", "mlp.down_proj"),
)  # fmt: skip
TOWER = replace(
    LAYOUT, blocks="encoder.layers", attention="self_attn", patches="embeddings.patch_embedding",
    norm="post_layernorm", projections=("q_proj", "k_proj", "v_proj", "out_proj"),
)  # fmt: skip
LW_DETR = replace(
    LAYOUT, blocks="encoder.layer", patches="embeddings.projection", norm="", mlp=("intermediate",),
    maps=("intermediate.fc1", "intermediate.fc2"),
)  # fmt: skip
VITDET = replace(
    LAYOUT, blocks="encoder.layer", patches="embeddings.projection", norm="", projections=("qkv", "proj"),
    grid_axis=1,
)  # fmt: skip
SAM = replace(
    LAYOUT, attention="attn", patches="patch_embed.projection", norm="", projections=("qkv", "proj"),
    maps=("mlp.lin1", "mlp.lin2"), mlp_classes=("SamMLPBlock",), grid_axis=-1,
)  # fmt: skip
# Classes whose attention and MLP both consist of two modules.
NESTED = replace(
    LAYOUT, blocks="encoder.layer", mlp=("intermediate", "output"), maps=("intermediate.dense", "output.dense"),
    projections=("attention.query", "attention.key", "attention.value", "output.dense"),
)  # fmt: skip
# Like NESTED, but the attention returns a tensor instead of a pair.
NESTED_TENSOR = replace(NESTED, returns_weights=False)

# Keys are class names. All classes in one key have the same reader.
_READERS: Mapping[str, ModelReader] = {
    # AST's classifier takes the mean of the class token and the distillation token.
    "ViTForImageClassification DeiTForImageClassification DeiTForImageClassificationWithTeacher "
    "ViTMSNForImageClassification ASTForAudioClassification VivitForVideoClassification": ModelReader(),
    "ViTModel DeiTModel ViTMSNModel ViTMAEModel VivitModel": ModelReader(answer=CLASS_TOKEN),
    "IJepaForImageClassification BeitForImageClassification": ModelReader(pooling="mean"),
    "IJepaModel": ModelReader(pooling="mean", answer="mean"),
    "BeitModel": ModelReader(pooling="mean", answer="pooler_output"),
    "Data2VecVisionForImageClassification": ModelReader(NESTED, "mean"),
    # DINOv2's classifier takes the class token and the mean of the patches. It counts as "mean", so patches are kept.
    "Dinov2ForImageClassification Dinov2WithRegistersForImageClassification": ModelReader(
        DINO, "mean", takes_any_size=True
    ),
    "Dinov2Model Dinov2WithRegistersModel": ModelReader(DINO, answer=CLASS_TOKEN, takes_any_size=True),
    "Dinov2Backbone Dinov2WithRegistersBackbone": ModelReader(DINO, answer=MAPS, takes_any_size=True),
    "DINOv3ViTModel": ModelReader(DINO3, answer=CLASS_TOKEN, takes_any_size=True),
    "LwDetrViTBackbone": ModelReader(
        LW_DETR, "mean", MAPS, takes_any_size=True, windowed=("num_windows_side", "window_block_indices")
    ),
    "RfDetrDinov2Backbone": ModelReader(
        DINO, "mean", MAPS, takes_any_size=True, windowed=("num_windows", "window_block_indexes")
    ),
    "VitDetBackbone VitDetModel": ModelReader(VITDET, "mean", MAPS),
    "SamVisionModel SamVisionEncoder": ModelReader(SAM, "mean", MAPS, embeddings="patch_embed"),
    "DINOv3ViTBackbone": ModelReader(DINO3, answer=MAPS, takes_any_size=True),
    "CLIPVisionModel": ModelReader(TOWER, answer="pooler_output"),
    "CLIPVisionModelWithProjection": ModelReader(TOWER, answer="image_embeds"),
    # This class pools the mean of the patches before the last norm.
    "CLIPForImageClassification": ModelReader(TOWER, "mean without a norm"),
    "SiglipVisionModel": ModelReader(TOWER, "attention", "pooler_output"),
    "Siglip2VisionModel": ModelReader(TOWER, "attention without padding", "pooler_output"),
    "SiglipForImageClassification": ModelReader(TOWER, "mean"),
    # This class pools the mean of the patches without the padded patches.
    "Siglip2ForImageClassification": ModelReader(TOWER, "mean without padding"),
    "YolosForObjectDetection": ModelReader(NESTED_TENSOR, "detection tokens", "detections"),
    "DPTForDepthEstimation": ModelReader(NESTED_TENSOR, "a map of all patches of several layers", "depth"),
    "VideoMAEForVideoClassification": ModelReader(NESTED_TENSOR, "mean without a norm"),
}
READERS: Mapping[str, ModelReader] = {name: reader for names, reader in _READERS.items() for name in names.split()}
# For saved models with several towers: the class of the image tower, which is the part that attnrx reads.
VISION_PARTS: Mapping[str, str] = {
    "CLIPModel": "CLIPVisionModelWithProjection",
    "SiglipModel": "SiglipVisionModel",
    "Siglip2Model": "Siglip2VisionModel",
}


def reader_of(source: nn.Module) -> ModelReader:
    """Returns the reader for a model. The model's class must be in `READERS`."""
    return READERS[type(source).__name__]


def is_transformers_folder(folder: Path | str) -> bool:
    """Returns whether a folder has a config.json that transformers wrote."""
    path = Path(folder) / "config.json"
    record = read_json(path) if path.is_file() else None
    return isinstance(record, Mapping) and "model_type" in record and "kind" not in record


# `OutputKind` names for the problem types of configurations. Without a problem type, outputs are class logits.
PROBLEMS = {"multi_label_classification": "multilabel", "regression": "regression"}
# Output kinds of answers that are neither logits nor embeddings: a number per pixel, and numbers with several units.
ANSWER_KINDS = {"depth": "map", "detections": "regression"}


class HuggingFaceModel(Adopted):
    """A working copy of a transformers Vision Transformer. It returns logits or an embedding for images."""

    def entering(self, images: ImageBatch) -> ImageBatch:
        return super().entering(self.inputs.images(images, 4) if self.around is None else images)

    def answering(self) -> Callable[[nn.Module, Tensor], Any]:
        if self.around is not None:
            return super().answering()
        return partial(_answer, reader_of(self.trunk), self.inputs, self.interpolation)

    @property
    def takes_any_size(self) -> bool:
        return reader_of(self.trunk).takes_any_size

    @cached_property
    def inputs(self) -> ModuleInputs:
        """The inputs of transformers' own model."""
        return reader_of(self.trunk).inputs(self.trunk)

    def _last_tokens(self, images: Tensor) -> Tensor:
        body = reader_of(self.trunk).body_of(self.trunk)
        with self.forward_pass((self._depth - 1,)):
            return body(**self.inputs.arguments(images)[1], **self.interpolation).last_hidden_state

    @property
    def interpolation(self) -> dict[str, bool]:
        """The argument that makes transformers resize position embeddings, or {} if it is not needed.

        The argument is passed if the image size differs from the size in the configuration, and the model resizes its
        position embeddings only on request.
        """
        is_other = self.inputs.shape != self.origin.input_shape and not self.takes_any_size
        return {INTERPOLATE: True} if is_other and interpolates(self.trunk) else {}

    @property
    def _depth(self) -> int:
        return len(HuggingFaceFamily().block_paths(self.trunk))

    @cached_property
    def dense_head_macs(self) -> int:
        """The MACs of DPT's neck and head, which convolve the patches of several layers."""
        source: Any = self.trunk
        config = source.config
        tokens = 1 + HuggingFaceFamily().num_patches(source, self.origin.input_shape)
        # The MACs are counted in a forward pass, because a DPT has many convolutions at several resolutions.
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            neck, head = type(source.neck)(config), type(source.head)(config)
            head(neck([torch.empty(1, tokens, config.hidden_size)] * len(config.neck_hidden_sizes)))
        return counter.get_total_flops() // 2  # PyTorch counts two operations per MAC


def _answer(
    reader: ModelReader, inputs: ModuleInputs, options: Mapping[str, Any], source: nn.Module, images: Tensor
) -> Tensor:
    """Returns the logits or the embedding of a transformers model, [batch, features]."""
    arguments = inputs.arguments(inputs.images(images, 4))[1]
    return reader.answer_of(source(**arguments, **options, output_attentions=False, return_dict=True))


class HuggingFaceAttention(Adapter):
    """attnrx attention that a transformers layer can call. It returns no attention weights."""

    takes_mask = False  # whether a mask of padded patches is accepted
    config: Any = None
    """The model's configuration. Through it, a user may request attention weights in every call."""

    @one_node
    def forward(
        self,
        hidden_states: TokenBatch,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        relative_position_bias: Tensor | None = None,
        **options: Any,
    ) -> tuple[TokenBatch, None] | TokenBatch:
        """Returns the attention output.

        In a layer with a relative position bias, `attention_mask` contains this bias, [1, heads, tokens, tokens].
        During export, transformers passes a mask that includes every token. attnrx ignores this mask, unless patches
        may be padded. `position_embeddings` are cosines and sines, each [patches, 2 * pairs].

        Raises:
            NotSupported: An unsupported mask is passed, or attention weights are requested. Also raised if tokens were
                removed and the images do not have the model's image size, because transformers would interpolate the
                position bias.
        """
        biased = self.attention.spec.pair_bias
        if attention_mask is not None and self.takes_mask:
            biased, attention_mask = True, self._mask_bias(attention_mask, hidden_states)
        elif attention_mask is not None and not biased and not torch.compiler.is_exporting():
            raise NotSupported("attention_mask is not supported in an adopted model.")
        if options.get("output_attentions", getattr(self.config, "output_attentions", False)) or _are_collected():
            raise NotSupported(
                "output_attentions=True: an adopted model returns no attention weights. Observe its layers with "
                "attnrx.models.observation_hooks instead."
            )
        biases = (attention_mask, relative_position_bias) if biased else ()
        kept = None if not biased or self.attention.kept_patches is None else self.attention.kept_patches()
        counts = {bias.shape[-1] for bias in biases if bias is not None}
        if kept is not None and self.prefix + kept.shape[1] in counts:
            raise NotSupported(
                "images of another size than the model was created for: transformers then interpolates the biases of "
                "pairs to the tokens that are left, and tokens of this model were pruned or merged. Give images of "
                "the configured image_size, or create the model for this size before its tokens are pruned."
            )
        rotation = None
        if position_embeddings is not None:
            pairs = slice(0, position_embeddings[0].shape[-1] // 2)  # because both halves of a row have equal angles
            cos, sin = (side[None, :, None, pairs] for side in position_embeddings)  # [1, patches, 1, pairs]
            rotation = cos, sin
        mixed = self.mixed(hidden_states, self.positions(rotation, *biases))
        return (mixed, None) if self.returns_weights else mixed

    def _mask_bias(self, mask: Tensor, tokens: TokenBatch) -> Tensor:
        """Converts an attention mask, [batch, 1, tokens, tokens], to an additive bias for every head."""
        if mask.dtype == torch.bool:
            excluded = torch.finfo(tokens.dtype).min / 2  # finite even after a score is added
            mask = torch.zeros_like(mask, dtype=tokens.dtype).masked_fill(~mask, excluded)
        heads = max((*self.attention.spec.heads, 0)) + 1
        return mask.expand(len(tokens), heads, -1, -1)


def _are_collected() -> bool:
    """Returns whether transformers collects attention weights in this call, even without an argument for them."""
    module = sys.modules.get("transformers.utils.output_capturing")  # only in recent versions
    if module is None or torch.compiler.is_compiling():
        return False
    return "attentions" in (module._active_collector.get() or {})


class HuggingFaceFamily(AdoptedFamily):
    """The family for models named `hf:ID` or `hf:FOLDER`, and for instances of the classes in `READERS`."""

    name = "huggingface"
    library = "transformers"
    model_type = HuggingFaceModel
    adapter_type = HuggingFaceAttention

    def parts(self, source: nn.Module) -> ViTParts:
        return reader_of(source).parts(source)

    def answer_kind(self, adopted: Adopted) -> str:
        source: Any = adopted.trunk
        answer = reader_of(source).answer
        if answer != "logits":
            return ANSWER_KINDS.get(answer, "embedding")
        return PROBLEMS.get(source.config.problem_type, "logits")

    def read(self, name: Path | str, trust: bool = False) -> tuple[nn.Module, dict[str, Any]]:
        """Reads a model from a local folder, or from the hub by its id. Returns the model and its input format.

        A model saved by a class in `READERS` is loaded as this class. For CLIP and SigLIP, only the image tower is
        loaded. Any other model is loaded as an image classifier. Mean, std and image size come from the image
        processor in the same folder. Without a processor, mean and std are 0.5, and the size comes from the
        configuration. If `trust` is true, code from the repository may run.

        Raises:
            CheckpointError: The model cannot be read, or weights are missing.
            InvalidInput: The model needs code from its repository, and `trust` is False.
        """
        try:
            kind = _class_of(open_pretrained(_transformers("AutoConfig"), name, trust))
            model, report = open_pretrained(kind, name, trust, output_loading_info=True)
        except AttnrxError:
            raise
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"hf:{name} cannot be read as an image classifier or an image tower: {error} Give a folder written by "
                "save_pretrained, or the id of such a model on the hub."
            ) from error
        # Missing weights, e.g. of a backbone's head, are drawn at random by transformers, which only warns.
        missing = sorted(map(str, report["missing_keys"])) + sorted(map(str, report["mismatched_keys"]))
        if missing:
            raise CheckpointError(
                f"hf:{name} lacks weights of {type(model).__name__}: {', '.join(missing[:4])} would be random. "
                "Fine-tune it as a classifier first, and save the result. If attnrx made this model smaller, load the "
                "folder that attnrx.save wrote, with these weights: attnrx.load(FOLDER, weights=THIS_FOLDER)."
            )
        reader = READERS.get(type(model).__name__)
        return model, _processor(name, reader is not None and reader.takes_any_size, trust)

    def inputs(self, model: nn.Module) -> ModuleInputs | None:
        adopted: HuggingFaceModel = self._own(model)
        return adopted.inputs if adopted.around is None else adopted.attnrx_inputs

    def answered_blocks(self, adopted: Adopted) -> Container[int]:
        # An output with the features of all tokens also needs pruned patches.
        return () if reader_of(adopted.trunk).answer == "logits" else (len(self.block_paths(adopted.trunk)) - 1,)

    def accepts_(self, model: nn.Module, shape: tuple[int, ...]) -> bool:
        adopted, inputs = self._adopted(model), self.inputs(model)
        if not (isinstance(inputs, PatchInputs) and inputs.is_padded(shape)):
            return False
        # Packed patches are not normalized, because they also contain a mask and a grid size.
        facts: dict[str, Any] = {"mean": (0.0,), "std": (1.0,), "preprocessing": {}}
        adopted.origin = replace(adopted.origin, input_shape=image_shape(shape), **facts)
        return True

    def knows_normalization(self, model: nn.Module) -> bool:
        return bool(self._adopted(model).origin.preprocessing)  # set only if mean and std come from an image processor

    def processor_config(self, model: nn.Module) -> dict[str, Any]:
        adopted = self._adopted(model)
        origin = adopted.origin
        if adopted.around is not None or not origin.preprocessing:
            return {}
        statistics = {"image_mean": list(origin.mean), "image_std": list(origin.std)}
        # All models save the same processor class, because its settings say what is computed.
        rescaling = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
        return {"image_processor_type": "ViTImageProcessor", **origin.preprocessing, **rescaling, **statistics}

    def geometry(self, model: nn.Module) -> ImageGeometry | None:
        """Returns how the image processor that was saved with the model resizes and crops images.

        The result is None if there is no processor, or if the processor returns images of varying sizes (e.g. for
        YOLOS). attnrx resizes images with Pillow, like processors with the backend "pil". Processors with the backend
        "torchvision" round a few pixels differently.
        """
        shape, settings = self._adopted(model).origin.input_shape, self._adopted(model).origin.preprocessing
        size, channels = settings.get("size", {}), shape[0]
        if not settings or channels not in (1, 3) or settings.get("do_pad") or settings.get("keep_aspect_ratio"):
            return None
        if not settings.get("do_resize", True):
            resize, target = "none", shape[1:]
        elif size.keys() == {"shortest_edge"}:
            resize, target = "shortest_edge", (size["shortest_edge"],) * 2
        elif size.keys() == {"height", "width"}:
            resize, target = "exact", (size["height"], size["width"])
        else:
            return None
        alpha = "white" if settings.get("do_convert_rgb") else "drop"
        filter_ = RESAMPLES[settings.get("resample", 2)]
        return ImageGeometry(shape[1:], channels, resize, target, filter_, center="floor", alpha=alpha)

    def make(self, name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
        try:
            config = open_pretrained(_transformers("AutoConfig"), name, False, **arguments)
        except AttnrxError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"hf:{name} has no readable configuration: {error}") from error
        # Weights are drawn on the CPU, so they are the same whatever the default device is.
        device = "meta" if torch.get_default_device().type == "meta" else "cpu"
        with torch.device(device):
            return model_from(_class_of(config), config)

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields refusals for unsupported model classes, attention classes and features."""
        name = type(model).__name__
        if name not in READERS or not self.adopts(model):
            adopted = ", ".join(READERS)
            yield Refusal(f"the class {name} has no reader", f"Of transformers, attnrx adopts {adopted}.")
            return
        reader, config = reader_of(model), cast(Any, model.config)
        is_hybrid = config.model_type == "dpt" and (config.is_hybrid or config.backbone_config is not None)
        reasons = {
            "a mask_ratio, of random patches (load it with mask_ratio=0.0)": getattr(config, "mask_ratio", 0),
            "a DPT whose backbone is a model of its own": is_hybrid,
        }
        if any(reasons.values()):  # stop here, because such a model may lack parts that the reader names
            yield from (Refusal(reason) for reason, is_set in reasons.items() if is_set)
            return
        for block in self.blocks(model):
            attention: Any = getattr(block, reader.layout.attention)
            if type(attention).__module__ != type(model).__module__:
                yield Refusal(f"the attention {type(attention).__name__} has no reader")
            else:
                yield from unread_attention(attention, reader.layout.projections)

    def origin(self, model: nn.Module) -> Origin:
        """Returns an origin from the model's configuration. Mean and std are 0.5, as in ViTImageProcessor."""
        shape = reader_of(model).inputs(model).shape
        half = (0.5,) * shape[0]
        return Origin(type(model).__name__, _settings(model.config), shape, half, half)

    def _stated(self, model: nn.Module, stated: Mapping[str, Any]) -> Origin:
        # The image processor comes from the folder or hub id from which the model was loaded.
        reader, source = reader_of(model), getattr(model.config, "_name_or_path", "")
        if source and not stated.get("preprocessing"):
            try:
                saved = _processor(source, reader.takes_any_size, local_files_only=True)
            except InvalidInput:  # the processor needs repository code, which is not trusted here
                saved = {}
            if len(saved.get("mean", ())) == reader.inputs(model).shape[0]:
                stated = {**saved, **stated}
        return super()._stated(model, stated)

    def _resized(self, source: nn.Module, origin: Origin, height: int, width: int) -> Origin:
        if not interpolates(source):
            return super()._resized(source, origin, height, width)
        # The processor's settings are scaled with the image size.
        settings = dict(origin.preprocessing)
        scales = height / origin.input_shape[1], width / origin.input_shape[2]
        if settings.get("do_center_crop") and "crop_size" in settings:
            settings["crop_size"] = {"height": height, "width": width}
        size = settings.get("size", {})
        if size.keys() == {"shortest_edge"}:
            # The size is rounded up, so the resized picture is never smaller than the crop.
            settings["size"] = {"shortest_edge": math.ceil(size["shortest_edge"] * max(scales))}
        elif size.keys() == {"height", "width"}:
            settings["size"] = {side: math.ceil(size[side] * scale) for side, scale in zip(size, scales, strict=True)}
        return replace(origin, preprocessing=settings)

    def created_again(self, origin: Origin) -> nn.Module:
        return LibraryAnswer(self._created(origin), origin)

    def creation(self, model: nn.Module) -> dict[str, Any] | None:
        """Returns the class name and the configuration of any transformers model."""
        name, config = type(model).__name__, getattr(model, "config", None)
        if not hasattr(config, "to_json_string") or getattr(_transformers(""), name, None) is not type(model):
            return None
        return {"architecture": name, "arguments": _settings(config)}

    def create(self, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Creates a transformers model of any class from its configuration."""
        kind = getattr(_transformers(""), architecture, None)
        # A name from a file might belong to any object in transformers, so only model classes are accepted.
        if not (isinstance(kind, type) and issubclass(kind, _transformers("PreTrainedModel"))):
            raise UnknownName("class of transformers", architecture, READERS)
        return kind(kind.config_class.from_dict(dict(arguments)))  # type: ignore[attr-defined]

    def recomputed(self, module: nn.Module) -> nn.Module | None:
        # In transformers, modules compute such buffers in __init__ from nothing but the configuration.
        return type(module)(module.config)

    def present_origin(self, adopted: Adopted) -> Origin:
        return replace(adopted.origin, arguments=_settings(adopted.trunk.config))

    def num_patches(self, source: nn.Module, input_shape: tuple[int, int, int]) -> int:
        inputs, (channels, height, width) = reader_of(source).inputs(source), input_shape
        if isinstance(inputs, PatchInputs):
            is_padded = inputs.is_padded(input_shape)
            return height if is_padded else (height // inputs.size) * (width // inputs.size)
        # AST's convolution takes time and bins in swapped order.
        return super().num_patches(source, (channels, width, height) if inputs.dimensions == 2 else input_shape)

    def head_macs(self, adopted: Adopted, tokens: int) -> int:
        source: Any = adopted.trunk
        if isinstance(adopted, HuggingFaceModel) and reader_of(source).answer == "depth":
            return adopted.dense_head_macs
        times = source.config.num_detection_tokens if reader_of(source).answer == "detections" else 1
        return times * super().head_macs(adopted, tokens)

    def _install_(self, adopted: Adopted, attention: Sequence[Attention]) -> None:
        super()._install_(adopted, attention)
        source = adopted.trunk
        for name, module in list(source.named_modules()):
            is_ours = isinstance(source.get_submodule(name.rpartition(".")[0]), PairBias)
            if type(module).__name__.endswith("RelativePositionBias") and not is_ours:
                # transformers interpolates the table in every call, even if the size is already right.
                bias = PairBias(module, partial(module, module.window_size))
                source.set_submodule(name, bias.train(module.training))
        for block in self.blocks(source):
            # In CLIP's and SigLIP's towers, the layers have a mask argument without a default.
            mask = inspect.signature(block.forward).parameters.get("attention_mask")
            if mask is not None and mask.default is inspect.Parameter.empty:
                block.register_forward_pre_hook(_without_mask, with_kwargs=True)

    def adapter(self, source: nn.Module, module: nn.Module, attention: Attention) -> Adapter:
        adapter: Any = super().adapter(source, module, attention)
        adapter.takes_mask = isinstance(reader_of(source).inputs(source), PatchInputs)
        adapter.config = reader_of(source).body_of(source).config
        return adapter

    def traits(self, source: nn.Module, module: nn.Module) -> dict[str, Any]:
        body: Any = reader_of(source).body_of(source)
        names = "use_relative_position_bias", "use_shared_relative_position_bias"
        return {
            # transformers rotates the two halves of a row (`rotate_half`).
            "rotary": HALVES if hasattr(body, "rope_embeddings") else None,
            "pair_bias": any(getattr(body.config, name, False) for name in names),
        }

    def pair_bias(self, module: nn.Module) -> nn.Module | None:
        """Returns the module that computes the position bias in Data2Vec, or None. BEiT passes this bias as a mask."""
        return dict(module.named_modules()).get("attention.relative_position_bias")

    def class_names(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the class labels in the configuration, or () if they are placeholders such as LABEL_0."""
        if self._adopted(model).path or self.output_kind(model) not in ("logits", "multilabel"):
            return ()
        config: Any = self._adopted(model).trunk.config
        names = tuple(config.id2label[index] for index in sorted(config.id2label))
        if any(num_outputs(head) != len(names) for head in self.heads(model)):  # a user replaced the head
            return ()
        return () if all(name == f"LABEL_{index}" for index, name in enumerate(names)) else names


INTERPOLATE = "interpolate_pos_encoding"


class LibraryAnswer(nn.Module):
    """Wraps a transformers model with its own attention. `forward` takes images, and returns e.g. logits."""

    def __init__(self, source: nn.Module, origin: Origin):
        super().__init__()
        self.model = HuggingFaceModel(source, origin)

    def forward(self, images: ImageBatch) -> Tensor:
        """Returns the logits or the embedding for images, [batch, features]."""
        return self.model.answer(images)


def interpolates(source: nn.Module) -> bool:
    """Returns whether a transformers model can resize its position embeddings, either always or on request."""
    reader = reader_of(source)
    return reader.takes_any_size or (
        reader.inputs(source).dimensions == 3  # images, not videos
        and all(
            INTERPOLATE in inspect.signature(type(part).forward).parameters for part in (source, reader.body_of(source))
        )
    )


def _settings(config: Any) -> dict[str, Any]:
    """Returns a configuration, or an image processor's settings, as JSON values."""
    options = {"use_diff": False} if hasattr(config, "model_type") else {}
    settings = json.loads(config.to_json_string(**options))
    settings.pop("_name_or_path", None)  # where a model was loaded from is not part of the model
    return settings


def _without_mask(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Adds the mask argument that layers of an image tower require, so blocks can be called with only tokens."""
    return args, kwargs if len(args) > 1 else {"attention_mask": None, **kwargs}


_without_mask.by_image = True  # type: ignore[attr-defined]


def _class_of(config: Any) -> Any:
    """Returns the class that a configuration names, or AutoModelForImageClassification if the class has no reader."""
    saved = next(iter(config.architectures or ()), "")
    name = VISION_PARTS.get(saved, saved)
    return _transformers(name if name in READERS else "AutoModelForImageClassification")


def _transformers(name: str) -> Any:
    transformers = required_module("transformers", "", "a model of Hugging Face", "transformers")
    return getattr(transformers, name) if name else transformers


# Settings of an image processor that change what it computes.
PROCESSOR_SETTINGS = (
    "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_convert_rgb", "do_pad", "keep_aspect_ratio"
)  # fmt: skip
RESAMPLES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers


def _processor(source: Path | str, takes_any_size: bool, trust: bool = False, **options: Any) -> dict[str, Any]:
    """Returns the mean, std and settings of a saved image processor as arguments of `adopt`, or {} if there is none.

    Raises:
        InvalidInput: The processor needs code from its repository, and `trust` is False.
    """
    try:
        processor = open_pretrained(_transformers("AutoImageProcessor"), source, trust, **options)
    except AttnrxError:
        raise
    # No image processor was saved, it is of another kind, or it needs a library that is not installed.
    except (OSError, ValueError, ImportError, KeyError, TypeError):
        return {}
    stated = _settings(processor)
    settings = {name: stated[name] for name in PROCESSOR_SETTINGS if stated.get(name) is not None}
    # Combines rescaling and normalization into one mean and std, for pixels divided by 255.
    scale = 255 * float(stated.get("rescale_factor") or 1 / 255) if stated.get("do_rescale", True) else 255.0
    normalizes = stated.get("do_normalize", True) and stated.get("image_mean") is not None
    statistics: Any = (stated["image_mean"], stated["image_std"]) if normalizes else ((0.0,) * 3, (1.0,) * 3)
    mean, std = (tuple(value / scale for value in values) for values in statistics)
    facts: dict[str, Any] = {"mean": mean, "std": std, "preprocessing": settings}
    # The size that enters the model: the size of the crop if the processor crops, else of the resized image.
    size = settings.get("crop_size" if settings.get("do_center_crop") else "size", {})
    if takes_any_size and {"height", "width"} <= size.keys():
        facts["input_shape"] = (len(mean), size["height"], size["width"])
    return facts
