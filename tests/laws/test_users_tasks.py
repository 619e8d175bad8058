"""Models and tasks of this year, shrunk as their users would write it: detectors, towers, an index, volumes, series."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.support.modules import tensors_of
from attnrx.vit.models import family_of
from support.users_models import CLASSES, SIZE, WIDTH, lw_detr, of_timm, rf_detr

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("single_precision")]
transformers: Any = pytest.importorskip("transformers")
timm: Any = pytest.importorskip("timm")

GRID = SIZE // 8
BODY = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48}
VIT = BODY | {"image_size": SIZE, "patch_size": 8}


def numbers(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


def pictures(count: int = 96) -> Tensor:
    return numbers(count, 3, SIZE, SIZE)


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def costs_less(shrunk: rx.Shrunk, original: nn.Module, share: float, **inputs: Any) -> nn.Module:
    before = rx.load(original, **inputs)
    after = family_of(shrunk.model).costs(shrunk.model)
    assert after.macs <= (share + 0.01) * family_of(before).costs(before).macs
    return shrunk.model


def same_outputs(found: Any, expected: Any) -> None:
    one, other = tensors_of(found), tensors_of(expected)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.shape == other[name].shape and tensor.isfinite().all()


@pytest.mark.parametrize("made", [rf_detr, pytest.param(lw_detr, marks=pytest.mark.slow)])
def test_a_fine_tuned_detector_with_windows(made: Callable[[], Any], tmp_path: Path) -> None:
    detector, images = made().eval(), pictures()
    with torch.no_grad():
        expected = detector(pixel_values=images[:2])
    shrunk = rx.shrink(detector, images, macs=0.85)
    small = costs_less(shrunk, detector, 0.85)
    with torch.no_grad():
        found = small(pixel_values=images[:2])
        assert type(found) is type(expected)
        same_outputs({"a": found.logits, "b": found.pred_boxes}, {"a": expected.logits, "b": expected.pred_boxes})
        again = rx.load(shrunk.save(tmp_path / "small"))
        torch.testing.assert_close(again(pixel_values=images[:2]).logits, found.logits, rtol=0, atol=0)


class Deim(nn.Module):
    """A detector with the structure of DEIMv2: DINOv3's features at three depths, and a head for classes and boxes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "depth": 4, "num_heads": 2}
        self.backbone = timm.create_model("vit_small_patch16_dinov3", num_classes=0, **sizes)
        self.mixed = nn.Conv2d(3 * WIDTH, WIDTH, 1)
        self.labels, self.boxes = nn.Conv2d(WIDTH, CLASSES, 1), nn.Conv2d(WIDTH, 4, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        taps = self.backbone.forward_intermediates(images, indices=[1, 2, 3], intermediates_only=True)
        features = self.mixed(torch.cat(taps, 1)).relu()
        logits, boxes = self.labels(features).flatten(2).mT, self.boxes(features).flatten(2).mT.sigmoid()
        return {"pred_logits": logits, "pred_boxes": boxes}


def test_a_detector_that_reads_features_at_several_depths() -> None:
    detector, images = Deim().eval(), pictures()
    small = costs_less(rx.shrink(detector, images, macs=0.8), detector, 0.8)
    with torch.no_grad():
        same_outputs(small(images[:2]), detector(images[:2]))


def test_the_encoder_of_sam_in_the_whole_model() -> None:
    vision = VIT | {"window_size": 3, "global_attn_indexes": [1], "mlp_dim": 48, "output_channels": 32}
    prompts = {"hidden_size": 32, "image_size": SIZE, "patch_size": 8, "mask_input_channels": 4}
    decoder = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 48}
    config = transformers.SamConfig(
        vision_config=vision | {"num_pos_feats": 16},
        prompt_encoder_config=prompts,
        mask_decoder_config=decoder | {"iou_head_hidden_dim": 16},
    )
    sam, images = transformers.SamModel(config).eval(), pictures()
    points = 8 + numbers(2, 1, 1, 2)
    with torch.no_grad():
        expected = sam(pixel_values=images[:2], input_points=points)
    shrunk = rx.shrink(sam.vision_encoder, images, macs=0.85)
    sam.vision_encoder = costs_less(shrunk, sam.vision_encoder, 0.85)
    with torch.no_grad():
        found = sam(pixel_values=images[:2], input_points=points)
    same_outputs([found.pred_masks, found.iou_scores], [expected.pred_masks, expected.iou_scores])


def test_the_encoder_of_sam_2_loses_hidden_units() -> None:
    stages = {"blocks_per_stage": [1, 1, 2, 1], "embed_dim_per_stage": [8, 16, 32, 64]}
    stages |= {"num_attention_heads_per_stage": [1, 1, 2, 2], "window_size_per_stage": [4, 4, 4, 2]}
    hiera = transformers.Sam2HieraDetConfig(**stages, global_attention_blocks=[3], hidden_size=8, image_size=[64, 64])
    maps = {"backbone_channel_list": [64, 32, 16, 8], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}
    encoder = transformers.Sam2VisionModel(
        transformers.Sam2VisionConfig(backbone_config=hiera, **maps, fpn_hidden_size=8)
    ).eval()
    images = numbers(96, 3, 64, 64)
    small = costs_less(rx.shrink(encoder, images, macs=0.9), encoder, 0.9)
    with torch.no_grad():
        same_outputs(small(images[:2]), encoder(images[:2]))


