"""Datasets: `load_data` turns the name or the path of a dataset into train, validation and test images.

    splits = load_data("cifar10")
    for batch in splits.train.batches(256, seed=0, augmentation=splits.augmentation):
        batch.images, batch.labels

Small images are decoded once, kept in memory as uint8 and augmented in batches on the device. Photographs are decoded
again in every pass, and so are image sets that do not fit into memory.
"""

from attnrx.data.fixed_images import MAX_IMAGES, FixedImages
from attnrx.data.formats import Columns
from attnrx.data.images import (
    Augmentation,
    Batch,
    ImageSet,
    LoadedImages,
    from_tensors,
    require_labelled,
    require_labels,
)
from attnrx.data.loading import DATASETS, DatasetCard, load_data
from attnrx.data.splits import ImageParts, Splits, distinct_splits, fit_labels, three_parts, without_images_of
from attnrx.data.user_data import ImageData, image_set
from attnrx.support.preprocessing import Normalization

__all__ = [
    "DATASETS",
    "MAX_IMAGES",
    "Augmentation",
    "Batch",
    "Columns",
    "DatasetCard",
    "FixedImages",
    "ImageData",
    "ImageParts",
    "ImageSet",
    "LoadedImages",
    "Normalization",
    "Splits",
    "distinct_splits",
    "fit_labels",
    "from_tensors",
    "image_set",
    "load_data",
    "require_labelled",
    "require_labels",
    "three_parts",
    "without_images_of",
]
