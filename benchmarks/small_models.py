"""Small models of many libraries, with random weights, for the measurements of benchmarks/models.py.

Every library has a function that yields one small model of each class. Its modules are imported in this function, so
the other libraries need not be installed. The models have the classes and parts of the published models, but a width of
about 48, three or four blocks, and images of 64 to 128 pixels.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, DEPTH, HEADS, SIDE, PATCH, CLASSES = 48, 3, 3, 64, 8, 10
GRID = SIDE // PATCH
BATCH = 4


@dataclass(frozen=True)
class SmallModel:
    """A function that creates a small model, and a note that distinguishes it from others of the same class.

    `inputs` are arguments for a batch of BATCH items, if the model does not take images. `side` is the size of the
    images, if the model does not state it.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Any = None
    side: int | None = None


def numbers(*shape: int) -> Tensor:
    """Returns normally distributed numbers for a batch of BATCH items, the same in every call."""
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))


def of_timm() -> Iterator[SmallModel]:
    timm: Any = importlib.import_module("timm")
    vit = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    for name, architecture in {
        "VisionTransformer": "vit_tiny_patch16_224",
        "VisionTransformer (DeiT III)": "deit3_small_patch16_224",
        "VisionTransformer (DINOv2, registers)": "vit_small_patch14_reg4_dinov2",
        "VisionTransformer (CLIP)": "vit_base_patch16_clip_224",
        "VisionTransformer (SigLIP, attention pooling)": "vit_base_patch16_siglip_224",
        "VisionTransformerDistilled (DeiT)": "deit_tiny_distilled_patch16_224",
        "VisionTransformerRelPos": "vit_relpos_small_patch16_224",
        "Beit": "beit_base_patch16_224",
        "Eva (EVA-02)": "eva02_tiny_patch14_224",
        "Eva (DINOv3)": "vit_small_patch16_dinov3",
        "Eva (perception encoder)": "vit_pe_spatial_tiny_patch16_512",
        "Cait": "cait_xxs24_224",
        "Xcit": "xcit_nano_12_p8_224",
    }.items():
        yield SmallModel(name, partial(timm.create_model, architecture, num_classes=CLASSES, **vit))
    windows = {"window_size": 3, "global_attn_indexes": (1,), "neck_chans": 16}
    yield SmallModel("VisionTransformerSAM", partial(timm.create_model, "samvit_base_patch16", **vit, **windows))
    hiera = {"embed_dim": 24, "num_heads": 1, "stages": (1, 1, 2, 1), "num_classes": CLASSES}
    yield SmallModel("Hiera", partial(timm.create_model, "hiera_tiny_224", img_size=(128, 128), **hiera))
    yield SmallModel("HieraDet (SAM 2)", partial(timm.create_model, "sam2_hiera_tiny", **hiera), side=128)
    swin = {"img_size": SIDE, "window_size": 4, "embed_dim": 24, "depths": (1, 2, 1), "num_heads": (2, 4, 8)}
    for name, architecture in {
        "SwinTransformer": "swin_tiny_patch4_window7_224",
        "SwinTransformerV2": "swinv2_tiny_window8_256",
    }.items():
        yield SmallModel(name, partial(timm.create_model, architecture, num_classes=CLASSES, **swin))
    qwen = {**vit, "mlp_ratio": 2, "pos_embed_grid_size": GRID, "num_classes": CLASSES}
    yield SmallModel("Qwen3VitClassifier", partial(timm.create_model, "qwen3_vit_88m", **qwen))

    def gemma() -> nn.Module:
        sizes = {"img_size": SIDE, "head_dim": 16, "intermediate_size": 96, "position_embedding_size": 64}
        model = timm.create_model("gemma4_vit_167m", num_classes=CLASSES, **vit | sizes)
        for name, buffer in model.named_buffers():  # the limits of published weights are finite
            if name.endswith(("_min", "_max")):
                buffer.fill_(-9.0 if name.endswith("_min") else 9.0)
        return model

    yield SmallModel("Gemma4VitClassifier", gemma)
    places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).expand(BATCH, -1, -1)
    packed = {
        "patches": numbers(GRID**2, 3 * PATCH**2),
        "patch_coord": places,
        "patch_valid": torch.ones(BATCH, GRID**2, dtype=torch.bool),
    }
    sizes = {key: value for key, value in vit.items() if key != "img_size"}
    yield SmallModel(
        "NaFlexVit", partial(timm.create_model, "naflexvit_base_patch16_gap", num_classes=CLASSES, **sizes), (packed,)
    )