def test_a_tower_with_attention_pooling_searches_the_old_index() -> None:
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "depth": 4, "num_heads": 2}
    tower = timm.create_model("vit_base_patch16_siglip_224", num_classes=0, **sizes).eval()
    images = pictures(400)
    shrunk = rx.shrink(tower, images, macs=0.8, keep_index=True)
    small = costs_less(shrunk, tower, 0.8)
    with torch.no_grad():
        same_outputs(small(images[:2]), tower(images[:2]))
    assert shrunk.plan is not None and "tokens" in shrunk.plan.about["axes"]
    assert any("new queries in the old index" in finding.claim for finding in shrunk.evidence.findings)


class Language(nn.Module):
    """A part of a vision language model: the tower, called with the patches of all images in one row, and words."""

    def __init__(self, visual: nn.Module):
        super().__init__()
        self.visual, self.words = visual, nn.Linear(64, 11)

    def forward(self, patches: Tensor) -> Tensor:
        tokens: Any = self.visual(patches.flatten(0, 1), torch.tensor([[1, GRID, GRID]] * len(patches)))
        return self.words(tokens.pooler_output).unflatten(0, (len(patches), -1))


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_the_tower_of_a_vision_language_model(name: str) -> None:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    fields = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 1, "depth": 3, "num_heads": 4}
    fields |= {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 64}
    if name == "qwen2_5_vl":
        kind, more = module.Qwen2_5_VisionTransformerPretrainedModel, {"fullatt_block_indexes": [1], "window_size": 32}
    else:
        kind, more = module.Qwen3VLVisionModel, {"num_position_embeddings": 64, "deepstack_visual_indexes": [1]}
    model = Language(kind(kind.config_class(**fields, **more))).eval()
    rows = numbers(96, GRID**2, 3 * 8**2)
    shrunk = rx.shrink(model, [*rows.split(16)], macs=0.9, inputs=lambda batch: batch)
    with torch.no_grad():
        same_outputs(shrunk.model(rows[:2]), model(rows[:2]))
    assert size_of(shrunk.model) < size_of(model)


def test_depth_is_judged_as_a_map_and_not_as_an_embedding() -> None:
    stages = [f"stage{index}" for index in range(1, 5)]
    backbone = transformers.Dinov2Config(**VIT, mlp_ratio=2, out_features=stages, reshape_hidden_states=False)
    neck = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "head_hidden_size": 4}
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone, **neck, patch_size=8, reassemble_hidden_size=WIDTH
    )
    model, images, lines = transformers.DepthAnythingForDepthEstimation(config).eval(), pictures(), list[str]()
    shrunk = rx.shrink(model, images, macs=0.85, log=lines.append)
    small = costs_less(shrunk, model, 0.85)
    with torch.no_grad():
        depth = small(pixel_values=images[:2]).predicted_depth
        assert depth.shape == model(pixel_values=images[:2]).predicted_depth.shape
    assert shrunk.plan is not None and shrunk.plan.about["outputs"] == "map"
    assert not any("cosine" in finding.claim for finding in shrunk.evidence.findings)


class Volumes(nn.Module):
    """A segmentation of volumes as by UNETR: cubes as patches, features at two depths, a 3-D decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv3d(1, WIDTH, 4, 4)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 64, WIDTH))
        self.vit = of_timm(num_classes=0)
        self.decoder = nn.ConvTranspose3d(2 * WIDTH, CLASSES, 4, 4)

    def forward(self, scans: Tensor) -> Tensor:
        tokens, taps = self.embed(scans).flatten(2).mT + self.positions, []
        for block in self.vit.blocks:
            tokens = block(tokens)
            taps.append(tokens)
        features = torch.cat([taps[0], self.vit.norm(tokens)], -1)
        return self.decoder(features.mT.unflatten(2, (4, 4, 4)))


def test_a_segmentation_of_volumes() -> None:
    model, scans = Volumes().eval(), numbers(96, 1, 16, 16, 16)
    shrunk = rx.shrink(model, [*scans.split(16)], macs=0.85, inputs=lambda batch: batch)
    with torch.no_grad():
        same_outputs(shrunk.model(scans[:2]), model(scans[:2]))
    axes = {"qk", "vo", "mlp"}
    assert shrunk.plan is not None and axes <= {*shrunk.plan.about["axes"]}  # found without a library's names


def test_a_classifier_of_series() -> None:
    series = {"num_input_channels": 3, "context_length": 64, "patch_length": 8, "patch_stride": 8, "d_model": WIDTH}
    layers = {"num_attention_heads": 2, "num_hidden_layers": 3, "ffn_dim": 48, "num_targets": CLASSES}
    model = transformers.PatchTSTForClassification(transformers.PatchTSTConfig(**series, **layers)).eval()
    values = numbers(96, 64, 3)
    shrunk = rx.shrink(model, [*values.split(16)], macs=0.85, inputs=lambda batch: {"past_values": batch})
    with torch.no_grad():
        found, expected = (each(past_values=values[:2]).prediction_logits for each in (shrunk.model, model))
    assert found.shape == expected.shape and found.isfinite().all()


class PatchCore(nn.Module):
    """Features of an early block, read without gradients, as in a detection of anomalies."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = of_timm(num_classes=0)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        (features,) = self.trunk.get_intermediate_layers(images, n=[1])
        return nn.functional.normalize(features, dim=-1)


class Probe(nn.Module):
    """A linear probe, whose trunk runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = of_timm(num_classes=0), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.trunk(images)
        return self.head(features)


@pytest.mark.parametrize("kind", [PatchCore, Probe])
def test_a_trunk_that_runs_without_gradients(kind: type[nn.Module]) -> None:
    model, images = kind().eval(), pictures()
    shrunk = rx.shrink(model, images, macs=0.85)
    with torch.no_grad():
        same_outputs(shrunk.model(images[:2]), model(images[:2]))
    rules = "" if shrunk.prescription is None else str(shrunk.prescription.rules)
    assert size_of(shrunk.model) < size_of(model) or "tokens" in rules
