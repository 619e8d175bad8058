"""Where a named dataset or a path is: the known datasets, and the reader of what is found."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from attnrx.data.digits import DigitsReader
from attnrx.data.files import FolderReader
from attnrx.data.parquet import Columns, HubReader, ParquetReader
from attnrx.data.splits import DatasetReader
from attnrx.support.errors import DataError, InvalidInput, nearest
from attnrx.support.plugins import import_plugins
from attnrx.support.preprocessing import ImageGeometry, Normalization

IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class DatasetCard:
    """The properties of a named dataset.

    The normalization is the published statistic of the training images, at their own size and without borders. `flip`
    and `shift` tell whether the augmentation mirrors images, and crops them from a padded image. `reader` reads a
    dataset that needs no file.
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
    reader: Callable[[], DatasetReader] | None = None


DATASETS: Mapping[str, DatasetCard] = {
    "digits": DatasetCard(
        geometry=ImageGeometry.of_size(16, 1, "fill"),  # 8x8 as stored
        normalization=Normalization((0.3053,), (0.3760,)),
        flip=False,  # mirrored digits are other signs
        reader=DigitsReader,
    ),
    "fashion_mnist": DatasetCard(
        geometry=ImageGeometry.of_size(32, 1, "pad"),  # 28x28 as stored
        normalization=Normalization((0.2860,), (0.3530,)),
        hub_id="zalando-datasets/fashion_mnist",
    ),
    "cifar10": DatasetCard(
        geometry=ImageGeometry.of_size(32, 3, "fill"),
        normalization=Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        hub_id="uoft-cs/cifar10",
    ),
    "cifar100": DatasetCard(
        geometry=ImageGeometry.of_size(32, 3, "fill"),
        normalization=Normalization((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        hub_id="uoft-cs/cifar100",
    ),
    "food101": DatasetCard(
        geometry=ImageGeometry.of_size(224, 3, "photo"),
        normalization=IMAGENET,
        hub_id="ethz/food101",
    ),
    "tiny_imagenet": DatasetCard(
        geometry=ImageGeometry.of_size(64, 3, "fill"),
        normalization=Normalization((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
        hub_id="zh-plus/tiny-imagenet",
    ),
    "imagenette": DatasetCard(
        geometry=ImageGeometry.of_size(224, 3, "photo"),
        normalization=IMAGENET,
        hub_id="frgfm/imagenette",
        folder="320px",
        revision="refs/convert/parquet",  # the main branch is a loading script, which datasets 4 no longer runs
        other_names=("imagenette224", "imagenette2", "imagenette2-320"),
    ),
    "imagenet-1k": DatasetCard(
        geometry=ImageGeometry.of_size(224, 3, "photo"),
        normalization=IMAGENET,
        hub_id="ILSVRC/imagenet-1k",
        ignored=("test",),  # its labels are hidden: all are -1
        other_names=("imagenet1k", "imagenet_1k", "imagenet"),
    ),
}


_REGISTERED: dict[str, DatasetCard] = {}


def register_dataset(name: str, card: DatasetCard) -> None:
    """Adds a dataset by its name in `load_data`.

    Raises:
        InvalidInput: Another dataset has this name.
    """
    if {**DATASETS, **_REGISTERED}.get(name, card) != card:
        raise InvalidInput(f"the dataset {name} exists already; choose another name.")
    _REGISTERED[name] = card


def known_datasets() -> Mapping[str, DatasetCard]:
    """Returns the catalogue and the registered datasets, those of other packages among them."""
    import_plugins()
    return {**DATASETS, **_REGISTERED}


def known_as(name: str) -> str | None:
    """Returns the catalogue's name of a dataset that may be spelt as its files are."""
    datasets = known_datasets()
    return next((canonical for canonical, card in datasets.items() if name in (canonical, *card.other_names)), None)


def local_copy(name: str, folder: Path) -> Path | None:
    """Finds `<name>.parquet`, or a folder `<name>`, under any of the dataset's names."""
    spellings = (name, *known_datasets()[name].other_names)
    paths = (folder / ending for spelling in spellings for ending in (f"{spelling}.parquet", spelling))
    return next((path for path in paths if path.exists()), None)


HUB = "hf:"


@dataclass(frozen=True)
class DatasetLocation:
    """A dataset's reader, and its entry in the catalogue, if any; `requested` is the user's text, for messages."""

    name: str
    requested: str
    reader: DatasetReader
    card: DatasetCard | None = None
    notes: tuple[str, ...] = ()


def locate(name_or_path: str | Path, columns: Columns) -> DatasetLocation:
    """Finds the dataset, without opening it.

    Raises:
        InvalidInput: The name is empty.
        DataError: There is nothing at the path, or no reader for it.
    """
    if not isinstance(name_or_path, str | Path) or name_or_path == "":
        raise InvalidInput(f"load_data({name_or_path!r}): give the name of a dataset or the path of one.")
    requested = str(name_or_path)
    if requested.startswith(HUB):
        hub_id = requested.removeprefix(HUB)
        return DatasetLocation(hub_id, requested, HubReader(hub_id, columns))
    # A Path names files, also if it is spelt like a dataset.
    catalogue_name = known_as(requested) if isinstance(name_or_path, str) else None
    if catalogue_name is not None:
        return _locate_known(catalogue_name, columns)
    if "://" in requested or requested.startswith("pipe:"):
        raise DataError(
            f"{requested} is remote, and files are read from local paths: download it, or give {HUB}owner/name for a "
            "hub dataset, or a DataLoader over it."
        )
    try:
        path = Path(requested).expanduser()
        exists = path.exists()
    # RuntimeError: ~name of an unknown user; OSError: a name that is too long; ValueError: a null byte
    except (RuntimeError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{requested[:200]!r} is no name of files ({reason}).") from error
    if not exists:
        raise _nothing_found(name_or_path)
    name = path.name if path.is_dir() else path.stem
    catalogue_name = known_as(name.lower())
    card = known_datasets()[catalogue_name] if catalogue_name else None
    # A file of a known name is assumed to hold that dataset; the note lists the assumption.
    notes = (
        (f"size and normalization are those of {catalogue_name}, by the name of the file",) if catalogue_name else ()
    )
    return DatasetLocation(name, requested, _reader(path, columns), card, notes)


def _locate_known(name: str, columns: Columns) -> DatasetLocation:
    card = known_datasets()[name]
    if card.reader is not None:
        return DatasetLocation(name, name, card.reader(), card)
    assert card.hub_id is not None
    folder = os.environ.get("ATTNRX_DATA")
    if folder and not Path(folder).expanduser().is_dir():
        raise DataError(f"ATTNRX_DATA={folder!r} is not a folder; correct the environment variable, or unset it.")
    copy = local_copy(name, Path(folder).expanduser()) if folder else None
    if copy is not None:
        return DatasetLocation(name, name, _reader(copy, columns), card, (f"read from {copy}",))
    reader = HubReader(card.hub_id, columns, card.folder, card.revision, card.ignored)
    return DatasetLocation(name, name, reader, card)


def _nothing_found(requested: str | Path) -> DataError:
    path = Path(requested)
    if isinstance(requested, Path) or path.name != requested or path.suffix or {*"*?["} & {*requested}:
        return DataError(
            f"there is nothing at {requested} (looked from {Path.cwd()}); give a parquet file, or a folder of parquet "
            f"files or images (not a pattern), {HUB}owner/name for a hub dataset, or one of "
            f"{', '.join(known_datasets())}."
        )
    return DataError(
        f"unknown dataset {requested!r}: {nearest(requested, known_datasets())} Or give the path of a parquet file, an "
        f"image folder, or {HUB}owner/name for a hub dataset."
    )


def _reader(path: Path, columns: Columns) -> DatasetReader:
    """Returns the reader of a parquet file, or of a folder: of its parquet files or images."""
    files = [path] if path.is_file() else sorted([*path.glob("*.parquet"), *path.glob("*/*.parquet")])
    if not files and path.is_dir():
        return FolderReader(path)
    if any(file.suffix.lower() != ".parquet" for file in files or [path]):
        raise DataError(f"{path} is neither parquet (.parquet) nor a folder of images; give a dataset that reads it.")
    return ParquetReader(path, tuple(files or [path]), columns)
