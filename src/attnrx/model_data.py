"""Conversion of user data to the image set or the splits of a model."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from attnrx.data import ImageSet, Normalization, Splits, fit_labels, image_set
from attnrx.data.pixels import SMALL, ImageGeometry
from attnrx.data.splits import NAMES, SPLITS, VALIDATION_IS_TEST, MissingImages
from attnrx.errors import DataError, InvalidInput
from attnrx.model_outputs import Logits, output_kind_of
from attnrx.models import family_of
from attnrx.optional import required_module
from attnrx.shapes import Float, Tensor


def normalization_of(model: nn.Module) -> Normalization:
    """Returns the scale on which the model reads images."""
    return Normalization(*family_of(model).normalization(model))


def images_for(model: nn.Module, data: Any, argument: str = "data") -> ImageSet:
    """Returns the data as an image set for this model (see `data.image_set`). PIL images are preprocessed as by the
    model's library; tensors must already be normalized for the model.

    Raises:
        InvalidInput: The data has an unknown type, or its images are not float tensors; the message names `argument`.
        DataError: The data is empty.
    """
    if isinstance(data, ImageSet):
        return data
    family = family_of(model)
    # That of the library, because its resizing and cropping are part of the model's accuracy.
    return image_set(data, family.preprocessing(model) or _own_preprocessing(model), argument)


def _own_preprocessing(model: nn.Module) -> Callable[[Any], Float[Tensor, "channels height width"]]:
    """Returns the preprocessing of a PIL image as for the named datasets, with the model's normalization."""
    family = family_of(model)
    channels, size, _ = family.input_shape(model)
    # Photographs are resized and cropped; a small picture is resized as it is (`data.pixels`).
    geometry = ImageGeometry(size, channels, "photo" if size > SMALL else "fill")
    scale = normalization_of(model)

    def preprocess(picture: Any) -> Tensor:
        transforms = required_module("torchvision.transforms.v2.functional", "data", "preprocessing of PIL images")
        pixels = transforms.pil_to_tensor(picture.convert("L" if channels == 1 else "RGB"))
        return scale.apply(geometry.still(pixels).float() / 255)

    return preprocess


def splits_for(model: nn.Module, data: Any, argument: str = "data") -> Splits:
    """Returns the data as splits.

    `Splits` are returned unchanged; a mapping (such as a `datasets.DatasetDict`) is read by split name; other data
    become the training images. A missing split raises an error only when it is used.
    """
    if isinstance(data, Splits):
        return data
    by_split = dict(data) if isinstance(data, Mapping) else {"train": data}
    unknown = [name for name in by_split if str(name).lower() not in SPLITS]
    if unknown:
        raise InvalidInput(f"{argument} has a split {unknown[0]!r}: name the splits train, validation and test.")
    sets: dict[str, ImageSet] = {
        SPLITS[name.lower()]: images_for(model, images, f"{argument}[{name!r}]") for name, images in by_split.items()
    }
    notes = ()
    if "test" not in sets and "validation" in sets:
        # Datasets often publish no labels of a test split; the note records that both are the same images.
        sets["test"], notes = sets["validation"], (VALIDATION_IS_TEST,)
    source = f"{argument} (a mapping from the names of splits to data)"
    # A placeholder per absent split, which raises with its name where it is used.
    missing = {name: MissingImages(source, name, tuple(sets)) for name in NAMES}
    family = family_of(model)
    channels, height, _ = family.input_shape(model)
    # Without names of its classes a model has their numbers; one of embeddings has none. One logit distinguishes two
    # classes, of which a configuration may name one.
    classes, names = tuple(map(str, range(num_classes(model)))), family.class_names(model)
    return Splits(
        name=argument,
        **{**missing, **sets},
        class_names=names if len(names) >= len(classes) else classes,
        channels=channels,
        image_size=height,
        normalization=normalization_of(model),
        augmentation=None,
        notes=notes,
    )


def adapt_preprocessing(splits: Splits, model: nn.Module, label_map: Mapping[str, int] | None = None) -> Splits:
    """Returns the splits with the model's normalization and with labels as class indices of the model.

    `label_map` maps class names of the dataset to class indices of the model; ImageNet subsets need none (see
    `data.fit_labels`). Labels that fit no head raise an error only when they are used.

    Raises:
        DataError: The images do not have the model's input shape, or the map does not fit.
    """
    family = family_of(model)
    channels, height, _ = family.input_shape(model)
    # Named data are decoded at one size, so another one needs another call of `load_data`; the scale can be changed
    # later.
    if splits.channels != channels:
        # The reader keeps grey images grey: which model they are for is the user's decision.
        wanted = "RGB" if channels == 3 else f"{channels}-channel"
        raise DataError(
            f"{splits.name} has images of {splits.channels} channel(s), the model needs {channels}: store them as "
            f"{wanted} images, give a PyTorch dataset that converts them (in torchvision, Grayscale({channels})), or "
            f"use a model of {splits.channels} channel(s)."
        )
    if splits.image_size != height:
        raise DataError(
            f"{splits.name} has images of {splits.image_size} pixels, the model needs {height}; load the data with "
            f"image_size={height}, or use a model for this size."
        )
    fitted = splits.renormalized(normalization_of(model))
    classes = num_classes(model)
    if not classes:
        if label_map is not None:
            raise InvalidInput("label_map was given, and the model has no classifier whose classes it could name.")
        return fitted
    return fit_labels(fitted, classes, label_map)


def num_classes(model: nn.Module) -> int:
    """Returns the number of classes that a model distinguishes; 0 for a model of embeddings."""
    heads, kind = family_of(model).heads(model), output_kind_of(model)
    return kind.num_classes(heads[0].out_features) if heads and isinstance(kind, Logits) else 0
