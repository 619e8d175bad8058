"""Images and labels of every kind of container, with one thing odd about each, given to the verbs that read them."""

import io
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import attnrx as rx
from support.odd_pictures import ODD, deep, scene
from support.sweep.case import Case, finite
from support.sweep.draws import generator, shuffled
from support.sweep.workshop import CLASSES, SIZE, WORKSHOP

COUNT = 20

IMAGES: dict[str, Callable[[Tensor], Any]] = {
    "as they should be": lambda images: images,
    "of another size": lambda images: images[..., :-4, :-4],
    "of one pixel": lambda images: images[..., :1, :1],
    "wide": lambda images: torch.cat([images, images], -1),
    "of one channel": lambda images: images[:, :1],
    "of four channels": lambda images: torch.cat([images, images[:, :1]], 1),
    "of no channel": lambda images: images[:, :0],
    "with channels last": lambda images: images.permute(0, 2, 3, 1),
    "without channels": lambda images: images[:, 0],
    "of five axes": lambda images: images[:, None],
    "flat": lambda images: images.flatten(1),
    "one image": lambda images: images[:1],
    "two images": lambda images: images[:2],
    "no image": lambda images: images[:0],
    "all equal": lambda images: images[:1].expand(COUNT, -1, -1, -1),
    "black": torch.zeros_like,
    "huge": lambda images: images * 1e30,
    "overflowing": lambda images: images * 3e38,
    "tiny": lambda images: images * 1e-30,
    "denormal": lambda images: images * 1e-44,
    "with a NaN": lambda images: _with(images, float("nan")),
    "with an infinity": lambda images: _with(images, float("inf")),
    "all NaN": lambda images: images * float("nan"),
    "of 0 to 255": lambda images: (images.sigmoid() * 255).round(),
    "of bytes": lambda images: (images.sigmoid() * 255).to(torch.uint8),
    "of 16 bits": lambda images: (images.sigmoid() * 65535).to(torch.int32),
    "of int64": lambda images: images.to(torch.int64),
    "of bool": lambda images: images > 0,
    "of float64": lambda images: images.double(),
    "of float16": lambda images: images.half(),
    "of bfloat16": lambda images: images.bfloat16(),
    "of float8": lambda images: images.to(torch.float8_e4m3fn),
    "complex": lambda images: images.to(torch.complex64),
    "sparse": lambda images: images.to_sparse(),
    "on meta": lambda images: images.to("meta"),
    "of a graph": lambda images: images.clone().requires_grad_() * 1,
    "transposed": lambda images: images.mT,
    "channels last in memory": lambda images: images.to(memory_format=torch.channels_last),
    "read only": lambda images: torch.from_numpy(np.broadcast_to(images[:1].numpy(), images.shape)),
    "in inference mode": lambda images: _inference(images),
}
LABELS: dict[str, Callable[[Tensor], Any]] = {
    "as they should be": lambda labels: labels,
    "none": lambda labels: None,
    "of one class": torch.zeros_like,
    "beyond the classes": lambda labels: labels + 5,
    "far beyond": lambda labels: labels + 2**40,
    "negative": lambda labels: -labels - 1,
    "unlabelled": lambda labels: torch.full_like(labels, -1),
    "partly unlabelled": lambda labels: torch.where(labels == 0, -1, labels),
    "floats": lambda labels: labels.float(),
    "half floats": lambda labels: labels + 0.5,
    "NaN": lambda labels: labels * float("nan"),
    "bool": lambda labels: labels > 0,
    "uint8": lambda labels: labels.to(torch.uint8),
    "int16": lambda labels: labels.to(torch.int16),
    "one-hot": lambda labels: torch.nn.functional.one_hot(labels, CLASSES),
    "soft": lambda labels: torch.nn.functional.one_hot(labels, CLASSES) * 0.5,
    "a column": lambda labels: labels[:, None],
    "too few": lambda labels: labels[:-1],
    "too many": lambda labels: torch.cat([labels, labels]),
    "no label": lambda labels: labels[:0],
    "complex": lambda labels: labels.to(torch.complex64),
    "on meta": lambda labels: labels.to("meta"),
    "texts": lambda labels: ["cat"] * len(labels),
    "objects": lambda labels: [object()] * len(labels),
    "a list": lambda labels: labels.tolist(),
    "an array": lambda labels: labels.numpy(),
}


