"""A user's own data as an ImageSet: a DataLoader, a dataset, a list of batches, tensors or a Hugging Face dataset.

Data with a length and an index (`torch.utils.data.Dataset`, `datasets.Dataset`, tensors, and a DataLoader over such a
dataset with its default sampler) become an `IndexedImages`: any rows in any order, so a training run can be resumed
exactly. Everything else is an iterable that can be iterated again and becomes an `IteratedImages`: one order, its own.

An item, and a batch, is an image alone, a pair (image, label), or a mapping with an image under one of IMAGE_KEYS and a
label under one of LABEL_KEYS. Images are float tensors on the scale that the model reads; a dataset whose images are
PIL pictures is preprocessed as the model's library does it (`Family.preprocessing`).
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from attnrx.data.images import Batch, ImageSet, Pass, RowImages, digest, evenly_spaced, require_held, rows_of_part
from attnrx.data.labels import UNLABELLED
from attnrx.errors import DataError, InvalidInput
from attnrx.preprocessing import Normalization
from attnrx.shapes import Float, Int, Tensor

# Of several keys that an item has, the first in these lists is used. transformers' processors and collators return
# "pixel_values" and "labels"; "img" and "fine_label" are the columns of CIFAR on the hub.
IMAGE_KEYS = ("pixel_values", "image", "images", "img", "inputs", "x")
LABEL_KEYS = ("labels", "label", "targets", "target", "fine_label", "y")

ImageData = Any
"""What `image_set` accepts: an ImageSet, a Tensor, a DataLoader, a Dataset, batches, a Hugging Face dataset."""

NUMBERS = "give one class number (an integer) for each image, e.g. the argmax of a one-hot vector"

Preprocess = Callable[[Any], Float[Tensor, "channels height width"]]


def image_set(data: ImageData, preprocess: Preprocess | None = None, argument: str = "data") -> ImageSet:
    """Returns the data as an ImageSet; an ImageSet is returned unchanged.

    `preprocess` turns a PIL picture into a float tensor [channels, height, width]. Labels are integers; without any,
    the set has a `label_problem`, and functions that need labels raise DataError.

    Raises:
        InvalidInput: The data is of another type, or an item has no image.
        DataError: The data is empty.
    """
    if isinstance(data, ImageSet):
        return data
    if isinstance(data, Tensor):
        return _of_tensors((data,), argument)
    # A pair of tensors is (images, labels); a list of tensors is a list of batches.
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(tensor, Tensor) for tensor in data):
        return _of_tensors(data, argument)
    if isinstance(data, DataLoader):
        return _of_loader(data, argument)
    # Texts and mappings can be iterated too, but their items are characters and keys.
    if isinstance(data, str | bytes | Mapping) or not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
        named = f"the text {data!r}" if isinstance(data, str) else f"of the type {type(data).__name__}"
        raise InvalidInput(
            f"{argument} is {named}: give a DataLoader, a dataset, a list of batches, a tensor [images, "
            "channels, height, width], a Hugging Face dataset, or one split of load_data, e.g. "
            "load_data('cifar10').validation."
        )
    # Before the check for an index, which a list has too: its items are batches, or single items in the list's order.
    if isinstance(data, list | tuple):
        return IteratedImages(data, _Reading("batches", argument))
    reading = _Reading(type(data).__name__, argument, preprocess)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _indexed(data, reading)
    return IteratedImages(data, reading)


class _Rows(TensorDataset):
    """Images, and their labels if there are any, which it lists as torchvision's datasets do."""

    @property
    def targets(self) -> Tensor | None:
        return self.tensors[1] if len(self.tensors) > 1 else None


def _of_tensors(tensors: tuple[Tensor, ...], argument: str) -> "IndexedImages":
    counts = [len(tensor) for tensor in tensors]
    if len(set(counts)) > 1:
        raise InvalidInput(f"{counts[0]} images and {counts[1]} labels: give one label for each image.")
    return _indexed(_Rows(*tensors), _Reading("tensor" if len(tensors) == 1 else "tensors", argument))


def _of_loader(loader: DataLoader[Any], argument: str) -> ImageSet:
    reading = _Reading(type(loader.dataset).__name__, argument)
    # torch defines __getitem__ for iterable datasets too, where it raises; they have no length.
    indexed = hasattr(loader.dataset, "__getitem__") and hasattr(loader.dataset, "__len__")
    ordered = isinstance(loader.sampler, SequentialSampler)
    shuffled = isinstance(loader.sampler, RandomSampler) and not loader.sampler.replacement
    # Another sampler may draw other images, or repeat some: the order is known only from iterating.
    if not indexed or loader.batch_size is None or not (ordered or shuffled):
        return IteratedImages(loader, reading)
    return _indexed(loader.dataset, reading, loader)


