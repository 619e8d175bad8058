"""Parquet files and hub datasets, read with the `datasets` library."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnrx.data.files import group_by_split, stamp
from attnrx.data.splits import SPLITS, DatasetReader, Opened, StoredImages, numbered_classes
from attnrx.support.arguments import TEXT, optional, require_fields
from attnrx.support.errors import DataError, nearest
from attnrx.support.hardware import cache_folder
from attnrx.support.hub import local_copies_if_unreachable
from attnrx.support.optional import required_module
from attnrx.support.shapes import Int, Tensor
from attnrx.support.validation import require_regular

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

LABEL = "label"


@dataclass(frozen=True)
class Columns:
    """The names of the columns that hold the image, its label and, in a file of several splits, the split.

    Without a `label_column` it is "label" where a table has it, and else the images have no labels. `test_column` may
    name a boolean column: of the test images only the rows with true are used.
    """

    image_column: str = "image"
    label_column: str | None = None
    split_column: str = "split"
    test_column: str | None = None

    def __post_init__(self):
        require_fields(
            self, image_column=TEXT, label_column=optional(TEXT), split_column=TEXT, test_column=optional(TEXT)
        )

    def fits(self, names: Collection[str], *, labelled: bool) -> bool:
        """Whether a table of these columns has the image and, with `labelled`, the label."""
        label = self.label_column or (LABEL if labelled else None)
        return self.image_column in names and (label is None or label in names)

    def of(self, names: Collection[str]) -> "Columns":
        """Returns the columns for a table of these names: one without labels has no label column."""
        return replace(self, label_column=LABEL) if self.label_column is None and LABEL in names else self


@dataclass(frozen=True)
class HubReader(DatasetReader):
    """A hub dataset. `ignored` names splits without use, such as a test split with hidden labels."""

    hub_id: str
    columns: Columns
    folder: str | None = None
    revision: str | None = None
    ignored: tuple[str, ...] = ()

    def identity(self) -> str:
        """Names the dataset: once decoded, the local copy is used, also without a network."""
        return f"hub:{self.hub_id}:{self.folder}:{self.revision}:{self.columns}"

    def open(self) -> Opened:
        """Downloads the dataset, or finds it in the hub's own cache, and reads the labels."""
        source = f"the hub dataset {self.hub_id}"
        tables = {name: table for name, table in self._load().items() if name not in self.ignored}
        if not tables:
            raise DataError(f"{source} has no split to use; check the name.")
        return _opened(tables, self.columns, source, lambda name, row: f"row {row} of split {name} of {source}")

    def _load(self) -> "dict[str, datasets.Dataset]":
        datasets = required_module("datasets", "data", "hub datasets")
        # After the import of `datasets`: only imported modules can be switched to their local copies.
        with local_copies_if_unreachable() as unreachable:
            try:
                loaded = datasets.load_dataset(self.hub_id, data_dir=self.folder, revision=self.revision)
                return {str(name): split for name, split in loaded.items()}
            except Exception as error:  # of five libraries: network, gating, cache, disk, parsing
                reason = unreachable or _first_line(error)
                raise DataError(
                    f"cannot load the hub dataset {self.hub_id}: {reason.rstrip('.')}. Check the network and, for a "
                    "dataset behind a licence, that you accepted it and are logged in; or give the path of a local "
                    "copy (parquet, a folder of images, tar shards), or put <name>.parquet into the folder in "
                    "ATTNRX_DATA."
                ) from error