class Rows(Dataset[Any]):
    """A dataset of the items that a function makes."""

    def __init__(self, item: Callable[[int], Any], count: Any = COUNT):
        self.item, self.count = item, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.count, int) and index >= self.count:
            raise IndexError(index)
        return self.item(index)


class Stream(IterableDataset[Any]):
    """Batches without a length."""

    def __init__(self, batches: list[Any]):
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _with(images: Tensor, value: float) -> Tensor:
    images = images.clone()
    images[min(3, len(images) - 1), 0, 0, 0] = value
    return images


def _inference(images: Tensor) -> Tensor:
    with torch.inference_mode():
        return images.clone()


def _at(values: Any, index: int) -> Any:
    return values[index % len(values)] if values is not None and len(values) else values


def _pair(images: Any, labels: Any) -> Any:
    return images if labels is None else (images, labels)


def _halves(images: Any, labels: Any) -> list[Any]:
    middle = max(len(images) // 2, 1)
    parts = [slice(0, middle), slice(middle, None)] if len(images) > 1 else [slice(0, None)]
    return [_pair(images[part], None if labels is None else labels[part]) for part in parts]


def _rows(images: Any, labels: Any) -> Rows:
    return Rows(lambda index: _pair(_at(images, index), _at(labels, index)), len(images))


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tensors": _pair,
    "batches": _halves,
    "a dataset": _rows,
    "a loader": lambda images, labels: DataLoader(_rows(images, labels), batch_size=6),
    "a shuffling loader": lambda images, labels: DataLoader(_rows(images, labels), batch_size=6, shuffle=True),
    "a loader that drops": lambda images, labels: DataLoader(_rows(images, labels), batch_size=6, drop_last=True),
    "a stream": lambda images, labels: Stream(_halves(images, labels)),
    "dictionaries": lambda images, labels: [
        {"pixel_values": images} if labels is None else {"pixel_values": images, "labels": labels}
    ],
    "a tensor dataset": lambda images, labels: TensorDataset(*([images] if labels is None else [images, labels])),
    "parts": lambda images, labels: {"train": _pair(images, labels), "test": (WORKSHOP.others, WORKSHOP.labels)},
    "arrays": lambda images, labels: _pair(images.numpy(), None if labels is None else np.asarray(labels)),
    "an iterator": lambda images, labels: iter(_halves(images, labels)),
}


def _raising(index: int) -> Any:
    raise RuntimeError("of the user")


def _exits(index: int) -> Any:
    raise SystemExit(3)


def _changing(draw: random.Random = random.Random(0)) -> Any:  # noqa: B008  (one generator for all items)
    return lambda index: (torch.full((3, SIZE, SIZE), draw.random()), index % CLASSES)


def picture(index: int, mode: str = "RGB", size: tuple[int, int] = (20, 24)) -> Image.Image:
    return Image.fromarray(scene(*size, 3)).convert(mode).rotate(index)


