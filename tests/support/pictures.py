"""Tiny datasets in every storage format, made on the spot; a flat colour tells the class and number of a picture."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from attnrx.data import LoadedImages, Normalization, Splits, from_tensors
from attnrx_lab.vision_transformer import ViTConfig

CLASSES = ("cat", "dog", "eel")


# The blue of the splits, so that no image is in two of them.
BLUE = {"train": 200, "validation": 210, "test": 220}


def encoded(
    label: int, number: int = 0, size: tuple[int, int] = (8, 8), kind: str = "png", split: str = "train"
) -> bytes:
    """One image: red tells the class, green the number; stripes of blue give it a texture, and tell the split."""
    pixels = np.zeros((*size, 3), dtype=np.uint8)
    pixels[..., 0] = 40 * label
    pixels[..., 1] = number % 256
    pixels[::2, :, 2] = BLUE.get(split, 200)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()


def grey(shade: int, size: int) -> bytes:
    """One grey image of one shade."""
    file = io.BytesIO()
    Image.fromarray(np.full((size, size), shade, dtype=np.uint8)).save(file, format="png")
    return file.getvalue()


def rows(count: int, split: str = "train", **options: Any) -> list[dict]:
    """Rows that go round the classes, as the columns of a hub image dataset."""
    return [
        {
            "image": {
                "bytes": encoded(i % 3, i, split=split, **options),
                "path": f"{split}/{CLASSES[i % 3]}/{i:04d}.png",
            },
            "label": i % 3,
            "label_name": CLASSES[i % 3],
            "split": split,
        }
        for i in range(count)
    ]


def write_parquet(path: Path, content: list[dict], names: Sequence[str] | None = CLASSES) -> Path:
    """Writes rows as parquet; `names` go into the schema as the names of the classes."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = pa.Table.from_pylist(content)
    if names is not None:
        features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=7)
    return path


def write_folder(root: Path, counts: dict[str, int], **options: Any) -> Path:
    """Writes `counts` images of every class into `root/<split>/<class>/`; the split "" writes no folder for it."""
    for split, count in counts.items():
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                (root / split / name / f"{number:03d}.png").write_bytes(encoded(label, number, split=split, **options))
    return root


def everything(splits: Splits, split: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pixels as 0..255, labels and source rows of a whole split."""
    batches = list(getattr(splits, split).batches(7))
    pixels = torch.cat([splits.normalization.invert(batch.images) for batch in batches]) * 255
    return pixels.round(), torch.cat([b.labels for b in batches]), torch.cat([b.index for b in batches])


def read_all(splits: Splits) -> None:
    """Decodes every image."""
    for split in ("train", "validation", "test"):
        for _ in getattr(splits, split).batches(64):
            pass


def sizes(splits: Splits) -> tuple[int, int, int]:
    return len(splits.train), len(splits.validation), len(splits.test)


def assert_labels_belong(splits: Splits) -> None:
    """Every picture carries the label it was made with: red is 40 times the class."""
    for split in ("train", "validation", "test"):
        pixels, labels, _ = everything(splits, split)
        assert torch.equal(pixels[:, 0, 0, 0].long(), 40 * labels), split


def speckles(
    config: ViTConfig, count: int = 7, normalization: Normalization | None = None, size: int | None = None
) -> LoadedImages:
    """A split of random pixels of the size that a model of ours wants and on its scale, by default."""
    generator = torch.Generator().manual_seed(5)
    side = config.image_size if size is None else size
    shape = (count, config.channels, side, side)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    scale = normalization or Normalization(config.mean, config.std)
    return from_tensors("speckles", pixels, torch.arange(count) % config.classes, scale)


def write_tree(root: Path, folders: str, count: int = 3) -> Path:
    """Writes images into every folder of a text such as `train/cat test/cat`."""
    for number, name in enumerate(folders.split()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            (root / name / f"{number}-{index}.png").write_bytes(encoded(number % 3, index))
    return root