def _indexed(dataset: Any, reading: "_Reading", loader: DataLoader[Any] | None = None) -> "IndexedImages":
    if not len(dataset):
        raise DataError(f"{reading.argument} is empty; give at least one image.")
    return IndexedImages(reading.name, _Source(dataset, reading, loader), torch.arange(len(dataset)))


@dataclass(frozen=True)
class _Reading:
    """What turns the items of a user's data into batches; `argument` names the data in messages.

    With `num_classes` every image must have a label below it.
    """

    name: str
    argument: str
    preprocess: Preprocess | None = None
    num_classes: int | None = None

    def fields(self, given: Any) -> tuple[Any, Any]:
        if isinstance(given, Batch):
            return given.images, given.labels
        if isinstance(given, Mapping) or hasattr(given, "keys"):
            image = next((given[key] for key in IMAGE_KEYS if key in given), None)
            if image is None:
                raise InvalidInput(
                    f"an item of {self.argument} has the keys {', '.join(map(str, given))}, and none of them names an "
                    f"image; rename one to one of {', '.join(IMAGE_KEYS)}."
                )
            return image, next((given[key] for key in LABEL_KEYS if key in given), None)
        if isinstance(given, list | tuple):
            if not given:
                raise InvalidInput(
                    f"an item of {self.argument} is an empty {type(given).__name__}; give (image, label)."
                )
            return given[0], given[1] if len(given) > 1 else None
        return given, None

    def batch(self, given: Any) -> Batch:
        """Returns a batch of any of the accepted forms; its `index` counts from 0, labels that are missing are -1."""
        images, labels = self.fields(given)
        images = self._require_images(images, 4)
        # On the CPU, on whatever device the user's loader puts the batch; `_pass` moves it to the device of the pass.
        numbers = torch.full((len(images),), UNLABELLED) if labels is None else self._numbers(labels)
        # Floats (soft labels, targets of a regression) would be cut to class numbers without an error.
        if numbers.shape != (len(images),) or numbers.is_floating_point():
            raise InvalidInput(
                f"the labels of {self.argument} are {numbers.dtype} {list(numbers.shape)} for {len(images)} images; "
                f"{NUMBERS}."
            )
        self.require_classes(numbers)
        return Batch(images.detach().cpu(), numbers.long(), torch.arange(len(images)))

    def collated(self, items: Sequence[Any]) -> Batch:
        """Returns single items as one batch; PIL pictures are preprocessed."""
        pairs = [self.fields(item) for item in items]
        images = [self._image(image) for image, _ in pairs]
        if len({image.shape for image in images}) > 1:
            shapes = sorted({tuple(image.shape) for image in images})
            raise InvalidInput(
                f"{self.argument} has images of the shapes {shapes[0]} and {shapes[-1]}; resize them to one."
            )
        labels = [UNLABELLED if label is None else self._class_number(label) for _, label in pairs]
        return self.batch((torch.stack(images), labels))

    def _image(self, image: Any) -> Tensor:
        if isinstance(image, Tensor) or not hasattr(image, "convert"):  # which PIL pictures have
            return self._require_images(image, 3)
        if self.preprocess is None:
            raise InvalidInput(
                f"{self.argument} holds PIL pictures, and this model states no preprocessing: give the dataset a "
                "transform that returns float tensors on the model's scale."
            )
        return self.preprocess(image)

    def _numbers(self, labels: Any) -> Tensor:
        try:
            return torch.as_tensor(labels).detach().cpu()
        except (TypeError, ValueError, RuntimeError):  # names of classes, or lists of several lengths
            raise InvalidInput(f"the labels of {self.argument} are {_described(labels)}; {NUMBERS}.") from None

    def _class_number(self, label: Any) -> int:
        number = label.item() if math.prod(getattr(label, "shape", (0,))) == 1 else label
        # __index__: integers. A bool has it too, and so has an array or tensor of several numbers.
        if isinstance(number, bool) or hasattr(number, "shape") or not hasattr(number, "__index__"):
            raise InvalidInput(f"a label of {self.argument} is {_described(label)}; {NUMBERS}.")
        return int(number)

    def require_classes(self, labels: Int[Tensor, "images"]) -> None:
        """Raises DataError for labels that are no class of the model, if they are limited to its classes."""
        wrong = labels if self.num_classes is None else labels[(labels < 0) | (labels >= self.num_classes)]
        if self.num_classes is None or not len(wrong):
            return
        label = int(wrong[0])
        found = "an image without a label" if label == UNLABELLED else f"an image with the label {label}"
        raise DataError(
            f"{self.argument} has {found}, and the model has the classes 0 to {self.num_classes - 1}; give every image "
            "one of them; where no loss reads labels, the images can be given without any."
        )

    def _require_images(self, images: Any, dimensions: int) -> Tensor:
        if not isinstance(images, Tensor) or images.ndim != dimensions:
            description = f"of type {type(images).__name__}"
            if isinstance(images, Tensor):
                description = f"a tensor {list(images.shape)}"
            shape = ("images", "channels", "height", "width")[-dimensions:]
            raise InvalidInput(
                f"the images of {self.argument} are {description}; give float tensors [{', '.join(shape)}] on the "
                "model's scale."
            )
        if not images.is_floating_point():
            raise InvalidInput(
                f"the images of {self.argument} are {images.dtype}; give floats on the scale that the model was "
                "trained with: divided by 255, minus the mean, divided by the standard deviation."
            )
        return images

    def require_no_augmentation(self, order: Pass) -> None:
        if order.augmentation is not None:
            raise InvalidInput(
                f"{self.argument} is augmented by its own transforms; attnrx augments only the datasets that it loads "
                "itself."
            )