WHOLE: dict[str, Callable[[], Any]] = {
    "an item that raises": lambda: Rows(_raising),
    "an item that exits": lambda: Rows(_exits),
    "items that change": lambda: Rows(_changing()),
    "a length of floats": lambda: Rows(_raising, 2.5),
    "a length of 10^12": lambda: Rows(_raising, 10**12),
    "a length of 2^70": lambda: Rows(_raising, 2**70),
    "pictures": lambda: Rows(picture),
    "grey pictures": lambda: Rows(lambda index: (picture(index, "L"), index % CLASSES)),
    "pictures with alpha": lambda: Rows(lambda index: (picture(index, "RGBA"), index % CLASSES)),
    "pictures of one pixel": lambda: Rows(lambda index: (picture(index, size=(1, 1)), index % CLASSES)),
    "pictures of all sizes": lambda: Rows(lambda index: (picture(index, size=(5 + index, 40)), index % CLASSES)),
    "pictures and texts": lambda: Rows(lambda index: (picture(index), "cat")),
    "images of two types": lambda: Rows(
        lambda i: torch.zeros(3, SIZE, SIZE, dtype=(torch.float32, torch.float64)[i % 2])
    ),
    "pairs, then images": lambda: Rows(lambda i: (torch.zeros(3, SIZE, SIZE), 0) if i else torch.zeros(3, SIZE, SIZE)),
    "triples": lambda: Rows(lambda i: (torch.zeros(3, SIZE, SIZE) + i, i % 3, "more")),
    "nested triples": lambda: Rows(lambda i: {"image": {"image": torch.zeros(3, SIZE, SIZE)}, "label": 0}),
    "an endless stream": lambda: _Endless(),
    "a stream of nothing": lambda: Stream([]),
    "a stream of None": lambda: Stream([None, None]),
    "a loader of nothing": lambda: DataLoader(Rows(_raising, 0), batch_size=2),
    "a loader with workers that raise": lambda: DataLoader(Rows(_raising), batch_size=2),
    "a collate function that returns None": lambda: DataLoader(Rows(picture), batch_size=2, collate_fn=lambda _: None),
    "a collate function that exits": lambda: DataLoader(Rows(picture), batch_size=2, collate_fn=lambda _: _exits(0)),
    "a list of paths": lambda: [WORKSHOP.data_folder / "train/cat/000.png"],
    "a text": lambda: "images",
    "a path": lambda: WORKSHOP.data_folder,
    "a list in itself": lambda: _in_itself(),
    "a dictionary of nothing": dict,
    "parts of other names": lambda: {"a": WORKSHOP.images, "b": WORKSHOP.others},
    "one part": lambda: {"train": (WORKSHOP.images, WORKSHOP.labels)},
    "parts that are equal": lambda: dict.fromkeys(("train", "test"), (WORKSHOP.images, WORKSHOP.labels)),
    "a subset": lambda: torch.utils.data.Subset(Rows(picture), [0, 99]),
    "a subset of nothing": lambda: torch.utils.data.Subset(Rows(picture), []),
    "a concatenation": lambda: torch.utils.data.ConcatDataset([_rows(WORKSHOP.images, WORKSHOP.labels)] * 2),
    "a masked array": lambda: np.ma.masked_array(WORKSHOP.images.numpy(), mask=True),
    "an array of texts": lambda: np.array(["a"] * 4),
    "a model": lambda: WORKSHOP.model,
    "a class": lambda: Rows,
    "a function": lambda: _raising,
    "a number": lambda: 3,
}


