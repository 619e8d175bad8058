"""Channels of decoders are removed, compensated and fitted; the smaller module is saved, loaded and exported."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization import decoding
from attnrx.change.realization.decoding import fit_decoder, smaller_decoder
from attnrx.data import FixedImages
from attnrx.data.model_data import images_for
from attnrx.decide.planning import Plan, PlanSettings, Target, plan_sharing
from attnrx.decide.planning.sensitivity import Answers
from attnrx.exporting import Baseline, parse_format
from attnrx.nouns.effort import DecoderFit
from attnrx.support.progress import no_log
from attnrx.vit.models import family_of, library_form, working_copy
from attnrx.vit.models.boundary.verbs import inside_verb, returned
from attnrx.workflows.shrink import ShrinkRun
from attnrx.workflows.shrunk import Shrunk

SIZE, WIDTH, CHANNELS = 32, 32, 16
FIRST, LAST = DecoderFit(64, 60), DecoderFit(128, 200)


class Saliency(nn.Module):
    """A map of patch features, which `by` names the method for, by convolutions, transposed ones and batch norms."""

    def __init__(self, by: str = "forward_features"):
        super().__init__()
        sizes: dict[str, Any] = {
            "img_size": SIZE,
            "patch_size": 8,
            "embed_dim": WIDTH,
            "depth": 2,
            "num_heads": 2,
            "num_classes": 0,
        }
        self.backbone, self.by = timm.create_model("vit_tiny_patch16_224", global_pool="", **sizes), by
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, CHANNELS, 4, 2, 1), nn.BatchNorm2d(CHANNELS), nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(CHANNELS, 1, 4, 2, 1),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = getattr(self.backbone, self.by)(images)[:, 1:]
        return self.decoder(tokens.mT.unflatten(2, (SIZE // 8, -1))).sigmoid()


class OfAnySize(nn.Module):
    """A map of a DINOv2 of transformers, whose position embeddings are interpolated to the size of the images."""

    def __init__(self):
        super().__init__()
        from transformers import Dinov2Config, Dinov2Model

        sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.backbone = Dinov2Model(Dinov2Config(**sizes, patch_size=8, image_size=64))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, CHANNELS, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(CHANNELS, 1, 4, 2, 1)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[2:]
        tokens = self.backbone(images).last_hidden_state[:, 1:]
        grid = tokens.transpose(1, 2).reshape(len(images), WIDTH, height // 8, width // 8)
        return nn.functional.interpolate(self.decoder(grid), size=(height, width), mode="bilinear")


@pytest.fixture(autouse=True)
def _half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "KEPT", 0.5)  # every channel of `module` is there twice


def module(by: str = "forward_features", redundant: bool = True) -> nn.Module:
    torch.manual_seed(0)
    made = Saliency(by).eval().float()
    with torch.no_grad():
        for index in (0, 3):  # every channel twice, so that a half can be removed without a change
            first: Any = made.decoder[index]
            dim = 1 if index == 0 else 0
            half = first.weight.narrow(dim, 0, CHANNELS // 2)
            if redundant:
                first.weight.copy_(torch.cat([half, half], dim))
                first.bias.copy_(first.bias[: CHANNELS // 2].repeat(2))
    return made


IMAGES = torch.randn(48, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


def working(made: nn.Module) -> Any:
    """The working copy of a module, with which `shrink` computes."""
    return working_copy(rx.load(made).eval())


def shrunk(model: nn.Module, images: torch.Tensor) -> tuple[ShrinkRun, Shrunk]:
    """The run of `shrink` with a smaller decoder, and what it returns."""
    settings = PlanSettings.preset("quick", batch=8, trials=1)
    with inside_verb():
        run = ShrinkRun.start(working_copy(model), images, None, "quick", settings, decoder=True)
        return run, returned(run.result(Target.parse("macs=0.8x")))


def fixed(model: Any) -> FixedImages:
    images = images_for(model, IMAGES, "images")
    assert isinstance(images, FixedImages)
    return images


def lean(model: Any) -> Any:
    found = smaller_decoder(model, fixed(model), FIRST)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("by", ["forward_features", "forward"])
def test_channels_that_others_replace_are_removed_without_a_change(by: str, tmp_path: Path) -> None:
    model = working(module(by))
    small = lean(model)
    assert [cut.units for cut in small.around.cuts] == [CHANNELS // 2] * 2
    assert small.source.decoder[1].num_features == small.source.decoder[3].in_channels == CHANNELS // 2
    before, after = (family_of(each).costs(each) for each in (model, small))
    assert after.macs < 0.95 * before.macs and after.params < before.params
    with torch.no_grad():
        expected, found = model(IMAGES), small(IMAGES)
    assert (found - expected).square().mean() < 0.01 * expected.var()
    # The reference of speed is the user's own module.
    library: Any = family_of(small).library_model(small)
    assert library.decoder[3].in_channels == CHANNELS
    rx.save(small, tmp_path)
    own: Any = library_form(small)
    loaded: Any = rx.load(tmp_path, factory=lambda: Saliency(by).float()).eval()
    for each in (own, loaded):
        assert type(each) is Saliency and each.decoder[1].num_features == each.decoder[3].in_channels == CHANNELS // 2
        torch.testing.assert_close(each(IMAGES), small(IMAGES))


def test_tokens_are_merged_and_the_decoder_is_fitted_to_the_original() -> None:
    model = working(module())
    small: Any = working_copy(rx.realize(lean(model), rx.prescribe(lean(model), "tokens=ward:0.5@2")).eval())
    with torch.no_grad():
        small.source.decoder[5].weight.mul_(2)
    fitted: Any
    fitted, line = fit_decoder(small, model, fixed(model), LAST)
    with torch.no_grad():
        base, *others = (each(IMAGES) for each in (model, small, fitted))
    errors = [float((other - base).square().mean()) for other in others]
    assert errors[1] < errors[0], line
    inside = dict(small.trunk.named_parameters())
    assert all(torch.equal(inside[name], value) for name, value in fitted.trunk.named_parameters())


def test_a_plan_with_a_smaller_decoder_gives_a_result_that_is_saved(tmp_path: Path) -> None:
    run, result = shrunk(rx.load(module()).eval(), torch.cat([IMAGES, IMAGES.flip(3), IMAGES.flip(2)]))
    assert run.has_smaller_decoder and type(result.model) is Saliency
    assert result.evidence.about["reference"] != result.evidence.about["candidate"]
    folder = result.save(tmp_path / "result")
    loaded = rx.load(folder, factory=lambda: Saliency().float()).eval()
    torch.testing.assert_close(loaded(IMAGES), result.model(IMAGES))


def test_a_decoder_is_smaller_for_images_of_another_size_than_the_model_was_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(decoding, "TOLERATED", 1e9)
    torch.manual_seed(0)
    images = torch.randn(96, 3, 40, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    run, result = shrunk(rx.load(OfAnySize().float()).eval(), images)
    small: Any = result.model
    assert run.has_smaller_decoder and small.decoder[2].in_channels == CHANNELS // 2
    assert small(images[:2]).shape == (2, 1, 40, 24)
    folder = result.save(tmp_path / "result")
    loaded = rx.load(folder, factory=lambda: OfAnySize().float()).eval()
    file: Any = rx.load(folder / "model.onnx")
    with torch.no_grad():
        torch.testing.assert_close(loaded(images[:8]), small(images[:8]))
        torch.testing.assert_close(file(images[:8]), small(images[:8]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("to", [None, "onnx"])
def test_a_speed_that_the_smaller_decoder_reaches_alone_gives_its_model(to: str | None) -> None:
    if to is not None:
        pytest.importorskip("onnxruntime")
    model = working(module())
    settings = PlanSettings.preset("quick", batch=8, trials=1, to=to)
    with inside_verb():
        run = ShrinkRun.start(model, torch.cat([IMAGES, IMAGES.flip(3)]), None, "quick", settings, decoder=True)
        result = returned(run.unchanged(Target.parse("latency=0.9x")))
    small: Any = result.model
    assert run.has_smaller_decoder and small.decoder[3].in_channels == CHANNELS // 2
    files = {finding.details["title"] for finding in result.evidence.findings if finding.check == "files"}
    assert ("this result" in files) == (to is not None)


def test_plans_for_a_copy_are_timed_beside_its_own_files_and_relative_to_the_same_baseline() -> None:
    pytest.importorskip("onnxruntime")
    model = working(module())
    small = lean(model)
    baseline = Baseline.as_file(model, parse_format("onnx"), fixed(model), no_log)
    made = baseline.of_copy(small, fixed(model))
    assert made.model is baseline.model and made.title == baseline.title and made.unchanged and made.empty
    with torch.no_grad():
        torch.testing.assert_close(made.unchanged(IMAGES[:8]), small(IMAGES[:8]), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(made.unchanged(IMAGES[:8]), made.empty(IMAGES[:8]))
    assert baseline.unchanged is not None and made.unchanged.bytes < baseline.unchanged.bytes


def test_divergences_and_costs_of_plans_are_relative_to_the_original() -> None:
    model = working(module())
    small = lean(model)
    with torch.no_grad():  # an error of the decoder itself
        small.source.decoder[5].weight.mul_(1.5)
    settings = PlanSettings.preset("quick", batch=8, trials=1, trial_images=24)
    images, others = (images_for(model, each, "images") for each in (IMAGES[:24], IMAGES[24:]))
    diagnosis = rx.diagnose(small, images, moments=True)
    plan = plan_sharing(small, diagnosis, "macs=0.8x", images, others, {}, settings=settings, reference=model)
    assert isinstance(plan, Plan)
    plain = Answers.of(model, images, 24).measure(small).mean
    chosen = Answers.of(model, images, 24).measure(rx.realize(small, plan.prescription)).mean
    (trial,) = plan.about["trials"]
    assert trial["divergence"] == pytest.approx(chosen, rel=1e-5) and plain > 0.1


def test_a_decoder_that_loses_much_or_costs_little_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = working(module(redundant=False))
    monkeypatch.setattr(decoding, "TOLERATED", 0.0)
    assert smaller_decoder(model, fixed(model), FIRST) is None
    monkeypatch.setattr(decoding, "TOLERATED", 1e9)
    short = DecoderFit(16, 4)
    assert smaller_decoder(model, fixed(model), short) is not None
    monkeypatch.setattr(decoding, "LEAST_SAVED", 0.99)
    assert smaller_decoder(model, fixed(model), short) is None


def test_a_detector_is_fitted_to_its_scores_and_boxes_only() -> None:
    """transformers also returns the states of every decoder layer, [layers, images, ...], which are no outputs."""
    users_models = pytest.importorskip("support.users_models")
    model = working(users_models.rf_detr().eval().float())
    (batch,) = decoding._batches(model, fixed(model).take(4))
    assert batch.targets.shape == (4, sum(model.around.sizes.values()))
    torch.testing.assert_close(decoding._outputs(model, batch), batch.targets)