@dataclass(frozen=True)
class ParquetReader(DatasetReader):
    """Parquet files, grouped into splits by their names, or by a column where the names contain no split."""

    root: Path
    files: tuple[Path, ...]
    candidates: tuple[Columns, ...]  # the first whose image and label are there is used

    def identity(self) -> str:
        return f"parquet:{self.candidates}:{stamp(self.files)}"

    def require_readable(self) -> None:
        self._columns()

    def open(self) -> Opened:
        """Maps the files into memory and reads the labels."""
        import pyarrow.parquet as parquet

        groups = group_by_split(self.files, self.root)
        columns = self._columns()
        # From the footers of the files; the rows of a table are those of its files, in this order.
        counts = {
            name: {file: parquet.read_metadata(file).num_rows for file in files} for name, files in groups.items()
        }
        for name, rows_by_file in counts.items():
            if not any(rows_by_file.values()):
                raise DataError(f"the {name or 'train'} split of {self.root} is empty; give it images or remove it.")

        def name_row(name: str, row: int) -> str:
            """Returns `file, row n`, counting from 0 inside the file."""
            ends = zip(counts[name].items(), accumulate(counts[name].values()), strict=True)
            return next(f"{file}, row {row - end + count}" for (file, count), end in ends if row < end)

        tables = {name: _load_parquet(files) for name, files in groups.items()}
        return _opened(tables, columns, str(self.root), name_row)

    def _columns(self) -> Columns:
        """Returns the first candidate that fits; checks that every file has its columns and numbers the same classes.

        `datasets` takes the class names of all files from the first one, so another order would mislabel images.
        """
        features = {file: _features(file) for file in self.files}
        first = features[self.files[0]]
        # One with labels before one without: the columns of the catalogue may name the label otherwise.
        fitting = (
            candidate.of(first)
            for labelled in (True, False)
            for candidate in self.candidates
            if candidate.fits(first, labelled=labelled)
        )
        columns = next(fitting, self.candidates[0])
        for file, file_features in features.items():
            _check_columns(list(file_features), columns, str(file))
            if columns.label_column is None:
                continue
            if _class_names(file_features[columns.label_column]) != _class_names(first[columns.label_column]):
                raise DataError(
                    f"label mismatch between {self.files[0]} and {file}: their schemas name different classes for "
                    f"{columns.label_column!r}; write both with the same list of classes."
                )
        return columns


def _features(file: Path) -> "datasets.Features":
    datasets = required_module("datasets", "data", "parquet files")
    parquet = required_module("pyarrow.parquet", "data", "parquet files")
    require_regular(file, DataError)
    try:
        return datasets.Features.from_arrow_schema(parquet.read_schema(file))
    except Exception as error:  # pyarrow's, or of the metadata that datasets parses
        raise DataError(f"{file} is not a whole parquet file ({_first_line(error)}); make or copy it again.") from error


