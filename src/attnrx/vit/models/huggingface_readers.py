"""Where the parts of the Vision Transformers of transformers are, one reader per class, and how their inputs enter."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.support.errors import NotSupported
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.vit.models.module_inputs import Field, ModuleInputs
from attnrx.vit.models.parts import ModelParts


@dataclass(frozen=True)
class OrderedImages(ModuleInputs):
    """Images whose patches the model would shuffle by random noise (ViTMAE): increasing noise keeps their order."""

    patch: tuple[int, int]

    def arguments(self, images: ImageBatch) -> tuple[list[Any], dict[str, Tensor]]:
        # ViTMAE sorts the patches by this noise, also where it masks none (mask_ratio 0).
        count = (images.shape[2] // self.patch[0]) * (images.shape[3] // self.patch[1])
        noise = torch.arange(count, device=images.device, dtype=images.dtype)
        return [], {"pixel_values": images, "noise": noise.expand(images.shape[0], -1)}


@dataclass(frozen=True)
class PatchInputs(ModuleInputs):
    """Images that are cut into patches before they enter the model (SigLIP 2), as its image processor does it.

    Images of any aspect ratio have up to so many patches, the rest of which is padding: those are one channel
    [patches, features + 3] in attnrx, whose last columns are the mask of patches, and height and width in patches.
    """

    ABOUT: ClassVar = ("pixel_attention_mask", "spatial_shapes")
    size: int
    """The side of a patch."""

    def image_in(self, fields: Mapping[str, Any]) -> Any:
        patches, mask, grid = (fields.get(name) for name in (self.name, *self.ABOUT))
        if patches is None or mask is None or grid is None:
            return patches
        patches, mask, grid = (torch.as_tensor(each) for each in (patches, mask, grid))
        columns = (mask[..., None], grid[..., None, :].expand(*mask.shape, 2))
        return torch.cat([patches, *(column.to(patches) for column in columns)], dim=-1).unsqueeze(-3)

    def arguments(self, images: ImageBatch) -> tuple[list[Any], dict[str, Tensor]]:
        if self.is_padded(images.shape[1:]):
            patches, mask, grid = images[:, 0].split((self.features, 1, 2), dim=-1)
            # Rounded: half precision has all integers up to 2048.
            mask, grid = mask[..., 0].round().long(), grid[:, 0].round().long().cpu()
        else:
            cut = images.unflatten(3, (-1, self.size)).unflatten(2, (-1, self.size))  # ..., down, size, right, size
            # On the CPU, because the model reads the grid of every image as Python integers.
            grid = torch.tensor([cut.shape[2], cut.shape[4]], device="cpu").expand(images.shape[0], -1)
            # Channels last within a patch, the order of the linear patch embedding: [batch, patches, features].
            patches = cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
            mask = torch.ones(patches.shape[:2], dtype=torch.long, device=images.device)
        return [], {self.name: patches, **dict(zip(self.ABOUT, (mask, grid), strict=True))}

    def require_exportable(self, shape: Sequence[int]) -> None:
        if shape[0] == 1:
            raise NotSupported(
                "a model of padded patches resizes its position embeddings to the grid of every image, of which "
                "transformers reads the sides as Python integers: a file has one grid. Export the model that was "
                "loaded for square images, or save the result without a file (onnx=False)."
            )

    @property
    def features(self) -> int:
        """Numbers of one patch."""
        return self.size**2 * self.fields[0].shape[0]

    def is_padded(self, shape: Sequence[int]) -> bool:
        """Returns whether inputs of this shape are padded patches."""
        return shape[0] == 1 and shape[2] == self.features + 3


def _pair(size: int | Iterable[int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def inputs_of_config(config: Any) -> ModuleInputs:
    """Returns what a class takes, by the configuration of its body: images, spectrograms [batch, time, mel bins] (AST),
    videos [batch, frames, channels, height, width], or patches (SigLIP 2).
    """
    if hasattr(config, "num_mel_bins"):
        return ModuleInputs((Field(("input_values",), (config.max_length, config.num_mel_bins)),))
    if config.model_type.startswith("siglip2"):
        # SigLIP 2 takes any aspect ratio up to num_patches; attnrx models have one input shape, so the square of them.
        side = math.isqrt(config.num_patches) * config.patch_size
        return PatchInputs((Field(("pixel_values",), (config.num_channels, side, side)),), config.patch_size)
    frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
    fields = (Field(("pixel_values",), (*frames, config.num_channels, *_pair(config.image_size))),)
    return OrderedImages(fields, _pair(config.patch_size)) if config.model_type == "vit_mae" else ModuleInputs(fields)


CLASS_TOKEN = "class token"
MAPS = "feature_maps"  # of a backbone, which is adopted as a whole module because they are several
# Parameters of the embeddings, and names of modules, over all classes of READERS: a class has some of each.
PREFIX = ("cls_token", "distillation_token", "register_tokens", "class_embedding", "detection_tokens")
NORMS_BEFORE = ("layernorm_before", "norm1", "layer_norm1")
HEADS = ("classifier", "cls_classifier", "distillation_classifier")
CLASSIFIERS = (*HEADS, "classifier.dense")
OTHER_HEADS = ("fc_norm", "visual_projection", "class_labels_classifier", "bbox_predictor", "neck", "head")
GATED = ("mlp.up_proj", "mlp.gate_proj", "mlp.down_proj")
# What a model returns, where it is not one field of the output of transformers; each is [batch, features].
ANSWERS: Mapping[str, Callable[[Any], Tensor]] = {
    CLASS_TOKEN: lambda output: output.last_hidden_state[:, 0],
    "mean": lambda output: output.last_hidden_state.mean(1),
    # The class logits and the box of every detection token, one after the other.
    "detections": lambda output: torch.cat([output.logits, output.pred_boxes], dim=-1).flatten(1),
    "depth": lambda output: output.predicted_depth.flatten(1),
}


# Where the parts of most classes are, in the body of a model.
LAYOUT = ModelParts(
    "layers", "attention", "embeddings.patch_embeddings.projection", "layernorm", classifiers=CLASSIFIERS,
    projections=("q_proj", "k_proj", "v_proj", "o_proj"), returns_weights=True,
)  # fmt: skip


@dataclass(frozen=True)
class ModelReader:
    """Where the parts of a class are, how it pools its tokens, and which of its outputs is its answer.

    The parts are those of `layout` in the body, the module with the embeddings and the layers. `answer` is a field of
    the output, or one of ANSWERS.
    """

    layout: ModelParts = LAYOUT
    pooling: str = "class"
    answer: str = "logits"
    takes_any_size: bool = False

    def answer_of(self, output: Any) -> Tensor:
        """Returns the answer, [batch, classes or features]."""
        return ANSWERS[self.answer](output) if self.answer in ANSWERS else output[self.answer]

    def body_path(self, source: nn.Module) -> str:
        """Returns the path of the module with the embeddings and the layers."""
        return next((path for path, part in source.named_modules() if "embeddings" in part._modules), "")

    def body_of(self, source: nn.Module) -> Any:
        return source.get_submodule(self.body_path(source))

    def inputs(self, source: nn.Module) -> ModuleInputs:
        """Returns what a model of this class takes."""
        return inputs_of_config(self.body_of(source).config)

    def parts(self, source: nn.Module) -> ModelParts:
        """Returns where the parts of a model of this class are."""
        path, layout = self.body_path(source), self.layout
        body: Any = source.get_submodule(path)
        blocks, norm, patches, head, pooler = (
            f"{path}.{name}".strip(".") for name in (layout.blocks, layout.norm, layout.patches, "head", "pooler")
        )
        # [1, tokens, width], or [width] for the class embedding of CLIP.
        tokens = body.get_submodule("embeddings").named_parameters(recurse=False)
        prefix_tokens = sum(token.shape[1] if token.ndim == 3 else 1 for name, token in tokens if name in PREFIX)
        last_block = list(source.get_submodule(blocks).children())[-1:]
        # The word that begins the names of the classes of a block and its MLP, e.g. ViT; a block may be of a subclass.
        kinds = [kind for block in last_block for kind in type(block).__mro__ if "transformers." in kind.__module__]
        word = kinds[0].__name__.removesuffix("Layer").removesuffix("Encoder") if kinds else ""
        pooling = self.pooling
        if not getattr(source.config, "use_mean_pooling", True):
            # BEiT and Data2Vec then take the first token, a class token; VideoMAE, which has none, a patch.
            pooling = "class" if pooling == "mean" else "the first patch"
        return replace(
            layout, blocks=blocks, patches=patches, norm=norm,
            mlp_classes=(f"{word}MLP", f"{word}Intermediate"),
            gated=dict.fromkeys((f"{word}SwiGLUFFN", f"{word}GatedMLP"), GATED),
            heads=(*HEADS, *OTHER_HEADS, norm, head, pooler),
            num_heads=body.config.num_attention_heads,
            norm_before=next((name for block in last_block for name in NORMS_BEFORE if hasattr(block, name)), None),
            prefix_tokens=prefix_tokens, has_class_token=prefix_tokens > 0, pooling=pooling,
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
# Classes whose attention consists of two modules, and whose MLP too.
NESTED = replace(
    LAYOUT, blocks="encoder.layer", mlp=("intermediate", "output"), maps=("intermediate.dense", "output.dense"),
    projections=("attention.query", "attention.key", "attention.value", "output.dense"),
)  # fmt: skip
# The same, where the attention returns a tensor instead of a pair.
NESTED_TENSOR = replace(NESTED, returns_weights=False)

# By the classes' names; those of one line have one reader.
_READERS: Mapping[str, ModelReader] = {
    # The input of AST's classifier is the mean of the class token and the distillation token.
    "ViTForImageClassification DeiTForImageClassification DeiTForImageClassificationWithTeacher "
    "ViTMSNForImageClassification ASTForAudioClassification VivitForVideoClassification": ModelReader(),
    "ViTModel DeiTModel ViTMSNModel ViTMAEModel VivitModel": ModelReader(answer=CLASS_TOKEN),
    "IJepaForImageClassification BeitForImageClassification": ModelReader(pooling="mean"),
    "IJepaModel": ModelReader(pooling="mean", answer="mean"),
    "BeitModel": ModelReader(pooling="mean", answer="pooler_output"),
    "Data2VecVisionForImageClassification": ModelReader(NESTED, "mean"),
    # DINOv2's classifier takes the class token and the mean of the patches; "mean", because the patches are needed.
    "Dinov2ForImageClassification Dinov2WithRegistersForImageClassification": ModelReader(
        DINO, "mean", takes_any_size=True
    ),
    "Dinov2Model Dinov2WithRegistersModel": ModelReader(DINO, answer=CLASS_TOKEN, takes_any_size=True),
    "Dinov2Backbone Dinov2WithRegistersBackbone": ModelReader(DINO, answer=MAPS, takes_any_size=True),
    "DINOv3ViTModel": ModelReader(DINO3, answer=CLASS_TOKEN, takes_any_size=True),
    "DINOv3ViTBackbone": ModelReader(DINO3, answer=MAPS, takes_any_size=True),
    "CLIPVisionModel": ModelReader(TOWER, answer="pooler_output"),
    "CLIPVisionModelWithProjection": ModelReader(TOWER, answer="image_embeds"),
    # The mean of the patches before the last norm.
    "CLIPForImageClassification": ModelReader(TOWER, "mean without a norm"),
    "SiglipVisionModel Siglip2VisionModel": ModelReader(TOWER, "attention", "pooler_output"),
    "SiglipForImageClassification": ModelReader(TOWER, "mean"),
    # The mean of the patches that are not padded.
    "Siglip2ForImageClassification": ModelReader(TOWER, "mean without padding"),
    "YolosForObjectDetection": ModelReader(NESTED_TENSOR, "detection tokens", "detections"),
    "DPTForDepthEstimation": ModelReader(NESTED_TENSOR, "a map of all patches of several layers", "depth"),
    "VideoMAEForVideoClassification": ModelReader(NESTED_TENSOR, "mean without a norm"),
}
READERS: Mapping[str, ModelReader] = {name: reader for names, reader in _READERS.items() for name in names.split()}
# The part of a saved model of several towers that is read.
VISION_PARTS: Mapping[str, str] = {
    "CLIPModel": "CLIPVisionModelWithProjection",
    "SiglipModel": "SiglipVisionModel",
    "Siglip2Model": "Siglip2VisionModel",
}


def reader_of(source: nn.Module) -> ModelReader:
    """Returns the reader of a model whose class is in `READERS`."""
    return READERS[type(source).__name__]
