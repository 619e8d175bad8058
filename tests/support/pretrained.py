"""Small models of timm and transformers, every weight drawn anew: one of each kind that can be adopted."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from attnrx.data import LoadedImages, Normalization, from_tensors
from attnrx.vit.models import family_of
from attnrx.vit.models.boundary.adoption import adopt
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.models.libraries.huggingface_family import HuggingFaceFamily
from attnrx.vit.models.libraries.timm_family import TimmFamily
from attnrx.vit.models.libraries.tower_families import OpenClipFamily, TorchvisionFamily
from attnrx.vit.models.users.reader import ModuleFamily, Reader

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

TIMM, HF, TORCHVISION, OPEN_CLIP, MODULE = (
    TimmFamily(),
    HuggingFaceFamily(),
    TorchvisionFamily(),
    OpenClipFamily(),
    ModuleFamily(),
)
SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
CONFIG = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 5,
    "layer_norm_eps": 1e-6,
}
BIASES_PER_LAYER = {"use_relative_position_bias": True, "layer_scale_init_value": 0.1}
ONE_BIAS = {"use_shared_relative_position_bias": True, "layer_scale_init_value": 0.0}
# What the classes with other inputs or outputs need besides CONFIG.
FIELDS: dict[str, dict[str, Any]] = {
    "ViTMAEModel": {"mask_ratio": 0.0},
    "Siglip2VisionModel": {"num_patches": 4},
    "YolosForObjectDetection": {"image_size": (16, 24), "num_detection_tokens": 3},
    "DPTForDepthEstimation": {
        "backbone_out_indices": [0, 1],
        "neck_hidden_sizes": [4, 6],
        "reassemble_factors": [2, 1],
        "fusion_hidden_size": 8,
        "is_hybrid": False,
        "neck_ignore_stages": [],
    },
    "ASTForAudioClassification": {"num_mel_bins": 12, "max_length": 20, "time_stride": 4, "frequency_stride": 2},
    "VideoMAEForVideoClassification": {"num_frames": 4},
    "VivitForVideoClassification": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "VivitModel": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
}


def shaken(model: nn.Module) -> Any:
    """Every parameter is drawn anew: libraries start biases at zero and scales at one, which would hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval().double()


def of_timm(name: str, **changes: Any) -> Any:
    return shaken(timm.create_model(name, **{**SMALL, **changes}))


def of_hf(kind: str, **changes: Any) -> Any:
    cls = getattr(transformers, kind)
    fields = {**CONFIG, **FIELDS.get(kind, {}), **changes}
    if kind.startswith("Dinov2"):
        fields.pop("intermediate_size")
    if kind in ("CLIPForImageClassification", "SiglipForImageClassification", "Siglip2ForImageClassification"):
        # Of the vision and the text tower.
        fields = {"vision_config": fields, "num_labels": fields.pop("num_labels")}
    return shaken(cls(cls.config_class(**fields)))


def of_torchvision(**changes: Any) -> Any:
    models = pytest.importorskip("torchvision.models")
    fields = {
        "image_size": 16,
        "patch_size": 8,
        "num_layers": 2,
        "num_heads": 3,
        "hidden_dim": 12,
        "mlp_dim": 48,
        "num_classes": 5,
    }
    return shaken(models.VisionTransformer(**{**fields, **changes}))


def of_open_clip(**changes: Any) -> Any:
    towers = pytest.importorskip("open_clip.transformer", reason="open_clip_torch is not installed")
    size = {"image_size": 16, "patch_size": 8, "width": 12, "layers": 2, "heads": 3, "mlp_ratio": 4.0, "output_dim": 7}
    changes["act_layer"] = getattr(towers, changes.get("act_layer", ""), nn.GELU)
    return shaken(towers.VisionTransformer(**{**size, **changes}))


