"""Storage formats: folders of image files, and tables of encoded images (parquet files and hub datasets).

Tables are read with the `datasets` library.
"""

import errno
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnrx.data.images import IMAGE_KEYS, LABEL_KEYS, StoredImages, likely_labels, round_robin
from attnrx.data.splits import SPLITS
from attnrx.support.arguments import described_error, require_fields
from attnrx.support.errors import DataError, nearest
from attnrx.support.foreign_files import open_hub_data, open_tables, table_features, table_rows
from attnrx.support.hardware import cache_folder
from attnrx.support.optional import required_module
from attnrx.support.records import require_regular
from attnrx.support.shapes import Int, Tensor

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

IMAGES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff"))
MAX_CLASSES = 100_000  # the most classes for labels that are numbers without names (ImageNet-21k has 21,841)


@dataclass(frozen=True)
class Opened:
    """An opened dataset: stored images by split, class names, and notes about decisions made on opening.

    If there are no class names, the images have no labels. The stored labels are then zeros, and `remedy` says how to
    add labels. `keys` holds one name per training image. Which images are held out depends on hashes of these names, or
    of the row numbers if there are no `keys`.
    """

    splits: Mapping[str, StoredImages]
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    keys: Sequence[str] = ()
    remedy: str = ""


def open_folder(root: Path) -> Opened:
    """Opens the images in `root/train/<class>/*.jpg` and in the other splits, or in `root/<class>/*.jpg`.

    Classes are the folders that contain images, in alphabetical order. Without class folders, as in `root/*.jpg` or
    `root/train/*.jpg`, the images have no labels.

    Raises:
        DataError: There are no images, only some splits have class folders, or it is not clear which folders are
            classes.
    """
    notes: list[str] = []
    try:
        listings = _listings_by_split(root, notes)
    except OSError as error:
        raise DataError(f"{root} cannot be listed: {error.strerror or error} ({error.filename}).") from error
    return open_listings(root, listings, notes)


Listing = list[tuple[Path, str]]
"""Image files, each with the name of its class. The name is "" for images without classes."""


def open_listings(root: Path, listings: Mapping[str, Listing], notes: Sequence[str] = ()) -> Opened:
    """Returns the listed images by split, with `notes` about how they were found. Their keys are paths below `root`.

    Raises:
        DataError: There are no images, or only some splits have classes.
    """
    class_names = sorted({word for listing in listings.values() for _, word in listing})
    if not class_names:
        raise DataError(
            f"{root} holds no images: expected {root}/train/<class>/*.jpg or {root}/<class>/*.jpg with one of "
            f"{', '.join(sorted(IMAGES))}."
        )
    # Images without class folders have the class "".
    if "" in class_names and len(class_names) > 1:
        flat = ", ".join(name for name, listing in listings.items() if "" in {word for _, word in listing})
        raise DataError(
            f"{root} has folders of classes in some splits and none in {flat}; give all splits folders of classes, or "
            "none."
        )
    splits, keys, number = {}, [], {name: label for label, name in enumerate(class_names)}
    for name, listing in listings.items():
        labels = torch.tensor([number[word] for _, word in listing], dtype=torch.int64)
        order = round_robin(labels)  # makes every prefix nearly balanced
        files = [listing[row][0] for row in order.tolist()]
        splits[name] = _stored_files(files, labels[order])
        if name == "train":
            # The paths are relative and have forward slashes, so the same images are held out on every machine.
            keys = [file.relative_to(root).as_posix() for file in files]
    if "" not in class_names:
        return Opened(splits, tuple(class_names), tuple(notes), keys=keys)
    notes = (*notes, "no folders of classes: the images are used without labels")
    return Opened(splits, (), notes, keys, remedy="put the images of every class into a folder of their own")


