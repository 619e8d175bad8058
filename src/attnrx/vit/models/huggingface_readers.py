"""Where the parts of the Vision Transformers of transformers are, one reader per class, and how their inputs enter."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.support.errors import NotSupported
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.vit.models.module_inputs import Field, ModuleInputs
from attnrx.vit.models.parts import ModelParts, Refusal


def images_of(config: Any) -> ModuleInputs:
    """Returns the inputs of a class that takes images, and cuts them into patches itself."""
    return ModuleInputs((Field(("pixel_values",), (config.num_channels, *_pair(config.image_size))),))


def spectrograms_of(config: Any) -> ModuleInputs:
    """Returns the inputs of a class that takes spectrograms [batch, time, mel bins] (AST)."""
    return ModuleInputs((Field(("input_values",), (config.max_length, config.num_mel_bins)),))


def videos_of(config: Any) -> ModuleInputs:
    """Returns the inputs of a class that takes videos [batch, frames, channels, height, width]."""
    shape = (config.num_frames, config.num_channels, *_pair(config.image_size))
    return ModuleInputs((Field(("pixel_values",), shape),))


@dataclass(frozen=True)
class OrderedImages(ModuleInputs):
    """Images whose patches the model would shuffle by random noise (ViTMAE): increasing noise keeps their order."""

    patch: tuple[int, int]

    @classmethod
    def of_config(cls, config: Any) -> "OrderedImages":
        return cls(images_of(config).fields, _pair(config.patch_size))

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

    @classmethod
    def of_config(cls, config: Any) -> "PatchInputs":
        # SigLIP 2 takes any aspect ratio up to num_patches; attnrx models have one input shape, so the square of them.
        side = math.isqrt(config.num_patches) * config.patch_size
        return cls((Field(("pixel_values",), (config.num_channels, side, side)),), config.patch_size)

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
    if isinstance(size, int):
        return size, size
    first, second = size
    return int(first), int(second)


CLASS_TOKEN = "class token"
MAPS = "feature_maps"  # of a backbone, which is adopted as a whole module because they are several
# Parameters of the embeddings, and names of modules, over all classes of READERS: a class has some of each.
PREFIX = ("cls_token", "distillation_token", "register_tokens", "class_embedding", "detection_tokens")
NORMS_BEFORE = ("layernorm_before", "norm1", "layer_norm1")
HEADS = ("classifier", "cls_classifier", "distillation_classifier")
CLASSIFIERS = (*HEADS, "classifier.dense")
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

    `word` begins the names of its attention and MLP classes. `body` is the path of the module with the embeddings and
    the layers, in which the parts are those of `layout`. `answer` is a field of the output, or one of ANSWERS. `heads`
    are paths, in the source, of modules that follow the body and that no other class has.
    """

    word: str
    body: str = ""
    layout: ModelParts = LAYOUT
    pooling: str = "class"
    answer: str = "logits"
    heads: tuple[str, ...] = ()
    takes_any_size: bool = False
    input: Callable[[Any], ModuleInputs] = images_of

    def answer_of(self, output: Any) -> Tensor:
        """Returns the answer, [batch, classes or features]."""
        return ANSWERS[self.answer](output) if self.answer in ANSWERS else output[self.answer]

    def body_of(self, source: nn.Module) -> Any:
        return source.get_submodule(self.body)

    def inputs(self, source: nn.Module) -> ModuleInputs:
        """Returns what a model of this class takes."""
        return self.input(self.body_of(source).config)

    def parts(self, source: nn.Module) -> ModelParts:
        """Returns where the parts of a model of this class are."""
        body, layout = self.body_of(source), self.layout
        blocks, norm, patches, head, pooler = (
            f"{self.body}.{path}".strip(".") for path in (layout.blocks, layout.norm, layout.patches, "head", "pooler")
        )
        # [1, tokens, width], or [width] for the class embedding of CLIP.
        tokens = body.get_submodule("embeddings").named_parameters(recurse=False)
        prefix_tokens = sum(token.shape[1] if token.ndim == 3 else 1 for name, token in tokens if name in PREFIX)
        last_block = list(source.get_submodule(blocks).children())[-1:]
        return replace(
            layout, blocks=blocks, patches=patches, norm=norm,
            mlp_classes=(f"{self.word}MLP", f"{self.word}Intermediate"),
            gated=dict.fromkeys((f"{self.word}SwiGLUFFN", f"{self.word}GatedMLP"), GATED),
            heads=(*HEADS, *self.heads, "fc_norm", "visual_projection", norm, head, pooler),
            num_heads=body.config.num_attention_heads,
            norm_before=next((name for block in last_block for name in NORMS_BEFORE if hasattr(block, name)), None),
            prefix_tokens=prefix_tokens, has_class_token=prefix_tokens > 0, pooling=self.pooling_of(source.config),
        )  # fmt: skip

    def pooling_of(self, config: Any) -> str:
        """Returns the pooling; some classes choose by their configuration between the class token and the mean."""
        if not hasattr(config, "use_mean_pooling"):
            return self.pooling
        # Without the mean, BEiT and Data2Vec take the first token, a class token; VideoMAE, which has none, a patch.
        return self.pooling if config.use_mean_pooling else "class" if self.pooling == "mean" else "the first patch"