class OwnAttention(nn.Module):
    """Attention with other names than those of any library, and another scale."""

    def __init__(self, width: int, heads: int, temperature: float = 1.25):
        super().__init__()
        self.heads, self.temperature = heads, temperature
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.mix = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, count, width = tokens.shape
        query, key, value = (
            part(tokens).view(batch, count, self.heads, -1).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        weights = (query @ key.transpose(-2, -1) / self.temperature).softmax(-1)
        return self.mix((weights @ value).transpose(1, 2).reshape(batch, count, width))


class OwnBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = OwnAttention(width, heads)
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens + self.attend(self.first(tokens))
        return tokens + self.ffn(self.second(tokens))


class OwnViT(nn.Module):
    """A user's own Vision Transformer, with positions that are no part of its weights."""

    def __init__(self, width: int = 12, depth: int = 2, heads: int = 3, classes: int = 5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, 8)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.places: torch.Tensor
        self.register_buffer("places", torch.arange(5.0 * width).view(1, 5, width) / 64, persistent=False)
        self.stages = nn.ModuleList(OwnBlock(width, heads) for _ in range(depth))
        self.final = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(tokens.shape[0], -1, -1), tokens], dim=1) + self.places
        for block in self.stages:
            tokens = block(tokens)
        return self.classify(self.final(tokens)[:, 0])


OWN = Reader(
    input_shape=(3, 16, 16),
    blocks="stages",
    attention="attend",
    projections=("to_q", "to_k", "to_v", "mix"),
    heads="heads",
    scale=0.8,
    norm_before="first",
    mlp="ffn",
    maps=("0", "2"),
    patches="stem",
    norm="final",
    head="classify",
)