def _described(label: Any) -> str:
    """Returns a label for a message: its shape, if it has one, because it may have an entry per class."""
    shape = getattr(label, "shape", None)
    return f"{label!r}"[:80] if shape is None else f"a {type(label).__name__} {list(shape)}"


@dataclass(frozen=True, eq=False)
class _Source:
    """A dataset with an index, and the DataLoader that it came with."""

    dataset: Any
    reading: _Reading
    loader: DataLoader[Any] | None = None

    def batch(self, rows: Sequence[int]) -> Batch:
        items = [self.dataset[row] for row in rows]
        if self.loader is None:
            batch = self.reading.collated(items)
        else:
            batch = self.reading.batch(self.loader.collate_fn(items))
        return replace(batch, index=torch.tensor(rows))

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """Reads batches of rows in this order, with the worker processes of the DataLoader."""
        loader = self.loader
        if loader is None or not loader.num_workers:
            yield from map(self.batch, rows)
            return
        # The user's loader iterates in the order of its own sampler; this one reads the given rows with the same
        # workers.
        row_loader = DataLoader(
            loader.dataset,
            batch_sampler=[list(indices) for indices in rows],
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            worker_init_fn=loader.worker_init_fn,
        )
        for batch_rows, batch in zip(rows, row_loader, strict=True):
            yield replace(self.reading.batch(batch), index=torch.tensor(batch_rows))

    @property
    def labels(self) -> Int[Tensor, "images"] | None:
        """The labels of all rows, if the dataset lists them, as torchvision's datasets do."""
        # They only balance the classes in `take`; the labels of a batch are those of its items. The names: most
        # datasets of torchvision have `targets`, SVHN has `labels`, Food101 `_labels`.
        for name in ("targets", "labels", "_labels"):
            values = getattr(self.dataset, name, None)
            if isinstance(values, Tensor | list | tuple) and len(values) == len(self.dataset):
                return _as_labels(values)
        names = getattr(self.dataset, "column_names", None) or ()  # of a Hugging Face dataset
        column = next((key for key in LABEL_KEYS if key in names), None)
        return None if column is None else _as_labels(list(self.dataset[column]))


def _as_labels(found: Any) -> Int[Tensor, "images"] | None:
    try:
        labels = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):  # names of classes, or nested lists
        return None
    # Negative numbers stand for missing labels, and `bincount`, which counts the classes, does not take them.
    usable = labels.ndim == 1 and not labels.is_floating_point() and len(labels) and int(labels.min()) >= 0
    return labels.long() if usable else None


@dataclass(frozen=True, eq=False)
class IndexedImages(RowImages):
    """Some rows of a dataset with an index, on the scale and with the transforms of the dataset itself."""

    store: _Source

    @property
    def has_labels(self) -> bool:
        # By the first image: the labels of all of them are known only after all items are read.
        return int(self.store.batch(self.rows[:1].tolist()).labels[0]) != UNLABELLED

    @property
    def fingerprint(self) -> str:
        """Hashes up to 64 images and their labels, spread over the rows."""
        rows = self.rows[evenly_spaced(len(self))].tolist()
        batches = [self.store.batch([row]) for row in rows]
        contents = [batch.images.contiguous().numpy().tobytes() for batch in batches]
        contents += [batch.labels.numpy().tobytes() for batch in batches]
        # The rows stand for the labels, of which only those of the sampled images are read.
        return digest(self.name, self.rows, contents)

    def renormalized(self, normalization: Normalization) -> ImageSet:
        """Returns the set itself: the user's own transforms decide the scale."""
        return self

    def limited_to(self, num_classes: int) -> "IndexedImages":
        """Returns the same images; those without a label below `num_classes` raise DataError where they are read."""
        store = replace(self.store, reading=replace(self.store.reading, num_classes=num_classes))
        if store.labels is not None:  # known before the images are read
            store.reading.require_classes(store.labels[self.rows])
        return replace(self, store=store)

    def _pass(self, order: Pass) -> Iterator[Batch]:
        self.store.reading.require_no_augmentation(order)  # so that every step's random numbers are None
        steps = [self.rows[positions].tolist() for positions, _ in order.steps(len(self))]
        for batch in self.store.batches(steps):
            yield _on_device(batch, order.device)


