"""A model takes images of another size, or rectangles, as its own library interpolates the position embeddings."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attnrx.data.model_data import preprocessing_of
from attnrx.support.errors import DataError, InvalidInput, NotSupported
from attnrx.support.shapes import Tensor
from attnrx.vit.models import accepting, answer, attach_tokens_, family_of, reduction_of, working_copy
from attnrx.vit.models.libraries.huggingface_family import reader_of
from attnrx.vit.tokens import ClassAttention, TokenPolicy, ToMe, Ward
from attnrx_lab.tokens import EViT, EvoViT, ZeroTPrune

rx = pytest.importorskip("attnrx")
pretrained = pytest.importorskip("support.pretrained")
VIT = "vit_tiny_patch16_224"
POLICY = TokenPolicy.staged(Ward(), 0.7, (2, 3))
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
# Height and width in patches of 8 pixels; the models are made for 2 x 2.
SIZES = ((3, 3), (5, 3), (2, 4))
OF_TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "class token": (VIT, {}),
    "dynamic": (VIT, {"dynamic_img_size": True}),
    "registers": ("vit_small_patch14_reg4_dinov2", {}),
    "positions of patches alone": ("deit3_small_patch16_224", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "rotary": ("eva02_tiny_patch14_224", {}),
    "attention pooling": ("vit_base_patch16_siglip_224", {"global_pool": "map"}),
    "mean": (VIT, {"class_token": False, "global_pool": "avg"}),
}
OF_TRANSFORMERS = (
    "Dinov2Model", "Dinov2ForImageClassification", "Dinov2WithRegistersModel", "DINOv3ViTModel", "ViTModel",
    "ViTForImageClassification", "DeiTModel", "IJepaModel", "ViTMAEModel", "CLIPVisionModelWithProjection",
    "SiglipVisionModel", "BeitModel",
)  # fmt: skip


def pictures(height: int, width: int, count: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.randn(count, 3, height, width, generator=generator, dtype=torch.float64).to(dtype)


@torch.no_grad()
def same(model: nn.Module, expected: Tensor, images: Tensor) -> None:
    torch.testing.assert_close(answer(model, images), expected, **EXACT)
    torch.testing.assert_close(working_copy(model)(images), expected, **EXACT)


def size_of(model: nn.Module) -> tuple[int, ...]:
    return family_of(model).input_shape(model)[1:]


def saved_and_loaded(model: nn.Module, folder: Path) -> Any:
    rx.save(model, folder)
    return rx.load(folder)


@torch.no_grad()
def test_a_model_of_timm_answers_as_timm_does_at_every_size(tmp_path: Path) -> None:
    for case, (name, changes) in OF_TIMM.items():
        model = pretrained.of_timm(name, **changes)
        for down, right in SIZES:
            height, width = 8 * down, 8 * right
            library, images = copy.deepcopy(model), pictures(height, width)
            if "dynamic_img_size" not in changes:
                library.set_input_size((height, width))
            adopted = rx.load(model, image_size=(height, width))
            expected = library(images)
            same(adopted, expected, images)
            assert size_of(adopted) == (height, width), case
            loaded = saved_and_loaded(adopted, tmp_path / case)
            same(loaded, expected, images)
            assert size_of(loaded) == (height, width)
        # The original was not changed.
        assert tuple(model.patch_embed.img_size) == (16, 16)


@torch.no_grad()
@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_a_model_of_transformers_answers_as_transformers_does_at_every_size(kind: str, tmp_path: Path) -> None:
    model = pretrained.of_hf(kind)
    resizes_itself = kind.startswith(("Dinov2", "DINOv3"))
    for down, right in SIZES:
        height, width = 8 * down, 8 * right
        images = pictures(height, width)
        options: dict[str, Any] = {} if resizes_itself else {"interpolate_pos_encoding": True}
        if kind == "ViTMAEModel":  # without it the patches are shuffled
            options["noise"] = torch.arange(down * right).expand(2, -1).double()
        expected = reader_of(model).answer_of(model(images, **options))
        adopted = rx.load(model, image_size=(height, width))
        same(adopted, expected, images)
        loaded = saved_and_loaded(adopted, tmp_path / kind)
        same(loaded, expected, images)
        # Called as the original is.
        for each in (adopted, loaded):
            assert type(each) is type(model)
            named = each(pixel_values=images, **options)
            torch.testing.assert_close(reader_of(model).answer_of(named), expected, **EXACT)


@torch.no_grad()
def test_a_model_of_torchvision_answers_as_torchvision_does_at_every_size(tmp_path: Path) -> None:
    vision_transformer = pytest.importorskip("torchvision.models.vision_transformer")
    model = pretrained.of_torchvision()
    for side in (24, 40):
        library = pretrained.of_torchvision(image_size=side)
        library.load_state_dict(vision_transformer.interpolate_embeddings(side, 8, model.state_dict()))
        adopted, images = rx.load(model, image_size=side), pictures(side, side)
        expected = library(images)
        same(adopted, expected, images)
        same(saved_and_loaded(adopted, tmp_path / str(side)), expected, images)
    with pytest.raises(NotSupported, match="square images only"):
        rx.load(model, image_size=(24, 16))


def test_costs_and_layout_are_those_of_a_model_made_for_the_size() -> None:
    for down, right in SIZES:
        made = rx.load(pretrained.of_timm(VIT, img_size=(8 * down, 8 * right)))
        resized_model = rx.load(pretrained.of_timm(VIT), image_size=(8 * down, 8 * right))
        family = family_of(made)
        assert family.costs(resized_model) == family.costs(made)
        assert family.token_layout(resized_model) == family.token_layout(made)
        assert family.geometry(resized_model) == family.geometry(made)


@torch.no_grad()
def test_a_smaller_model_of_another_size_is_the_smaller_model_of_that_size(tmp_path: Path) -> None:
    """Compression and the change of size commute, with the shares of a token policy too."""
    original = rx.load(pretrained.of_timm(VIT, depth=4, img_size=32))
    images = pictures(64, 40)
    for text in ("qk=total_rank:0.5 vo=total_rank:0.5 hidden=total_rank:0.5", ""):
        slim = original
        if text:
            data = pictures(32, 32, 8)
            slim = rx.realize(original, rx.prescribe(rx.diagnose(original, data, moments=True), text))
        first = copy.deepcopy(slim)
        attach_tokens_(first, family_of(first), POLICY)
        then = accepting(first, (3, 64, 40))
        second = accepting(slim, (3, 64, 40))
        second = copy.deepcopy(second)
        attach_tokens_(second, family_of(second), POLICY)
        expected = second(images)
        same(second, expected, images)
        same(then, expected, images)
        reduction = reduction_of(then)
        assert reduction is not None
        assert reduction.policy.counts(reduction.shape.layout.patches) == (28, 19)  # 0.7 and 0.49 of 40 patches
        assert family_of(then).costs(then) == family_of(second).costs(second)
        same(rx.load(saved_and_loaded(first, tmp_path / "first"), image_size=(64, 40)), expected, images)
        with pytest.raises(InvalidInput, match=r"takes \[batch, 3, 32, 32\]"):
            working_copy(first)(images)
        with pytest.raises(AssertionError, match="doesn't match model"):  # of timm
            first(images)


@torch.no_grad()
@pytest.mark.parametrize("by", ["compress", "mask"])
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_smaller_model_takes_every_size_where_its_library_interpolates(library: str, by: str, tmp_path: Path) -> None:
    """One model at three sizes: as the copies that were made for each of them, and with the same shares of patches."""
    model = pretrained.of_hf("Dinov2Model", image_size=32, num_hidden_layers=4) if library == "transformers" else None
    model = pretrained.of_timm(VIT, depth=4, img_size=32, dynamic_img_size=True) if model is None else model
    slim = rx.load(model)
    prescription = rx.prescribe(rx.diagnose(slim, pictures(32, 32, 8)), "qk=total_rank:0.5 vo=total_rank:0.5")
    slim = rx.realize(slim, prescription, by=by)
    unpruned = copy.deepcopy(slim)
    for reducer in (Ward(), ToMe(), ClassAttention(), EViT(), EvoViT(), ZeroTPrune()):
        pruned = copy.deepcopy(unpruned)
        attach_tokens_(pruned, family_of(pruned), TokenPolicy.staged(reducer, 0.7, (2, 3)), by)
        loaded = saved_and_loaded(pruned, tmp_path / reducer.__class__.__name__) if by == "compress" else pruned
        for size in ((32, 32), (48, 40), (24, 64), (32, 32)):
            images, at_size = pictures(*size), copy.deepcopy(accepting(unpruned, (3, *size)))
            same(unpruned, answer(at_size, images), images)
            attach_tokens_(at_size, family_of(at_size), TokenPolicy.staged(reducer, 0.7, (2, 3)), by)
            expected = answer(at_size, images)
            same(pruned, expected, images)
            same(loaded, expected, images)
            assert family_of(pruned).patch_features(pruned, images).shape[1] == math.prod(size) // 64
        with pytest.raises(InvalidInput, match="image_size=32"):
            working_copy(pruned)(pictures(20, 24))
        if library == "timm":  # transformers leaves out a border that patches do not tile
            with pytest.raises(AssertionError, match="should be divisible by patch size"):
                pruned(pictures(20, 24))


@pytest.mark.parametrize("library", ["transformers", "timm", "timm, dynamic"])
def test_the_exported_file_has_the_size(library: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    changes = {"dynamic_img_size": True} if "dynamic" in library else {}
    model = pretrained.of_hf("Dinov2Model", image_size=56) if library == "transformers" else None
    model = pretrained.of_timm(VIT, **changes) if model is None else model
    adopted = rx.load(model.float(), image_size=(40, 24))
    exported = rx.export(adopted, tmp_path / "model.onnx")
    images = pictures(40, 24, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(exported(images), answer(adopted, images), rtol=0, atol=1e-5)
    assert tuple(exported.facts["images"]["shape"]) == (3, 40, 24)


@pytest.mark.parametrize(
    ("made_for", "size"),
    [(70, (42, 28)), *(pytest.param(518, size, marks=pytest.mark.slow) for size in ((224, 224), (280, 210)))],
)
def test_shrink_uses_the_size_of_the_images(made_for: int, size: tuple[int, int], tmp_path: Path) -> None:
    """As DINOv2's files are: made for larger images than they are used with."""
    model = pretrained.of_hf("Dinov2Model", image_size=made_for, patch_size=14, num_hidden_layers=3).float()
    data, lines = pictures(*size, 24, torch.float32), list[str]()
    result = rx.shrink(model, data, macs=0.8, log=lines.append)
    assert any(f"made for {made_for} x {made_for}" in line for line in lines)
    assert size_of(result.model) == size
    at_size = rx.load(model, image_size=size)
    costs = family_of(at_size).costs(at_size), family_of(result.model).costs(result.model)
    assert costs[1].macs <= 0.8 * costs[0].macs
    # The model that was given is the reference of the saved one, at its size.
    folder = result.save(tmp_path / "slim", original=rx.load(model))
    evidence = rx.verify(folder, rx.load(model), data, "fidelity,costs")
    assert evidence.about["reference"] == result.evidence.about["reference"]
    images = pictures(*size, dtype=torch.float32)
    with torch.no_grad():
        expected = answer(result.model, images)
        torch.testing.assert_close(rx.load(folder / "model.onnx")(images), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(answer(rx.load(folder), images), expected, rtol=0, atol=1e-6)


def test_pictures_are_resized_in_the_proportion_of_the_processor(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pretrained.of_hf("Dinov2Model", image_size=56).float().save_pretrained(tmp_path)
    processor = transformers.BitImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 24, "width": 24})
    processor.save_pretrained(tmp_path)
    assert size_of(rx.load(tmp_path)) == (24, 24)
    larger = rx.load(tmp_path, image_size=(48, 40))
    geometry = preprocessing_of(larger).geometry
    assert (geometry.size, geometry.resize_to) == ((48, 40), (64, 64))
    config = family_of(larger).processor_config(larger)
    assert (config["size"], config["crop_size"]) == ({"shortest_edge": 64}, {"height": 48, "width": 40})


def test_sizes_that_a_model_cannot_take_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"patches of 8 x 8 .* do not tile images of 20 x 24"):
        rx.load(pretrained.of_timm(VIT), image_size=(20, 24))
    with pytest.raises(NotSupported, match="a bias for every pair of tokens"):
        rx.load(pretrained.of_timm("beit_base_patch16_224"), image_size=24)
    with pytest.raises(NotSupported, match="does not resize its position embeddings"):
        rx.load(pretrained.of_hf("DPTForDepthEstimation"), image_size=24)
    with pytest.raises(NotSupported, match="takes images of 16 x 16 only"):
        rx.load("svda:digits", image_size=32)
    with pytest.raises(DataError, match=r"attnrx\.load\(model, image_size=\(24, 16\)\)"):
        rx.diagnose(rx.load(pretrained.of_timm(VIT)), pictures(24, 16, 4))
