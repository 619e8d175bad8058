"""Encoded images of one split, and an opened dataset: what every storage format is read into."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from attnrx.data.decoding import decode
from attnrx.errors import DataError
from attnrx.shapes import Int, Tensor, UInt8

SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}

MOST_CLASSES = 100_000  # ImageNet-21k has 21,841


def numbered_classes(highest: int, source: str) -> tuple[str, ...]:
    """Returns the numbers 0 to `highest` as class names, for data without names.

    Raises:
        DataError: The highest label is no class number.
    """
    if highest >= MOST_CLASSES:
        raise DataError(
            f"{source} has the label {highest} and no class names, so labels count classes from 0; at most "
            f"{MOST_CLASSES:,} classes are supported. Number the classes anew, or give them names."
        )
    return tuple(str(label) for label in range(highest + 1))


class StoredImages(ABC):
    """The images of one split in storage order; `sources` are their rows in the source."""

    labels: Int[Tensor, "stored"]
    sources: Int[Tensor, "stored"]

    @abstractmethod
    def content(self, position: int) -> bytes:
        """Returns the encoded bytes of one image."""

    @abstractmethod
    def where(self, position: int) -> str:
        """Returns the file and row of one image, for messages."""

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, position: int, channels: int | None) -> UInt8[Tensor, "channels height width"]:
        """Decodes one image.

        Raises:
            DataError: The image cannot be decoded; the message contains `where(position)`.
        """
        try:
            return decode(self.content(position), channels)
        except (ValueError, OSError) as error:
            raise DataError(f"cannot decode the image {self.where(position)}: {error}.") from error


@dataclass(frozen=True)
class Opened:
    """An opened dataset: stored images by split, class names, and notes about decisions made on opening."""

    splits: Mapping[str, StoredImages]
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()


class DatasetReader(ABC):
    """Opens the dataset of one storage format at one path."""

    @abstractmethod
    def identity(self) -> str:
        """Returns a key of the content that is cheap to compute and changes when a file changes."""

    @abstractmethod
    def open(self) -> Opened:
        """Reads the labels and finds the images.

        Raises:
            DataError: The files are damaged, or their labels do not agree.
        """