# Fields that the classes of several families share.
DINO: dict[str, Any] = {"layout": replace(LAYOUT, blocks="encoder.layer"), "takes_any_size": True}
DINO3: dict[str, Any] = {
    "layout": replace(
        LAYOUT, blocks="model.layer", patches="embeddings.patch_embeddings", norm="norm",
        maps=("mlp.up_proj", "mlp.down_proj"),
    ),
    "takes_any_size": True,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "layout": replace(
        LAYOUT, blocks="encoder.layers", attention="self_attn", patches="embeddings.patch_embedding",
        norm="post_layernorm", projections=("q_proj", "k_proj", "v_proj", "out_proj"),
    )
}  # fmt: skip
# Classes whose attention consists of two modules, and whose MLP too.
NESTED_LAYOUT = replace(
    LAYOUT, blocks="encoder.layer", mlp=("intermediate", "output"), maps=("intermediate.dense", "output.dense"),
    projections=("attention.query", "attention.key", "attention.value", "output.dense"),
)  # fmt: skip
NESTED: dict[str, Any] = {"layout": NESTED_LAYOUT}
# The same, where the attention returns a tensor instead of a pair.
NESTED_TENSOR: dict[str, Any] = {"layout": replace(NESTED_LAYOUT, returns_weights=False)}

