"""Files and named datasets are fitted to a model as its own library does it."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import attnrx as rx
from attnrx.data import load_data
from attnrx.data.model_data import images_for, preprocessing_of
from support import odd_pictures
from support.pictures import CLASSES, write_parquet

timm = pytest.importorskip("timm")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def timm_model(size: tuple[int, int]) -> Any:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=size, patch_size=8, depth=1, embed_dim=12, num_heads=3, num_classes=3
    )
    model.pretrained_cfg.update(crop_pct=0.8)
    return model.float()


def pictures(shape: tuple[int, int], mode: str) -> list[Image.Image]:
    """Six pictures of every class; those of one class follow each other."""
    return [Image.fromarray(np.roll(odd_pictures.scene(*shape), 5 * n, axis=1)).convert(mode) for n in range(18)]


def stored(folder: Path, kind: str, all_pictures: list[Image.Image]) -> Path:
    contents = [odd_pictures.saved(picture, "png") for picture in all_pictures]
    if kind == "parquet":
        table = [
            {"image": {"bytes": content, "path": None}, "label": n // 6, "split": "train" if n % 2 else "test"}
            for n, content in enumerate(contents)
        ]
        return write_parquet(folder / "odd.parquet", table)
    for n, content in enumerate(contents):
        path = folder / "odd" / ("train" if n % 2 else "test") / CLASSES[n // 6] / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder / "odd"


@pytest.mark.parametrize("kind", ["parquet", "folder"])
@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
@pytest.mark.parametrize("shape", [(40, 66), (140, 121)], ids=["small", "photographs"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_files_become_what_the_transform_of_the_model_makes_of_them(
    tmp_path: Path, kind: str, size: tuple[int, int], shape: tuple[int, int], mode: str
) -> None:
    model, all_pictures = timm_model(size), pictures(shape, mode)
    config = timm.data.resolve_model_data_config(model, {"input_size": (3, *size)})
    transform = timm.data.create_transform(**config)
    expected = {n: transform(picture.convert("RGB")) for n, picture in enumerate(all_pictures) if n % 2 == 0}
    adopted, path = rx.load(model), stored(tmp_path, kind, all_pictures)
    ways: dict[str, dict[str, Any]] = {
        "with the geometry": {"geometry": preprocessing_of(adopted).geometry},
        "with a size": {"image_size": size},
        "without a size": {},
    }
    for way, options in ways.items():
        adapted = rx.adapt_preprocessing(load_data(path, **options), adopted)
        assert (adapted.channels, adapted.image_size) == (3, size[0] if size[0] == size[1] else size), way
        batch = next(iter(adapted.test.batches(64)))
        assert len(batch) == len(expected)
        for image, label in zip(batch.images, batch.labels.tolist(), strict=True):
            differences = {n: float((image - other).abs().max()) for n, other in expected.items()}
            nearest = min(differences, key=differences.__getitem__)
            assert differences[nearest] < 1e-6 and nearest // 6 == label, way


def test_a_dataset_keeps_its_own_geometry_for_models_of_attnrx_and_gets_their_size_and_channels() -> None:
    splits = load_data("digits")
    assert rx.adapt_preprocessing(splits, rx.models.build_model("svda:digits")).geometry == splits.geometry
    model = rx.models.build_model("svda:digits", channels=3, image_size=8, mean=(0.5,) * 3, std=(0.5,) * 3)
    adapted = rx.adapt_preprocessing(splits, model)
    batch, before = next(iter(adapted.train.batches(9))), next(iter(splits.train.batches(9)))
    assert batch.images.shape == (9, 3, 8, 8)
    assert torch.equal(batch.images[:, 0], batch.images[:, 2])
    assert torch.equal(batch.labels, before.labels) and torch.equal(batch.index, before.index)


def test_pil_items_are_turned_upright_and_keep_16_bits() -> None:
    model = rx.load(timm_model((32, 32)))
    content, upper = odd_pictures.deep()
    turned = Image.open(io.BytesIO(odd_pictures.oriented("png", 6)))
    upright = Image.fromarray(np.rot90(odd_pictures.scene(60, 91), -1).copy())
    for given, same in ((Image.open(io.BytesIO(content)), upper), (turned, upright)):
        found = [images_for(model, Items([picture])) for picture in (given, same)]
        first, second = (next(iter(images.batches(1))).images for images in found)
        assert torch.equal(first, second)


class Items:
    def __init__(self, items: list[Any]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.items[row], 0