class _Endless(IterableDataset[Any]):
    """Random batches without an end."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(64, 3, SIZE, SIZE)


def _in_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


# Folders of images: one file of a folder of images becomes another.
PICTURES: dict[str, Callable[[], bytes]] = {
    **{name: lambda content=content: content for name, content in ODD.items()},
    "16 bits": lambda: deep()[0],
    "16 bits tiff": lambda: deep("tiff")[0],
    "floats tiff": lambda: _saved(Image.fromarray(scene(20, 20, 1)[..., 0].astype(np.float32)), "tiff"),
    "floats tiff with NaN": lambda: _saved(Image.fromarray(np.full((20, 20), np.nan, np.float32)), "tiff"),
    "32 bits": lambda: _saved(Image.fromarray(scene(20, 20, 1)[..., 0].astype(np.int32) * 9999), "tiff"),
    "several frames": lambda: _frames("gif"),
    "several pages": lambda: _frames("tiff"),
    "a bomb": lambda: _saved(Image.new("1", (30_000, 30_000)), "png"),
    "very wide": lambda: _saved(Image.new("RGB", (60_000, 1)), "png"),
    "half a file": lambda: ODD["landscape jpeg"][:2000],
    "empty": lambda: b"",
    "a text": lambda: b"no picture",
    "a page": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
}


def _saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def _frames(kind: str) -> bytes:
    frames = [Image.fromarray(scene(20 + 2 * 0, 20)) for _ in range(3)]
    return _saved(frames[0], kind, save_all=True, append_images=frames[1:])


FOLDERS: dict[str, Callable[[Path], object]] = {
    "no class": lambda root: [shutil.rmtree(root / "train" / name) for name in ("cat", "dog", "eel")],
    "one class": lambda root: [shutil.rmtree(path) for path in root.glob("*/[ce]*")],
    "an empty class": lambda root: [path.unlink() for path in (root / "train/dog").iterdir()],
    "a class in the test alone": lambda root: shutil.copytree(root / "test/cat", root / "test/fox"),
    "no test": lambda root: shutil.rmtree(root / "test"),
    "no training": lambda root: shutil.rmtree(root / "train"),
    "the test in the training": lambda root: shutil.copytree(root / "test/cat", root / "train/cat", dirs_exist_ok=True),
    "odd names of classes": lambda root: (root / "train/cat").rename(root / "train/müller <b>\U0001f642"),
    "names that are not UTF-8": lambda root: (root / "train/cat/000.png").rename(root / "train/cat/a\udcff.png"),
    "a file among the classes": lambda root: (root / "train/notes.txt").write_text("a"),
    "hidden files": lambda root: (root / "train/cat/.DS_Store").write_text("a"),
    "a link to itself": lambda root: (root / "train/cat/loop").symlink_to(root / "train"),
    "a pipe": lambda root: __import__("os").mkfifo(root / "train/cat/pipe.png"),
    "a folder named as an image": lambda root: (root / "train/cat/folder.png").mkdir(),
    "capital endings": lambda root: (root / "train/cat/000.png").rename(root / "train/cat/000.PNG"),
    "spaces in names": lambda root: (root / "train/cat").rename(root / "train/ cat "),
    "nothing": lambda root: [shutil.rmtree(root / name) for name in ("train", "validation", "test")],
}


VERBS: dict[str, Callable[[Any], Any]] = {
    "diagnose": lambda data: rx.diagnose(WORKSHOP.model, data),
    "verify": lambda data: rx.verify(WORKSHOP.slim, WORKSHOP.model, data, "fidelity,costs,accuracy"),
    "repair": lambda data: rx.repair(WORKSHOP.slim, WORKSHOP.model, data, rx.realization.realizing.Repair(steps=1)),
    "shrink": lambda data: rx.shrink(WORKSHOP.model, data, macs=0.6).evidence,
    "image_set": lambda data: [batch.images for batch in rx.data.image_set(data).batches(8)],
}  # fmt: skip


@cache
def slots() -> tuple[tuple[str, str, str, str], ...]:
    """Every verb, container, kind of images and kind of labels of which one is odd; then data and files of one kind."""
    odd = [(images, "as they should be") for images in IMAGES] + [("as they should be", labels) for labels in LABELS]
    cells = [(verb, container, *each) for verb in VERBS for container in CONTAINERS for each in odd]
    whole = [(verb, "whole", name, "") for verb in VERBS for name in WHOLE]
    pictures = [("load_data", "picture", name, "") for name in PICTURES]
    folders = [("load_data", "folder", name, "") for name in FOLDERS]
    # Of each kind about as many as it has members of its own.
    parts = [shuffled(cells, "cells")[:120], shuffled(whole, "whole")[:80], pictures, folders]
    return tuple(shuffled([each for part in parts for each in part], "data"))


def _folder(change: Callable[[Path], object], folder: Path) -> Callable[[], Any]:
    """A folder of images with a change, and what reads it."""
    root = folder / "images"
    shutil.copytree(WORKSHOP.data_folder, root)
    change(root)
    return lambda: _images_of(root)


def _images_of(root: Path) -> Any:
    splits = rx.load_data(root, image_size=SIZE)
    return [batch.images for part in (splits.train, splits.validation, splits.test) for batch in part.batches(8)]


def draw(number: int, folder: Path) -> Case:
    verb, container, first, second = slots()[number]
    if container == "picture":
        content = PICTURES[first]()
        return Case(
            f"a file of images: {first}",
            _folder(lambda root: (root / "train/dog/001.png").write_bytes(content), folder),
            words=("001.png",),
        )
    if container == "folder":
        return Case(f"a folder of images: {first}", _folder(FOLDERS[first], folder))
    if container == "whole":
        return Case(f"{verb} of {first}", lambda: VERBS[verb](WHOLE[first]()))
    generator("data", number)
    images = IMAGES[first](torch.randn(COUNT, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(number)))
    labels = LABELS[second](torch.arange(COUNT) % CLASSES)
    name = f"{verb} of {container}: images {first}, labels {second}"
    try:
        data = CONTAINERS[container](images, labels)
    except Exception:  # torch or NumPy cannot make them
        data = _pair(images, labels)
    return Case(name, lambda: VERBS[verb](data))


__all__ = ["draw", "finite", "slots"]