READERS: Mapping[str, ModelReader] = {
    "ViTForImageClassification": ModelReader("ViT", "vit"),
    "ViTModel": ModelReader("ViT", answer=CLASS_TOKEN),
    "DeiTForImageClassification": ModelReader("DeiT", "deit"),
    "DeiTForImageClassificationWithTeacher": ModelReader("DeiT", "deit"),
    "DeiTModel": ModelReader("DeiT", answer=CLASS_TOKEN),
    "ViTMSNForImageClassification": ModelReader("ViTMSN", "vit"),
    "ViTMSNModel": ModelReader("ViTMSN", answer=CLASS_TOKEN),
    "ViTMAEModel": ModelReader("ViTMAE", answer=CLASS_TOKEN, input=OrderedImages.of_config),
    "IJepaForImageClassification": ModelReader("IJepa", "ijepa", pooling="mean"),
    "IJepaModel": ModelReader("IJepa", pooling="mean", answer="mean"),
    "BeitForImageClassification": ModelReader("Beit", "beit", pooling="mean"),
    "BeitModel": ModelReader("Beit", pooling="mean", answer="pooler_output"),
    "Data2VecVisionForImageClassification": ModelReader("Data2VecVision", "data2vec_vision", pooling="mean", **NESTED),
    # DINOv2's classifier takes the class token and the mean of the patches; "mean", because the patches are needed.
    "Dinov2ForImageClassification": ModelReader("Dinov2", "dinov2", pooling="mean", **DINO),
    "Dinov2Model": ModelReader("Dinov2", answer=CLASS_TOKEN, **DINO),
    "Dinov2WithRegistersForImageClassification": ModelReader(
        "Dinov2WithRegisters", "dinov2_with_registers", pooling="mean", **DINO
    ),
    "Dinov2WithRegistersModel": ModelReader("Dinov2WithRegisters", answer=CLASS_TOKEN, **DINO),
    "Dinov2Backbone": ModelReader("Dinov2", answer=MAPS, **DINO),
    "Dinov2WithRegistersBackbone": ModelReader("Dinov2WithRegisters", answer=MAPS, **DINO),
    "DINOv3ViTModel": ModelReader("DINOv3ViT", answer=CLASS_TOKEN, **DINO3),
    "DINOv3ViTBackbone": ModelReader("DINOv3ViT", answer=MAPS, **DINO3),
    "CLIPVisionModel": ModelReader("CLIP", answer="pooler_output", **TOWER),
    "CLIPVisionModelWithProjection": ModelReader("CLIP", "vision_model", answer="image_embeds", **TOWER),
    # The mean of the patches before the last norm.
    "CLIPForImageClassification": ModelReader("CLIP", "vision_model", pooling="mean without a norm", **TOWER),
    "SiglipVisionModel": ModelReader("Siglip", pooling="attention", answer="pooler_output", **TOWER),
    "SiglipForImageClassification": ModelReader("Siglip", "vision_model", pooling="mean", **TOWER),
    "Siglip2VisionModel": ModelReader(
        "Siglip2", pooling="attention", answer="pooler_output", input=PatchInputs.of_config, **TOWER
    ),
    # The mean of the patches that are not padded.
    "Siglip2ForImageClassification": ModelReader(
        "Siglip2", "vision_model", pooling="mean without padding", input=PatchInputs.of_config, **TOWER
    ),
    "YolosForObjectDetection": ModelReader(
        "Yolos", "vit", pooling="detection tokens", answer="detections",
        heads=("class_labels_classifier", "bbox_predictor"), **NESTED_TENSOR,
    ),
    "DPTForDepthEstimation": ModelReader(
        "DPTViT", "dpt", pooling="a map of all patches of several layers", answer="depth", heads=("neck", "head"),
        **NESTED_TENSOR,
    ),
    # The mean of the class token and the distillation token.
    "ASTForAudioClassification": ModelReader("AST", "audio_spectrogram_transformer", input=spectrograms_of),
    "VideoMAEForVideoClassification": ModelReader(
        "VideoMAE", "videomae", pooling="mean without a norm", input=videos_of, **NESTED_TENSOR
    ),
    "VivitForVideoClassification": ModelReader("Vivit", "vivit", input=videos_of),
    "VivitModel": ModelReader("Vivit", answer=CLASS_TOKEN, input=videos_of),
}  # fmt: skip
# The part of a saved model of several towers that is read.
VISION_PARTS: Mapping[str, str] = {
    "CLIPModel": "CLIPVisionModelWithProjection",
    "SiglipModel": "SiglipVisionModel",
    "Siglip2Model": "Siglip2VisionModel",
}


def reader_of(source: nn.Module) -> ModelReader:
    """Returns the reader of a model whose class is in `READERS`."""
    return READERS[type(source).__name__]


def unread_settings(config: Any) -> Iterator[Refusal]:
    """Yields the settings of a configuration with which a class of READERS has parts that are not read."""
    if config.output_attentions:
        yield Refusal("a configuration with output_attentions=True (attnrx attention returns no attention weights)")
    if getattr(config, "mask_ratio", 0):
        yield Refusal(f"mask_ratio={config.mask_ratio} removes random patches (load it with mask_ratio=0.0)")
    if config.model_type == "dpt" and (config.is_hybrid or config.backbone_config is not None):
        yield Refusal("a DPT whose backbone is a model of its own")
