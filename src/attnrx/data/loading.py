"""The one function from a name or a path to train, validation and test images."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from attnrx.data.augmentation import Augmentation
from attnrx.data.cache import Decoded, DecodedSplit, cache_path, fetch, store
from attnrx.data.catalogue import PHOTOS
from attnrx.data.decoding import CorruptImages, Policy, decode_all
from attnrx.data.geometry import ImageGeometry, guess_geometry
from attnrx.data.images import ImageSet, evenly_spaced
from attnrx.data.locating import DatasetLocation, locate
from attnrx.data.memory import MemoryImages, PixelStore
from attnrx.data.normalization import Normalization
from attnrx.data.shards import ShardImages, ShardReader, assign_shards, read_shard
from attnrx.data.splits import MissingImages, Splits, assign, by_canonical_name, check_labels
from attnrx.data.stored import Opened, StoredImages
from attnrx.data.streaming import Picture, Stream, StreamedImages
from attnrx.data.tables import Columns
from attnrx.errors import DataError, InvalidInput
from attnrx.shapes import Tensor, UInt8

IN_MEMORY = 2 * 2**30  # bytes of decoded pixels that are held in memory; larger sets stream


@dataclass(frozen=True)
class Options:
    """Options of the user for reading a dataset."""

    image_size: int | None
    on_corrupt: Policy
    validation_share: float
    seed: int

    def __post_init__(self):
        if self.image_size is not None and self.image_size < 1:
            raise InvalidInput(f"image_size={self.image_size}: give the side of the model's input in pixels.")
        if not 0 < self.validation_share < 1:
            raise InvalidInput(
                f"validation_share={self.validation_share}: it is a share of the training images, between 0 and 1."
            )
        CorruptImages(self.on_corrupt)


def load_data(
    name_or_path: str | Path,
    *,
    image_size: int | None = None,
    on_corrupt: Policy = "raise",
    validation_share: float = 0.1,
    seed: int = 0,
    columns: Columns | None = None,
) -> Splits:
    """Returns train, validation and test images from a known name, a local path or a hub id.

    A name of `DATASETS` is looked up in the folder that ATTNRX_DATA names, then on the Hugging Face hub, and
    `hf:owner/name` is any hub dataset. A path is a parquet file or a folder of them, a folder of images, or WebDataset
    shards (`train-{000..009}.tar`). Small images are decoded once and kept in memory, others stream. `seed` decides
    which training images are held out when there is no validation split; nothing else is random.
    """
    options = Options(image_size, on_corrupt, validation_share, seed)
    location = locate(name_or_path, columns)
    if isinstance(location.reader, ShardReader):
        return _from_shards(location, location.reader, options)
    known = location.card.geometry if location.card else None
    photos = known is not None and known.fit == "photo"  # streamed, so the files are not decoded beforehand
    copy = None if photos else cache_path(location.reader.identity(), known, image_size, on_corrupt)
    decoded = fetch(copy) if copy else None
    if decoded is None:
        opened = by_canonical_name(location.reader.open(), location.requested)
        geometry = _geometry(location, options, _first_pictures(opened))
        if copy is None or geometry.fit == "photo" or _decoded_bytes(opened, geometry) > IN_MEMORY:
            return _streamed(opened, geometry, location, options)
        decoded = _decode(opened, geometry, location, CorruptImages(on_corrupt))
        store(copy, decoded)
    return _in_memory(decoded, location, options)


def _geometry(location: DatasetLocation, options: Options, pictures: Iterable[Picture]) -> ImageGeometry:
    """Returns the geometry of the catalogue, or guesses one from some pictures; a requested size overrides its size."""
    if location.card is not None:
        known = location.card.geometry
        if options.image_size in (None, known.size):
            return known
        return ImageGeometry(
            options.image_size or known.size, known.channels, "photo" if known.fit == "photo" else "fill"
        )
    pictures_found = []
    corrupt = CorruptImages(options.on_corrupt)
    for picture in pictures:
        try:
            pictures_found.append(picture())
        except DataError as error:
            corrupt.report(error)
    if not pictures_found:
        raise DataError(
            f"none of the {len(corrupt.found)} first images of {location.requested} can be decoded: {corrupt.found[0]}"
        )
    return guess_geometry(pictures_found, options.image_size)


def _first_pictures(opened: Opened) -> Iterable[Picture]:
    records = opened.splits.get("train") or next(iter(opened.splits.values()))
    return (partial(records.picture, row, None) for row in evenly_spaced(len(records), 16))


def _decoded_bytes(opened: Opened, geometry: ImageGeometry) -> int:
    return sum(len(records) for records in opened.splits.values()) * geometry.channels * geometry.size**2


def _decode(opened: Opened, geometry: ImageGeometry, location: DatasetLocation, corrupt: CorruptImages) -> Decoded:
    splits = {}
    for name, records in opened.splits.items():
        pixels, kept = decode_all(partial(_still, records, geometry), len(records), geometry.shape, corrupt)
        splits[name] = DecodedSplit(pixels, records.labels[kept], records.sources[kept])
    notes = opened.notes
    if corrupt.found:
        notes = (*notes, f"{len(corrupt.found)} corrupt images were skipped; the first: {corrupt.found[0]}")
    check_labels({name: split.labels for name, split in splits.items()}, opened.class_names, location.requested)
    return Decoded(splits, opened.class_names, geometry, notes)


def _still(records: StoredImages, geometry: ImageGeometry, row: int) -> UInt8[Tensor, "channels size size"]:
    return geometry.still(records.picture(row, geometry.channels))


def _in_memory(decoded: Decoded, location: DatasetLocation, options: Options) -> Splits:
    labels = {name: split.labels for name, split in decoded.splits.items()}
    assignment = assign(labels, location.requested, options.validation_share, options.seed)
    stores = {name: PixelStore(split.pixels, split.labels, split.sources) for name, split in decoded.splits.items()}
    scale = _normalization(location, decoded.geometry)
    sets = {
        split: MemoryImages(f"{location.name}/{split}", stores[part.stored], part.rows, scale)
        for split, part in assignment.parts.items()
    }
    return _splits(location, sets, decoded.geometry, decoded.class_names, (*decoded.notes, *assignment.notes))


def _streamed(opened: Opened, geometry: ImageGeometry, location: DatasetLocation, options: Options) -> Splits:
    labels = {name: records.labels for name, records in opened.splits.items()}
    assignment = assign(labels, location.requested, options.validation_share, options.seed)
    sets = {
        split: StreamedImages(
            f"{location.name}/{split}", opened.splits[part.stored], part.rows, _stream(location, geometry, options)
        )
        for split, part in assignment.parts.items()
    }
    notes = (*opened.notes, *assignment.notes, *_skip_note(options))
    return _splits(location, sets, geometry, opened.class_names, notes)


def _from_shards(location: DatasetLocation, reader: ShardReader, options: Options) -> Splits:
    opened = reader.open()
    shards, notes = assign_shards(opened, location.requested)
    some = shards["train"] if "train" in shards else next(iter(shards.values()))
    first = (partial(sample.picture, None) for sample in islice(read_shard(some[0]), 16))
    geometry = _geometry(location, options, first)
    sets = {
        split: ShardImages(f"{location.name}/{split}", shards[split], _stream(location, geometry, options))
        for split in shards
    }
    return _splits(location, sets, geometry, opened.class_names, (*notes, *_skip_note(options)))


def _stream(location: DatasetLocation, geometry: ImageGeometry, options: Options) -> Stream:
    return Stream(geometry, _normalization(location, geometry), CorruptImages(options.on_corrupt))


def _skip_note(options: Options) -> tuple[str, ...]:
    if options.on_corrupt == "raise":
        return ()
    return ("corrupt images are skipped while streaming; each split lists them as `skipped`",)


def _normalization(location: DatasetLocation, geometry: ImageGeometry) -> Normalization:
    return location.card.normalization if location.card else Normalization.half(geometry.channels)


def _augmentation(location: DatasetLocation, geometry: ImageGeometry) -> Augmentation:
    """Returns the catalogue's augmentation, its padding always an eighth of the side."""
    known = location.card.augmentation if location.card else Augmentation()
    return PHOTOS if geometry.fit == "photo" else replace(known, padding=geometry.size // 8)


def _splits(
    location: DatasetLocation,
    sets: Mapping[str, ImageSet],
    geometry: ImageGeometry,
    class_names: tuple[str, ...],
    notes: tuple[str, ...],
) -> Splits:
    missing = {split: MissingImages(location.requested, split, sets) for split in ("train", "validation", "test")}
    return Splits(
        name=location.name,
        **{**missing, **sets},
        class_names=class_names,
        channels=geometry.channels,
        image_size=geometry.size,
        normalization=_normalization(location, geometry),
        augmentation=_augmentation(location, geometry),
        notes=(*location.notes, *notes),
    )
