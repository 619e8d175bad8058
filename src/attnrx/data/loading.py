"""The one function from a name or a path to train, validation and test images.

Decoded copies of sets of small images are kept in the user's cache folder, so that only the first load decodes.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from attnrx.data.files import FolderReader
from attnrx.data.images import ImageSet, evenly_spaced
from attnrx.data.labels import Relabelled
from attnrx.data.loaded_images import CPU, MemoryImages, Picture, PixelStore, StreamedImages
from attnrx.data.locating import DatasetLocation, locate
from attnrx.data.parquet import Columns
from attnrx.data.pixels import (
    Augmentation,
    decode_all,
    guess_geometry,
    padding_for,
)
from attnrx.data.splits import (
    NAMES,
    MissingImages,
    Opened,
    Splits,
    StoredImages,
    assign,
    by_canonical_name,
)
from attnrx.support.arguments import PATH, RATE, SEED, SIDE, Kind, checked, each, either, instance, optional
from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx.support.hardware import cache_folder
from attnrx.support.preprocessing import ImageGeometry, Normalization
from attnrx.support.storage import (
    check_seal,
    file_sha256,
    read_json,
    read_tensors,
    sealed,
    write_json,
    write_tensors,
)

IN_MEMORY = 2 * 2**30  # bytes of decoded pixels that are held in memory; larger sets stream
SCHEMA = 3  # raise it when decoding or resizing changes, so that old copies are not used
PARTS = ("pixels", "labels", "sources")  # the tensors of a split in a decoded copy


@dataclass(frozen=True)
class Content:
    """A whole dataset: its stored splits, decoded or to stream, class names, and the geometry of its pictures.

    `photos`: whether training crops parts of the pictures.
    """

    splits: Mapping[str, PixelStore | StoredImages]
    class_names: tuple[str, ...]
    geometry: ImageGeometry
    notes: tuple[str, ...]
    photos: bool = False


SIDES = each(SIDE, "(height, width)", least=1, most=2)


@checked(
    name_or_path=Kind("the name of a dataset, a file or a folder", PATH.accepts),
    image_size=optional(either("the side of the model's input in pixels, or (height, width)", SIDE, SIDES)),
    geometry=optional(instance("an ImageGeometry", ImageGeometry)),
    validation_share=RATE,
    seed=SEED,
    columns=optional(instance("Columns, e.g. attnrx.data.Columns(image_column='image')", Columns)),
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

    Small images are decoded once and kept in memory, others stream. A folder of images without a folder for every class
    has no labels. Pictures are fitted as the catalogue states, or as a guess from a few of them; `adapt_preprocessing`
    changes it to what a model states.

    Args:
        name_or_path: A name of `DATASETS`, which is looked up in the folder that ATTNRX_DATA names, then on the Hugging
            Face hub; `hf:owner/name` of any hub dataset; or the path of a parquet file or a folder of them, or a
            folder of images, with JPEG, PNG, WebP, BMP, GIF, TIFF or PPM images.
        image_size: The side of the input in pixels, or (height, width).
        geometry: How pictures become pixels, in full.
        validation_share: The share of each class that is held out of train where there is no validation split.
        seed: Decides which images are held out; nothing else is random.
        columns: The names of the columns of a table.

    Raises:
        InvalidInput: An argument is not of its kind.
        DataError: There is no such dataset, or it is damaged, empty, or without the columns that were named.
        NotSupported: The library that reads the format is not installed.

    Examples:
        >>> splits = rx.load_data("digits")
        >>> len(splits.train), len(splits.validation), len(splits.test)
        (1295, 143, 359)
    """
    loading = _Loading(locate(name_or_path, columns), image_size, geometry, validation_share, seed)
    return loading.read()


