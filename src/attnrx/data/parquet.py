"""Tables of encoded images: parquet files and hub datasets, read with the `datasets` library."""

import glob
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnrx.data.images import IMAGE_KEYS, LABEL_KEYS
from attnrx.data.loaded_images import StoredImages
from attnrx.data.splits import SPLITS, Opened, numbered_classes
from attnrx.support.arguments import described_error, require_fields
from attnrx.support.errors import DataError, nearest
from attnrx.support.hardware import cache_folder
from attnrx.support.optional import required_module
from attnrx.support.records import require_regular
from attnrx.support.shapes import Int, Tensor

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa


@dataclass(frozen=True)
class Columns:
    """The names of the columns that hold the image, its label and, in a file of several splits, the split.

    By default image and label are in the first column of IMAGE_KEYS and of LABEL_KEYS (`data.images`) that a table has;
    without such a label column the images have no labels. `test_column` may name a boolean column: of the test images
    only the rows with true are used.
    """

    example = "attnrx.data.Columns(image_column='image')"

    image_column: str | None = None
    label_column: str | None = None
    split_column: str = "split"
    test_column: str | None = None

    def __post_init__(self):
        require_fields(self)

    def in_table(self, names: Sequence[str], source: str) -> "Columns":
        """Returns the columns that a table of these names has.

        Raises:
            DataError: It lacks the image, or a column that was named.
        """
        image = self.image_column or next((key for key in IMAGE_KEYS if key in names), "image")
        label = self.label_column or next((key for key in LABEL_KEYS if key in names), None)
        for kind, wanted in (("image", image), ("label", label)):
            if wanted is not None and wanted not in names:
                raise DataError(
                    f"{source} has no {kind} column {wanted!r} (it has {', '.join(names)}): {nearest(wanted, names)} "
                    f'Give --{kind}-column NAME, in Python columns=Columns({kind}_column="NAME").'
                )
        return replace(self, image_column=image, label_column=label)


def open_hub(
    hub_id: str,
    columns: Columns,
    folder: str | None = None,
    revision: str | None = None,
    ignored: Sequence[str] = (),
) -> Opened:
    """Downloads a dataset, or finds it in the hub's own cache, and reads the labels.

    `ignored` names splits without use, such as a test split with hidden labels.

    Raises:
        DataError: The dataset cannot be loaded, has no split to use, or its columns or labels do not fit.
        NotSupported: `datasets` is not installed.
    """
    datasets = required_module("datasets", "data", "hub datasets")
    try:
        loaded = datasets.load_dataset(hub_id, data_dir=folder, revision=revision)
        splits = {str(name): split for name, split in loaded.items() if name not in ignored}
    except Exception as error:  # of five libraries: network, gating, cache, disk, parsing
        raise DataError(
            f"cannot load the hub dataset {hub_id}: {described_error(error).rstrip('.')}. Check the network and, for a "
            "dataset behind a licence, that you accepted it and are logged in; or give the path of a local copy "
            "(parquet, a folder of images), or put <name>.parquet into the folder in ATTNRX_DATA."
        ) from error
    source = f"the hub dataset {hub_id}"
    if not splits:
        raise DataError(f"{source} has no split to use; check the name.")
    return _opened(splits, columns, source)


def open_parquet(root: Path, files: Sequence[Path], columns: Columns) -> Opened:
    """Maps parquet files into memory, grouped into splits by their names, or by a column where the names contain no
    split, and reads the labels.

    Raises:
        DataError: A file is damaged or empty, or the labels of the files do not fit together.
        NotSupported: `datasets` is not installed.
    """
    import pyarrow.parquet as parquet

    tables = {}
    for name, group in _group_by_split(files, root).items():
        filled = [file for file in group if parquet.read_metadata(file).num_rows]
        if not filled:
            raise DataError(f"the {name or 'train'} split of {root} is empty; give it images or remove it.")
        tables[name] = _load_parquet(filled)
    return _opened(tables, columns, str(root))


def parquet_columns(files: Sequence[Path], columns: Columns) -> Columns:
    """Returns the columns of the first file; checks that every file is whole, has them and numbers the same classes.

    The class names of a table are those of its first file, so another order would mislabel images.

    Raises:
        DataError: A file is damaged, lacks a column, or names other classes than the others.
        NotSupported: `datasets` is not installed.
    """
    features = {file: _read_features(file) for file in files}
    first = features[files[0]]
    columns = columns.in_table([*first], str(files[0]))
    for file, found in features.items():
        label = columns.in_table([*found], str(file)).label_column
        if label is not None and _class_names(found, label) != _class_names(first, label):
            raise DataError(
                f"label mismatch between {files[0]} and {file}: their schemas name different classes for {label!r}; "
                "write both with the same list of classes."
            )
    return columns