VIT, BEIT = "vit_tiny_patch16_224", "beit_base_patch16_224"
CASES: dict[str, tuple[AdoptedFamily, Callable[[], Any]]] = {
    "vit": (TIMM, partial(of_timm, VIT)),
    "vit, no qkv bias": (TIMM, partial(of_timm, VIT, qkv_bias=False)),
    "vit, no bias at all": (TIMM, partial(of_timm, VIT, qkv_bias=False, proj_bias=False)),
    "vit, norms after": (TIMM, partial(of_timm, "vit_base_patch16_rpn_224")),
    "vit, no class token": (TIMM, partial(of_timm, VIT, class_token=False, global_pool="avg", drop_path_rate=0.1)),
    "vit, mean pooled": (TIMM, partial(of_timm, VIT, global_pool="avg")),
    "vit, norms before": (TIMM, partial(of_timm, VIT, pre_norm=True)),
    "vit, no norm after": (TIMM, partial(of_timm, VIT, final_norm=False)),
    "vit, positions resampled": (TIMM, partial(of_timm, VIT, dynamic_img_size=True)),
    "vit, no classifier": (TIMM, partial(of_timm, VIT, num_classes=0)),
    "vit, wide images": (TIMM, partial(of_timm, VIT, img_size=(16, 24))),
    "clip": (TIMM, partial(of_timm, "vit_base_patch16_clip_quickgelu_224")),
    "deit, distilled": (TIMM, partial(of_timm, "deit_tiny_distilled_patch16_224")),
    "deit3": (TIMM, partial(of_timm, "deit3_small_patch16_224")),
    "dinov2": (TIMM, partial(of_timm, "vit_small_patch14_dinov2")),
    "dinov2, registers": (TIMM, partial(of_timm, "vit_small_patch14_reg4_dinov2")),
    "dinov2, gated MLP": (TIMM, partial(of_timm, "vit_giant_patch14_reg4_dinov2")),
    "vit, norms of query and key": (TIMM, partial(of_timm, VIT, qk_norm=True)),
    "vit, norm of the outputs": (TIMM, partial(of_timm, VIT, scale_attn_norm=True)),
    "vit, attention pooling": (TIMM, partial(of_timm, VIT, global_pool="map")),
    "timm siglip": (TIMM, partial(of_timm, "vit_base_patch16_siglip_224")),
    "beit3, norm of the outputs": (TIMM, partial(of_timm, "beit3_base_patch16_224")),
    "beit, bias per layer": (TIMM, partial(of_timm, BEIT)),
    "beit, one bias": (TIMM, partial(of_timm, BEIT, use_rel_pos_bias=False, use_shared_rel_pos_bias=True)),
    "relative positions": (TIMM, partial(of_timm, "vit_relpos_small_patch16_224")),
    "relative positions by an MLP": (TIMM, partial(of_timm, "vit_relpos_base_patch32_plus_rpn_256")),
    "eva": (TIMM, partial(of_timm, "eva_large_patch14_196")),
    "eva02": (TIMM, partial(of_timm, "eva02_tiny_patch14_224")),
    "eva02, norm of the outputs": (TIMM, partial(of_timm, "eva02_base_patch14_224")),
    "dinov3": (TIMM, partial(of_timm, "vit_small_patch16_dinov3")),
    "dinov3, class token": (TIMM, partial(of_timm, "vit_small_patch16_dinov3", global_pool="token")),
    "rotary, axial": (TIMM, partial(of_timm, "vit_small_patch16_rope_224")),
    "rotary, mixed": (TIMM, partial(of_timm, "vit_small_patch16_rope_mixed_224")),
    "perception encoder": (TIMM, partial(of_timm, "vit_pe_spatial_tiny_patch16_512")),
    "sapiens2, grouped heads": (TIMM, partial(of_timm, "vit_base_patch16_sapiens2", num_kv_heads=1)),
    "hf vit": (HF, partial(of_hf, "ViTForImageClassification")),
    "hf vit, no qkv bias": (HF, partial(of_hf, "ViTForImageClassification", qkv_bias=False)),
    "hf deit": (HF, partial(of_hf, "DeiTForImageClassification")),
    "hf deit, distilled": (HF, partial(of_hf, "DeiTForImageClassificationWithTeacher")),
    "hf dinov2": (HF, partial(of_hf, "Dinov2ForImageClassification")),
    "hf dinov2, gated MLP": (HF, partial(of_hf, "Dinov2ForImageClassification", use_swiglu_ffn=True)),
    "hf dinov2, registers": (HF, partial(of_hf, "Dinov2WithRegistersForImageClassification")),
    "hf vit, backbone": (HF, partial(of_hf, "ViTModel")),
    "hf deit, backbone": (HF, partial(of_hf, "DeiTModel")),
    "hf msn": (HF, partial(of_hf, "ViTMSNForImageClassification")),
    "hf msn, backbone": (HF, partial(of_hf, "ViTMSNModel")),
    "hf ijepa": (HF, partial(of_hf, "IJepaForImageClassification")),
    "hf ijepa, backbone": (HF, partial(of_hf, "IJepaModel")),
    "hf dinov2, backbone": (HF, partial(of_hf, "Dinov2Model")),
    "hf dinov2, registers, backbone": (HF, partial(of_hf, "Dinov2WithRegistersModel")),
    "hf clip tower": (HF, partial(of_hf, "CLIPVisionModel")),
    "hf clip tower, projected": (HF, partial(of_hf, "CLIPVisionModelWithProjection", projection_dim=7)),
    "hf clip": (HF, partial(of_hf, "CLIPForImageClassification")),
    "hf siglip tower": (HF, partial(of_hf, "SiglipVisionModel")),
    "hf siglip": (HF, partial(of_hf, "SiglipForImageClassification")),
    "hf siglip2 tower": (HF, partial(of_hf, "Siglip2VisionModel")),
    "hf mae": (HF, partial(of_hf, "ViTMAEModel")),
    "hf dinov3": (HF, partial(of_hf, "DINOv3ViTModel", num_register_tokens=2)),
    "hf dinov3, gated MLP": (HF, partial(of_hf, "DINOv3ViTModel", use_gated_mlp=True)),
    "hf beit": (HF, partial(of_hf, "BeitForImageClassification", **BIASES_PER_LAYER)),
    "hf beit, one bias": (HF, partial(of_hf, "BeitForImageClassification", **ONE_BIAS)),
    "hf beit, class token": (HF, partial(of_hf, "BeitModel", use_mean_pooling=False, **BIASES_PER_LAYER)),
    "hf data2vec": (HF, partial(of_hf, "Data2VecVisionForImageClassification", **{**BIASES_PER_LAYER, **ONE_BIAS})),
    "hf yolos": (HF, partial(of_hf, "YolosForObjectDetection", use_mid_position_embeddings=True)),
    "hf dpt": (HF, partial(of_hf, "DPTForDepthEstimation")),
    "hf ast": (HF, partial(of_hf, "ASTForAudioClassification")),
    "torchvision": (TORCHVISION, of_torchvision),
    "torchvision, two linear maps after": (TORCHVISION, partial(of_torchvision, representation_size=8)),
    "open_clip": (OPEN_CLIP, partial(of_open_clip, act_layer="QuickGELU")),
    "open_clip, mean pooled": (OPEN_CLIP, partial(of_open_clip, pool_type="avg", no_ln_pre=True)),
    "open_clip, mean before the norm": (
        OPEN_CLIP,
        partial(of_open_clip, pool_type="avg", final_ln_after_pool=True, ls_init_value=0.1),
    ),
    "open_clip, attention pooling": (
        OPEN_CLIP,
        partial(of_open_clip, output_dim=8, attentional_pool=True, attn_pooler_queries=3, attn_pooler_heads=2),
    ),
    "own": (MODULE, lambda: shaken(OwnViT())),
    "hf vivit": (HF, partial(of_hf, "VivitForVideoClassification")),
    "hf videomae": (HF, partial(of_hf, "VideoMAEForVideoClassification")),
}
# What differs from another case is around the blocks: the input, the pooling, the head, or the class of the library.
SAME_BLOCKS = {
    "vit, no class token", "vit, mean pooled", "vit, positions resampled", "vit, no classifier", "vit, wide images",
    "clip", "dinov2, registers", "dinov3, class token", "hf deit", "hf deit, distilled", "hf dinov2, registers",
    "hf vit, backbone", "hf deit, backbone", "hf msn", "hf msn, backbone", "hf ijepa", "hf ijepa, backbone",
    "hf dinov2, backbone", "hf dinov2, registers, backbone", "hf clip tower, projected", "hf clip", "hf siglip",
    "hf siglip2 tower", "hf mae", "hf beit, class token", "hf data2vec", "hf ast", "hf dpt", "hf vivit",
    "torchvision, two linear maps after", "open_clip, mean pooled", "open_clip, mean before the norm",
    "open_clip, attention pooling",
}  # fmt: skip
BLOCKS = [name for name in CASES if name not in SAME_BLOCKS]


