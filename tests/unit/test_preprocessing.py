"""A picture becomes the input of a model exactly as the model's own library does it."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from attnrx.data.model_data import dataset_classes, preprocessing_of
from attnrx.support.errors import InvalidInput
from attnrx.support.preprocessing import ImageGeometry
from attnrx.support.shapes import Tensor
from support import odd_pictures
from support.odd_pictures import ODD

timm = pytest.importorskip("timm")
rx = pytest.importorskip("attnrx")
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-6, "check_dtype": False}
TIMM: dict[str, dict[str, Any]] = {
    "crop 0.875, bilinear": {"crop_pct": 0.875, "interpolation": "bilinear"},
    "crop 0.9, bicubic": {"crop_pct": 0.9, "interpolation": "bicubic"},
    "whole, lanczos": {"crop_pct": 1.0, "interpolation": "lanczos"},
    "border": {"crop_pct": 0.95, "crop_mode": "border", "interpolation": "bicubic"},
    "squash": {"crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bilinear"},
    "nearest": {"crop_pct": 0.9, "interpolation": "nearest"},
    "larger": {"crop_pct": 1.0, "interpolation": "bicubic", "size": (96, 96)},
    "rectangle": {"crop_pct": 0.9, "interpolation": "bicubic", "size": (48, 80)},
}


def timm_model(size: tuple[int, int] = (64, 64), channels: int = 3, **settings: Any) -> Any:
    shape = {"img_size": size, "patch_size": 16, "in_chans": channels, "embed_dim": 12, "depth": 1, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, **shape)
    scale = {"mean": (0.485, 0.456, 0.406)[:channels], "std": (0.229, 0.224, 0.225)[:channels]}
    model.pretrained_cfg.update(**scale, **settings)
    return model.float()


def opened(content: bytes, mode: str = "RGB") -> Image.Image:
    """What a user of timm or torchvision opens and converts, upright."""
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    picture.info.pop("transparency", None)  # Pillow warns of it and drops it
    return picture.convert(mode)


def of_timm(model: Any) -> Callable[[Image.Image], Tensor]:
    input_size = (model.patch_embed.proj.in_channels, *model.patch_embed.img_size)
    config = timm.data.resolve_model_data_config(model, {"input_size": input_size})
    return timm.data.create_transform(**config)


def quick(cases: dict[str, Any], *names: str) -> list[Any]:
    """All cases as parameters, those without one of the names for the slow suite."""
    return [pytest.param(case, marks=() if case in names else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("name", quick(TIMM, "crop 0.9, bicubic", "border", "rectangle"))
def test_pictures_become_what_the_transform_of_timm_makes(name: str) -> None:
    model = timm_model(**TIMM[name])
    transform, preprocessing = of_timm(model), preprocessing_of(rx.load(model))
    for kind, content in ODD.items():
        expected = transform(opened(content))
        for picture in (content, Image.open(io.BytesIO(content))):
            torch.testing.assert_close(preprocessing(picture), expected, **EXACT, msg=f"{name}: {kind}")


def test_a_model_of_grey_pictures_gets_grey_ones() -> None:
    model = timm_model(channels=1)
    transform, preprocessing = of_timm(model), preprocessing_of(rx.load(model))
    for kind, content in ODD.items():
        torch.testing.assert_close(preprocessing(content), transform(opened(content, "L")), **EXACT, msg=kind)


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_sixteen_bits_are_scaled_and_not_cut_off(kind: str) -> None:
    model, (content, upper) = timm_model(), odd_pictures.deep(kind)
    expected, preprocessing = of_timm(model)(upper.convert("RGB")), preprocessing_of(rx.load(model))
    torch.testing.assert_close(preprocessing(content), expected, **EXACT)
    torch.testing.assert_close(preprocessing(Image.open(io.BytesIO(content))), expected, **EXACT)
    # Pillow's mode of 32 bits, of which some formats use 16.
    as_int = np.asarray(Image.open(io.BytesIO(content))).astype(np.int32)
    torch.testing.assert_close(preprocessing(Image.fromarray(as_int)), expected, **EXACT)
    torch.testing.assert_close(preprocessing(Image.fromarray(as_int << 15)), expected, **EXACT)


PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTImageProcessor", {"size": {"height": 32, "width": 32}}),
    "deit": ("DeiTImageProcessor", {"size": {"height": 37, "width": 37}, "crop_size": {"height": 32, "width": 32}}),
    "bit": ("BitImageProcessor", {"size": {"shortest_edge": 37}, "crop_size": {"height": 32, "width": 32}}),
    "clip, on white": ("CLIPImageProcessor", {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}),
    "siglip": ("SiglipImageProcessor", {"size": {"height": 32, "width": 32}}),
    "crop alone": ("BitImageProcessor", {"do_resize": False, "crop_size": {"height": 32, "width": 32}}),
    "other scale": (
        "ViTImageProcessor",
        {
            "size": {"height": 32, "width": 32},
            "rescale_factor": 1 / 127.5,
            "image_mean": [1.0] * 3,
            "image_std": [1.0] * 3,
        },
    ),
    "not normalized": ("ViTImageProcessor", {"size": {"height": 32, "width": 32}, "do_normalize": False}),
}


@pytest.mark.parametrize("name", quick(PROCESSORS, "vit", "clip, on white", "other scale"))
def test_pictures_become_what_the_processor_of_a_folder_makes(name: str, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    kind, settings = PROCESSORS[name]
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=24, image_size=32, num_labels=3
    )
    transformers.ViTForImageClassification(config).float().save_pretrained(tmp_path)
    processor = getattr(transformers, f"{kind}Pil")(**settings)
    processor.save_pretrained(tmp_path)
    loaded = rx.load(f"hf:{tmp_path}")
    rx.save(loaded, tmp_path / "saved")
    converts = getattr(processor, "do_convert_rgb", None)
    # An instance knows the folder that it comes from.
    instance = rx.load(transformers.ViTForImageClassification.from_pretrained(tmp_path))
    for preprocessing in map(preprocessing_of, (loaded, rx.load(tmp_path / "saved"), instance)):
        for picture, content in ODD.items():
            upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
            given = upright if converts else opened(content)
            expected = processor(images=given, return_tensors="pt")["pixel_values"][0]
            torch.testing.assert_close(preprocessing(content), expected.float(), **EXACT, msg=f"{name}: {picture}")


def test_pictures_become_what_the_transform_of_torchvision_makes() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.VisionTransformer(32, 16, 1, 3, 12, 24, num_classes=3)
    preset = torchvision.transforms._presets.ImageClassification(crop_size=32, resize_size=36)
    preprocessing = preprocessing_of(rx.load(model))
    for kind, content in ODD.items():
        torch.testing.assert_close(preprocessing(content), preset(opened(content)), **EXACT, msg=kind)


def test_a_saved_model_keeps_its_preprocessing(tmp_path: Any) -> None:
    loaded = rx.load(timm_model(size=(48, 80), crop_pct=0.8, crop_mode="border", interpolation="bilinear"))
    rx.save(loaded, tmp_path)
    again = rx.load(tmp_path)
    assert preprocessing_of(again) == preprocessing_of(loaded)
    settings = timm.data.resolve_model_data_config(again)
    assert (settings["crop_pct"], settings["crop_mode"], settings["interpolation"]) == (0.8, "border", "bilinear")


def test_a_model_of_attnrx_keeps_the_geometry_of_its_training_data(tmp_path: Any) -> None:
    splits = rx.load_data("digits", image_size=12)
    shape = {"channels": 1, "image_size": 12, "patch_size": 4, "geometry": splits.geometry}
    model = rx.models.build_model("svda:digits", mean=(0.5,), std=(0.5,), **shape)
    rx.save(model, tmp_path)
    again = rx.load(tmp_path)
    assert preprocessing_of(again).geometry == splits.geometry
    assert rx.adapt_preprocessing(rx.load_data("digits"), again).geometry == splits.geometry
    padded = ImageGeometry.of_size(32, 1, "pad")
    model = rx.models.build_model("svda:fashion_mnist", mean=(0.5,), std=(0.5,), geometry=padded)
    grey = np.full((28, 28), 255, np.uint8)
    assert preprocessing_of(model)(Image.fromarray(grey)).sum() == 28 * 28 - (32 * 32 - 28 * 28)
    with pytest.raises(InvalidInput, match="geometry for images of"):
        rx.models.build_model("svda:digits", geometry=padded)


def test_the_class_names_of_a_dataset_are_found_in_its_parts_and_loaders() -> None:
    class Listed(torch.utils.data.TensorDataset):
        classes = ("ant", "bee")

    listed = Listed(torch.zeros(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))
    part = torch.utils.data.Subset(torch.utils.data.Subset(listed, range(3)), range(2))
    for data in (listed, part, torch.utils.data.DataLoader(part, 2)):
        assert dataset_classes(data) == ("ant", "bee")
    nameless = torch.utils.data.TensorDataset(torch.zeros(4, 3, 8, 8))
    assert dataset_classes(None, nameless, torch.zeros(3), [1, 2], listed) == ("ant", "bee")
    assert dataset_classes(nameless) == ()
