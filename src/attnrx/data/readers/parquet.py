"""Local parquet: one file with a split column, one file per split, or many; the columns of a hub image dataset."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from attnrx.data.cache import cache_folder
from attnrx.data.readers.arrow import (
    ArrowRecords,
    Columns,
    LabelColumn,
    check_columns,
    declared_names,
    image_column,
    label_column,
    marked_rows,
    unify_labels,
)
from attnrx.data.readers.reader import SPLITS, Opened, Reader, Records
from attnrx.errors import DataError
from attnrx.validation import require_regular

if TYPE_CHECKING:
    import pyarrow as pa


READ_WHOLE = 2**30  # bytes of parquet that are read into memory at once


@dataclass(frozen=True)
class ParquetReader(Reader):
    """Parquet files, grouped into splits by their names, or by a column where the names say nothing."""

    root: Path
    files: tuple[Path, ...]
    candidates: tuple[Columns, ...]  # the first whose image and label are there is used

    def identity(self) -> str:
        """Hashes the names, sizes and times of the files and the columns requested."""
        return f"parquet:{self.candidates}:{stamp(self.files)}"

    def open(self) -> Opened:
        """Maps the files into memory and reads the labels."""
        groups = group_by_split(self.files, self.root)
        place = str(self.root)
        columns = self._columns()
        tables = {name: _table(files, columns) for name, files in groups.items()}
        labels = {name: label_column(table, columns, place) for name, table in tables.items()}
        if list(groups) == [""] and columns.split_column in tables[""].column_names:
            return self._open_by_column(tables[""], labels[""], columns)
        numbers, class_names = unify_labels(labels, place)
        splits: dict[str, Records] = {}
        for name, table in tables.items():
            images = image_column(table, columns, place)
            kept = marked_rows(table, columns, place) if name == "test" else np.ones(len(table), dtype=bool)
            rows = torch.from_numpy(np.flatnonzero(kept))
            splits[name or "train"] = ArrowRecords(images, numbers[name][rows], rows, FileRows(groups[name]).name)
        return Opened(splits, class_names)

    def _columns(self) -> Columns:
        """Chooses the names of the columns, and checks that every file has them and numbers the same classes."""
        found = {file: _schema(file) for file in self.files}
        first = found[self.files[0]]
        fitting = (
            columns for columns in self.candidates if {columns.image_column, columns.label_column} <= set(first.names)
        )
        columns = next(fitting, self.candidates[0])
        for file, schema in found.items():
            check_columns(schema.names, columns, str(file))
            if declared_names(schema, columns.label_column) != declared_names(first, columns.label_column):
                raise DataError(
                    f"label mismatch between {self.files[0]} and {file}: their schemas name different classes for "
                    f"{columns.label_column!r}; write both with the same list of classes."
                )
        return columns

    def _open_by_column(self, table: "pa.Table", labels: LabelColumn, columns: Columns) -> Opened:
        place = str(self.root)
        numbers, class_names = unify_labels({"": labels}, place)
        images = image_column(table, columns, place)
        belongs = np.asarray(table.column(columns.split_column).to_pylist(), dtype=object)
        splits: dict[str, Records] = {}
        for name in dict.fromkeys(belongs.tolist()):
            own = belongs == name
            if name == "test":
                own &= marked_rows(table, columns, place)
            rows = torch.from_numpy(np.flatnonzero(own))
            splits[str(name)] = ArrowRecords(images, numbers[""][rows], rows, FileRows(self.files).name)
        return Opened(splits, class_names)


@dataclass(frozen=True)
class FileRows:
    """Finds the file of a row when several files were read as one; the counts are only read when something is wrong."""

    files: tuple[Path, ...]

    def name(self, row: int) -> str:
        """Returns `file, row n`, counting from 0 inside the file."""
        import pyarrow.parquet as parquet

        counts = [parquet.read_metadata(file).num_rows for file in self.files]
        for file, count, end in zip(self.files, counts, accumulate(counts), strict=True):
            if row < end:
                return f"{file}, row {row - end + count}"
        return f"row {row}"


def stamp(files: Iterable[Path]) -> str:
    """Hashes the paths, sizes and modification times of files: cheap, and different when one of them changes."""
    seen = hashlib.sha256()
    for file in files:
        status = require_regular(file, DataError).stat()
        seen.update(f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return seen.hexdigest()


def split_in_path(path: Path | str) -> str:
    """Returns the split that a path names (`val/0001.tar`, `train-00000-of-00002.parquet`), or an empty text."""
    words = re.split(r"[^a-z]+", str(path).lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def group_by_split(files: Iterable[Path], root: Path) -> Mapping[str, tuple[Path, ...]]:
    """Groups files by the split that their name or folder below `root` says; if none says any, in one named ""."""
    files = tuple(files)
    groups: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        below = file.relative_to(root) if file.is_relative_to(root) and file != root else Path(file.name)
        groups[split_in_path(below) if len(files) > 1 else ""].append(file)
    if "" in groups and len(groups) > 1:
        raise DataError(
            f"{root} holds files of {', '.join(sorted(name for name in groups if name))}, but {groups[''][0].name} "
            "belongs to no split; put train, validation or test into every file name, or into its folder's."
        )
    return {name: tuple(sorted(group)) for name, group in groups.items()}


def _schema(file: Path) -> "pa.Schema":
    import pyarrow.parquet as parquet
    from pyarrow import ArrowException

    require_regular(file, DataError)
    try:
        return parquet.read_schema(file)
    except (ArrowException, OSError) as error:
        raise DataError(f"{file} is not a whole parquet file ({error}); make or copy it again.") from error


def _table(files: tuple[Path, ...], columns: Columns) -> "pa.Table":
    """Reads small files into memory; `datasets` makes a memory-mapped copy of large ones."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    wanted = [
        columns.image_column,
        columns.label_column,
        f"{columns.label_column}_name",
        columns.split_column,
        columns.test_column,
    ]
    try:
        if sum(file.stat().st_size for file in files) > READ_WHOLE:
            return _mapped(files)
        names = parquet.read_schema(files[0]).names
        return pa.concat_tables(
            parquet.ParquetFile(file).read([name for name in wanted if name in names]) for file in files
        )
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DataError(
            f"cannot read {files[0]}{' and its siblings' if len(files) > 1 else ''} as one table: {error}. "
            "The files of a split must be whole and have the same columns."
        ) from error


def _mapped(files: tuple[Path, ...]) -> "pa.Table":
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        paths = [str(file) for file in files]
        place = str(cache_folder() / "arrow")
        return datasets.load_dataset("parquet", data_files={"train": paths}, split="train", cache_dir=place).data.table
    except DatasetsError as error:
        raise ValueError(str(error.__cause__ or error)) from error
