"""Folders of image files."""

from pathlib import Path

import torch

from attnrx.data.images import round_robin
from attnrx.data.loaded_images import StoredImages
from attnrx.data.splits import SPLITS, Opened
from attnrx.support.errors import DataError
from attnrx.support.records import require_regular
from attnrx.support.shapes import Int, Tensor

IMAGES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff"))

Listing = list[tuple[Path, str]]
"""The images of one split, and the class of each: the name of its folder, or "" without one."""


def open_folder(root: Path) -> Opened:
    """Lists the files of `root/train/<class>/*.jpg` and other splits beside it, or of `root/<class>/*.jpg`.

    Classes are the folders that hold images, in alphabetical order. Without folders of classes, `root/*.jpg` or
    `root/train/*.jpg`, the images have no labels.

    Raises:
        DataError: There are no images, or only some splits have folders of classes.
    """
    listings = _listings(root)
    classes = {name: {of_file for _, of_file in listing} for name, listing in listings.items()}
    if not any(classes.values()):
        raise DataError(
            f"{root} holds no images: expected {root}/train/<class>/*.jpg or {root}/<class>/*.jpg with one of "
            f"{', '.join(sorted(IMAGES))}."
        )
    # Images without folders of classes are those of the class "".
    flat = [name for name, names in classes.items() if names == {""}]
    if flat and any(listing and name not in flat for name, listing in listings.items()):
        raise DataError(
            f"{root} has folders of classes in some splits and none in {', '.join(flat)}; give all splits folders of "
            "classes, or none."
        )
    class_names = tuple(sorted(set[str]().union(*classes.values())))
    listed = {name or "train": _ordered(listing, class_names) for name, listing in listings.items()}
    splits = {name: _stored(files, labels) for name, (files, labels) in listed.items()}
    # Relative and with forward slashes, so that the same images are held out on every machine.
    keys = [file.relative_to(root).as_posix() for file in listed.get("train", ((), ()))[0]]
    if not flat:
        return Opened(splits, class_names, keys=keys)
    notes = ("no folders of classes: the images are used without labels",)
    return Opened(splits, (), notes, keys, remedy="put the images of every class into a folder of their own")


def _listings(root: Path) -> dict[str, Listing]:
    """Lists the images of every split; the split "" is a folder without split folders."""
    try:
        below = [entry for entry in sorted(root.iterdir()) if entry.is_dir() and entry.name[0] != "."]
        splits = {SPLITS[entry.name.lower()]: entry for entry in below if entry.name.lower() in SPLITS}
        return {name: _listed(folder) for name, folder in (splits or {"": root}).items()}
    except OSError as error:
        raise DataError(f"{root} cannot be listed: {error.strerror or error} ({error.filename}).") from error


def _listed(folder: Path) -> Listing:
    """Lists the images in the folders of the classes, or where there are none those in the folder itself."""
    listing: Listing = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name[0] != ".":
            # In the order of torchvision's ImageFolder.
            found = sorted(filter(_is_image, entry.rglob("*")), key=lambda path: (str(path.parent), path.name))
            listing += [(path, entry.name) for path in found]
    if not listing:
        listing = [(path, "") for path in sorted(folder.iterdir()) if _is_image(path)]
    return listing


def _is_image(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError as error:  # the name becomes the name of a class, or part of a fingerprint
        raise DataError(f"the name {str(path)!r} is not UTF-8; rename it.") from error
    return path.suffix.lower() in IMAGES and not path.name.startswith(".") and not path.is_dir()


def _ordered(listing: Listing, class_names: tuple[str, ...]) -> tuple[list[Path], Int[Tensor, "_"]]:
    """Returns the files and their labels going round the classes, so that any prefix is nearly balanced."""
    number = {name: label for label, name in enumerate(class_names)}
    labels = torch.tensor([number[name] for _, name in listing], dtype=torch.int64)
    order = round_robin(labels)
    return [listing[row][0] for row in order.tolist()], labels[order]


def _stored(files: list[Path], labels: Int[Tensor, "_"]) -> StoredImages:
    return StoredImages(
        labels,
        torch.arange(len(files)),
        lambda at: require_regular(files[at], DataError).read_bytes(),
        lambda at: str(files[at]),
    )
