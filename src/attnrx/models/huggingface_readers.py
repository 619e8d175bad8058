"""Where the parts of the Vision Transformers of transformers are: one reader per class."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from attnrx.shapes import Tensor


@dataclass(frozen=True)
class ModelReader:
    """The paths of a class, how it pools its tokens, and which of its outputs is its answer.

    `word` begins the names of its attention and MLP classes. `body` is the path of the module with the embeddings and
    the layers; the other paths are in that body, and `attention` in a layer. `answer` is a
    field of the output, or "class token" or "mean" of the last hidden state.
    """

    word: str
    body: str = ""
    layers: str = "layers"
    attention: str = "attention"
    patches: str = "embeddings.patch_embeddings.projection"
    norm: str = "layernorm"
    pooling: str = "class"
    answer: str = "logits"
    resizes: bool = False

    def answer_of(self, output: Any) -> Tensor:
        """Returns the answer, [batch, classes or width]."""
        if self.answer == "class token":
            return output.last_hidden_state[:, 0]
        return output.last_hidden_state.mean(1) if self.answer == "mean" else output[self.answer]

    def body_of(self, source: nn.Module) -> nn.Module:
        return source.get_submodule(self.body)


DINO: dict[str, Any] = {"layers": "encoder.layer", "resizes": True}
TOWER: dict[str, Any] = {
    "layers": "encoder.layers",
    "attention": "self_attn",
    "patches": "embeddings.patch_embedding",
    "norm": "post_layernorm",
}
CLASS_TOKEN = "class token"

READERS: Mapping[str, ModelReader] = {
    "ViTForImageClassification": ModelReader("ViT", "vit"),
    "ViTModel": ModelReader("ViT", answer=CLASS_TOKEN),
    "DeiTForImageClassification": ModelReader("DeiT", "deit"),
    "DeiTForImageClassificationWithTeacher": ModelReader("DeiT", "deit"),
    "DeiTModel": ModelReader("DeiT", answer=CLASS_TOKEN),
    "ViTMSNForImageClassification": ModelReader("ViTMSN", "vit"),
    "ViTMSNModel": ModelReader("ViTMSN", answer=CLASS_TOKEN),
    "IJepaForImageClassification": ModelReader("IJepa", "ijepa", pooling="mean"),
    "IJepaModel": ModelReader("IJepa", pooling="mean", answer="mean"),
    # DINOv2's classifier takes the class token and the mean of the patches.
    "Dinov2ForImageClassification": ModelReader("Dinov2", "dinov2", pooling="mean", **DINO),
    "Dinov2Model": ModelReader("Dinov2", answer=CLASS_TOKEN, **DINO),
    "Dinov2WithRegistersForImageClassification": ModelReader(
        "Dinov2WithRegisters", "dinov2_with_registers", pooling="mean", **DINO
    ),
    "Dinov2WithRegistersModel": ModelReader("Dinov2WithRegisters", answer=CLASS_TOKEN, **DINO),
    "CLIPVisionModel": ModelReader("CLIP", answer="pooler_output", **TOWER),
    "CLIPVisionModelWithProjection": ModelReader("CLIP", "vision_model", answer="image_embeds", **TOWER),
    # The mean of the patches before the last norm.
    "CLIPForImageClassification": ModelReader("CLIP", "vision_model", pooling="mean without a norm", **TOWER),
    "SiglipVisionModel": ModelReader("Siglip", pooling="attention", answer="pooler_output", **TOWER),
    "SiglipForImageClassification": ModelReader("Siglip", "vision_model", pooling="mean", **TOWER),
}
# The part of a saved model of several towers that is read.
VISION_PARTS: Mapping[str, str] = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


def reader_of(source: nn.Module) -> ModelReader:
    """Returns the reader of a model whose class is in `READERS`."""
    return READERS[type(source).__name__]
