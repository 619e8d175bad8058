"""Converts a user's data to image sets and splits for a model."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from attnrx.data import MAX_IMAGES, FixedImages, ImageSet, Normalization, Splits, fit_labels, image_set
from attnrx.data.images import LABEL_KEYS
from attnrx.data.splits import SPLITS, VALIDATION_IS_TEST, with_missing
from attnrx.data.user_data import TARGETS, training_set
from attnrx.support.arguments import checked, described_error, instance, optional, user_code
from attnrx.support.errors import AttnrxError, DataError, InvalidInput, ScaleWarning
from attnrx.support.modules import evaluating, tensors_of
from attnrx.support.preprocessing import SMALL, ImageGeometry, Preprocessing
from attnrx.support.shapes import Tensor
from attnrx.vit.models import ModuleInputs, accepting, family_of, num_outputs
from attnrx.vit.models.input_validation import require_channels_first
from attnrx.vit.outputs import Logits, current_judgement, output_kind_of


@dataclass(frozen=True, eq=False)
class ModelBatches:
    """Batches of any form, and a function `inputs` that turns a batch into the arguments of a module's `forward`.

    Labels are found as in `image_set`: the second entry of a pair, or an entry under one of LABEL_KEYS. If `inputs`
    passes this entry on to `forward`, it is not treated as a label.
    """

    data: Any
    inputs: Callable[[Any], Any]
    packing: ModuleInputs | None = None

    @classmethod
    def of(cls, data: Any, inputs: Callable[[Any], Any] | None) -> Any:
        """Returns the data together with `inputs`, for every split. If `inputs` is None, returns the data unchanged.

        Raises:
            InvalidInput: The data cannot be iterated, or can be iterated only once.
        """
        if inputs is None:
            return data
        if isinstance(data, Mapping):
            return {name: cls.of(each, inputs) for name, each in data.items()}
        if isinstance(data, str | ImageSet | Splits | Tensor | Iterator) or not hasattr(data, "__iter__"):
            raise InvalidInput(
                f"data of type {type(data).__name__} with inputs=...: give a DataLoader or a list of batches."
            )
        return cls(data, inputs)

    def example(self) -> Any:
        """Calls `inputs` on the first batch, and returns the arguments for the model that it makes.

        Raises:
            DataError: The data are empty, or cannot be read.
        """
        with user_code("the first batch of data", DataError):
            for arguments, _ in self:
                return arguments
        raise DataError("data is empty; give at least one batch.")

    def packed(self, inputs: ModuleInputs | None) -> "ModelBatches":
        """Returns the batches as pairs (images, labels). `inputs` packs the arguments of `forward` into one tensor.

        Raises:
            InvalidInput: The model takes only images, so there is nothing to pack.
        """
        if inputs is None:
            raise InvalidInput("inputs=... for a model of images: load the model with inputs=..., or omit it.")
        return replace(self, packing=inputs)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yields the result of `inputs` for every batch, with the labels."""
        for batch in self.data:
            labels = None
            if isinstance(batch, tuple | list):
                labels = batch[1] if len(batch) == 2 else None
            elif hasattr(batch, "keys"):
                labels = next((batch[key] for key in LABEL_KEYS if key in batch), None)
            with user_code("inputs(batch)", DataError):
                arguments = self.inputs(batch)
            if any(each is labels for each in tensors_of(arguments).values()):
                labels = None
            yield arguments if self.packing is None else self.packing.packed(arguments), labels

    def __len__(self) -> int:
        return len(self.data)


def normalization_of(model: nn.Module) -> Normalization:
    """Returns the mean and standard deviation by which the model expects images to be normalized."""
    return Normalization(*family_of(model).normalization(model))


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """Returns the preprocessing of pictures that the model's own library defines for this model.

    If the library defines no preprocessing, the input size decides. For small inputs, pictures are resized to fill the
    input. For larger inputs, they are resized to 256/224 of the input size, and then cropped at the center.

    Raises:
        NotSupported: No model family matches.
    """
    family = family_of(model)
    return Preprocessing(family.geometry(model) or _own_geometry(family.input_shape(model)), normalization_of(model))


def _own_geometry(shape: tuple[int, int, int], photos: bool | None = None) -> ImageGeometry:
    channels, *size = shape
    photos = min(size) > SMALL if photos is None else photos
    return ImageGeometry.of_size((size[0], size[1]), channels, "photo" if photos else "fill")