def _group_by_split(files: Sequence[Path], root: Path) -> Mapping[str, Sequence[Path]]:
    """Groups files by the split that their name or folder below `root` names; files without one form the group ""."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(files):
        # A folder above the dataset, e.g. /data/test/set, does not name a split, and one file holds all splits.
        below = file.relative_to(root) if file.is_relative_to(root) and file != root else Path(file.name)
        # Whole words: latest.parquet does not name the test split, train-00000-of-00002.parquet the train split.
        words = re.split(r"[^a-z]+", str(below).lower()) if len(files) > 1 else ()
        groups[next((SPLITS[word] for word in words if word in SPLITS), "")].append(file)
    if "" in groups and len(groups) > 1:
        raise DataError(
            f"{root} holds files of {', '.join(sorted(name for name in groups if name))}, but {groups[''][0].name} "
            "belongs to no split; put train, validation or test into every file name, or into its folder's."
        )
    return groups


def _read_features(file: Path) -> "datasets.Features":
    """Returns the columns of a parquet file as `datasets` reads them, with the class names that its schema states."""
    datasets = required_module("datasets", "data", "parquet files")
    import pyarrow.parquet as parquet

    require_regular(file, DataError)
    try:
        return datasets.Features.from_arrow_schema(parquet.read_schema(file))
    except Exception as error:  # pyarrow's, or of the metadata
        raise DataError(
            f"{file} is not a whole parquet file ({described_error(error)}); make or copy it again."
        ) from error


def _class_names(features: "datasets.Features", column: str) -> tuple[str, ...]:
    return tuple(getattr(features.get(column), "names", None) or ())


def _load_parquet(files: Sequence[Path]) -> "datasets.Dataset":
    """Maps parquet files into memory; `datasets` writes a copy for it into the cache folder, once."""
    datasets = required_module("datasets", "data", "parquet files")
    # A copy for every state of the files: `datasets` looks at their times alone.
    paths = [file.absolute() for file in files]
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    copy = cache_folder() / "datasets" / sha256(repr(states).encode()).hexdigest()[:16]
    try:
        # Names of files are patterns there.
        return datasets.Dataset.from_parquet([glob.escape(str(path)) for path in paths], cache_dir=str(copy))
    except Exception as error:  # damaged pages, unlike columns, a damaged copy, a full disk
        raise DataError(
            f"cannot read {files[0]}{' and its siblings' if len(files) > 1 else ''} as one table: "
            f"{described_error(error.__cause__ or error)}. The files of a split must be whole and have the same "
            f"columns; their copy is in {copy}."
        ) from error


def _opened(splits: Mapping[str, "datasets.Dataset"], columns: Columns, source: str) -> Opened:
    """Returns the images of tables by split."""
    tables: dict[str, pa.Table] = {name: split.with_format("arrow")[:] for name, split in splits.items()}
    found = [*dict.fromkeys(name for table in tables.values() for name in table.column_names)]
    columns = columns.in_table(found, source)
    for table in tables.values():
        columns.in_table(table.column_names, source)
    notes, remedy = (), ""
    if columns.label_column is not None:
        stated = _class_names(next(iter(splits.values())).features, columns.label_column)
        labels, class_names = _labels(tables, columns.label_column, stated, source)
    else:
        labels, class_names = {name: torch.zeros(len(table), dtype=torch.int64) for name, table in tables.items()}, ()
        notes = (f"no label column (it has {', '.join(found)}): the images are used without labels",)
        remedy = 'name their column (--label-column NAME, in Python columns=Columns(label_column="NAME"))'
    stored = {}
    for name, table in tables.items():
        # One table for all splits of a file; each has its own rows of it.
        images = _encoded_images(table, columns, source)
        for split, rows in _rows_by_split(table, name, columns, source).items():
            stored[split] = _stored(images, labels[name], rows, f"of split {name or 'train'} of {source}")
    if columns.test_column is not None and not any(map(_is_test, stored)):
        raise DataError(
            f"{source} has no test split (it has {', '.join(stored)}), whose rows the column {columns.test_column!r} "
            "could choose; omit --test-column, in Python Columns(test_column=...)."
        )
    return Opened(stored, class_names, notes, remedy=remedy)


def _is_test(split: str) -> bool:
    return SPLITS.get(split.lower()) == "test"


def _stored(images: "pa.ChunkedArray", labels: Int[Tensor, "_"], rows: Int[Tensor, "_"], source: str) -> StoredImages:
    """Returns some rows of a column of bytes or of {bytes, path}, of which either may be missing."""

    def image(position: int) -> dict:
        cell = images[int(rows[position])].as_py()
        return {"bytes": cell} if isinstance(cell, bytes) else cell or {}

    def content(position: int) -> bytes:
        record = image(position)
        if record.get("bytes") is None and record.get("path"):
            return require_regular(record["path"], DataError).read_bytes()
        return record.get("bytes") or b""  # decoding nothing raises the error of a corrupt image

    def where(position: int) -> str:
        path = image(position).get("path")
        return f"row {int(rows[position])} {source}" + (f" ({path})" if path else "")

    return StoredImages(labels[rows], rows, content, where)


def _rows_by_split(table: "pa.Table", name: str, columns: Columns, source: str) -> dict[str, Int[Tensor, "rows"]]:
    """Returns the rows of every split of a table: the table's own split, or those of its split column."""
    split_of_row = np.full(len(table), name or "train", dtype=object)
    if not name and columns.split_column in table.column_names:
        split_of_row = np.asarray(table.column(columns.split_column).to_pylist(), dtype=object)
    # A table without rows has no value to group by, but is a split too, so that it can be refused by its name.
    masks = {str(split): split_of_row == split for split in dict.fromkeys(split_of_row.tolist())} or {
        name or "train": split_of_row
    }
    tests = [split for split in masks if columns.test_column is not None and _is_test(split)]
    for split in tests:
        assert columns.test_column is not None
        if columns.test_column not in table.column_names or str(table.column(columns.test_column).type) != "bool":
            raise DataError(
                f"{source} has no column {columns.test_column!r} of true and false (it has "
                f"{', '.join(table.column_names)}) to choose the test images."
            )
        masks[split] = masks[split] & np.asarray(table.column(columns.test_column).to_pylist(), dtype=bool)
    return {split: torch.from_numpy(np.flatnonzero(mask)) for split, mask in masks.items()}