@cache
def adopted_once(name: str) -> tuple[AdoptedFamily, Any, Any]:
    family, make = CASES[name]
    model = make()
    return family, model, adopt(family, family.marked(model, OWN) if isinstance(family, ModuleFamily) else model)


@cache
def deep() -> Any:
    """Four layers on sixteen patches; tests copy it before they change it."""
    return adopt(TIMM, of_timm(VIT, depth=4, img_size=32))


def inputs(model: nn.Module, count: int = 3) -> torch.Tensor:
    """Random images of a model's size, always the same."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, *family_of(model).input_shape(model), generator=generator, dtype=torch.float64)


def images_for(model: nn.Module, count: int = 8) -> LoadedImages:
    """Random pictures of a model's size, always the same."""
    shape = family_of(model).input_shape(model)
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)
    normalization = Normalization((0.5,) * shape[0], (0.5,) * shape[0])
    return from_tensors("random", pixels, torch.zeros(count, dtype=torch.long), normalization)


def twin_of(model: Any) -> Mapping[str, torch.Tensor]:
    """The weights of a timm ViT under the names of transformers."""
    names = {
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "pos_embed": "vit.embeddings.position_embeddings",
        "cls_token": "vit.embeddings.cls_token",
        "norm": "vit.layernorm",
        "head": "classifier",
    }
    for layer in range(len(model.blocks)):
        ours, theirs = f"blocks.{layer}", f"vit.layers.{layer}"
        names |= {f"{ours}.norm1": f"{theirs}.layernorm_before", f"{ours}.norm2": f"{theirs}.layernorm_after"}
        names |= {f"{ours}.mlp.{part}": f"{theirs}.mlp.{part}" for part in ("fc1", "fc2")}
        names |= {f"{ours}.attn.proj": f"{theirs}.attention.o_proj"}
    renamed = {}
    for name, tensor in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        if owner.endswith("attn.qkv"):
            for part, own in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"vit.layers.{owner.split('.')[1]}.attention.{part}_proj.{kind}"] = own
        else:
            renamed[names.get(name) or f"{names[owner]}.{kind}"] = tensor
    return renamed