def images_for(
    model: nn.Module, data: Any, argument: str = "data", *, limit: int = MAX_IMAGES, seed: int = 0
) -> ImageSet:
    """Returns the data as an image set for this model, read in one pass (see `data.image_set`).

    PIL images are preprocessed as in the model's own library (`preprocessing_of`). Tensors must already be normalized.

    Raises:
        InvalidInput: The data has an unknown type, or its images are not float tensors. The message names `argument`.
        DataError: The data is empty, or reading it raised an error.
    """
    if isinstance(data, ImageSet):
        return data
    inputs = family_of(model).inputs(model)
    if isinstance(data, ModelBatches):
        data, inputs = data.packed(inputs), None
    scale, preprocess = normalization_of(model), preprocessing_of(model)
    kind = output_kind_of(model)
    outputs = kind.name if kind.has_decisions or not current_judgement().reads_labels else TARGETS
    images = image_set(
        data, preprocess, argument, normalization=scale, limit=limit, seed=seed, outputs=outputs, inputs=inputs
    )
    _require_sizes(model, images, argument, family_of(model).inputs(model))
    return images


def _require_sizes(model: nn.Module, images: ImageSet, argument: str, inputs: ModuleInputs | None) -> None:
    """Raises InvalidInput if the model rejects one of the image sizes, or DataError if channels are the last axis."""
    if isinstance(images, FixedImages) and inputs is None:
        require_channels_first(images.store.values.shape[1:], family_of(model).input_shape(model), f"{argument} has")
    for others in images.others if isinstance(images, FixedImages) else ():
        some = [next(iter(each.take(1).batches(1))).images for each in (images, others)]
        shapes = [tuple(each.shape[1:]) for each in some]
        try:
            fitting = accepting(model, shapes[0])
            with evaluating([fitting]):
                fitting(some[1].to(next(fitting.parameters())))
        except Exception as error:  # the code of a module raises errors of any type
            raise InvalidInput(
                f"{argument} has images of the shapes {shapes[0]} and {shapes[1]}, and this model takes none of the "
                f"second one: resize them to one ({described_error(error)})"
            ) from error


def splits_for(
    model: nn.Module,
    data: Any,
    argument: str = "data",
    *,
    training: bool = False,
    limit: int = MAX_IMAGES,
    seed: int = 0,
) -> Splits:
    """Returns a user's data as splits.

    `Splits` are returned unchanged. In a mapping (such as a `datasets.DatasetDict`), the keys are the names of the
    splits. Other data become the training images. A missing split raises an error only when it is used. Images are read
    once, at most `limit` per split. With `training`, the rows of a dataset are instead read again in every pass, in the
    order of that pass.

    Raises:
        InvalidInput: A split has an unknown name or occurs twice, or single rows of the training data cannot be read.
        DataError: The data is empty, or reading it raised an error.
    """
    if isinstance(data, Splits):
        return data
    family = family_of(model)
    by_split = dict(data) if isinstance(data, Mapping) else {"train": data}
    sets: dict[str, ImageSet] = {}
    for name, images in by_split.items():
        split, named = SPLITS.get(str(name).lower()), f"{argument}[{name!r}]"
        if split is None or split in sets:
            raise InvalidInput(
                f"{argument} has a split {name!r}: name the splits train, validation and test, and give each once."
            )
        lazy = None
        if training:
            lazy = training_set(images, preprocessing_of(model), named, inputs=family.inputs(model))
        if lazy is None and training and split == "train":
            raise InvalidInput(
                f"{named} can only be iterated in its own order, and training draws a new order for every epoch so "
                "that a run can be resumed: give a dataset with a length and an index, or a DataLoader over one with "
                "its default sampler."
            )
        sets[split] = images_for(model, images, named, limit=limit, seed=seed) if lazy is None else lazy
    notes = ()
    if "test" not in sets and "validation" in sets:
        # Datasets often publish no labels for the test split. A note records that both splits hold the same images.
        sets["test"], notes = sets["validation"], (VALIDATION_IS_TEST,)
    channels, *size = family.input_shape(model)
    # Without class names, the classes are named by their numbers. An embedding model has no classes. A model with
    # one logit has two classes, and its configuration may name only one of them.
    classes = tuple(map(str, range(num_classes(model))))
    of_data = dataset_classes(*by_split.values())
    names = family.class_names(model) or (of_data if len(of_data) == len(classes) else ())
    return Splits(
        name=argument,
        **with_missing(sets, f"{argument} (a mapping from the names of splits to data)"),
        class_names=names if len(names) >= len(classes) else classes,
        channels=channels,
        image_size=size[0] if size[0] == size[1] else (size[0], size[1]),
        normalization=normalization_of(model),
        augmentation=None,
        notes=notes,
    )