def _listings_by_split(root: Path, notes: list[str]) -> dict[str, Listing]:
    """Returns the images of every split. If a folder in `root` has the name of a split, it holds the split's images.

    If no folder has the name of a split, all images are training images.

    Raises:
        DataError: Two folders name the same split, or beside the folders of splits there is a folder with images that
            may be a class.
    """
    folders: dict[str, Path] = {}
    for entry in _subfolders(root):
        split = SPLITS.get(entry.name.lower())
        if split in folders:
            raise DataError(f"{root} has two {split} splits, {folders[split].name} and {entry.name}; rename one.")
        if split is not None:
            folders[split] = entry
    listings = {name: class_folders(folder) for name, folder in (folders or {"train": root}).items()}
    class_names = {word for listing in listings.values() for _, word in listing} - {""}
    for entry in _subfolders(root) if folders else ():
        if entry in folders.values() or not any(map(is_image, entry.rglob("*"))):
            continue
        # A folder with the same classes is an unknown split, which is ignored. Any other folder may be a class.
        if not class_names & {word for _, word in class_folders(entry)}:
            names = " and ".join(folder.name for folder in folders.values())
            raise DataError(
                f"{root} has {names}, named like a split, beside {entry.name}, which has other images. If all of them "
                f"are classes, move them into {root / 'train'}, or rename {names}; if {names} holds a split, move "
                f"{entry.name} elsewhere, or into it."
            )
        notes.append(f"the folder {entry.name!r} is neither train, validation nor test and is not used")
    return listings


def _subfolders(folder: Path) -> list[Path]:
    return [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and entry.name[0] != "."]


def class_folders(folder: Path) -> Listing:
    """Returns the images in the class folders, each with the name of its class.

    If no subfolder has images, the images in the folder itself are returned, each with the class name "".

    Raises:
        DataError: A file name is not UTF-8, or the class folders seem to be at a deeper level.
    """
    listing: Listing = []
    for entry in _subfolders(folder):
        # torchvision's ImageFolder uses the same order.
        found = sorted(filter(is_image, entry.rglob("*")), key=lambda path: (str(path.parent), path.name))
        listing += [(path, entry.name) for path in found]
    _require_folders_of_classes(folder, listing)
    return listing or [(path, "") for path in sorted(folder.iterdir()) if is_image(path)]


def _require_folders_of_classes(folder: Path, listing: Listing) -> None:
    """Raises DataError if the class folders seem to be at a deeper level.

    This is assumed in three cases:

    - All folders have the same subfolders, as in <corruption>/<severity>/<class>.
    - There is only one folder, and it has several subfolders.
    - Some images are three folders deep.
    """
    inside: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for parent, word in dict.fromkeys((path.parent, word) for path, word in listing):
        inside[word].add(parent.relative_to(folder / word).parts)
    names = {frozenset(parts[:1] for parts in each) for each in inside.values()}
    same = next(iter(names)) if len(names) == 1 else frozenset[tuple[str, ...]]()
    if (len(same) > 1 and () not in same) or any(len(parts) > 1 for each in inside.values() for parts in each):
        path, word = max(listing, key=lambda each: len(each[0].parts))
        raise DataError(
            f"the folders in {folder} hold folders with images, e.g. {path.relative_to(folder).parent}, so it is not "
            f"clear which of them are classes. Give the folder whose folders are the classes, e.g. {path.parent.parent}"
            f"; if {word} is a class, put its images into one folder, or pass torchvision's ImageFolder in Python."
        )


