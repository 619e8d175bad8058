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
from attnrx.data.geometry import Geometry, guess_geometry
from attnrx.data.images import ImageSet, spread
from attnrx.data.locating import Place, locate
from attnrx.data.memory import MemoryImages, PixelStore
from attnrx.data.normalization import Normalization
from attnrx.data.readers.arrow import Columns
from attnrx.data.readers.reader import Opened, Records
from attnrx.data.readers.shards import ShardReader, read
from attnrx.data.shards import ShardImages, assign_shards
from attnrx.data.splits import MissingImages, Splits, assign, by_canonical_name, check_labels
from attnrx.data.streaming import Picture, Stream, StreamedImages
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
    place = locate(name_or_path, columns)
    if isinstance(place.reader, ShardReader):
        return _from_shards(place, place.reader, options)
    known = place.card.geometry if place.card else None
    photos = known is not None and known.fit == "photo"  # never decoded beforehand: no need to look at every file
    copy = None if photos else cache_path(place.reader.identity(), known, image_size, on_corrupt)
    decoded = fetch(copy) if copy else None
    if decoded is None:
        opened = by_canonical_name(place.reader.open(), place.requested)
        geometry = _geometry(place, options, _first_pictures(opened))
        if copy is None or geometry.fit == "photo" or _decoded_bytes(opened, geometry) > IN_MEMORY:
            return _streamed(opened, geometry, place, options)
        decoded = _decode(opened, geometry, place, CorruptImages(on_corrupt))
        store(copy, decoded)
    return _in_memory(decoded, place, options)


def _geometry(place: Place, options: Options, pictures: Iterable[Picture]) -> Geometry:
    """Returns the geometry of the catalogue, or guesses one from some pictures; a requested size overrides its size."""
    if place.card is not None:
        known = place.card.geometry
        if options.image_size in (None, known.size):
            return known
        return Geometry(options.image_size or known.size, known.channels, "photo" if known.fit == "photo" else "fill")
    seen = []
    corrupt = CorruptImages(options.on_corrupt)
    for picture in pictures:
        try:
            seen.append(picture())
        except DataError as error:
            corrupt.report(error)
    if not seen:
        raise DataError(
            f"none of the {len(corrupt.met)} first images of {place.requested} can be decoded: {corrupt.met[0]}"
        )
    return guess_geometry(seen, options.image_size)


def _first_pictures(opened: Opened) -> Iterable[Picture]:
    records = opened.splits.get("train") or next(iter(opened.splits.values()))
    return (partial(records.picture, row, None) for row in spread(len(records), 16))


def _decoded_bytes(opened: Opened, geometry: Geometry) -> int:
    return sum(len(records) for records in opened.splits.values()) * geometry.channels * geometry.size**2


def _decode(opened: Opened, geometry: Geometry, place: Place, corrupt: CorruptImages) -> Decoded:
    splits = {}
    for name, records in opened.splits.items():
        pixels, kept = decode_all(partial(_still, records, geometry), len(records), geometry.shape, corrupt)
        splits[name] = DecodedSplit(pixels, records.labels[kept], records.sources[kept])
    notes = opened.notes
    if corrupt.met:
        notes = (*notes, f"{len(corrupt.met)} corrupt images were skipped; the first: {corrupt.met[0]}")
    check_labels({name: split.labels for name, split in splits.items()}, opened.class_names, place.requested)
    return Decoded(splits, opened.class_names, geometry, notes)


def _still(records: Records, geometry: Geometry, row: int) -> UInt8[Tensor, "channels size size"]:
    return geometry.still(records.picture(row, geometry.channels))


def _in_memory(decoded: Decoded, place: Place, options: Options) -> Splits:
    labels = {name: split.labels for name, split in decoded.splits.items()}
    assignment = assign(labels, place.requested, options.validation_share, options.seed)
    stores = {name: PixelStore(split.pixels, split.labels, split.sources) for name, split in decoded.splits.items()}
    scale = _normalization(place, decoded.geometry)
    sets = {
        split: MemoryImages(f"{place.name}/{split}", stores[part.stored], part.rows, scale)
        for split, part in assignment.parts.items()
    }
    return _splits(place, sets, decoded.geometry, decoded.class_names, (*decoded.notes, *assignment.notes))


def _streamed(opened: Opened, geometry: Geometry, place: Place, options: Options) -> Splits:
    labels = {name: records.labels for name, records in opened.splits.items()}
    assignment = assign(labels, place.requested, options.validation_share, options.seed)
    sets = {
        split: StreamedImages(
            f"{place.name}/{split}", opened.splits[part.stored], part.rows, _stream(place, geometry, options)
        )
        for split, part in assignment.parts.items()
    }
    notes = (*opened.notes, *assignment.notes, *_skip_note(options))
    return _splits(place, sets, geometry, opened.class_names, notes)


def _from_shards(place: Place, reader: ShardReader, options: Options) -> Splits:
    opened = reader.open()
    shards, notes = assign_shards(opened, place.requested)
    some = shards["train"] if "train" in shards else next(iter(shards.values()))
    first = (partial(sample.picture, None) for sample in islice(read(some[0]), 16))
    geometry = _geometry(place, options, first)
    sets = {
        split: ShardImages(f"{place.name}/{split}", shards[split], _stream(place, geometry, options))
        for split in shards
    }
    return _splits(place, sets, geometry, opened.class_names, (*notes, *_skip_note(options)))


def _stream(place: Place, geometry: Geometry, options: Options) -> Stream:
    return Stream(geometry, _normalization(place, geometry), CorruptImages(options.on_corrupt))


def _skip_note(options: Options) -> tuple[str, ...]:
    if options.on_corrupt == "raise":
        return ()
    return ("corrupt images are skipped while streaming; each split lists those it met as `skipped`",)


def _normalization(place: Place, geometry: Geometry) -> Normalization:
    return place.card.normalization if place.card else Normalization.half(geometry.channels)


def _augmentation(place: Place, geometry: Geometry) -> Augmentation:
    """Returns the catalogue's augmentation, its padding always an eighth of the side."""
    known = place.card.augmentation if place.card else Augmentation()
    return PHOTOS if geometry.fit == "photo" else replace(known, padding=geometry.size // 8)


def _splits(
    place: Place, sets: Mapping[str, ImageSet], geometry: Geometry, class_names: tuple[str, ...], notes: tuple[str, ...]
) -> Splits:
    missing = {split: MissingImages(place.requested, split, sets) for split in ("train", "validation", "test")}
    return Splits(
        name=place.name,
        **{**missing, **sets},
        class_names=class_names,
        channels=geometry.channels,
        image_size=geometry.size,
        normalization=_normalization(place, geometry),
        augmentation=_augmentation(place, geometry),
        notes=(*place.notes, *notes),
    )