def stated_image_size(data: Any) -> tuple[int, int] | None:
    """Returns the height and width of images that you pass as tensors, batches or a dataset.

    Returns None if the data itself has no size, e.g. a dataset's name, or pictures without a transform.
    """
    if isinstance(data, Mapping):
        data = next(iter(data.values()), None)
    if isinstance(data, str | Path | ModelBatches | Iterator):  # an iterator can be read only once
        return None
    if isinstance(data, Splits):
        data = data.train
    with suppress(AttnrxError):
        images = next(iter(image_set(data, outputs="map", limit=1).take(1).batches(1))).images
        if images.ndim == 4:
            return images.shape[2], images.shape[3]
    return None


def dataset_classes(*data: Any) -> tuple[str, ...]:
    """Returns the class names of a dataset, or () if it has none. The dataset may be inside a Subset or a DataLoader.

    The names come from the dataset's attribute `classes`, as in torchvision, or from the label feature of a Hugging
    Face dataset.
    """
    for each in data:
        # A DataLoader and a Subset have the dataset that they read from as an attribute.
        for _ in range(8):
            if getattr(each, "classes", None) is None and hasattr(each, "dataset"):
                each = each.dataset
        features = getattr(each, "features", None)
        label = next((features[key] for key in LABEL_KEYS if key in features), None) if features else None
        names = getattr(each, "classes", None) or getattr(label, "names", None)
        if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()


@checked(label_map=optional(instance("a dictionary from class names to class numbers", Mapping)))
def adapt_preprocessing(splits: Splits, model: nn.Module, label_map: Mapping[str, int] | None = None) -> Splits:
    """Returns the splits with the model's preprocessing, and with the model's class indices as labels.

    Pictures that attnrx decodes get the size, crop, interpolation and channels that the model's own library uses. If
    the library defines no preprocessing, the dataset's own preprocessing is kept, at the model's input size. Subsets of
    ImageNet need no `label_map` (see `data.fit_labels`). If labels do not fit the head, an error is raised only when
    the labels are used.

    Args:
        splits: The dataset.
        model: The model for which images and labels are prepared.
        label_map: The model's class index for every class name in the dataset.

    Returns:
        The splits for this model.

    Raises:
        DataError: The images do not have the shape of the model's input and cannot be resized, or `label_map` does not
            fit.
        InvalidInput: `label_map` was passed for a model without classes.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> splits = rx.adapt_preprocessing(rx.load_data("digits"), rx.load(vit))
        >>> splits.channels, splits.image_size  # of gray images of 16 x 16 pixels
        (3, 32)
    """
    family = family_of(model)
    shape = family.input_shape(model)
    if splits.geometry is not None:
        splits = _fitted(splits, splits.geometry, model)
    channels, *size = shape
    wanted = size[0] if size[0] == size[1] else tuple(size)
    if (splits.channels, splits.image_size) != (channels, wanted):
        raise DataError(
            f"{splits.name} has images of {splits.channels} channel(s) and {splits.image_size} pixels, the model needs "
            f"{channels} and {wanted}: load the data with image_size={wanted}, give a PyTorch dataset that converts "
            f"them (in torchvision, Grayscale({channels})), or use a model for these images."
        )
    fitted = splits.renormalized(normalization_of(model))
    if not family.knows_normalization(model):
        # Pixels that attnrx normalizes fit any scale, so only this warning can show the problem.
        scale = fitted.normalization
        note = (
            f"the model has no image processor, so its normalization is unknown: pixels are normalized with mean "
            f"{scale.mean} and std {scale.std}. Save its processor (preprocessor_config.json) with the model, or give "
            "tensors that are normalized as in its training."
        )
        warnings.warn(note, ScaleWarning, stacklevel=2)
        fitted = replace(fitted, notes=(*fitted.notes, note))
    classes = num_classes(model)
    if not classes:
        if label_map is not None:
            raise InvalidInput("label_map was given, and the model has no classifier whose classes it could name.")
        return fitted
    return fit_labels(fitted, classes, label_map)


def _fitted(splits: Splits, geometry: ImageGeometry, model: nn.Module) -> Splits:
    family = family_of(model)
    shape, stated = family.input_shape(model), family.geometry(model)
    if stated is None and geometry.shape == shape:
        return splits
    photos = splits.augmentation is not None and splits.augmentation.area is not None
    wanted = stated or _own_geometry(shape, photos)
    # A picture has one or three channels. Other models need tensors.
    if wanted == geometry or wanted.channels not in (1, 3):
        return splits
    note = f"pictures are preprocessed as the model states: {wanted}"
    return replace(splits.with_geometry(wanted), notes=(*splits.notes, note))


def num_classes(model: nn.Module) -> int:
    """Returns the number of classes that a model distinguishes, or 0 for an embedding model."""
    heads, kind = family_of(model).heads(model), output_kind_of(model)
    return kind.num_classes(num_outputs(heads[0])) if heads and isinstance(kind, Logits) else 0
