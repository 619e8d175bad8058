"""Reads datasets in the form that their authors publish: pixel arrays, lists of files, or images with a label file."""

import csv
import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnrx.data.formats import Listing, Opened, class_folders, open_folder, open_listings
from attnrx.data.images import StoredImages
from attnrx.support.errors import CheckpointError, DataError
from attnrx.support.foreign_files import open_arrays, open_structures
from attnrx.support.records import require_regular

CIFAR_SIDE = 32
# The file with the class names, by the number of classes.
CIFAR_NAMES, CIFAR_NAMES_TEXT = {10: "batches.meta", 100: "meta"}, {10: "batches.meta.txt", 100: "fine_label_names.txt"}
IDX_IMAGES, IDX_LABELS = 0x803, 0x801  # the first four bytes: unsigned bytes, and the number of dimensions
IMAGENET_VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
# In ImageNet-C, a folder CORRUPTION/SEVERITY contains images for testing.
SEVERITIES = ("1", "2", "3", "4", "5")
CORRUPTIONS = frozenset(
    (
        *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "defocus_blur", "glass_blur"),
        *("motion_blur", "zoom_blur", "gaussian_blur", "snow", "frost", "fog", "spatter", "brightness", "contrast"),
        *("saturate", "elastic_transform", "pixelate", "jpeg_compression"),
    )
)
# Files that list the images of every split. The images are in the folder "images". The first layout is Food-101's, and
# the second one is the first division of DTD.
LISTED_SPLITS = (
    {"train": "meta/train.txt", "test": "meta/test.txt"},
    {"train": "labels/train1.txt", "validation": "labels/val1.txt", "test": "labels/test1.txt"},
)

Arrays = tuple[np.ndarray, np.ndarray]  # pixels [images, height, width] or [images, 3, height, width], and labels

Reader = tuple[str, Callable[[], Opened]]  # the name of the dataset, and the function that opens it


def open_published(root: Path) -> Opened:
    """Opens a folder whose files have the layout of a known dataset. Opens all other folders with `open_folder`.

    The known layouts are CIFAR-10 and CIFAR-100 (binary and Python), MNIST and FashionMNIST (idx), Food-101, DTD, Tiny
    ImageNet, ImageNet and the folders CORRUPTION/SEVERITY of ImageNet-C. For ImageNet, all validation images are in one
    folder, and their labels are in the devkit or in Kaggle's solution file beside it.

    Raises:
        DataError: A file is missing or damaged, the folder holds several datasets, or it has no images.
    """
    try:
        found = [read for folder in (root, *_folders(root)) for read in (_cifar(folder), _idx(folder)) if read]
        if len(found) > 1:
            names = ", ".join(name for name, _ in found)
            raise DataError(f"{root} holds several datasets ({names}); give the folder of one of them.")
        if found:
            return found[0][1]()
        notes: list[str] = []
        for layout in (_listed_splits, _tiny_imagenet, _imagenet, _imagenet_c):
            if listings := layout(root, notes):
                return open_listings(root, listings, notes)
    except OSError as error:
        raise DataError(f"{root} cannot be read: {error.strerror or error} ({error.filename}).") from error
    return open_folder(root)


def _folders(root: Path) -> list[Path]:
    """Returns the subfolders of a folder, and the folders "raw" in them, where torchvision stores files."""
    inner = [entry for entry in sorted(root.iterdir()) if entry.is_dir() and not entry.name.startswith(".")][:100]
    return [each for entry in inner for each in (entry, entry / "raw") if each.is_dir()]


# Arrays of pixels -----------------------------------------------------------------------------------------------------


def _cifar(folder: Path) -> Reader | None:
    for ending, read, meta in ((".bin", _binary_batch, CIFAR_NAMES_TEXT), ("", _python_batch, CIFAR_NAMES)):
        ten = {"train": [f"data_batch_{n}{ending}" for n in range(1, 6)], "test": [f"test_batch{ending}"]}
        hundred = {"train": [f"train{ending}"], "test": [f"test{ending}"]}
        for parts, (classes, names) in zip((ten, hundred), meta.items(), strict=True):
            # The file with the names must exist, too, because `train` and `test` are common names.
            if all((folder / file).is_file() for file in (parts["train"][0], names)):
                files = {split: [folder / file for file in each] for split, each in parts.items()}
                return f"{folder.name}, CIFAR-{classes}", partial(_cifar_batches, files, read, classes, folder / names)
    return None


def _cifar_batches(
    files: Mapping[str, Sequence[Path]], read: Callable[[Path, int], Arrays], classes: int, names: Path
) -> Opened:
    arrays = {split: [read(_required(file), classes) for file in each] for split, each in files.items()}
    return Opened({split: _stored(each, files[split]) for split, each in arrays.items()}, _cifar_names(names, classes))


