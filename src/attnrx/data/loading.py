"""Loads train, validation and test images from a name or a path, and lists the known datasets."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from attnrx.data.formats import Columns, Opened, open_hub, open_parquet, require_columns
from attnrx.data.images import UNLABELLED, Augmentation, ImageSet, LoadedImages, StoredImages, evenly_spaced, hold_out
from attnrx.data.published import open_published
from attnrx.data.splits import SPLITS, VALIDATION_IS_TEST, Splits, padding_for, with_missing
from attnrx.support.arguments import BELOW_ONE, PATH, SIDE, Kind, checked, each, either, optional
from attnrx.support.errors import DataError, nearest
from attnrx.support.optional import required_module
from attnrx.support.preprocessing import IMAGENET, SMALL, ImageGeometry, Normalization
from attnrx.support.registry import Registry
from attnrx.support.shapes import Int, Tensor, UInt8

SIDES = each(SIDE, "(height, width)", least=1, most=2)
GUESSED_FROM = 16  # how many pictures are used to guess the geometry of an unknown dataset
DIGIT_SIDE, GREYS = 8, 16  # scikit-learn stores the pixels of the digits as counts, 0 to 16
TEST_SHARE = 0.2  # the share that is held out for the test if a dataset has neither test nor validation images


@dataclass(frozen=True)
class DatasetCard:
    """The properties of a named dataset.

    `normalization` is the published mean and standard deviation of the training images, at their own size and without
    borders. If nothing is published for a dataset, ImageNet's values are used. `flip` says whether training mirrors
    images, and `shift` whether it pads them and crops them at random. If a dataset needs no file, `open` is a function
    that returns it. If a dataset is on no hub, `publisher` says where you can download it.
    """

    geometry: ImageGeometry
    normalization: Normalization
    flip: bool = True
    shift: bool = True
    hub_id: str | None = None
    folder: str | None = None
    revision: str | None = None
    ignored: tuple[str, ...] = ()
    other_names: tuple[str, ...] = ()
    open: Callable[[], Opened] | None = None
    publisher: str | None = None


def open_digits() -> Opened:
    """Returns the 1,797 handwritten digits that come with scikit-learn, in scikit-learn's order, without a download."""
    images, labels = digit_images()
    return Opened({"train": stored_greys(images, labels, "digit {} of scikit-learn")}, tuple("0123456789"))


def stored_greys(
    images: UInt8[Tensor, "images height width"], labels: Int[Tensor, "images"], name: str
) -> StoredImages:
    """Returns grey images in memory. `name` is how messages call an image, with {} in place of its number."""
    # The content is a PGM file, a header and then the pixels, so these images are read like all others.
    header = b"P5 %d %d 255\n" % (images.shape[2], images.shape[1])
    return StoredImages(
        labels, torch.arange(len(labels)), lambda at: header + images[at].numpy().tobytes(), name.format
    )


def digit_images() -> tuple[UInt8[Tensor, "digits side side"], Int[Tensor, "digits"]]:
    """Returns the pixels and the labels of scikit-learn's digits.

    Raises:
        NotSupported: scikit-learn is not installed.
    """
    digits = required_module("sklearn.datasets", "data", "the digits")
    images, labels = digits.load_digits(return_X_y=True)
    pixels = (images * 255 / GREYS).round().astype("uint8").reshape(-1, DIGIT_SIDE, DIGIT_SIDE)
    return torch.from_numpy(pixels), torch.from_numpy(labels).long()