@dataclass(frozen=True, eq=False)
class IteratedImages(ImageSet):
    """An iterable of batches, or of single items, that every pass iterates from its beginning.

    The length is counted in a first pass. The batches are those of the iterable; single items are collated. A part has
    the images from `first` up to `stop`.
    """

    source: Iterable[Any]
    reading: _Reading
    first: int = 0
    stop: int | None = None

    def __post_init__(self):
        if isinstance(self.source, Iterator):
            raise InvalidInput(
                f"{self.reading.argument} is an iterator ({type(self.source).__name__}), which can be read once only; "
                "give a list, a DataLoader, or an object whose __iter__ begins anew."
            )

    def __len__(self) -> int:
        return self._counted[0]

    @property
    def fingerprint(self) -> str:
        """Hashes the labels of all images, and of each batch the first image."""
        return self._counted[1]

    @property
    def has_labels(self) -> bool:
        return self._counted[2]

    @cached_property
    def _counted(self) -> tuple[int, str, bool]:
        """The number of images, the fingerprint, and whether there are labels; from one pass, the first time."""
        labels, contents = [torch.empty(0, dtype=torch.long)], []
        # Only the labels and a hash per batch are held, because the images may not fit in memory.
        for batch in self._batches(64):
            labels.append(batch.labels)
            contents.append(hashlib.sha256(batch.images[0].contiguous().numpy().tobytes()).digest())
        all_labels = torch.cat(labels)
        if not len(all_labels):
            raise DataError(f"{self.reading.argument} yielded no image; give at least one.")
        return len(all_labels), digest(self.reading.name, all_labels, contents), bool((all_labels != UNLABELLED).all())

    def take(self, count: int) -> ImageSet:
        require_held(count, len(self))
        return self._cut(slice(0, count))

    def part(self, process: int, processes: int, batch_size: int) -> ImageSet:
        return self._cut(rows_of_part(len(self), process, processes, batch_size))

    def _cut(self, rows: slice) -> ImageSet:
        return replace(self, first=self.first + rows.start, stop=self.first + rows.stop)

    def renormalized(self, normalization: Normalization) -> ImageSet:
        """Returns the set itself: the user's own transforms decide the scale."""
        return self

    def limited_to(self, num_classes: int) -> "IteratedImages":
        """Returns the same images; those without a label below `num_classes` raise DataError where they are read."""
        return replace(self, reading=replace(self.reading, num_classes=num_classes))

    def _pass(self, order: Pass) -> Iterator[Batch]:
        self.reading.require_no_augmentation(order)
        if order.seed is not None or order.start or order.shard != (0, 1):
            raise InvalidInput(
                f"{self.reading.argument} can only be iterated in its own order, and training draws a new order for "
                "every epoch so that a run can be resumed: give a dataset with a length and an index, or a DataLoader "
                "over one."
            )
        for batch in self._batches(order.batch_size):
            yield _on_device(batch, order.device)

    def _batches(self, batch_size: int) -> Iterator[Batch]:
        """Yields the batches on the CPU, with the row of every image, cut to the own rows."""
        num_read = 0
        for batch in self._as_given(batch_size):
            stop = len(batch) if self.stop is None else min(len(batch), self.stop - num_read)
            part = slice(max(self.first - num_read, 0), stop)
            if part.start < part.stop:
                # Rows are counted from the beginning of the iterable, so an image has the same row in every part.
                index = torch.arange(num_read, num_read + len(batch))
                yield Batch(batch.images[part], batch.labels[part], index[part])
            num_read += len(batch)
            if self.stop is not None and num_read >= self.stop:
                return

    def _as_given(self, batch_size: int) -> Iterator[Batch]:
        parts = iter(self.source)
        first = next(parts, None)
        if first is None:
            return
        # The first item decides between batches and single items, and is then put back.
        image, _ = self.reading.fields(first)
        parts = chain([first], parts)
        if isinstance(image, Tensor) and image.ndim == 4:
            yield from map(self.reading.batch, parts)
        else:
            while items := list(islice(parts, batch_size)):
                yield self.reading.collated(items)


def _on_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(batch.images.to(device), batch.labels.to(device), batch.index.to(device))
