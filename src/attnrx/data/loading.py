"""The one function from a name or a path to train, validation and test images."""

from collections.abc import Sequence
from pathlib import Path

from attnrx.data.files import FolderReader
from attnrx.data.images import ImageSet, evenly_spaced
from attnrx.data.labels import Relabelled
from attnrx.data.loaded_images import LoadedImages
from attnrx.data.locating import DatasetCard, locate
from attnrx.data.parquet import Columns
from attnrx.data.pixels import Augmentation, guess_geometry, padding_for
from attnrx.data.splits import NAMES, MissingImages, Opened, Splits, assign, by_canonical_name
from attnrx.support.arguments import PATH, RATE, SIDE, Kind, checked, each, either, optional
from attnrx.support.preprocessing import ImageGeometry, Normalization

SIDES = each(SIDE, "(height, width)", least=1, most=2)
GUESSED_FROM = 16  # pictures of a dataset without a known geometry


@checked(
    name_or_path=Kind("the name of a dataset, a file or a folder", PATH.accepts),
    image_size=optional(either("the side of the model's input in pixels, or (height, width)", SIDE, SIDES)),
    validation_share=RATE,
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

    Small images are decoded at their first use and kept in memory, others stream. A folder of images without a folder
    for every class has no labels. Pictures are fitted as the catalogue states, or as a guess from a few of them;
    `adapt_preprocessing` changes it to what a model states. An image that cannot be decoded is an error that names it,
    in the first pass that needs it.

    Args:
        name_or_path: A name of `DATASETS`, which is looked up in the folder that ATTNRX_DATA names, then on the Hugging
            Face hub; `hf:owner/name` of any hub dataset; or the path of a parquet file or a folder of them, or a
            folder of images, with JPEG, PNG, WebP, BMP, GIF, TIFF or PPM images.
        image_size: The side of the input in pixels, or (height, width).
        geometry: How pictures become pixels, in full.
        validation_share: The share of each class that is held out of train where there is no validation split.
        seed: Decides which images are held out; nothing else is random.
        columns: The names of the columns of a table; by default the usual ones.

    Raises:
        InvalidInput: An argument is not of its kind.
        DataError: There is no such dataset, or it is damaged, empty, or without the columns that were named.
        NotSupported: The library that reads the format is not installed.

    Examples:
        >>> splits = rx.load_data("digits")
        >>> len(splits.train), len(splits.validation), len(splits.test)
        (1295, 143, 359)
    """
    location = locate(name_or_path, columns or Columns())
    card, requested = location.card, location.requested
    opened = by_canonical_name(location.reader.open(), requested)
    labels = {name: stored.labels for name, stored in opened.splits.items()}
    parts, notes = assign(labels, requested, validation_share, seed, opened.keys)
    own_geometry = _geometry_of(opened, card, image_size)
    photos = _are_photos(own_geometry)
    geometry = geometry or own_geometry
    normalization = _normalization(card, geometry.channels)
    sets: dict[str, ImageSet] = {
        split: LoadedImages(
            f"{location.name}/{split}", opened.splits[stored], rows, geometry, normalization, photos=photos
        )
        for split, (stored, rows) in parts.items()
    }
    if not opened.class_names:
        remedy = 'name their column (--label-column NAME, in Python columns=Columns(label_column="NAME"))'
        if isinstance(location.reader, FolderReader):
            remedy = "put the images of every class into a folder of their own"
        problem = f"{requested} has no labels, and this needs them: {remedy}."
        sets = {split: Relabelled.without_labels(images, problem) for split, images in sets.items()}
    missing = {split: MissingImages(requested, split, sets) for split in NAMES}
    flip, shift = (True, True) if card is None else (card.flip, card.shift)
    # The window is usual for ImageNet.
    window = Augmentation(padding=0, area=(0.08, 1.0)) if photos else None
    return Splits(
        name=location.name,
        **{**missing, **sets},
        class_names=opened.class_names,
        channels=geometry.channels,
        image_size=geometry.side,
        normalization=normalization,
        augmentation=window or Augmentation(padding_for(geometry) if shift else 0, flip),
        notes=(*location.notes, *opened.notes, *notes),
        geometry=geometry,
    )


def _geometry_of(opened: Opened, card: DatasetCard | None, size: int | Sequence[int] | None) -> ImageGeometry:
    """Returns the geometry of the catalogue, or guesses one from pictures; a requested size overrides its size."""
    requested = (size[0], size[1]) if isinstance(size, Sequence) else size
    if card is None:
        stored = opened.splits.get("train") or next(iter(opened.splits.values()))
        # Spread over the split, because datasets are often sorted, by class or by size.
        pictures = [stored.picture(at, None) for at in evenly_spaced(len(stored), GUESSED_FROM)]
        return guess_geometry(pictures, requested)
    if requested is None or requested == card.geometry.side:
        return card.geometry
    # Black borders (`pad`) fit one size only; at another one pictures are resized.
    return ImageGeometry.of_size(requested, card.geometry.channels, "photo" if _are_photos(card.geometry) else "fill")


def _are_photos(geometry: ImageGeometry) -> bool:
    """Whether a geometry of the catalogue, or a guessed one, is that of photographs (`ImageGeometry.of_size`)."""
    return geometry.resize_to != geometry.size


def _normalization(card: DatasetCard | None, channels: int) -> Normalization:
    fits = card is not None and len(card.normalization.mean) == channels
    return card.normalization if card and fits else Normalization.half(channels)