def _encoded_images(table: "pa.Table", columns: Columns, source: str) -> "pa.ChunkedArray":
    """Returns the column of encoded images; they are decoded in threads, see `LoadedImages`."""
    import pyarrow.types as kinds

    assert columns.image_column is not None
    column = table.column(columns.image_column)
    kind: Any = column.type
    is_bytes = kinds.is_binary(kind) or kinds.is_large_binary(kind)
    if not is_bytes and not (kinds.is_struct(kind) and kind.get_field_index("bytes") >= 0):
        raise DataError(
            f"column {columns.image_column!r} of {source} holds {kind}, not encoded images; "
            "it must hold bytes, or a struct {bytes, path}. Give --image-column NAME, in Python "
            'columns=Columns(image_column="NAME").'
        )
    return column


def _labels(
    tables: Mapping[str, "pa.Table"], label_column: str, class_names: tuple[str, ...], source: str
) -> tuple[dict[str, Int[Tensor, "_"]], tuple[str, ...]]:
    """Returns every split's labels as numbers of one list of classes, and the names of the classes.

    Labels are words, or numbers that are named by the schema (`class_names`) or by a column `<label>_name`.
    """
    values = {name: _label_values(table.column(label_column), label_column, source) for name, table in tables.items()}
    are_words = {name: each.dtype.kind not in "iu" for name, each in values.items()}
    if len({*are_words.values()}) > 1:
        kinds = ", ".join(f"{name} has {'words' if words else 'numbers'}" for name, words in are_words.items())
        raise DataError(f"label mismatch between the splits of {source}: {kinds}; give all splits the same classes.")
    if all(are_words.values()):
        # Sorted, so that the numbers do not depend on the order of the rows or splits.
        class_names = tuple(np.unique(np.concatenate([*values.values()])).tolist())
        values = {name: np.searchsorted(class_names, each) for name, each in values.items()}
        return {name: torch.as_tensor(each, dtype=torch.int64) for name, each in values.items()}, class_names
    by_number, named = dict(enumerate(class_names)), f"{label_column}_name"
    for name, table in tables.items():
        if named not in table.column_names:
            continue
        pairs = zip(values[name].tolist(), table.column(named).to_pylist(), strict=True)
        for number, word in dict.fromkeys(pairs):  # every different pair once, in the order of the rows
            if by_number.setdefault(number, word) != word:
                raise DataError(
                    f"label mismatch in {source}: label {number} is {by_number[number]!r} in one row and {word!r} in "
                    "another; make the labels and their names agree."
                )
    if not class_names:
        highest = max(int(each.max(initial=-1)) for each in values.values())
        class_names = tuple(
            by_number.get(number, name) for number, name in enumerate(numbered_classes(highest, source))
        )
    return {name: torch.as_tensor(each, dtype=torch.int64) for name, each in values.items()}, class_names


def _label_values(column: "pa.ChunkedArray", label_column: str, source: str) -> np.ndarray:
    """Returns the words or the numbers of a label column."""
    import pyarrow.types as kinds

    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(f"{source} has {column.null_count} rows without a label, the first is row {row}; remove them.")
    if kinds.is_string(column.type) or kinds.is_large_string(column.type):
        return np.asarray(column.to_pylist())
    if not kinds.is_integer(column.type):
        raise DataError(
            f"column {label_column!r} of {source} holds {column.type}, not class numbers or names. "
            'Give --label-column NAME, in Python columns=Columns(label_column="NAME").'
        )
    return column.to_numpy().astype(np.int64)
