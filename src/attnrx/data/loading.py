"""The one function from a name or a path to train, validation and test images."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from attnrx.data.augmentation import Augmentation
from attnrx.data.cache import Decoded, DecodedSplit, cache_path, fetch, store
from attnrx.data.catalogue import DATASETS, PHOTOS
from attnrx.data.decoding import CorruptImages, Policy, decode_all
from attnrx.data.geometry import Geometry, guess_geometry
from attnrx.data.images import ImageSet, spread
from attnrx.data.locating import Place, locate
from attnrx.data.memory import MemoryImages, PixelStore
from attnrx.data.normalization import Normalization
from attnrx.data.readers.arrow import Columns
from attnrx.data.readers.reader import Opened
from attnrx.data.shards import ShardReader, load_shards
from attnrx.data.splits import Splits, assign, canonical, check_labels
from attnrx.data.streaming import Stream, StreamedImages
from attnrx.errors import InvalidInput
from attnrx.shapes import Int, Tensor

IN_MEMORY = 2 * 2**30  # bytes of decoded pixels that are held in memory; larger sets stream


@dataclass(frozen=True)
class Options:
    """What the user asked for beside the dataset itself."""

    image_size: int | None
    on_corrupt: Policy
    validation_share: float
    seed: int


def load_data(
    name_or_path: str | Path,
    *,
    image_size: int | None = None,
    on_corrupt: Policy = "raise",
    validation_share: float = 0.1,
    seed: int = 0,
    columns: Columns | None = None,
) -> Splits:
    """Gives train, validation and test images from a known name, a local path or a hub id.

    A name of `DATASETS` is looked up in the folder that ATTNRX_DATA names, then on the Hugging Face hub; `hf:owner/name`
    is any hub dataset. A path is a parquet file or folder of them, a folder of images, or WebDataset shards
    (`train-{000..009}.tar`). Small images are decoded once and kept in memory, others stream. `seed` decides which
    training images are held out when there is no validation split. Nothing is random otherwise.
    """
    if image_size is not None and image_size < 1:
        raise InvalidInput(f"image_size={image_size}: give the side of the model's input in pixels.")
    place = locate(name_or_path, columns)
    options = Options(image_size, on_corrupt, validation_share, seed)
    corrupt = CorruptImages(on_corrupt)
    if isinstance(place.reader, ShardReader):
        return load_shards(place.reader, place, image_size, corrupt)
    path = cache_path(place.reader.identity(), place.card_name, image_size, on_corrupt)
    decoded = fetch(path)
    if decoded is None:
        opened = place.reader.open()
        check_splits(opened, place)
        geometry = choose_geometry(opened, place, image_size)
        if geometry.fit == "photo" or _decoded_bytes(opened, geometry) > IN_MEMORY:
            return _streamed(opened, place, Stream(geometry, normalization_of(place, geometry), corrupt), options)
        decoded = _decode(opened, geometry, corrupt)
        store(path, decoded)
    return _in_memory(decoded, place, options)


def choose_geometry(opened: Opened, place: Place, image_size: int | None) -> Geometry:
    """Gives the geometry of the catalogue, or guesses one from up to 16 pictures; an asked-for size overrides it."""
    if place.card_name is not None:
        known = DATASETS[place.card_name].geometry
        if image_size in (None, known.size):
            return known
        return replace(known, size=image_size, fit="photo" if known.fit == "photo" else "fill")
    records = next(iter(opened.splits.values()))
    return guess_geometry([records.picture(row, None) for row in spread(len(records), 16)], image_size)
