"""Data for a model: whatever a user has, as the image set or the splits that the model reads."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from attnrx.data import ImageSet, Normalization, Splits, fit_labels, image_set
from attnrx.data.geometry import SMALL, Geometry
from attnrx.data.readers.reader import SPLITS
from attnrx.data.splits import VALIDATION_IS_TEST, MissingImages
from attnrx.errors import DataError, InvalidInput
from attnrx.models import family_of
from attnrx.optional import required_module
from attnrx.shapes import Float, Tensor


def images_for(model: nn.Module, data: Any, argument: str = "data") -> ImageSet:
    """Returns the data as an image set for this model (see `data.image_set`): PIL pictures are preprocessed as the
    model's library does it, all other images are already on the model's scale.

    Raises:
        InvalidInput: The data is of an unknown type, or its images are no float tensors; the message names `argument`.
        DataError: The data is empty.
    """
    if isinstance(data, ImageSet):
        return data
    family = family_of(model)
    return image_set(data, family.preprocessing(model) or _own_preprocessing(model), argument)


def _own_preprocessing(model: nn.Module) -> Callable[[Any], Float[Tensor, "channels height width"]]:
    """Fits a PIL picture as the named datasets are fitted, on the scale of the model."""
    family = family_of(model)
    channels, size, _ = family.input_shape(model)
    geometry = Geometry(size, channels, "photo" if size > SMALL else "fill")
    scale = Normalization(*family.normalization(model))

    def preprocess(picture: Any) -> Tensor:
        transforms = required_module("torchvision.transforms.v2.functional", "data", "preprocessing of PIL images")

        pixels = transforms.pil_to_tensor(picture.convert("L" if channels == 1 else "RGB"))
        return scale.apply(geometry.still(pixels).float() / 255)

    return preprocess


def splits_for(model: nn.Module, data: Any, argument: str = "data") -> Splits:
    """Returns the data as splits: `Splits` as they are, a mapping (such as a `datasets.DatasetDict`) by the names of
    its splits, anything else as the training images alone. Splits that are missing are refused where they are needed.
    """
    if isinstance(data, Splits):
        return data
    given = dict(data) if isinstance(data, Mapping) else {"train": data}
    unknown = [name for name in given if str(name).lower() not in SPLITS]
    if unknown:
        raise InvalidInput(f"{argument} has a split {unknown[0]!r}: name the splits train, validation and test.")
    sets: dict[str, ImageSet] = {
        SPLITS[name.lower()]: images_for(model, own, f"{argument}[{name!r}]") for name, own in given.items()
    }
    notes = ()
    if "test" not in sets and "validation" in sets:
        sets["test"], notes = sets["validation"], (VALIDATION_IS_TEST,)
    for name in ("train", "validation", "test"):
        if name not in sets:
            sets[name] = MissingImages(f"{argument} (a mapping from the names of splits to data)", name, tuple(sets))
    family = family_of(model)
    channels, height, _ = family.input_shape(model)
    heads = family.heads(model)
    classes = tuple(map(str, range(heads[0].out_features))) if heads else ()
    return Splits(
        name=argument,
        train=sets["train"],
        validation=sets["validation"],
        test=sets["test"],
        class_names=family.class_names(model) or classes,
        channels=channels,
        image_size=height,
        normalization=Normalization(*family.normalization(model)),
        augmentation=None,
        notes=notes,
    )


def adapt_preprocessing(splits: Splits, model: nn.Module, label_map: Mapping[str, int] | None = None) -> Splits:
    """Returns the dataset on the scale that the model was trained with, its labels as numbers of the model's classes.

    `label_map` gives the model's class number of every class of the dataset, by name; ImageNet subsets need none (see
    `data.fit_labels`). Labels that fit no head are refused where they are needed, not here.

    Raises:
        DataError: The images have another shape than the model reads, or the map does not fit.
    """
    family = family_of(model)
    channels, height, _ = family.input_shape(model)
    if (splits.channels, splits.image_size) != (channels, height):
        raise DataError(
            f"{splits.name} has {splits.channels} channels at {splits.image_size} pixels, the model wants {channels} "
            f"at {height}; load the data with image_size={height}, or take a model for this data."
        )
    fitted = splits.renormalized(Normalization(*family.normalization(model)))
    heads = family.heads(model)
    if not heads:
        if label_map is not None:
            raise InvalidInput("label_map was given, and the model has no classifier whose classes it could name.")
        return fitted
    return fit_labels(fitted, heads[0].out_features, label_map)
