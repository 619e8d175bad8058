"""Datasets on the Hugging Face hub, by their id."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnrx.data.readers.arrow import (
    ArrowRecords,
    Columns,
    check_columns,
    image_column,
    label_column,
    unify_labels,
)
from attnrx.data.readers.reader import Opened, Reader
from attnrx.errors import DataError
from attnrx.hub import local_copies_if_unreachable

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class HubReader(Reader):
    """A hub dataset. `ignored` names splits that are of no use, such as a test split with hidden labels."""

    hub_id: str
    columns: Columns
    folder: str | None = None
    revision: str | None = None
    ignored: tuple[str, ...] = ()

    def identity(self) -> str:
        """Names the dataset: once decoded, it is used from the local copy, also without a network."""
        return f"hub:{self.hub_id}:{self.folder}:{self.revision}:{self.columns}"

    def open(self) -> Opened:
        """Downloads the dataset, or finds it in the hub's own cache, and reads the labels."""
        found = {name: table for name, table in self._load().items() if name not in self.ignored}
        if not found:
            raise DataError(f"the hub dataset {self.hub_id} has no split to use; check the name.")
        place = f"the hub dataset {self.hub_id}"
        for table in found.values():
            check_columns(table.column_names, self.columns, place)
        labels, class_names = unify_labels(
            {name: label_column(table, self.columns, place) for name, table in found.items()}, place
        )
        splits = {
            name: ArrowRecords(
                image_column(table, self.columns, place),
                labels[name],
                torch.arange(len(table)),
                lambda row, name=name: f"row {row} of split {name} of {place}",
            )
            for name, table in found.items()
        }
        return Opened(splits, class_names)

    def _load(self) -> "dict[str, pa.Table]":
        """Returns the memory-mapped table of every split, with the names of the classes in its schema."""
        import datasets

        with local_copies_if_unreachable() as unreachable:
            try:
                found = datasets.load_dataset(self.hub_id, data_dir=self.folder, revision=self.revision)
                return {
                    str(name): split.data.table.replace_schema_metadata(split.features.arrow_schema.metadata)
                    for name, split in found.items()
                }
            except Exception as error:  # of five libraries: network, gating, cache, disk, parsing
                reason = unreachable or (str(error).splitlines()[0] if str(error) else type(error).__name__)
                raise DataError(
                    f"cannot load the hub dataset {self.hub_id}: {reason.rstrip('.')}. Check the network and, for a "
                    "dataset behind a licence, that you accepted it and are logged in; or give the path of a local "
                    "copy (parquet, a folder of images, tar shards), or put <name>.parquet into the folder in "
                    "ATTNRX_DATA."
                ) from error