def is_image(path: Path) -> bool:
    """Returns whether a file is named like an image: with a known suffix, and without a leading dot.

    Raises:
        DataError: The file name is not UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:  # the name becomes a class name, or part of a fingerprint
        raise DataError(f"the name {str(path)!r} is not UTF-8; rename it.") from error
    return path.suffix.lower() in IMAGES and not path.name.startswith(".") and not path.is_dir()


def _stored_files(files: list[Path], labels: Int[Tensor, "_"]) -> StoredImages:
    return StoredImages(
        labels,
        torch.arange(len(files)),
        lambda at: require_regular(files[at], DataError).read_bytes(),
        lambda at: str(files[at]),
    )


@dataclass(frozen=True)
class Columns:
    """The names of the columns that contain the image and its label.

    If you name no columns, attnrx reads the image from the first of IMAGE_KEYS (`data.images`) that a table has, and
    the label from the first of LABEL_KEYS. If a table has none of LABEL_KEYS, attnrx looks for columns that the schema
    declares as classes, or whose name says label, class, category or target. If there is exactly one such column,
    attnrx uses it. If there are several, you must name one. If there is none, the images have no labels. `test_column`
    may name a boolean column. The test split then contains only the rows in which this column is true.
    """

    example = "attnrx.data.Columns(image_column='image')"

    image_column: str | None = None
    label_column: str | None = None
    test_column: str | None = None

    def __post_init__(self):
        require_fields(self)

    def in_table(self, features: Mapping[str, Any], source: str) -> "Columns":
        """Returns the image and label columns of a table with these `features`, a mapping from column names to types.

        Raises:
            DataError: The table has no image column, lacks a column that was named, or has several possible labels.
        """
        names = [*features]
        image = self.image_column or next((key for key in IMAGE_KEYS if key in names), "image")
        label = self.label_column or next((key for key in LABEL_KEYS if key in names), None)
        likely = _label_columns(features)
        if label is None and len(likely) > 1:
            raise DataError(
                f"{source} has several columns that may be the label: {', '.join(likely)} (it has {', '.join(names)}). "
                f"Give --label-column {likely[0]}, or another of them, in Python "
                f'columns=Columns(label_column="{likely[0]}").'
            )
        label = label or next(iter(likely), None)
        for kind, wanted in (("image", image), ("label", label)):
            if wanted is not None and wanted not in names:
                raise DataError(
                    f"{source} has no {kind} column {wanted!r} (it has {', '.join(names)}): {nearest(wanted, names)} "
                    f'Give --{kind}-column NAME, in Python columns=Columns({kind}_column="NAME").'
                )
        return replace(self, image_column=image, label_column=label)


def _label_columns(features: Mapping[str, Any]) -> list[str]:
    """Returns the columns that the schema declares as classes, and columns that are named like labels."""
    named = {name for name in likely_labels(features) if _is_class_type(str(getattr(features[name], "dtype", "")))}
    return [name for name, feature in features.items() if name in named or getattr(feature, "names", None)]


def _is_class_type(dtype: str) -> bool:
    return dtype in ("string", "large_string") or re.fullmatch(r"u?int\d+", dtype) is not None


def open_hub(
    hub_id: str, columns: Columns, folder: str | None = None, revision: str | None = None, ignored: Sequence[str] = ()
) -> Opened:
    """Downloads a dataset, or finds it in the hub's own cache, and reads the labels.

    `ignored` names splits that are not usable, such as a test split with hidden labels.

    Raises:
        DataError: The dataset cannot be loaded, has no split to use, or its columns or labels do not fit.
        NotSupported: `datasets` is not installed.
    """
    required_module("datasets", "data", "hub datasets")
    try:
        loaded = open_hub_data(hub_id, folder, revision)
        splits = {str(name): split for name, split in loaded.items() if name not in ignored}
    except Exception as error:  # of five libraries: network, gating, cache, disk, parsing
        raise DataError(
            f"cannot load the hub dataset {hub_id}: {described_error(error).rstrip('.')}. Check the network and, for a "
            "dataset behind a licence, that you accepted it and are logged in; or give the path of a local copy "
            "(parquet, a folder of images), or put <name>.parquet into the folder in ATTNRX_DATA."
        ) from error
    return _opened(splits, columns, f"the hub dataset {hub_id}")


def require_columns(files: Sequence[Path], columns: Columns) -> None:
    """Checks that every file is complete, has the columns, and numbers the classes in the same way as the others.

    The class names of a table come from its first file, so a different order in another file would mislabel images.

    Raises:
        DataError: A file is damaged, lacks a column, or has different class names.
        NotSupported: `datasets` is not installed.
    """
    required_module("datasets", "data", "parquet files")
    first_names = None
    for file in files:
        require_regular(file, DataError)
        try:
            features = table_features(file)
        except Exception as error:  # an error of pyarrow, or in the metadata
            raise DataError(
                f"{file} is not a whole parquet file ({described_error(error)}); make or copy it again."
            ) from error
        columns = columns.in_table(features, str(file))
        names = _class_names(features, columns.label_column)
        first_names = names if first_names is None else first_names
        if names != first_names:
            raise DataError(
                f"label mismatch between {files[0]} and {file}: their schemas name different classes for "
                f"{columns.label_column!r}; write both with the same list of classes."
            )


def open_parquet(root: Path, files: Sequence[Path], columns: Columns) -> Opened:
    """Maps parquet files into memory, and reads the labels.

    If the paths of the files name splits, each file belongs to the split in its path. Otherwise, rows are grouped by
    the column `split`.

    Raises:
        DataError: A file is damaged or empty, or the labels of the files do not match.
        NotSupported: `datasets` is not installed.
    """
    required_module("datasets", "data", "parquet files")
    tables = {}
    for name, group in _group_by_split(files, root).items():
        # `datasets` writes one copy of the files into this cache folder and maps it into memory. It only compares the
        # files' times, so the folder is named by their paths, sizes and times, and changed files get a new copy.
        paths = [file.absolute() for file in group if table_rows(file)]
        if not paths:
            raise DataError(f"the {name or 'train'} split of {root} is empty; give it images or remove it.")
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        copy = cache_folder() / "datasets" / sha256(repr(states).encode()).hexdigest()[:16]
        _require_cache(copy)
        try:
            tables[name] = open_tables(paths, copy)
        except Exception as error:  # damaged pages, different columns, a damaged copy, a full disk
            if (written := _unwritten(error)) is not None:
                raise _no_cache(copy, written) from error
            raise DataError(
                f"cannot read {group[0]}{' and its siblings' if len(group) > 1 else ''} as one table: "
                f"{described_error(error.__cause__ or error)}. The files of a split must be whole and have the same "
                f"columns; their copy is in {copy}."
            ) from error
    return _opened(tables, columns, str(root))


def _require_cache(copy: Path) -> None:
    """Raises DataError if the copy of a table cannot be written."""
    try:
        copy.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_cache(copy, error) from error
    if not os.access(copy, os.W_OK | os.X_OK):
        raise _no_cache(copy, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _no_cache(copy: Path, error: OSError) -> DataError:
    return DataError(
        f"the copy of a table cannot be written into the cache {copy}: {error.strerror or error}. Free some space, or "
        "name another folder in ATTNRX_CACHE."
    )


def _unwritten(error: BaseException | None) -> OSError | None:
    """Returns the disk error (full, read-only, no access) that caused a library's error, or None if there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            return error
        error = error.__cause__ or error.__context__
    return None