def _binary_batch(file: Path, classes: int) -> Arrays:
    """Reads rows of label bytes (for CIFAR-100 the coarse and the fine label) and 3 x 32 x 32 pixel bytes."""
    labels = 1 if classes == 10 else 2
    content = np.frombuffer(file.read_bytes(), dtype=np.uint8)
    row = labels + 3 * CIFAR_SIDE**2
    if not len(content) or len(content) % row:
        raise _damaged(file, f"{len(content):,} bytes are no multiple of {row:,}, the size of an image")
    rows = content.reshape(-1, row)
    return rows[:, labels:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE), rows[:, labels - 1]


def _python_batch(file: Path, classes: int) -> Arrays:
    content = _pickled(file)
    pixels, labels = (content.get(name) for name in (b"data", b"labels" if classes == 10 else b"fine_labels"))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3 * CIFAR_SIDE**2,):
        raise _damaged(file, "it has no rows of 3,072 bytes in b'data'")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        raise _damaged(file, "it has no label for every image")
    return pixels.reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE), np.asarray(labels, dtype=np.int64)


def _pickled(file: Path) -> Mapping[Any, Any]:
    try:
        content = open_arrays(file)
    except CheckpointError as error:
        raise _damaged(file, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(file, "it holds no dictionary")
    return content


def _cifar_names(meta: Path, classes: int) -> tuple[str, ...]:
    if meta.suffix == ".txt":
        names = meta.read_text("utf-8", errors="replace").split()
    else:
        stored = _pickled(meta).get(b"label_names" if classes == 10 else b"fine_label_names", [])
        names = [name.decode(errors="replace") for name in stored if isinstance(name, bytes)]
    if len(names) != classes:
        raise _damaged(meta, f"it names {len(names)} classes, and there are {classes}")
    return tuple(names)


def _idx(folder: Path) -> Reader | None:
    """Finds idx files (MNIST and FashionMNIST), compressed or not, with a dash or a dot in their names."""
    files = {}
    for split, name in (("train", "train"), ("test", "t10k")):
        pairs = [sorted(folder.glob(f"{name}-{kind}?idx*-ubyte*")) for kind in ("images", "labels")]
        if all(pairs):
            files[split] = [next((file for file in pair if file.suffix != ".gz"), pair[0]) for pair in pairs]
    return (f"{folder.name}, idx files", partial(_idx_splits, files)) if files else None


def _idx_splits(files: Mapping[str, Sequence[Path]]) -> Opened:
    arrays: dict[str, Arrays] = {}
    for split, (images, labels) in files.items():
        arrays[split] = _idx_array(images, IDX_IMAGES), _idx_array(labels, IDX_LABELS)
        if len(arrays[split][0]) != len(arrays[split][1]):
            raise _damaged(labels, f"it has another number of labels than {images.name} has images")
    classes = 1 + max(int(labels.max(initial=0)) for _, labels in arrays.values())
    return Opened(
        {split: _stored([each], files[split]) for split, each in arrays.items()}, tuple(map(str, range(classes)))
    )


def _idx_array(file: Path, magic: int) -> np.ndarray:
    """Reads an idx file: four bytes with the number of dimensions, the size of each dimension, and the array."""
    content = _required(file).read_bytes()
    if file.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise _damaged(file, str(error)) from error
    length = 4 * (1 + magic % 256)
    head = [int.from_bytes(content[start : start + 4]) for start in range(0, length, 4)]
    if head[0] != magic or len(content) - length != math.prod(head[1:]):
        raise _damaged(file, "its size is not the one that it states")
    return np.frombuffer(content, dtype=np.uint8, offset=length).reshape(head[1:])


def _stored(batches: Sequence[Arrays], files: Sequence[Path]) -> StoredImages:
    pixels, labels = (np.concatenate(each) for each in zip(*batches, strict=True))
    height, width = pixels.shape[-2:]
    # The contents are PGM and PPM files, a header and then the pixels, so these images are read like all others.
    header = b"P%d %d %d 255\n" % (5 if pixels.ndim == 3 else 6, width, height)

    def content(position: int) -> bytes:
        picture = pixels[position]
        return header + (picture if picture.ndim == 2 else picture.transpose(1, 2, 0)).tobytes()

    numbers = torch.from_numpy(labels.astype(np.int64))
    return StoredImages(numbers, torch.arange(len(numbers)), content, f"image {{}} of {files[0]}".format)


# Lists of files -------------------------------------------------------------------------------------------------------


def _listed_splits(root: Path, notes: list[str]) -> dict[str, Listing]:
    """Returns the images of every split from the authors' lists of `<class>/<file>`, or {} if there are no lists."""
    for layout in LISTED_SPLITS:
        if not all((root / file).is_file() for file in layout.values()):
            continue
        notes.append(f"the splits are those of {', '.join(layout.values())}")
        listings: dict[str, Listing] = {}
        for split, name in layout.items():
            lines = _required(root / name).read_text("utf-8", errors="replace").split()
            files = [root / "images" / (line if Path(line).suffix else f"{line}.jpg") for line in lines]
            if missing := [file for file in files if not file.is_file()]:
                raise DataError(f"{root / name} lists {missing[0]}, which is not there; complete the images.")
            listings[split] = [(file, file.parent.name) for file in files]
        return listings
    return {}


def _tiny_imagenet(root: Path, notes: list[str]) -> dict[str, Listing]:
    labels = root / "val" / "val_annotations.txt"
    if not labels.is_file():
        return {}
    rows = [line.split("\t") for line in _required(labels).read_text("utf-8", errors="replace").splitlines()]
    listing = [(root / "val" / "images" / row[0], row[1]) for row in rows if len(row) > 1]
    if missing := [file for file, _ in listing if not file.is_file()]:
        raise DataError(f"{labels} lists {missing[0]}, which is not there; complete the images.")
    notes.append("the validation labels are those of val_annotations.txt; the labels of the test images are hidden")
    return {**_trained(root), "validation": listing}


def _imagenet(root: Path, notes: list[str]) -> dict[str, Listing]:
    """Returns ImageNet's images. All validation images are in one folder, and a separate file holds their labels."""
    places = [root, root / "Data" / "CLS-LOC", root / "ILSVRC" / "Data" / "CLS-LOC"]  # Kaggle's archive has the last
    for place in places:
        folder = place / "val"
        if not folder.is_dir() or not (files := _flat(folder)):
            continue
        beside = (root, *places, *place.parents[:4])
        kaggle = [each / "LOC_val_solution.csv" for each in beside]
        devkit = [each / "ILSVRC2012_devkit_t12" / "data" for each in beside]
        if table := next(filter(Path.is_file, kaggle), None):
            words = dict(_solution(table))
        elif kit := next((each for each in devkit if each.is_dir()), None):
            words = _ground_truth(kit)
            table = kit / "ILSVRC2012_validation_ground_truth.txt"
        else:
            raise DataError(
                f"{folder} holds ImageNet's validation images without their classes: put the extracted devkit "
                f"(ILSVRC2012_devkit_t12) or Kaggle's LOC_val_solution.csv into {root}, or move every image into a "
                "folder of its class."
            )
        if unknown := [file for file in files if file.stem not in words]:
            raise DataError(f"{table} has no class of {unknown[0]}; complete it.")
        notes.append(
            f"the validation labels are those of {table.name}; test images have hidden labels and are not used"
        )
        return {**_trained(place), "validation": [(file, words[file.stem]) for file in files]}
    return {}


def _flat(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if IMAGENET_VALIDATION.fullmatch(entry.name))


def _solution(table: Path) -> Iterator[tuple[str, str]]:
    """Yields the image and the class of each row in Kaggle's table: `ILSVRC2012_val_00000001,n01751748 x y x y ...`."""
    with _required(table).open(encoding="utf-8", errors="replace", newline="") as lines:
        for row in csv.reader(lines):
            if len(row) > 1 and row[1].strip() and row[0].startswith("ILSVRC"):
                yield row[0], row[1].split()[0]


def _ground_truth(kit: Path) -> dict[str, str]:
    """Returns the class of every validation image as a WordNet id. The devkit maps its class numbers to these ids."""
    truth = _required(kit / "ILSVRC2012_validation_ground_truth.txt").read_text("utf-8", errors="replace").split()
    rows = open_structures(_required(kit / "meta.mat")).get("synsets", ())
    wordnet = {str(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows}
    if unknown := sorted(set(truth) - wordnet.keys()):
        raise _damaged(kit / "meta.mat", f"it has no class of the number {unknown[0]}")
    return {f"ILSVRC2012_val_{number:08d}": wordnet[each] for number, each in enumerate(truth, 1)}


def _trained(place: Path) -> dict[str, Listing]:
    folder = place / "train"
    if not folder.is_dir():
        return {}
    listing = class_folders(folder)
    if not listing and (archives := sorted(folder.glob("*.tar"))):
        raise DataError(f"{archives[0]} is an archive: extract it into the folder {archives[0].with_suffix('')}.")
    return {"train": listing} if listing else {}


def _imagenet_c(root: Path, notes: list[str]) -> dict[str, Listing]:
    place = root.absolute()
    if place.name not in SEVERITIES or place.parent.name not in CORRUPTIONS:
        return {}
    notes.append(f"images with {place.parent.name} of severity {place.name}, all to test on")
    return {"test": class_folders(root)}


def _required(file: Path) -> Path:
    if not file.is_file():
        raise DataError(f"{file} is missing; extract the whole archive.")
    return require_regular(file, DataError)


def _damaged(file: Path, problem: str) -> DataError:
    return DataError(f"{file} is damaged: {problem.rstrip('.')}. Download and extract it again.")
