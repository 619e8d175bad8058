"""Encoded images and labels in memory-mapped Arrow tables, which parquet files and hub datasets become."""

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from attnrx.data.readers.reader import Records, numbered_classes
from attnrx.errors import DataError, nearest
from attnrx.shapes import Int, Tensor
from attnrx.validation import require_regular

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Columns:
    """The names of the columns that hold the image, its label and, in a file of several splits, the split.

    `test_column` may name a column of true and false: of the test images only those that it marks are used.
    """

    image_column: str = "image"
    label_column: str = "label"
    split_column: str = "split"
    test_column: str | None = None


class ArrowRecords(Records):
    """Some rows of a table whose image column holds encoded bytes, or a struct of bytes and path."""

    def __init__(self, images: "pa.ChunkedArray", labels: Tensor, rows: Tensor, name_row: Callable[[int], str]):
        self.labels = labels
        self.sources = rows
        self._name_row = name_row
        self._chunks = images.chunks
        self._ends = np.cumsum([len(chunk) for chunk in self._chunks]).tolist()

    def content(self, position: int) -> bytes:
        """Returns the stored bytes of one image, following its path when only that is stored."""
        content, path = self._cell(int(self.sources[position]))
        if content is None and path:
            return require_regular(path, DataError).read_bytes()
        return content or b""

    def where(self, position: int) -> str:
        """Names the file and row, and the path the image had before it was stored."""
        row = int(self.sources[position])
        path = self._cell(row)[1]
        return self._name_row(row) + (f" ({path})" if path else "")

    def _cell(self, row: int) -> tuple[bytes | None, str | None]:
        chunk = bisect_right(self._ends, row)
        cell = self._chunks[chunk][row - (self._ends[chunk - 1] if chunk else 0)].as_py()
        return (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)


@dataclass(frozen=True)
class LabelColumn:
    """One label column as it is stored: numbers or words, with the names the file gives to the numbers."""

    values: np.ndarray
    names: tuple[str, ...] | None

    @property
    def words(self) -> bool:
        """Whether the labels are words rather than numbers."""
        return self.values.dtype.kind not in "iu"


def check_columns(found: list[str], columns: Columns, place: str) -> None:
    """Refuses a table without the image or the label column, naming the nearest one."""
    for kind, wanted in (("image", columns.image_column), ("label", columns.label_column)):
        if wanted not in found:
            raise DataError(
                f"{place} has no {kind} column {wanted!r} (it has {', '.join(found)}): {nearest(wanted, found)} "
                f'Give --{kind}-column NAME, in Python columns=Columns({kind}_column="NAME").'
            )


def marked_rows(table: "pa.Table", columns: Columns, place: str) -> np.ndarray:
    """Says of every row whether it may be a test image."""
    import pyarrow.types as kinds

    if columns.test_column is None:
        return np.ones(len(table), dtype=bool)
    if columns.test_column not in table.column_names or not kinds.is_boolean(table.column(columns.test_column).type):
        raise DataError(
            f"{place} has no column {columns.test_column!r} of true and false (it has {', '.join(table.column_names)}) "
            "to choose the test images."
        )
    return np.asarray(table.column(columns.test_column).to_pylist(), dtype=bool)


def declared_names(schema: "pa.Schema", column: str) -> tuple[str, ...] | None:
    """Reads the names of the classes from the note that the `datasets` library leaves in a schema."""
    try:
        note = json.loads((schema.metadata or {})[b"huggingface"])
        return tuple(note["info"]["features"][column]["names"])
    except (KeyError, TypeError, ValueError):
        return None


def image_column(table: "pa.Table", columns: Columns, place: str) -> "pa.ChunkedArray":
    """Returns the column of encoded images, or refuses a column of another type."""
    import pyarrow.types as kinds

    column = table.column(columns.image_column)
    kind = column.type
    struct = kinds.is_struct(kind) and "bytes" in {field.name for field in kind}
    if not (struct or kinds.is_binary(kind) or kinds.is_large_binary(kind)):
        raise DataError(
            f"column {columns.image_column!r} of {place} holds {kind}, not encoded images; "
            "it must hold bytes, or a struct {bytes, path}. Give --image-column NAME, in Python "
            'columns=Columns(image_column="NAME").'
        )
    return column


def label_column(table: "pa.Table", columns: Columns, place: str) -> LabelColumn:
    """Reads the labels, with their names from the schema or from a column `<label>_name` beside them."""
    import pyarrow.types as kinds

    column = table.column(columns.label_column)
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(f"{place} has {column.null_count} rows without a label, the first is row {row}; remove them.")
    if kinds.is_string(column.type) or kinds.is_large_string(column.type):
        return LabelColumn(np.asarray(column.to_pylist()), None)
    if not kinds.is_integer(column.type):
        raise DataError(
            f"column {columns.label_column!r} of {place} holds {column.type}, not class numbers or names. "
            'Give --label-column NAME, in Python columns=Columns(label_column="NAME").'
        )
    values = column.to_numpy().astype(np.int64)
    names = declared_names(table.schema, columns.label_column)
    beside = f"{columns.label_column}_name"
    if beside in table.column_names:
        names = _names_beside(values, table.column(beside), names, place)
    return LabelColumn(values, names)


def _names_beside(
    values: np.ndarray, column: "pa.ChunkedArray", names: tuple[str, ...] | None, place: str
) -> tuple[str, ...] | None:
    """Reads the names that stand beside the numbers; a number with two names means that the labels are mixed up."""
    encoded = column.combine_chunks().dictionary_encode()
    words = encoded.dictionary.to_pylist()
    found: dict[int, str] = {}
    pairs = np.unique(np.stack([values, encoded.indices.to_numpy(zero_copy_only=False)]), axis=1)
    for label, code in pairs.T.tolist():
        declared = names[label] if names and 0 <= label < len(names) else None
        other = found.setdefault(label, declared or words[code])
        if other != words[code]:
            raise DataError(
                f"label mismatch in {place}: label {label} is {other!r} in one place and {words[code]!r} in another; "
                "make the labels and their names agree."
            )
    if names or not found or min(found) < 0:
        return names
    return tuple(found.get(label, name) for label, name in enumerate(numbered_classes(max(found), place)))


def unify_labels(columns: Mapping[str, LabelColumn], place: str) -> tuple[dict[str, Int[Tensor, "_"]], tuple[str, ...]]:
    """Returns every split's labels as numbers of one list of classes, or says where the splits disagree."""
    first_name, first = next(iter(columns.items()))
    for name, column in columns.items():
        if column.words != first.words or (column.names and first.names and column.names != first.names):
            raise DataError(
                f"label mismatch between the splits of {place}: {first_name} has {_summary(first)}, {name} has "
                f"{_summary(column)}; give all splits the same classes in the same order."
            )
    if first.words:
        names = tuple(np.unique(np.concatenate([column.values for column in columns.values()])).tolist())
        numbered = {name: np.searchsorted(names, column.values) for name, column in columns.items()}
    else:
        numbered = {name: column.values for name, column in columns.items()}
        highest = max(int(values.max(initial=-1)) for values in numbered.values())
        names = first.names or numbered_classes(highest, place)
    return {name: torch.as_tensor(values, dtype=torch.int64) for name, values in numbered.items()}, names


def _summary(column: LabelColumn) -> str:
    if column.words:
        return "words"
    if column.names is None:
        return "numbers"
    return f"{len(column.names)} classes ({', '.join(column.names[:3])}, ...)"
