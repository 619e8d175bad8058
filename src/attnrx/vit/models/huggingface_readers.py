"""Where the parts of the Vision Transformers of transformers are: one reader per class."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from attnrx.support.shapes import Tensor
from attnrx.vit.models.adopted_family import ModelParts
from attnrx.vit.models.huggingface_inputs import (
    ImageInput,
    OrderedImageInput,
    PatchInput,
    SpectrogramInput,
    VideoInput,
)
from attnrx.vit.models.unsupported_features import Refusal

CLASS_TOKEN = "class token"
MAPS = "feature_maps"  # of a backbone, which is adopted as a whole module because they are several
# Parameters of the embeddings, and names of modules, over all classes of READERS: a class has some of each.
PREFIX = ("cls_token", "distillation_token", "register_tokens", "class_embedding", "detection_tokens")
NORMS_BEFORE = ("layernorm_before", "norm1", "layer_norm1")
HEADS = ("classifier", "cls_classifier", "distillation_classifier")
CLASSIFIERS = (*HEADS, "classifier.dense")
# What a model returns, where it is not one field of the output of transformers; each is [batch, features].
ANSWERS: Mapping[str, Callable[[Any], Tensor]] = {
    CLASS_TOKEN: lambda output: output.last_hidden_state[:, 0],
    "mean": lambda output: output.last_hidden_state.mean(1),
    # The class logits and the box of every detection token, one after the other.
    "detections": lambda output: torch.cat([output.logits, output.pred_boxes], dim=-1).flatten(1),
    "depth": lambda output: output.predicted_depth.flatten(1),
}


@dataclass(frozen=True)
class ModelReader:
    """The paths of a class, how it pools its tokens, and which of its outputs is its answer.

    `word` begins the names of its attention and MLP classes. `body` is the path of the module with the embeddings and
    the layers; the other paths are in that body. `attention` is a path in a layer, `projections` are the paths in it of
    query, key, value and output; `mlp` are the paths in a layer of the modules of its MLP, and `maps` those of its two
    linear maps. `answer` is a field of the output, or one of ANSWERS. `heads` are paths, in the source, of modules that
    follow the body and that no other class has; `head_tokens` names the field of the configuration with the number of
    tokens on which they run. `returns_weights`: whether the attention returns a pair with its weights.
    """

    word: str
    body: str = ""
    layers: str = "layers"
    attention: str = "attention"
    projections: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    returns_weights: bool = True
    patches: str = "embeddings.patch_embeddings.projection"
    norm: str = "layernorm"
    mlp: tuple[str, ...] = ("mlp",)
    mlp_class: str = "MLP"
    maps: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    pooling: str = "class"
    answer: str = "logits"
    heads: tuple[str, ...] = ()
    head_tokens: str = ""
    takes_any_size: bool = False
    input: ImageInput = field(default_factory=ImageInput)

    def answer_of(self, output: Any) -> Tensor:
        """Returns the answer, [batch, classes or features]."""
        return ANSWERS[self.answer](output) if self.answer in ANSWERS else output[self.answer]

    def body_of(self, source: nn.Module) -> nn.Module:
        return source.get_submodule(self.body)

    def parts(self, source: nn.Module) -> ModelParts:
        """Returns where the parts of a model of this class are."""
        body = self.body_of(source)
        layers, norm, patches, head, pooler = (
            f"{self.body}.{path}".strip(".") for path in (self.layers, self.norm, self.patches, "head", "pooler")
        )
        pooled_norms = (f"{head}.layernorm", f"{pooler}.layernorm", "classifier.layernorm", "fc_norm")
        # [1, tokens, width], or [width] for the class embedding of CLIP.
        tokens = body.get_submodule("embeddings").named_parameters(recurse=False)
        prefix_tokens = sum(token.shape[1] if token.ndim == 3 else 1 for name, token in tokens if name in PREFIX)
        last_block = list(body.get_submodule(self.layers).children())[-1:]
        config: Any = source.config
        return ModelParts(
            blocks=layers,
            attention=self.attention,
            patches=patches,
            norm=norm,
            mlp_classes=(f"{self.word}{self.mlp_class}",),
            heads=(*HEADS, *self.heads, "fc_norm", "visual_projection", norm, head, pooler),
            classifiers=CLASSIFIERS,
            # The norm of a CLIP tower is applied to the class token only.
            pooled_norms=(*pooled_norms, *((norm,) if self.word == "CLIP" else ())),
            norm_before=next((name for block in last_block for name in NORMS_BEFORE if hasattr(block, name)), None),
            mlp=self.mlp,
            gated=dict.fromkeys(
                (f"{self.word}SwiGLUFFN", f"{self.word}GatedMLP"), ("mlp.up_proj", "mlp.gate_proj", "mlp.down_proj")
            ),
            maps=self.maps,
            prefix_tokens=prefix_tokens,
            has_class_token=prefix_tokens > 0,
            pooling=self.pooling_of(config),
            head_tokens=getattr(config, self.head_tokens) if self.head_tokens else 1,
        )

    def pooling_of(self, config: Any) -> str:
        """Returns the pooling; some classes choose by their configuration between the class token and the mean."""
        if not hasattr(config, "use_mean_pooling"):
            return self.pooling
        # Without the mean, BEiT and Data2Vec take the first token, a class token; VideoMAE, which has none, a patch.
        return self.pooling if config.use_mean_pooling else "class" if self.pooling == "mean" else "the first patch"


# Fields that the classes of several families share.
DINO: dict[str, Any] = {"layers": "encoder.layer", "takes_any_size": True}
DINO3: dict[str, Any] = {
    "layers": "model.layer",
    "patches": "embeddings.patch_embeddings",
    "norm": "norm",
    "maps": ("mlp.up_proj", "mlp.down_proj"),
    "takes_any_size": True,
}
TOWER: dict[str, Any] = {
    "layers": "encoder.layers",
    "attention": "self_attn",
    "projections": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "patches": "embeddings.patch_embedding",
    "norm": "post_layernorm",
}
# Classes whose attention consists of two modules, and whose MLP too.
NESTED: dict[str, Any] = {
    "layers": "encoder.layer",
    "projections": ("attention.query", "attention.key", "attention.value", "output.dense"),
    "mlp": ("intermediate", "output"),
    "mlp_class": "Intermediate",
    "maps": ("intermediate.dense", "output.dense"),
}
# The same, where the attention returns a tensor instead of a pair.
NESTED_TENSOR: dict[str, Any] = {**NESTED, "returns_weights": False}

READERS: Mapping[str, ModelReader] = {
    "ViTForImageClassification": ModelReader("ViT", "vit"),
    "ViTModel": ModelReader("ViT", answer=CLASS_TOKEN),
    "DeiTForImageClassification": ModelReader("DeiT", "deit"),
    "DeiTForImageClassificationWithTeacher": ModelReader("DeiT", "deit"),
    "DeiTModel": ModelReader("DeiT", answer=CLASS_TOKEN),
    "ViTMSNForImageClassification": ModelReader("ViTMSN", "vit"),
    "ViTMSNModel": ModelReader("ViTMSN", answer=CLASS_TOKEN),
    "ViTMAEModel": ModelReader("ViTMAE", answer=CLASS_TOKEN, input=OrderedImageInput()),
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
        "Siglip2", pooling="attention", answer="pooler_output", input=PatchInput(), **TOWER
    ),
    # The mean of the patches that are not padded.
    "Siglip2ForImageClassification": ModelReader(
        "Siglip2", "vision_model", pooling="mean without padding", input=PatchInput(), **TOWER
    ),
    "YolosForObjectDetection": ModelReader(
        "Yolos",
        "vit",
        pooling="detection tokens",
        answer="detections",
        heads=("class_labels_classifier", "bbox_predictor"),
        head_tokens="num_detection_tokens",
        **NESTED_TENSOR,
    ),
    "DPTForDepthEstimation": ModelReader(
        "DPTViT", "dpt", pooling="a map of all patches of several layers", answer="depth", heads=("neck", "head"),
        **NESTED_TENSOR,
    ),
    # The mean of the class token and the distillation token.
    "ASTForAudioClassification": ModelReader("AST", "audio_spectrogram_transformer", input=SpectrogramInput()),
    "VideoMAEForVideoClassification": ModelReader(
        "VideoMAE", "videomae", pooling="mean without a norm", input=VideoInput(), **NESTED_TENSOR
    ),
    "VivitForVideoClassification": ModelReader("Vivit", "vivit", input=VideoInput()),
    "VivitModel": ModelReader("Vivit", answer=CLASS_TOKEN, input=VideoInput()),
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
    if not getattr(config, "vision_use_head", True):
        yield Refusal("a SigLIP without a pooling head (vision_use_head=False) returns no embedding")