_CARDS: dict[str, DatasetCard] = {
    "digits": DatasetCard(
        geometry=ImageGeometry.of_size(16, 1, "fill"),  # 8x8 as stored
        normalization=Normalization((0.3053,), (0.3760,)),
        flip=False,  # mirrored digits are different signs
        open=open_digits,
    ),
    "fashion_mnist": DatasetCard(
        geometry=ImageGeometry.of_size(32, 1, "pad"),  # 28x28 as stored
        normalization=Normalization((0.2860,), (0.3530,)),
        hub_id="zalando-datasets/fashion_mnist",
        other_names=("fashion-mnist", "FashionMNIST"),
    ),
    "cifar10": DatasetCard(
        geometry=ImageGeometry.of_size(32, 3, "fill"),
        normalization=Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        hub_id="uoft-cs/cifar10",
        other_names=("cifar-10", "cifar-10-batches-py", "cifar-10-batches-bin"),
    ),
    "cifar100": DatasetCard(
        geometry=ImageGeometry.of_size(32, 3, "fill"),
        normalization=Normalization((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        hub_id="uoft-cs/cifar100",
        other_names=("cifar-100", "cifar-100-python", "cifar-100-binary"),
    ),
    "food101": DatasetCard(
        geometry=ImageGeometry.of_size(224, 3, "photo"),
        normalization=Normalization(*IMAGENET),
        hub_id="ethz/food101",
        other_names=("food-101",),
    ),
    "dtd": DatasetCard(
        geometry=ImageGeometry.of_size(224, 3, "photo"),
        normalization=Normalization(*IMAGENET),
        publisher="the Describable Textures Dataset's own page (dtd-r1.0.1.tar.gz)",
        other_names=("dtd-r1.0.1",),
    ),
    "eurosat": DatasetCard(
        geometry=ImageGeometry.of_size(64, 3, "fill"),
        normalization=Normalization(*IMAGENET),
        publisher="the EuroSAT record of its authors (EuroSAT_RGB.zip)",
        other_names=("EuroSAT_RGB", "EuroSAT-RGB"),
    ),
    "tiny_imagenet": DatasetCard(
        geometry=ImageGeometry.of_size(64, 3, "fill"),
        normalization=Normalization((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
        hub_id="zh-plus/tiny-imagenet",
        other_names=("tiny-imagenet", "tiny-imagenet-200"),
    ),
    "imagenette": DatasetCard(
        geometry=ImageGeometry.of_size(224, 3, "photo"),
        normalization=Normalization(*IMAGENET),
        hub_id="frgfm/imagenette",
        folder="320px",
        revision="refs/convert/parquet",  # the main branch is a loading script, which datasets 4 no longer runs
        other_names=("imagenette224", "imagenette2", "imagenette2-320"),
    ),
    "imagenet-1k": DatasetCard(
        geometry=ImageGeometry.of_size(224, 3, "photo"),
        normalization=Normalization(*IMAGENET),
        hub_id="ILSVRC/imagenet-1k",
        ignored=("test",),  # its labels are hidden, and all are -1
        other_names=("imagenet1k", "imagenet_1k", "imagenet", "ILSVRC2012"),
    ),
}
DATASETS = Registry[DatasetCard]("dataset", named=_CARDS)


HUB = "hf:"


@dataclass(frozen=True)
class DatasetLocation:
    """A dataset that was found but not yet read. `open` reads it, and `card` is its catalogue entry, if it has one.

    `requested` is the text that the user gave.
    """

    name: str
    requested: str
    open: Callable[[], Opened]
    card: DatasetCard | None = None
    notes: tuple[str, ...] = ()


def locate(name_or_path: str | Path, columns: Columns) -> DatasetLocation:
    """Finds a dataset, and checks everything that can be checked without reading images or labels.

    Raises:
        DataError: There is nothing at the path, attnrx does not read its format, a file is damaged, or a table lacks a
            column that was named.
        NotSupported: The library that reads the format is not installed.
    """
    requested = str(name_or_path)
    if requested.startswith(HUB):
        hub_id = requested.removeprefix(HUB)
        return DatasetLocation(hub_id, requested, partial(open_hub, hub_id, columns))
    names = _spellings()
    # A `Path` always means files, because some spellings of dataset names are also common folder names.
    known = names.get(requested.lower()) if isinstance(name_or_path, str) else None
    # If attnrx cannot download a dataset, its name refers first to a folder of that name.
    fetched = requested in DATASETS and (DATASETS[requested].hub_id or DATASETS[requested].open) is not None
    if known is not None and (fetched or not os.path.lexists(requested)):
        return _locate_known(known, columns)
    path = Path(requested)
    try:
        path = path.expanduser()
        exists = requested and path.exists()
    except (RuntimeError, OSError, ValueError):  # ~name of an unknown user, a name that is too long, a null byte
        exists = False
    if not exists:
        raise DataError(
            f"there is nothing at {requested[:200]!r} (looked from {Path.cwd()}), and it is no name of a dataset: "
            f"{nearest(requested, DATASETS)} Or give a local parquet file, or a local folder of parquet files or "
            f"images (not a pattern), or {HUB}owner/name for a hub dataset."
        )
    name = path.name if path.is_dir() else path.stem
    # A file with a known name is assumed to contain that dataset. A note says so.
    known, card, notes = names.get(name.lower()), None, ()
    if known is not None:
        card, notes = DATASETS[known], (f"size and normalization are those of {known}, by the name of the file",)
    return DatasetLocation(name, requested, _opener(path, columns), card, notes)


def _spellings() -> dict[str, str]:
    """Returns the catalogue name for every spelling."""
    return {spelling.lower(): name for name, card in DATASETS.items() for spelling in (name, *card.other_names)}


def catalogue_name(name_or_path: str | Path) -> str | None:
    """Returns the catalogue name of a dataset, or None. Accepts every spelling, and paths that end with one."""
    path = Path(name_or_path)
    spelling = path.stem if path.suffix == ".parquet" else path.name
    return _spellings().get(spelling.lower())


def _locate_known(name: str, columns: Columns) -> DatasetLocation:
    card = DATASETS[name]
    if card.open is not None:
        return DatasetLocation(name, name, card.open, card)
    if folder := os.environ.get("ATTNRX_DATA"):
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise DataError(f"ATTNRX_DATA={folder!r} is not a folder; correct the environment variable, or unset it.")
        for spelling in (name, *card.other_names):
            for path in (root / f"{spelling}.parquet", root / spelling):
                if path.exists():
                    return DatasetLocation(name, name, _opener(path, columns), card, (f"read from {path}",))
    if card.hub_id is None:
        raise DataError(
            f"the images of {name} are on no hub: download them from {card.publisher}, extract them, and give the path "
            f"of their folder, or put it as {name} into the folder that ATTNRX_DATA names."
        )
    hub = partial(open_hub, card.hub_id, columns, card.folder, card.revision, card.ignored)
    return DatasetLocation(name, name, hub, card)


def _opener(path: Path, columns: Columns) -> Callable[[], Opened]:
    """Returns a function that opens a parquet file, or a folder with parquet files or images."""
    files = [path] if path.is_file() else sorted([*path.glob("*.parquet"), *path.glob("*/*.parquet")])
    if not files and path.is_dir():
        return partial(open_published, path)
    if any(file.suffix.lower() != ".parquet" for file in files or [path]):
        raise DataError(f"{path} is neither parquet (.parquet) nor a folder of images; give a dataset that reads it.")
    files = files or [path]
    require_columns(files, columns)
    return partial(open_parquet, path, files, columns)


@checked(
    name_or_path=Kind("the name of a dataset, a file or a folder", PATH.accepts),
    image_size=optional(either("the side of the model's input in pixels, or (height, width)", SIDE, SIDES)),
    validation_share=BELOW_ONE,
)
def load_data(
    name_or_path: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    geometry: ImageGeometry | None = None,
    validation_share: float = 0.1,
    seed: int = 0,
    columns: Columns | None = None,
) -> Splits:
    """Returns train, validation and test images from a known name, a local path or a hub id.

    Small images are decoded on first use and kept in memory. Other images are decoded in every pass. A folder of images
    has labels only if every class has a folder. If an image cannot be decoded, the first pass that needs it raises an
    error that says where the image is.

    The catalogue says how the pictures of a known dataset are resized and cropped. For other datasets, attnrx chooses
    this geometry from a few pictures. `adapt_preprocessing` replaces the geometry with the model's own preprocessing.

    Args:
        name_or_path: The name of a known dataset (`DATASETS`), `hf:owner/name` for any hub dataset, or a path. A known
            name is looked up in the folder that ATTNRX_DATA names, then on the Hugging Face hub. A path is a parquet
            file, a folder of parquet files, or a folder of JPEG, PNG, WebP, BMP, GIF, TIFF or PPM images. It may also
            be a folder in the layout that the authors of CIFAR, MNIST, Food-101, DTD, ImageNet, Tiny ImageNet or
            ImageNet-C publish.
        image_size: The side of the input in pixels, or (height, width).
        geometry: How pictures become pixels: size, resizing, crop and channels. It takes precedence over `image_size`.
        validation_share: The share of each class that is held out of the training split, if there is no validation
            split. With 0, there are no validation images.
        seed: The seed that selects the held-out validation images. Nothing else is random.
        columns: The names of a table's image and label columns. By default, the usual names are tried.

    Raises:
        InvalidInput: An argument has a wrong type or value.
        DataError: There is no such dataset, it is damaged or empty, or it lacks a column that was named.
        NotSupported: The library that reads the format is not installed.

    Examples:
        >>> splits = rx.load_data("digits")
        >>> len(splits.train), len(splits.validation), len(splits.test)
        (1295, 143, 359)
    """
    location = locate(name_or_path, columns or Columns())
    card, requested = location.card, location.requested
    opened = by_canonical_name(location.open(), requested)
    parts, notes = assign(opened, requested, validation_share, seed)
    own_geometry = _geometry_of(opened, card, image_size)
    photos = _are_photos(own_geometry)
    geometry = geometry or own_geometry
    fits = card is not None and len(card.normalization.mean) == geometry.channels
    normalization = card.normalization if card and fits else Normalization.half(geometry.channels)
    numbers, problem = None, None
    if not opened.class_names:
        numbers = torch.tensor([UNLABELLED])
        problem = f"{requested} has no labels, and this needs them: {opened.remedy}."
    sets: dict[str, ImageSet] = {
        split: LoadedImages(
            f"{location.name}/{split}", opened.splits[stored], rows, geometry, normalization, photos, numbers, problem
        )
        for split, (stored, rows) in parts.items()
    }
    flip, shift = (True, True) if card is None else (card.flip, card.shift)
    # This crop window is usual for ImageNet.
    window = Augmentation(padding=0, area=(0.08, 1.0)) if photos else None
    return Splits(
        name=location.name,
        **with_missing(sets, requested),
        class_names=opened.class_names,
        channels=geometry.channels,
        image_size=geometry.side,
        normalization=normalization,
        augmentation=window or Augmentation(padding_for(geometry) if shift else 0, flip),
        notes=(*location.notes, *opened.notes, *notes),
        geometry=geometry,
    )


def by_canonical_name(opened: Opened, source: str) -> Opened:
    """Renames the splits to train, validation and test, drops other splits with a note, and checks the labels.

    Raises:
        DataError: Two splits have names for the same split, no split has a known name, a split is empty, a label is not
            a class number, or a class does not occur in train.
    """
    splits: dict[str, StoredImages] = {}
    notes = list(opened.notes)
    for stored, records in opened.splits.items():
        name = SPLITS.get(stored.lower())
        if name is None:
            notes.append(f"the split {stored!r} is neither train, validation nor test and is not used")
        elif name in splits:
            raise DataError(f"{source} has two {name} splits, one of them called {stored!r}; rename or remove one.")
        else:
            splits[name] = records
    if not splits:
        raise DataError(
            f"{source} has no train, validation or test split (it has {', '.join(map(repr, opened.splits))}); "
            "rename one."
        )
    for split, records in splits.items():
        labels, classes = records.labels, len(opened.class_names) or 1  # without labels, all are zero
        if not len(labels):
            raise DataError(f"the {split} split of {source} is empty; give it images or remove it.")
        outside = ((labels < 0) | (labels >= classes)).nonzero().flatten()
        if len(outside):
            row = int(outside[0])
            raise DataError(
                f"label {int(labels[row])} of image {row} in the {split} split of {source} is outside the {classes} "
                f"classes (0 to {classes - 1}); {len(outside)} images are like that. Correct the labels, or leave the "
                "split out if its labels are hidden."
            )
    for split, records in splits.items():
        # Without a train split, each split is compared with itself, which never fails.
        trained = splits.get("train", records).labels
        strange = records.labels[~torch.isin(records.labels, trained)]
        if len(strange):
            raise DataError(
                f"label mismatch between the splits of {source}: class {opened.class_names[strange.min()]!r} occurs in "
                f"{split} but never in train; check that both count the same classes."
            )
    return replace(opened, splits=splits, notes=tuple(notes))


def assign(
    opened: Opened, source: str, share: float, seed: int
) -> tuple[dict[str, tuple[str, Int[Tensor, "_"]]], tuple[str, ...]]:
    """Assigns every image to train, validation or test. Returns the stored split and the rows of each part, and notes.

    If there is no test split, the validation images become the test split. If a split is still missing, it is held out
    of the training split, with the same share of each class. Which images are held out depends on hashes of their
    `keys`, or of their row numbers if there are no keys. `share` and `seed` only affect the validation images. Test
    images are selected with a fixed share and seed, so they are always the same. Without a train split, nothing is held
    out.

    Raises:
        DataError: No class in train has two images, so none can be held out.
    """
    parts = {name: (name, torch.arange(len(stored))) for name, stored in opened.splits.items()}
    notes = []
    if "test" not in parts and "validation" in parts:
        # If there are train images, a new validation split can be held out of them.
        parts["test"] = parts.pop("validation") if "train" in parts else parts["validation"]
        notes.append(VALIDATION_IS_TEST)
    # The test is held out first, so `share` and `seed` do not affect it.
    for split, wanted, by in (("test", TEST_SHARE, 0), ("validation", share, seed)):
        if split in parts or "train" not in parts or not wanted:
            continue
        rows = parts["train"][1]
        named: list[str | int] = [opened.keys[row] if opened.keys else row for row in map(int, rows.tolist())]
        marked = hold_out(opened.splits["train"].labels[rows], named, wanted, by)
        if not marked.any():
            raise DataError(
                f"{source} has no {split} split, and no class of train has two images to hold one out; add images."
            )
        parts[split], parts["train"] = ("train", rows[marked]), ("train", rows[~marked])
        notes.append(f"no {split} split: {int(marked.sum())} training images are held out, {wanted:.0%} of each class")
    return parts, tuple(notes)


def _geometry_of(opened: Opened, card: DatasetCard | None, size: int | Sequence[int] | None) -> ImageGeometry:
    """Returns the catalogue's geometry, or guesses one from some pictures. If `size` is given, it replaces the size."""
    requested = (size[0], size[1]) if isinstance(size, Sequence) else size
    if card is None:
        stored = opened.splits.get("train") or next(iter(opened.splits.values()))
        # The pictures are spread over the split, because datasets are often sorted, by class or by size.
        pictures = [stored.picture(at, None) for at in evenly_spaced(len(stored), GUESSED_FROM)]
        return guess_geometry(pictures, requested)
    if requested is None or requested == card.geometry.side:
        return card.geometry
    # Black borders (`pad`) suit only the catalogue's size. For another size, pictures are resized.
    return ImageGeometry.of_size(requested, card.geometry.channels, "photo" if _are_photos(card.geometry) else "fill")


def guess_geometry(pictures: Sequence[UInt8[Tensor, "_ _ _"]], size: int | tuple[int, int] | None) -> ImageGeometry:
    """Chooses a geometry for a dataset that is not in the catalogue, from a few of its pictures."""
    channels = 3 if max(picture.shape[0] for picture in pictures) >= 3 else 1
    sides = [min(picture.shape[-2:]) for picture in pictures]
    if max(sides) > SMALL:
        return ImageGeometry.of_size(size or 224, channels, "photo")
    return ImageGeometry.of_size(size or Counter(sides).most_common(1)[0][0], channels, "fill")


def _are_photos(geometry: ImageGeometry) -> bool:
    """Returns whether a geometry from the catalogue, or a guessed one, is for photographs (`ImageGeometry.of_size`)."""
    return geometry.resize_to != geometry.size
