"""What every reader of a storage format gives: encoded images and labels by split, before any decision about sizes."""

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


def numbered_classes(highest: int, place: str) -> tuple[str, ...]:
    """Names the classes 0 to `highest` by their numbers, where the data gives them no names.

    Raises:
        DataError: The highest label is no class number.
    """
    if highest >= MOST_CLASSES:
        raise DataError(
            f"{place} has the label {highest} and no class names, so labels count classes from 0; at most "
            f"{MOST_CLASSES:,} classes are supported. Number the classes anew, or give them names."
        )
    return tuple(str(label) for label in range(highest + 1))


class Records(ABC):
    """The images of one split as they are stored, in storage order."""

    labels: Int[Tensor, "stored"]
    sources: Int[Tensor, "stored"]  # the row of each image in its file, for messages and paired comparisons

    @abstractmethod
    def content(self, position: int) -> bytes:
        """Returns the stored bytes of one image."""

    @abstractmethod
    def where(self, position: int) -> str:
        """Names the place of one image, so that a person can find it."""

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, position: int, channels: int | None) -> UInt8[Tensor, "channels height width"]:
        """Decodes one image, or raises a DataError that names it."""
        try:
            return decode(self.content(position), channels)
        except (ValueError, OSError) as error:
            raise DataError(f"cannot decode the image {self.where(position)}: {error}.") from error


@dataclass(frozen=True)
class Opened:
    """An opened dataset: records by split name, the classes their labels count, and what the reader had to decide."""

    splits: Mapping[str, Records]
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Reader(ABC):
    """One storage format, pointed at one place."""

    @abstractmethod
    def identity(self) -> str:
        """Names the content without opening it: it changes when a file does, so that decoded copies can be reused."""

    @abstractmethod
    def open(self) -> Opened:
        """Reads labels and finds the images, or raises a DataError that says what is wrong."""