def _load_parquet(files: tuple[Path, ...]) -> "datasets.Dataset":
    """Converts parquet files to a memory-mapped table in the user's cache folder, once."""
    datasets = required_module("datasets", "data", "parquet files")
    parquet = required_module("pyarrow.parquet", "data", "parquet files")
    # A folder for every content, because `datasets` knows files by their names and times alone.
    paths, cache = [str(file) for file in files], str(cache_folder() / "arrow" / stamp(files)[:16])
    try:
        try:
            return datasets.Dataset.from_parquet(paths, cache_dir=cache)
        except OSError:  # the cache folder cannot be written: a full disk, a file of that name
            return datasets.concatenate_datasets([datasets.Dataset(parquet.ParquetFile(path).read()) for path in paths])
    except Exception as error:  # of pyarrow, fsspec and datasets: damaged pages, unlike columns
        # datasets wraps the cause in an error of its own, DatasetGenerationError.
        cause = error.__cause__ or error
        raise DataError(
            f"cannot read {files[0]}{' and its siblings' if len(files) > 1 else ''} as one table: "
            f"{_first_line(cause)}. The files of a split must be whole and have the same columns."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _opened(
    tables: "Mapping[str, datasets.Dataset]", columns: Columns, source: str, name_row: Callable[[str, int], str]
) -> Opened:
    columns = columns.of({name for table in tables.values() for name in table.column_names})
    for table in tables.values():
        _check_columns(table.column_names, columns, source)
    labels, class_names, notes = _read_labels(tables, columns, source)
    splits = {}
    for name, table in tables.items():
        # One table for all splits of a file; each has its own rows of it.
        images = _encoded_images(table, columns, source)
        for split, rows in _rows_by_split(table, name, columns, source).items():
            splits[split] = _stored(images, labels[name], rows, partial(name_row, name))
    if columns.test_column is not None and not any(map(_is_test, splits)):
        raise DataError(
            f"{source} has no test split (it has {', '.join(splits)}), whose rows the column {columns.test_column!r} "
            "could choose; omit --test-column, in Python Columns(test_column=...)."
        )
    return Opened(splits, class_names, notes)


def _read_labels(
    tables: "Mapping[str, datasets.Dataset]", columns: Columns, source: str
) -> tuple[dict[str, Int[Tensor, "_"]], tuple[str, ...], tuple[str, ...]]:
    """Returns the labels of every table, the class names, and notes; without labels zeros, and no class names."""
    if columns.label_column is not None:
        read = {name: _labels(table, columns.label_column, source) for name, table in tables.items()}
        return (*_unify_labels(read, source), ())
    found = ", ".join(next(iter(tables.values())).column_names)
    note = f"no label column (it has {found}): the images are used without labels"
    return {name: torch.zeros(len(table), dtype=torch.int64) for name, table in tables.items()}, (), (note,)


def _is_test(split: str) -> bool:
    return SPLITS.get(split.lower()) == "test"


def _stored(
    images: "datasets.Dataset", labels: Int[Tensor, "_"], rows: Int[Tensor, "_"], name_row: Callable[[int], str]
) -> StoredImages:
    """Returns some rows of a table whose one column holds {bytes, path}, of which either may be missing."""

    def image(position: int) -> dict:
        # The table has one column, in which a cell may be null.
        return next(iter(images[int(rows[position])].values())) or {"bytes": None, "path": None}

    def content(position: int) -> bytes:
        record = image(position)
        if record["bytes"] is None and record["path"]:
            return require_regular(record["path"], DataError).read_bytes()
        return record["bytes"] or b""  # decoding nothing raises the error of a corrupt image

    def where(position: int) -> str:
        path = image(position)["path"]
        return name_row(int(rows[position])) + (f" ({path})" if path else "")

    return StoredImages(labels[rows], rows, content, where)


def _check_columns(found: list[str], columns: Columns, source: str) -> None:
    for kind, wanted in (("image", columns.image_column), ("label", columns.label_column)):
        if wanted is not None and wanted not in found:
            raise DataError(
                f"{source} has no {kind} column {wanted!r} (it has {', '.join(found)}): {nearest(wanted, found)} "
                f'Give --{kind}-column NAME, in Python columns=Columns({kind}_column="NAME").'
            )


def _rows_by_split(
    table: "datasets.Dataset", name: str, columns: Columns, source: str
) -> dict[str, Int[Tensor, "rows"]]:
    """Returns the rows of every split of a table: the table's own split, or those of its split column."""
    split_of_row = np.full(len(table), name or "train", dtype=object)
    if not name and columns.split_column in table.column_names:
        split_of_row = np.asarray(table[columns.split_column][:], dtype=object)
    # A table without rows has no value to group by, but is a split too, so that it can be refused by its name.
    masks = {str(split): split_of_row == split for split in dict.fromkeys(split_of_row.tolist())} or {
        name or "train": split_of_row
    }
    tests = [split for split in masks if columns.test_column is not None and _is_test(split)]
    for split in tests:
        assert columns.test_column is not None
        if getattr(table.features.get(columns.test_column), "dtype", None) != "bool":
            raise DataError(
                f"{source} has no column {columns.test_column!r} of true and false (it has "
                f"{', '.join(table.column_names)}) to choose the test images."
            )
        masks[split] = masks[split] & np.asarray(table[columns.test_column][:], dtype=bool)
    return {split: torch.from_numpy(np.flatnonzero(mask)) for split, mask in masks.items()}


def _encoded_images(table: "datasets.Dataset", columns: Columns, source: str) -> "datasets.Dataset":
    """Returns the column of encoded images alone, undecoded."""
    import datasets

    feature = table.features[columns.image_column]
    encoded = isinstance(feature, datasets.Image) or getattr(feature, "dtype", None) in ("binary", "large_binary")
    if not encoded and not (isinstance(feature, dict) and "bytes" in feature):
        kind = table.data.schema.field(columns.image_column).type
        raise DataError(
            f"column {columns.image_column!r} of {source} holds {kind}, not encoded images; "
            "it must hold bytes, or a struct {bytes, path}. Give --image-column NAME, in Python "
            'columns=Columns(image_column="NAME").'
        )
    # Reading a row then touches no other column. Images are decoded in threads, see `Stream` and `decode_all`.
    images = table.select_columns([columns.image_column]).with_format(None)
    return images.cast_column(columns.image_column, datasets.Image(decode=False))


@dataclass(frozen=True)
class _LabelColumn:
    """One label column: numbers or words, and the class names that the schema or another column gives to numbers."""

    values: np.ndarray
    names: tuple[str, ...] | None

    @property
    def words(self) -> bool:
        return self.values.dtype.kind not in "iu"


def _class_names(feature: object) -> tuple[str, ...] | None:
    names = getattr(feature, "names", None)
    return None if names is None else tuple(names)


def _labels(table: "datasets.Dataset", label_column: str, source: str) -> _LabelColumn:
    """Reads the labels, with their names from the schema or from a column `<label>_name`."""
    import pyarrow.types as kinds

    column = _arrow_column(table, label_column)
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(f"{source} has {column.null_count} rows without a label, the first is row {row}; remove them.")
    if kinds.is_string(column.type) or kinds.is_large_string(column.type):
        return _LabelColumn(np.asarray(column.to_pylist()), None)
    if not kinds.is_integer(column.type):
        raise DataError(
            f"column {label_column!r} of {source} holds {column.type}, not class numbers or names. "
            'Give --label-column NAME, in Python columns=Columns(label_column="NAME").'
        )
    values = column.to_numpy().astype(np.int64)
    names = _class_names(table.features[label_column])
    named = f"{label_column}_name"
    if named in table.column_names:
        names = _names_by_number(values, _arrow_column(table, named).to_pylist(), names, source)
    return _LabelColumn(values, names)


def _arrow_column(table: "datasets.Dataset", name: str) -> "pa.ChunkedArray":
    # As Arrow, because a column of Python objects takes many times the memory.
    arrow: Any = table.select_columns([name]).with_format("arrow")
    return arrow[:].column(0)


def _names_by_number(
    values: np.ndarray, words: list[str], names: tuple[str, ...] | None, source: str
) -> tuple[str, ...] | None:
    """Returns the class names of a column of names; a number with two names means that labels are mixed up."""
    by_label: dict[int, str] = dict(enumerate(names or ()))
    # Every different pair once, in the order of the rows.
    for label, word in dict.fromkeys(zip(values.tolist(), words, strict=True)):
        if by_label.setdefault(label, word) != word:
            raise DataError(
                f"label mismatch in {source}: label {label} is {by_label[label]!r} in one row and {word!r} in another; "
                "make the labels and their names agree."
            )
    if names or not by_label or min(by_label) < 0:
        return names
    return tuple(by_label.get(label, name) for label, name in enumerate(numbered_classes(max(by_label), source)))


def _unify_labels(
    columns: Mapping[str, _LabelColumn], source: str
) -> tuple[dict[str, Int[Tensor, "_"]], tuple[str, ...]]:
    """Returns every split's labels as numbers of one list of classes."""
    first_name, first = next(iter(columns.items()))
    for name, column in columns.items():
        if column.words != first.words or (column.names and first.names and column.names != first.names):
            raise DataError(
                f"label mismatch between the splits of {source}: {first_name} has {_summary(first)}, {name} has "
                f"{_summary(column)}; give all splits the same classes in the same order."
            )
    if first.words:
        # Sorted, so that the numbers do not depend on the order of the rows or splits.
        names = tuple(np.unique(np.concatenate([column.values for column in columns.values()])).tolist())
        numbered = {name: np.searchsorted(names, column.values) for name, column in columns.items()}
    else:
        numbered = {name: column.values for name, column in columns.items()}
        highest = max(int(values.max(initial=-1)) for values in numbered.values())
        names = first.names or numbered_classes(highest, source)
    return {name: torch.as_tensor(values, dtype=torch.int64) for name, values in numbered.items()}, names


def _summary(column: _LabelColumn) -> str:
    if column.words:
        return "words"
    if column.names is None:
        return "numbers"
    return f"{len(column.names)} classes ({', '.join(column.names[:3])}, ...)"
