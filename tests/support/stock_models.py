"""Small models of four libraries, which these libraries create at other sizes, too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
torchvision = pytest.importorskip("torchvision")

SMALL: dict[str, Any] = {
    "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 64, "image_size": 16, "patch_size": 8,
    "num_labels": 5,
}  # fmt: skip
SIZES: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "num_heads": 3}


def _of(kind: str, config: str, **more: Any) -> Callable[[int], nn.Module]:
    def make(depth: int) -> nn.Module:
        settings = getattr(transformers, config)(**{**SMALL, "num_hidden_layers": depth, **more})
        return getattr(transformers, kind)(settings)

    return make


def _timm(name: str, **more: Any) -> Callable[[int], nn.Module]:
    return lambda depth: timm.create_model(name, depth=depth, **{**SIZES, **more})


def _open_clip(depth: int) -> nn.Module:
    towers = pytest.importorskip("open_clip.transformer")
    return towers.VisionTransformer(16, 8, 24, depth, 3, 64 / 24, 0.1)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "timm ViT": _timm("vit_tiny_patch16_224", num_classes=5),
    "timm DINOv2": _timm("vit_small_patch14_reg4_dinov2"),
    "timm SigLIP": _timm("vit_base_patch16_siglip_224"),
    "timm EVA-02": _timm("eva02_tiny_patch14_224", num_heads=2, num_classes=5),
    "ViT": _of("ViTForImageClassification", "ViTConfig"),
    "DINOv2": _of("Dinov2Model", "Dinov2Config", mlp_ratio=3),
    "SigLIP": _of("SiglipVisionModel", "SiglipVisionConfig"),
    "CLIP": _of("CLIPVisionModel", "CLIPVisionConfig"),
    "torchvision": lambda depth: torchvision.models.VisionTransformer(16, 8, depth, 3, 24, 64, num_classes=5),
    "open_clip": _open_clip,
}


def stock_model(name: str, depth: int = 2) -> nn.Module:
    """Returns a model whose weights are all random: LayerScale and tokens begin at constants."""
    torch.manual_seed(0)
    model = MODELS[name](depth).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


def images(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def tensors(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of what a model of any library answers."""
    parts = output.to_tuple() if hasattr(output, "to_tuple") else (output,)
    return [part for part in parts if isinstance(part, torch.Tensor)]