@dataclass(frozen=True)
class _Loading:
    """A dataset's location with the user's options for reading it."""

    location: DatasetLocation
    image_size: int | tuple[int, int] | None
    geometry: ImageGeometry | None
    validation_share: float
    seed: int

    def read(self) -> Splits:
        content = self._content()
        again: dict[ImageGeometry, Content] = {}
        parts, notes = assign(
            {name: store.labels for name, store in content.splits.items()},
            self.location.requested,
            self.validation_share,
            self.seed,
        )
        scale, sets = self._normalization(content.geometry), {}
        for split, (stored, rows) in parts.items():
            name, store = f"{self.location.name}/{split}", content.splits[stored]
            if isinstance(store, PixelStore):
                store.decode_again = partial(self._decode_again, again, stored)
                sets[split] = MemoryImages(name, store, rows, scale)
            else:
                sets[split] = StreamedImages(name, store, rows, content.geometry, scale)
        return self._splits(sets, replace(content, notes=(*content.notes, *notes)))

    def _content(self) -> Content:
        """Decodes a set of small images, or finds its decoded copy; others are opened only."""
        card_geometry = self.location.card.geometry if self.location.card else None
        # Photographs are streamed, so their files are not decoded beforehand.
        photos = card_geometry is not None and _are_photos(card_geometry)
        # The copy has the splits as they are stored: which rows are held out is decided afterwards, by share and seed.
        reader, options = self.location.reader, (card_geometry, self.image_size, self.geometry)
        # All options that change the content are part of the key, so a copy is never compared with them.
        key = None if photos else hashlib.sha256(repr((SCHEMA, reader.identity(), *options)).encode()).hexdigest()[:24]
        copy = None if key is None else cache_folder() / "decoded" / f"{key}.safetensors"
        decoded = _read_copy(copy) if copy else None
        if decoded is not None:
            return decoded
        opened = by_canonical_name(reader.open(), self.location.requested)
        records = opened.splits.get("train") or next(iter(opened.splits.values()))
        # Pictures spread over the split, because datasets are often sorted, by class or by size.
        stated = self._dataset_geometry(partial(records.picture, at, None) for at in evenly_spaced(len(records), 16))
        geometry, photos = self.geometry or stated, _are_photos(stated)
        size = sum(map(len, opened.splits.values())) * math.prod(geometry.shape)
        # Photographs stream whatever their number, because the usual augmentation crops whole pictures.
        if copy is None or photos or size > IN_MEMORY:
            return Content(opened.splits, opened.class_names, geometry, opened.notes, photos)
        decoded = self._decode(opened, geometry)
        _write_copy(copy, decoded)
        return decoded

    def _decode_again(
        self, again: dict[ImageGeometry, Content], name: str, geometry: ImageGeometry
    ) -> PixelStore | StoredImages:
        """Returns the images of a store with another geometry, at the same positions."""
        if geometry not in again:
            again[geometry] = replace(self, image_size=None, geometry=geometry)._content()
        return again[geometry].splits[name]

    def _dataset_geometry(self, pictures: Iterable[Picture]) -> ImageGeometry:
        """Returns the geometry of the catalogue, or guesses one from pictures; a requested size overrides its size."""
        if self.location.card is not None:
            card_geometry = self.location.card.geometry
            if self.image_size is None or self.image_size == card_geometry.side:
                return card_geometry
            # Black borders (`pad`) fit one size only; at another one pictures are resized.
            fit = "photo" if _are_photos(card_geometry) else "fill"
            return ImageGeometry.of_size(self.image_size, card_geometry.channels, fit)
        return guess_geometry([picture() for picture in pictures], self.image_size)

    def _decode(self, opened: Opened, geometry: ImageGeometry) -> Content:
        splits = {
            name: PixelStore(
                decode_all(partial(stored.fitted, geometry), len(stored), geometry.shape), stored.labels, stored.sources
            )
            for name, stored in opened.splits.items()
        }
        return Content(splits, opened.class_names, geometry, opened.notes)

    def _normalization(self, geometry: ImageGeometry) -> Normalization:
        card = self.location.card
        fits = card is not None and len(card.normalization.mean) == geometry.channels
        return card.normalization if card and fits else Normalization.half(geometry.channels)

    def _splits(self, sets: Mapping[str, ImageSet], content: Content) -> Splits:
        location, geometry = self.location, content.geometry
        if not content.class_names:
            remedy = 'name their column (--label-column NAME, in Python columns=Columns(label_column="NAME"))'
            if isinstance(location.reader, FolderReader):
                remedy = "put the images of every class into a folder of their own"
            problem = f"{location.requested} has no labels, and this needs them: {remedy}."
            sets = {split: Relabelled.without_labels(images, problem) for split, images in sets.items()}
        missing = {split: MissingImages(location.requested, split, sets) for split in NAMES}
        flip, shift = (True, True) if location.card is None else (location.card.flip, location.card.shift)
        augmentation = Augmentation(padding_for(geometry) if shift else 0, flip)
        if content.photos:
            augmentation = Augmentation(padding=0, area=(0.08, 1.0))  # as usual for ImageNet
        notes = (*location.notes, *content.notes)
        return Splits(
            name=location.name,
            **{**missing, **sets},
            class_names=content.class_names,
            channels=geometry.channels,
            image_size=geometry.side,
            normalization=self._normalization(geometry),
            augmentation=augmentation,
            notes=notes,
            geometry=geometry,
        )


def _are_photos(geometry: ImageGeometry) -> bool:
    """Whether a geometry of the catalogue, or a guessed one, is that of photographs (`ImageGeometry.of_size`)."""
    return geometry.resize_to != geometry.size


def _write_copy(path: Path, decoded: Content) -> None:
    """Writes a decoded copy: tensors first, then the JSON that makes it valid. A full disk costs only the copy."""
    tensors = {
        f"{name}.{part}": tensor
        for name, store in decoded.splits.items()
        if isinstance(store, PixelStore)
        for part, tensor in zip(PARTS, store.on(CPU), strict=True)
    }
    about = {
        "splits": list(decoded.splits),
        "class_names": list(decoded.class_names),
        "geometry": decoded.geometry.to_dict(),
        "notes": list(decoded.notes),
    }
    try:
        # The hash of the tensors and that of the record: a copy that was edited is not used.
        about["pixels_sha256"] = file_sha256(write_tensors(path, tensors))
        write_json(path.with_suffix(".json"), sealed(about))
    except CheckpointError:
        # Tensors without their JSON are never read, and only occupy the disk.
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _read_copy(path: Path) -> Content | None:
    """Reads a decoded copy back, or returns None if it is missing, damaged or edited."""
    try:
        about = read_json(path.with_suffix(".json"))
        check_seal(about, path.with_suffix(".json"))
        tensors = read_tensors(path, about["pixels_sha256"])
        parts = {name: [tensors[f"{name}.{part}"] for part in PARTS] for name in about["splits"]}
        splits = {name: PixelStore(pixels, labels, sources) for name, (pixels, labels, sources) in parts.items()}
        geometry = ImageGeometry.from_dict(about["geometry"])
        return Content(splits, tuple(about["class_names"]), geometry, tuple(about["notes"]))
    # The copy can be made again, so damage of it is no error.
    except (CheckpointError, InvalidInput, KeyError, TypeError, AttributeError):
        return None