def _group_by_split(files: Sequence[Path], root: Path) -> Mapping[str, Sequence[Path]]:
    """Groups files by the split that their path below `root` names. Files that name no split have the key ""."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(files):
        # Folders above the dataset do not name a split, e.g. /data/test/set. A single file contains all splits.
        below = file.relative_to(root) if file.is_relative_to(root) and file != root else Path(file.name)
        # Only whole words count. latest.parquet does not name the test split, but train-00000-of-00002.parquet names
        # the train split.
        words = re.split(r"[^a-z]+", str(below).lower()) if len(files) > 1 else ()
        groups[next((SPLITS[word] for word in words if word in SPLITS), "")].append(file)
    if "" in groups and len(groups) > 1:
        raise DataError(
            f"{root} holds files of {', '.join(sorted(name for name in groups if name))}, but {groups[''][0].name} "
            "belongs to no split; put train, validation or test into every file name, or into its folder's."
        )
    return groups


def _class_names(features: "datasets.Features", column: str | None) -> tuple[str, ...]:
    return tuple(getattr(features.get(column), "names", None) or ())


def _opened(splits: Mapping[str, "datasets.Dataset"], columns: Columns, source: str) -> Opened:
    """Returns the images in the tables by split."""
    tables: dict[str, pa.Table] = {name: split.with_format("arrow")[:] for name, split in splits.items()}
    features = {name: feature for split in splits.values() for name, feature in split.features.items()}
    stated, columns = columns, columns.in_table(features, source)
    for split in splits.values():
        columns.in_table(split.features, source)
    if columns.label_column is not None:
        names = _class_names(next(iter(splits.values())).features, columns.label_column)
        labels, class_names = _labels(tables, columns.label_column, names, source)
        others = [name for name in _label_columns(features) if name != columns.label_column]
        notes, remedy = (), ""
        if stated.label_column is None and (others or columns.label_column not in LABEL_KEYS):
            unread = f" ({', '.join(others)} may be labels too)" if others else ""
            notes = (f"the labels are the column {columns.label_column!r}{unread}; --label-column NAME takes another",)
    else:
        labels, class_names = {name: torch.zeros(len(table), dtype=torch.int64) for name, table in tables.items()}, ()
        notes = (f"no label column (it has {', '.join(features)}): the images are used without labels",)
        remedy = 'name their column (--label-column NAME, in Python columns=Columns(label_column="NAME"))'
    stored = {}
    for name, table in tables.items():
        # A table may hold several splits, each with its own rows.
        images = _encoded_images(table, columns, source)
        for split, rows in _rows_by_split(table, name, columns, source).items():
            stored[split] = _stored_rows(images, labels[name], rows, f"of split {split} of {source}")
    if columns.test_column is not None and not any(map(_is_test, stored)):
        raise DataError(
            f"{source} has no test split (it has {', '.join(stored)}), whose rows the column {columns.test_column!r} "
            "could choose; omit --test-column, in Python Columns(test_column=...)."
        )
    return Opened(stored, class_names, notes, remedy=remedy)


def _is_test(split: str) -> bool:
    return SPLITS.get(split.lower()) == "test"


def _wrong_column(kind: str, column: "pa.ChunkedArray", source: str, needed: str) -> DataError:
    return DataError(
        f"the {kind} column of {source} holds {column.type}, not {needed}. Give --{kind}-column NAME, in Python "
        f'columns=Columns({kind}_column="NAME").'
    )


def _encoded_images(table: "pa.Table", columns: Columns, source: str) -> "pa.ChunkedArray":
    """Returns the column of encoded images. Threads decode them later (see `LoadedImages`)."""
    import pyarrow.types as kinds

    column = table.column(columns.image_column)
    kind: Any = column.type
    is_bytes = kinds.is_binary(kind) or kinds.is_large_binary(kind)
    if not is_bytes and not (kinds.is_struct(kind) and kind.get_field_index("bytes") >= 0):
        raise _wrong_column("image", column, source, "encoded images, as bytes or a struct {bytes, path}")
    return column


def _rows_by_split(table: "pa.Table", name: str, columns: Columns, source: str) -> dict[str, Int[Tensor, "rows"]]:
    """Returns the row numbers of a table, grouped by split.

    If `name` is not empty, all rows belong to this split. Otherwise, rows are grouped by the column `split`. Without
    such a column, all rows belong to train. If `columns` names a test column, the test split has only the rows in which
    this column is true.
    """
    has_column = not name and "split" in table.column_names
    split_of_row = table.column("split").to_pylist() if has_column else [name or "train"] * len(table)
    values = np.asarray(split_of_row, dtype=object)
    # A table without rows has no values to group by. It still counts as a split, so that an error can name it.
    names = dict.fromkeys(split_of_row) or (name or "train",)
    found = {str(split): np.flatnonzero(values == split) for split in names}
    for split in [split for split in found if columns.test_column is not None and _is_test(split)]:
        if columns.test_column not in table.column_names or str(table.column(columns.test_column).type) != "bool":
            raise DataError(
                f"{source} has no column {columns.test_column!r} of true and false (it has "
                f"{', '.join(table.column_names)}) to choose the test images."
            )
        is_selected = np.asarray(table.column(columns.test_column).to_pylist(), dtype=bool)
        found[split] = found[split][is_selected[found[split]]]
    return {split: torch.from_numpy(rows) for split, rows in found.items()}


def _stored_rows(
    images: "pa.ChunkedArray", labels: Int[Tensor, "_"], rows: Int[Tensor, "_"], source: str
) -> StoredImages:
    """Returns the given rows of an image column. A cell holds bytes, or a mapping with "bytes", "path" or both."""

    def image(position: int) -> dict:
        cell = images[int(rows[position])].as_py()
        return {"bytes": cell} if isinstance(cell, bytes) else cell or {}

    def content(position: int) -> bytes:
        record = image(position)
        if record.get("bytes") is None and record.get("path"):
            return require_regular(record["path"], DataError).read_bytes()
        return record.get("bytes") or b""  # decoding empty bytes raises the error for a corrupt image

    def where(position: int) -> str:
        path = image(position).get("path")
        return f"row {int(rows[position])} {source}" + (f" ({path})" if path else "")

    return StoredImages(labels[rows], rows, content, where)


def _labels(
    tables: Mapping[str, "pa.Table"], label_column: str, class_names: tuple[str, ...], source: str
) -> tuple[dict[str, Int[Tensor, "_"]], tuple[str, ...]]:
    """Returns the labels of every split as class numbers, and the class names, which are the same for all splits.

    Labels are words or numbers. For numbers, `class_names` are the names that the schema gives to the classes. If the
    schema gives no names, each class is named by its number.
    """
    values = {name: _label_values(table.column(label_column), source) for name, table in tables.items()}
    are_words = {name: each.dtype.kind not in "iu" for name, each in values.items()}
    if len({*are_words.values()}) > 1:
        kinds = ", ".join(f"{name} has {'words' if words else 'numbers'}" for name, words in are_words.items())
        raise DataError(f"label mismatch between the splits of {source}: {kinds}; give all splits the same classes.")
    if all(are_words.values()):
        # Class names are sorted, so class numbers do not depend on the order of rows or splits.
        class_names = tuple(np.unique(np.concatenate([*values.values()])).tolist())
        values = {name: np.searchsorted(class_names, each) for name, each in values.items()}
    elif not class_names:
        highest = max(int(each.max(initial=-1)) for each in values.values())
        if highest >= MAX_CLASSES:
            raise DataError(
                f"{source} has the label {highest} and no class names, so labels count classes from 0; at most "
                f"{MAX_CLASSES:,} classes are supported. Number the classes anew, or give them names."
            )
        class_names = tuple(map(str, range(highest + 1)))
    return {name: torch.as_tensor(each, dtype=torch.int64) for name, each in values.items()}, class_names


def _label_values(column: "pa.ChunkedArray", source: str) -> np.ndarray:
    """Returns the words or the numbers in a label column."""
    import pyarrow.types as kinds

    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(f"{source} has {column.null_count} rows without a label, the first is row {row}; remove them.")
    if kinds.is_string(column.type) or kinds.is_large_string(column.type):
        return np.asarray(column.to_pylist())
    if not kinds.is_integer(column.type):
        raise _wrong_column("label", column, source, "class numbers or names")
    return column.to_numpy().astype(np.int64)