class OfPatches(nn.Module):
    """A vision tower of a language model, called with the patches [batch, patches, numbers] of images of one size.

    The tower itself takes the patches of all images in one row, and the frames, height and width of every image.
    """

    def __init__(self, tower: nn.Module):
        super().__init__()
        self.tower = tower

    def forward(self, patches: Tensor) -> Tensor:
        grids, row = torch.tensor([[1, GRID, GRID]] * len(patches)), patches.flatten(0, 1)
        if type(self.tower).__name__ == "PaddleOCRVisionModel":
            output: Any = self.tower(row[None], grid_thw=grids).last_hidden_state
        else:
            output = self.tower(row, grids).pooler_output
        return output.unflatten(0, (len(patches), -1))


class Prompted(nn.Module):
    """A segmentation model that takes images and points, and returns the masks and their scores."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        output: Any = self.model(pixel_values=images, input_points=points)
        return output.pred_masks, output.iou_scores


def of_transformers() -> Iterator[SmallModel]:
    for part in (classifiers, towers, sequences, hierarchies, segmenters, detectors):
        yield from part()


def config_of(name: str, *settings: dict[str, Any], **fields: Any) -> Any:
    """Returns a configuration of transformers. Later fields replace earlier ones."""
    for each in reversed(settings):
        fields = each | fields
    return getattr(importlib.import_module("transformers"), name)(**fields)


def small(
    name: str, *settings: dict[str, Any], inputs: Any = None, side: int | None = None, **fields: Any
) -> SmallModel:
    """Returns a model of transformers. Its class is the first word of `name`."""
    kind: Any = getattr(importlib.import_module("transformers"), name.partition(" ")[0])
    config = config_of(kind.config_class.__name__, *settings, **fields)
    return SmallModel(name, lambda: kind(config), inputs, side)


BODY: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
DINO = BODY | {"image_size": SIDE, "patch_size": PATCH}
VIT, LABELS = DINO | {"intermediate_size": 4 * WIDTH}, {"num_labels": CLASSES}


def classifiers() -> Iterator[SmallModel]:
    biases = {"use_relative_position_bias": True, "layer_scale_init_value": 0.1}
    yield small("ViTForImageClassification", VIT, LABELS)
    yield small("DeiTForImageClassificationWithTeacher", VIT, LABELS)
    yield small("BeitForImageClassification", VIT, LABELS, biases)
    yield small("Data2VecVisionForImageClassification", VIT, LABELS, biases)
    yield small("Dinov2ForImageClassification", DINO, LABELS)
    yield small("Dinov2WithRegistersModel", DINO)
    yield small("DINOv3ViTModel", VIT, num_register_tokens=4)
    yield small("IJepaForImageClassification", VIT, LABELS)
    yield small("ViTMAEModel", VIT, mask_ratio=0.0)
    yield small("ViTMSNModel", VIT)


def towers() -> Iterator[SmallModel]:
    """Yields models of images and texts, and their image towers."""
    yield small("CLIPVisionModelWithProjection", VIT, projection_dim=32)
    yield small("SiglipVisionModel", VIT)
    packed = {
        "pixel_values": numbers(GRID**2, 3 * PATCH**2),
        "pixel_attention_mask": torch.ones(BATCH, GRID**2, dtype=torch.long),
        "spatial_shapes": torch.full((BATCH, 2), GRID),
    }
    yield small("Siglip2VisionModel", VIT, num_patches=GRID**2, inputs=packed)
    words = {"vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    text = BODY | words | {"intermediate_size": 96}
    yield small("CLIPModel", vision_config=VIT, text_config=text)
    yield small("SiglipModel", vision_config=VIT, text_config=text | {"projection_size": WIDTH})
    models = "transformers.models"
    patches = {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 1, "depth": DEPTH, "num_heads": 4}
    merged = patches | {"hidden_size": 64, "intermediate_size": 160, "out_hidden_size": 64}
    qwen2, qwen25, qwen3, paddle = (
        importlib.import_module(f"{models}.{name}.modeling_{name}")
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paddleocr_vl")
    )
    configs = {
        qwen2.Qwen2VisionTransformerPretrainedModel: patches | {"embed_dim": 64, "hidden_size": 64},
        qwen25.Qwen2_5_VisionTransformerPretrainedModel: merged | {"window_size": 32, "fullatt_block_indexes": [1]},
        qwen3.Qwen3VLVisionModel: merged | {"num_position_embeddings": 64, "deepstack_visual_indexes": [1]},
        paddle.PaddleOCRVisionModel: VIT | {"num_attention_heads": 4, "hidden_size": 64},
    }
    for kind, fields in configs.items():
        rows = (GRID**2, 3, PATCH, PATCH) if kind is paddle.PaddleOCRVisionModel else (GRID**2, 3 * PATCH**2)
        make = partial(of_patches, kind, fields)
        yield SmallModel(f"{kind.__name__} (patches)", make, (numbers(*rows),))


def of_patches(kind: Any, fields: dict[str, Any]) -> nn.Module:
    return OfPatches(kind(kind.config_class(**fields)))


def sequences() -> Iterator[SmallModel]:
    """Yields models of videos, spectrograms and series."""
    yield small("VideoMAEForVideoClassification", VIT, LABELS, num_frames=4)
    yield small("VivitForVideoClassification", VIT, LABELS, num_frames=4, tubelet_size=[2, PATCH, PATCH])
    yield small("TimesformerForVideoClassification", VIT, LABELS, num_frames=4)
    strides = {"num_mel_bins": 32, "max_length": 64, "time_stride": 8, "frequency_stride": 8}
    yield small("ASTForAudioClassification", VIT, LABELS, strides)
    series = {"num_input_channels": 3, "context_length": 64, "patch_length": 8, "patch_stride": 8, "d_model": WIDTH}
    layers = {"num_attention_heads": HEADS, "num_hidden_layers": DEPTH, "ffn_dim": 96, "num_targets": CLASSES}
    yield small("PatchTSTForClassification", series, layers, inputs={"past_values": numbers(64, 3)})


def swin_of(depths: list[int]) -> dict[str, Any]:
    """Returns the fields of a Swin transformer with a stage for each of the numbers of blocks."""
    heads = [2, 2, 4, 8][-len(depths) :]
    return {"patch_size": 4, "embed_dim": 24, "depths": depths, "num_heads": heads, "window_size": 4}


def hierarchies() -> Iterator[SmallModel]:
    yield small("SwinForImageClassification", swin_of([1, 2, 1]), LABELS, image_size=SIDE)
    yield small("Swinv2ForImageClassification", swin_of([1, 2, 1]), LABELS, image_size=SIDE)
    stages = {"embed_dim": 24, "depths": [1, 2, 1], "num_heads": [1, 2, 4]}
    pooled = {"num_query_pool": 2, "masked_unit_size": [4, 4], "image_size": [SIDE, SIDE]}
    yield small("HieraForImageClassification", LABELS, stages, pooled)
    stages = {"hidden_sizes": [16, 32, 32, 48], "depths": [1] * 4, "num_attention_heads": [1, 2, 2, 3]}
    yield small("SegformerForSemanticSegmentation", LABELS, stages, decoder_hidden_size=32, image_size=SIDE)
    stages = {
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [24, 48, 96, 192],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "window_size_per_stage": [8, 4, 4, 4],
        "global_attention_blocks": [3],
    }
    hiera = config_of("Sam2HieraDetConfig", stages, hidden_size=24, image_size=[128, 128])
    maps = {"backbone_channel_list": [192, 96, 48, 24], "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]}
    yield small("Sam2VisionModel", maps, backbone_config=hiera, fpn_hidden_size=32, side=128)


def segmenters() -> Iterator[SmallModel]:
    """Yields models of masks and depth, with their decoders."""
    windows = {"window_size": 3, "global_attn_indexes": [1], "mlp_dim": 4 * WIDTH, "output_channels": 32}
    yield small("SamVisionModel", DINO, windows)
    decoder = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sam = config_of(
        "SamConfig",
        vision_config=DINO | windows | {"num_pos_feats": 16},
        prompt_encoder_config={"hidden_size": 32, "image_size": SIDE, "patch_size": PATCH, "mask_input_channels": 4},
        mask_decoder_config=decoder | {"mlp_dim": 64, "iou_head_hidden_dim": 32},
    )
    model: Any = importlib.import_module("transformers").SamModel
    yield SmallModel(
        "SamModel (images and points)", lambda: Prompted(model(sam)), (numbers(3, SIDE, SIDE), 20 + numbers(1, 1, 2))
    )
    pools = {"hidden_size": 32, "pool_scales": [1, 2], "use_auxiliary_head": False}
    dino = config_of("Dinov2Config", DINO, out_features=["stage1", "stage3"])
    yield small("UperNetForSemanticSegmentation (DINOv2)", LABELS, pools, backbone_config=dino)
    four = [f"stage{index}" for index in range(1, 5)]
    swin = config_of("SwinConfig", swin_of([1, 1, 2, 1]), image_size=128, out_features=four)
    yield small("UperNetForSemanticSegmentation (Swin)", LABELS, pools, backbone_config=swin, side=128)
    widths = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), 32)
    layers = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 8}
    hidden = {"encoder_feedforward_dim": 64, "dim_feedforward": 64}
    mask2former = LABELS | widths | layers | hidden
    yield small("Mask2FormerForUniversalSegmentation (Swin)", mask2former, backbone_config=swin, side=128)
    yield small("EomtForUniversalSegmentation", DINO, LABELS, num_blocks=1, num_queries=8)
    neck = {"neck_hidden_sizes": [16, 16, 24, 24], "fusion_hidden_size": 16}
    taps = {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "is_hybrid": False}
    yield small("DPTForDepthEstimation", VIT, neck, taps)
    dino = config_of("Dinov2Config", DINO, num_hidden_layers=4, out_features=four, reshape_hidden_states=False)
    head = {"patch_size": PATCH, "reassemble_hidden_size": WIDTH, "head_hidden_size": 8}
    yield small("DepthAnythingForDepthEstimation", neck, head, backbone_config=dino)


def detectors() -> Iterator[SmallModel]:
    """Yields models of boxes and poses, with their decoders."""
    pose = config_of("VitPoseBackboneConfig", BODY, image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH], mlp_ratio=2)
    yield small("VitPoseForPoseEstimation", LABELS, backbone_config=pose)
    yield small("YolosForObjectDetection", VIT, LABELS, image_size=(SIDE, SIDE), num_detection_tokens=6)
    vitdet = {"pretrain_image_size": SIDE, "window_size": 4, "window_block_indices": [0, 2], "out_indices": [3]}
    yield small("VitDetBackbone", DINO, vitdet, use_relative_position_embeddings=True)
    heads = {"decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2, "group_detr": 1}
    decoder = heads | LABELS | {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 64, "num_queries": 8}
    body = DINO | {"num_hidden_layers": 4, "mlp_ratio": 2, "out_indices": [2, 4]}
    windows = {"num_windows": 4, "window_block_indices": [0, 2], "pretrain_image_size": SIDE}
    backbone = config_of("LwDetrViTConfig", body, windows)
    yield small("LwDetrForObjectDetection", decoder, backbone_config=backbone, projector_scale_factors=[1.0])
    backbone = config_of("RfDetrDinov2Config", body, num_windows=2, window_block_indexes=[0, 1])
    yield small("RfDetrForObjectDetection", decoder, backbone_config=backbone)


def of_torchvision() -> Iterator[SmallModel]:
    models: Any = importlib.import_module("torchvision.models")
    vit = {"image_size": SIDE, "patch_size": PATCH, "num_layers": DEPTH, "num_heads": HEADS, "hidden_dim": WIDTH}
    yield SmallModel("VisionTransformer", partial(models.VisionTransformer, **vit, mlp_dim=4 * WIDTH))
    swin = {"patch_size": [4, 4], "embed_dim": 24, "depths": [1, 2, 1], "num_heads": [2, 4, 8], "window_size": [4, 4]}
    yield SmallModel("SwinTransformer", partial(models.SwinTransformer, **swin, num_classes=CLASSES), side=SIDE)


def of_open_clip() -> Iterator[SmallModel]:
    model: Any = importlib.import_module("open_clip.model")
    vision = {"image_size": SIDE, "patch_size": PATCH, "width": WIDTH, "layers": DEPTH, "head_width": 16}
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    towers = {
        "VisionTransformer": {},
        "VisionTransformer (mean pooling)": {"pool_type": "avg", "final_ln_after_pool": True},
        "VisionTransformer (CoCa)": {"attentional_pool": True, "attn_pooler_queries": 8, "attn_pooler_heads": 2},
    }
    for name, fields in towers.items():
        yield SmallModel(name, lambda fields=fields: model.CLIP(32, vision | fields, text).visual)
    yield SmallModel("CLIP", partial(model.CLIP, 32, vision, text))


def of_rfdetr() -> Iterator[SmallModel]:
    config: Any = importlib.import_module("rfdetr.config")
    build = importlib.import_module("rfdetr.models.lwdetr").build_model_from_config
    sizes = {"resolution": 128, "positional_encoding_size": 8, "hidden_dim": 32, "sa_nheads": 2, "ca_nheads": 2}
    fields = {"pretrain_weights": None, "num_classes": CLASSES, "num_queries": 26, "num_select": 26, "device": "cpu"}
    yield SmallModel("LWDETR (RF-DETR Nano)", lambda: build(config.RFDETRNanoConfig(**sizes, **fields)))


def of_segment_anything() -> Iterator[SmallModel]:
    modeling: Any = importlib.import_module("segment_anything.modeling")
    windows = {"use_rel_pos": True, "window_size": 3, "global_attn_indexes": (1,), "out_chans": 32}
    sizes = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    yield SmallModel("ImageEncoderViT", partial(modeling.ImageEncoderViT, **sizes, **windows))


def of_sam2() -> Iterator[SmallModel]:
    backbones = "sam2.modeling.backbones"
    hiera, encoder = (importlib.import_module(f"{backbones}.{name}") for name in ("hieradet", "image_encoder"))
    positions = importlib.import_module("sam2.modeling.position_encoding")
    sizes = {"embed_dim": 24, "num_heads": 1, "stages": (1, 1, 2, 1), "window_spec": (8, 4, 4, 4)}

    def make() -> nn.Module:
        trunk = hiera.Hiera(**sizes, global_att_blocks=(3,), window_pos_embed_bkg_spatial_size=(7, 7))
        return encoder.ImageEncoder(
            trunk, encoder.FpnNeck(positions.PositionEmbeddingSine(32), 32, trunk.channel_list), scalp=1
        )

    yield SmallModel("ImageEncoder (Hiera)", make, (numbers(3, 128, 128),))


def of_monai() -> Iterator[SmallModel]:
    nets: Any = importlib.import_module("monai.networks.nets")
    sizes = {"img_size": (32, 32, 32), "hidden_size": WIDTH, "mlp_dim": 4 * WIDTH, "num_heads": HEADS}
    volume = (numbers(1, 32, 32, 32),)
    vit = {**sizes, "patch_size": (8, 8, 8), "num_layers": DEPTH, "classification": True, "num_classes": CLASSES}
    yield SmallModel("ViT (volumes)", partial(nets.ViT, 1, **vit), volume)
    yield SmallModel("UNETR (volumes)", partial(nets.UNETR, 1, 3, feature_size=8, **sizes), volume)
    swin = {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4), "window_size": 4}
    yield SmallModel("SwinUNETR (volumes)", partial(nets.SwinUNETR, 1, 3, **swin), (numbers(1, 64, 64, 64),))


def of_smp() -> Iterator[SmallModel]:
    models: Any = importlib.import_module("segmentation_models_pytorch")
    vit = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "num_heads": HEADS}
    options = {"encoder_weights": None, "classes": CLASSES}
    decoder = {"decoder_intermediate_channels": (16, 16, 24, 24), "decoder_fusion_channels": 16}
    yield SmallModel("DPT (ViT of timm)", partial(models.DPT, "tu-vit_tiny_patch16_224", **options, **decoder, **vit))
    yield SmallModel(
        "Segformer (MiT)", partial(models.Segformer, "mit_b0", **options, decoder_segmentation_channels=32), side=SIDE
    )


def of_lightly() -> Iterator[SmallModel]:
    modules: Any = importlib.import_module("lightly.models.modules")
    timm: Any = importlib.import_module("timm")
    vit = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    make = partial(timm.create_model, "vit_tiny_patch16_224", num_classes=0, **vit)
    yield SmallModel("MaskedVisionTransformerTIMM", lambda: modules.MaskedVisionTransformerTIMM(make()))
    models: Any = importlib.import_module("torchvision.models")
    sizes = {"image_size": SIDE, "patch_size": PATCH, "num_layers": DEPTH, "num_heads": HEADS, "hidden_dim": WIDTH}
    other = partial(models.VisionTransformer, **sizes, mlp_dim=4 * WIDTH)
    yield SmallModel("MaskedVisionTransformerTorchvision", lambda: modules.MaskedVisionTransformerTorchvision(other()))


def of_torchgeo() -> Iterator[SmallModel]:
    models: Any = importlib.import_module("torchgeo.models")
    vit = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}

    def of_bands() -> nn.Module:
        model = models.vit_small_patch16_224(in_chans=13, num_classes=CLASSES, **vit)
        model.pretrained_cfg.update(mean=(0.5,) * 13, std=(0.25,) * 13)  # the statistics of the bands
        return model

    yield SmallModel("VisionTransformer (13 bands)", of_bands)
    yield SmallModel("ScaleMAE", partial(models.ScaleMAE, num_classes=CLASSES, **vit))
    sizes = {"encoder_dim": 64, "encoder_depth": 4, "num_heads": 16, "patch_size": PATCH, "image_size": SIDE}
    radar = {"x_sar": numbers(2, SIDE, SIDE), "x_optical": numbers(12, SIDE, SIDE)}
    yield SmallModel("CROMA (radar and optical)", partial(models.CROMA, **sizes), radar)


# The module that is imported, the package, and the function that yields the models.
SMALL_MODELS: dict[str, tuple[str, Callable[[], Iterator[SmallModel]]]] = {
    "timm": ("timm", of_timm),
    "transformers": ("transformers", of_transformers),
    "torchvision": ("torchvision", of_torchvision),
    "open_clip": ("open_clip_torch", of_open_clip),
    "rfdetr": ("rfdetr", of_rfdetr),
    "segment_anything": ("segment_anything", of_segment_anything),
    "sam2": ("sam2", of_sam2),
    "monai": ("monai", of_monai),
    "segmentation_models_pytorch": ("segmentation_models_pytorch", of_smp),
    "lightly": ("lightly", of_lightly),
    "torchgeo": ("torchgeo", of_torchgeo),
}
