"""A user's own data as an ImageSet: a DataLoader, a dataset, a list of batches, tensors or a Hugging Face dataset.

`image_set` reads the data once into a `FixedImages` (`attnrx.data.fixed_images`). Data with a length and an index are
read row by row: `torch.utils.data.Dataset`, `datasets.Dataset`, tensors, and a DataLoader over such a dataset. If the
DataLoader has a custom sampler, every row that it draws is read once. Other iterables are iterated once. For training,
rows are read again in every epoch, in a new order, so a run can be resumed exactly (`training_set`).

An item, or a batch, has one of three forms: only an image, a pair (image, label), or a mapping with an image under one
of IMAGE_KEYS and a label under one of LABEL_KEYS. Images are float tensors with the model's normalization. PIL pictures
in a dataset are preprocessed as in the model's own library (`model_data.preprocessing_of`).
"""

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from attnrx.data.fixed_images import (
    DTYPES,
    MAX_IMAGES,
    MAX_UNCOUNTED,
    ONE_DRAW,
    FixedImages,
    content_hashes,
    read_once,
    seeded_draws,
)
from attnrx.data.images import (
    IMAGE_KEYS,
    LABEL_KEYS,
    UNLABELLED,
    Batch,
    ImageSet,
    Pass,
    digest,
    evenly_spaced,
    likely_labels,
    require_labelled,
)
from attnrx.support.arguments import Kind, checked, user_code
from attnrx.support.errors import DataError, InvalidInput
from attnrx.support.preprocessing import Normalization
from attnrx.support.shapes import Float, Int, Tensor

MASK_KEYS = ("mask", "masks", "annotation")  # keys of labels for TARGETS
# UNREAD are kinds of outputs that are compared without labels. TARGETS are labels of any shape, for a metric.
UNREAD, TARGETS = ("regression", "map", "several"), "targets"

ImageData = Any
"""What `image_set` accepts: an ImageSet, a Tensor, a DataLoader, a Dataset, batches, a Hugging Face dataset."""

# The error message about wrong labels, by the kind of the model's outputs. All other kinds need class numbers.
NUMBERS = "give one class number (an integer) for each image, e.g. the argmax of a one-hot vector"
SEVERAL_LABELS = ("multilabel", "label_probabilities")
LABELS = {
    **dict.fromkeys(
        SEVERAL_LABELS, "this model has several labels: give a vector of 0 and 1 for each image, one number per label"
    ),
    "binary_logit": 'this model has one logit: give 0 or 1 for each image, or load it with outputs="regression"',
    TARGETS: "give one for each image, all of one shape",
}

Preprocess = Callable[[Any], Float[Tensor, "channels height width"]]

FORMAT_OF_INPUTS = Kind(
    "what `Family.inputs` returns for the model, or None",
    lambda value: value is None or (hasattr(value, "image_in") and not isinstance(value, type)),
)

# Images per batch, for data without batches.
BATCH = 32
CANDIDATES = 1_000_000  # the most rows that are requested from a sampler
MAX_LISTED = 2**24  # the most rows for which the dataset's list of labels is read, to balance a selection of rows
MAX_ROWS = 2**31  # the most rows of a dataset for training
# How many images are read a second time, to find out whether every reading returns the same images.
READ_TWICE = 6
# The first batch of an iterable is not read a second time if it has more images than this.
MAX_READ_TWICE = 256


@checked(inputs=FORMAT_OF_INPUTS)
def image_set(
    data: ImageData,
    preprocess: Preprocess | None = None,
    argument: str = "data",
    *,
    normalization: Normalization | None = None,
    limit: int = MAX_IMAGES,
    seed: int = 0,
    outputs: str = "logits",
    inputs: Any = None,
) -> ImageSet:
    """Returns a user's data as an ImageSet, read in one pass. An ImageSet is returned unchanged.

    Labels are integers. Without labels, the set has a `label_problem`, and functions that need labels raise DataError.
    If random transforms or samplers would return other images when they are read again, the set contains one random
    draw, and its `notes` say so.

    Args:
        data: A DataLoader, a dataset, batches, tensors or a Hugging Face dataset (see the module).
        preprocess: A function that turns a PIL picture into a float tensor [channels, height, width].
        argument: The name of the data in messages.
        normalization: The model's normalization. With it, images from 8-bit pixels are stored in one byte per value.
        limit: The maximum number of images to read. If there are more rows, the chosen rows are balanced over the
            classes if the dataset lists its labels, else evenly spaced.
        seed: The seed for the random transforms and samplers of the data.
        outputs: The name of the model's `OutputKind`. For "multilabel", a label is a vector of 0 and 1. For
            "regression", "map" or "several", labels are not read. For "targets", labels are tensors of any shape, e.g.
            masks for a metric.
        inputs: A converter from inputs of the model's own library (videos, spectrograms, padded patches) to images
            (`Family.inputs`). None means that the data are images with channels, height and width.

    Raises:
        InvalidInput: The data has an unsupported type, or an item has no image.
        DataError: The data is empty, or the user's code raised an error, which is chained as the cause.
    """
    if isinstance(data, ImageSet):
        return data
    reading = _ItemReader(argument, preprocess, outputs=outputs, inputs=inputs)
    with seeded_draws(seed, _generators_of(data)):
        images = _source_of(data, reading).read(limit, normalization)
    if not reading.unread:
        return images
    names = ", ".join(reading.unread)
    note = f"{argument}: no labels are read. If {names} holds them, rename it to one of {', '.join(LABEL_KEYS)}"
    return replace(images, notes=(note, *images.notes))


def training_set(
    data: ImageData, preprocess: Preprocess | None = None, argument: str = "data", *, inputs: Any = None
) -> ImageSet | None:
    """Returns a user's data as an ImageSet that reads its rows anew in every pass, in the order of that pass.

    Returns None if the data can only be iterated, or if a sampler does not draw every row of the dataset exactly once.

    Raises:
        InvalidInput: The data has an unsupported type.
        DataError: The data is empty or too long, or its length or sampler raised an error.
    """
    if isinstance(data, ImageSet):
        return data
    with seeded_draws(0, _generators_of(data)):  # a sampler may draw its rows
        source = _source_of(data, _ItemReader(argument, preprocess, inputs=inputs), training=True)
    if not isinstance(source, IndexedImages) or not source.is_whole:
        return None
    if len(source) > MAX_ROWS:
        raise DataError(f"{argument} states a length of {len(source):,}; at most {MAX_ROWS:,} are supported.")
    return source


def _generators_of(data: Any) -> list[torch.Generator]:
    """Returns the random generators of a DataLoader and its samplers."""
    owners = (data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [each for each in found if isinstance(each, torch.Generator)]


def _source_of(data: Any, reading: "_ItemReader", training: bool = False) -> "IndexedImages | _IterableData":
    # A pair of tensors is (images, labels), but a list of tensors is a list of batches.
    tensors: tuple[Any, ...] = data if isinstance(data, tuple) and len(data) == 2 else (data,)
    if all(isinstance(tensor, Tensor) for tensor in tensors):
        return _of_tensors(tensors, reading)
    if isinstance(data, DataLoader):
        return _of_loader(data, reading, training)
    argument = reading.argument
    # Texts and mappings can be iterated, too, but their items are characters and keys.
    if isinstance(data, str | bytes | Mapping | np.generic) or not (
        hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    ):
        named = f"the text {data!r}" if isinstance(data, str) else f"of the type {type(data).__name__}"
        raise InvalidInput(
            f"{argument} is {named}: give a DataLoader, a dataset, a list of batches, a tensor [images, "
            "channels, height, width], a Hugging Face dataset, or one split of load_data, e.g. "
            "load_data('cifar10').validation."
        )
    # Lists are handled before data with an index, although they have one. Their items are batches, or single items in
    # order.
    if isinstance(data, list | tuple):
        return _IterableData("batches", data, reading, is_list=True)
    name, length = type(data).__name__, _length(data, argument) if hasattr(data, "__getitem__") else None
    return _IterableData(name, data, reading) if length is None else IndexedImages(name, data, reading, range(length))


def _length(data: Any, argument: str) -> int | None:
    """Returns the length of a user's data, or None if it has no length."""
    with user_code(f"the length of {argument} ({type(data).__name__})", DataError):
        try:
            return len(data)
        except TypeError:  # of an iterable
            return None


def _of_tensors(tensors: tuple[Tensor, ...], reading: "_ItemReader") -> "IndexedImages":
    images = reading.require_images(tensors[0], 4)  # required here, because a sparse tensor has no rows to read
    if any(tensor.shape[:1] != images.shape[:1] for tensor in tensors[1:]):
        raise InvalidInput(
            f"{reading.argument} has {len(images)} images and labels {list(tensors[1].shape)}: give one for each image."
        )
    if any(tensor.is_meta for tensor in tensors[1:]):
        raise InvalidInput(
            f"{reading.argument} has labels on the meta device, which have no values: give them on a CPU."
        )
    # Labels may be on another device, but they are read by row.
    rows = TensorDataset(images.detach(), *(labels.detach().cpu() for labels in tensors[1:]))
    return IndexedImages("tensor" if len(tensors) == 1 else "tensors", rows, reading, range(len(images)))


def _of_loader(loader: DataLoader[Any], reading: "_ItemReader", training: bool) -> "IndexedImages | _IterableData":
    argument, dataset = reading.argument, loader.dataset
    name = type(dataset).__name__
    # Iterable datasets inherit a __getitem__ from torch that raises an error. Such datasets have no length.
    length = _length(dataset, argument) if hasattr(dataset, "__getitem__") else None
    # A loader class with its own iteration may change its batches there, e.g. normalize them.
    has_own_iteration = type(loader).__iter__ is not DataLoader.__iter__ and not training
    if length is None or loader.batch_sampler is None or has_own_iteration:
        return _IterableData(name, loader, reading)
    sampler = loader.sampler
    has_own_batches = type(loader.batch_sampler) is not BatchSampler
    if isinstance(sampler, SequentialSampler | RandomSampler) and not has_own_batches:
        if isinstance(sampler, SequentialSampler) or (not sampler.replacement and len(sampler) == length):
            return IndexedImages(name, dataset, reading, range(len(sampler)), loader)
    with user_code(f"the sampler of {argument}", DataError):
        drawn = chain.from_iterable(loader.batch_sampler) if has_own_batches else iter(sampler)
        found = list(islice(drawn, CANDIDATES))
    # A sampler may return anything that its dataset accepts as an index.
    if not all(hasattr(row, "__index__") for row in found):
        return _IterableData(name, loader, reading)
    # Each row is read once. With random transforms, reading it twice would give two images of the same picture.
    rows = list(dict.fromkeys(int(row) for row in found))
    notes = ()
    if len(rows) < len(found):
        drawn = f"draws {len(found):,} images, {len(rows):,} of them different"
        notes = (f"{argument}: its sampler {drawn}; each is used once",)
    return IndexedImages(name, dataset, reading, rows, loader, notes, is_whole=False)


@dataclass(frozen=True)
class _ItemReader:
    """Turns the items of a user's data into batches. `argument` is the name of the data in messages."""

    argument: str
    preprocess: Preprocess | None = None
    outputs: str = "logits"
    inputs: Any = None
    unread: dict[str, None] = field(default_factory=dict)  # keys of items that may be labels, collected by `fields`

    def fields(self, given: Any) -> tuple[Any, Any]:
        """Returns an item's image and its label (None if it has none). For a batch, returns all images and labels."""
        if isinstance(given, Batch):
            return given.images, given.labels
        if isinstance(given, list | tuple) and given:
            return given[0], given[1] if len(given) > 1 else None
        if isinstance(given, list | tuple) or not hasattr(given, "keys"):
            return given, None
        image = None if self.inputs is None else self.inputs.image_in(given)
        if image is None:
            image = next((given[key] for key in IMAGE_KEYS if key in given), None)
        if image is None:
            names = dict.fromkeys(((self.inputs.name,) if self.inputs is not None else ()) + IMAGE_KEYS)
            raise InvalidInput(
                f"an item of {self.argument} has the keys {', '.join(map(str, given))}, and none of them names an "
                f"image; rename one to one of {', '.join(names)}."
            )
        keys = (*LABEL_KEYS, *MASK_KEYS) if self.outputs == TARGETS else LABEL_KEYS
        label = next((given[key] for key in keys if key in given), None)
        if label is None and self.outputs not in UNREAD:
            self.unread.update(dict.fromkeys(likely_labels(given)))
        return image, label

    def batch(self, given: Any) -> Batch:
        """Returns a batch from any of the accepted forms. Its `index` counts from 0, and missing labels become -1."""
        images, labels = self.fields(given)
        images = self.require_images(images, 4)
        # The batch is on the CPU, whatever device the user's loader uses. `_pass` moves it to the device of the pass.
        return Batch(images.detach().cpu(), self._labels(labels, len(images)), torch.arange(len(images)))

    def _labels(self, labels: Any, count: int) -> Tensor:
        """Returns the labels of `count` images in the form that the model's outputs need. `labels` may be a list."""
        given = labels if isinstance(labels, list) else [labels]
        if self.outputs in UNREAD or all(label is None for label in given):
            return torch.full((count,), UNLABELLED)
        needs = LABELS.get(self.outputs, NUMBERS)
        try:
            values = [UNLABELLED if label is None else label for label in given]
            # A mask may be a PIL picture.
            values = [np.array(label) if hasattr(label, "convert") else label for label in values]
            found = [torch.as_tensor(label).detach().cpu() for label in values]
            numbers = torch.stack(found) if isinstance(labels, list) else found[0]
        except (TypeError, ValueError, RuntimeError):  # class names, or labels of several shapes
            raise InvalidInput(f"the labels of {self.argument} are {reprlib.repr(labels)}; {needs}.") from None
        if self.outputs == TARGETS:
            is_valid = numbers.ndim > 0 and len(numbers) == count
        elif self.outputs in SEVERAL_LABELS:
            is_valid = numbers.ndim == 2 and len(numbers) == count and bool(((numbers == 0) | (numbers == 1)).all())
        else:
            if numbers.shape == (count, 1):  # a class number may be an array of one
                numbers = numbers[:, 0]
            # Labels for a binary cross-entropy are floats.
            if self.outputs == "binary_logit" and bool(((numbers == 0) | (numbers == 1)).all()):
                numbers = numbers.long()
            # Other floats (soft labels, regression targets) are rejected, because `long` would silently truncate them.
            # Numbers above 2**63 would become negative.
            is_integer = not (numbers.is_floating_point() or numbers.is_complex())
            is_valid = numbers.shape == (count,) and is_integer
            is_valid = is_valid and (numbers.dtype != torch.uint64 or bool((numbers.long() >= 0).all()))
        if not is_valid:
            found = f"{numbers.dtype} {list(numbers.shape)} for {count} images"
            raise InvalidInput(f"the labels of {self.argument} are {found}; {needs}.")
        return numbers if self.outputs == TARGETS else numbers.long()

    def by_size(self, items: Sequence[Any]) -> Iterator[tuple[list[int], Batch]]:
        """Yields one batch per image size, made of single items, together with the positions of these items."""
        pairs = [self.fields(item) for item in items]
        images, labels = [self._image(image) for image, _ in pairs], [label for _, label in pairs]
        sizes: dict[torch.Size, list[int]] = {}
        for position, image in enumerate(images):
            sizes.setdefault(image.shape, []).append(position)
        for positions in sizes.values():
            stacked = torch.stack([images[position] for position in positions])
            yield positions, self.batch((stacked, [labels[position] for position in positions]))

    def _image(self, image: Any) -> Tensor:
        if isinstance(image, Tensor) or not hasattr(image, "convert"):  # PIL pictures have `convert`
            return self.require_images(image, 3)
        if self.preprocess is None:
            raise InvalidInput(
                f"{self.argument} holds PIL pictures, and this model states no preprocessing: give the dataset a "
                "transform that returns float tensors on the model's scale."
            )
        with user_code(f"a picture of {self.argument}", DataError):  # only now may it be read from its file
            return self.preprocess(image)

    def is_batch(self, image: Any) -> bool:
        """Returns whether a tensor holds several images rather than one."""
        own = 3 if self.inputs is None else self.inputs.dimensions
        return isinstance(image, Tensor) and image.ndim in (own + 1, 4) and (own <= 3 or image.ndim > own)

    def require_images(self, images: Any, dimensions: int) -> Tensor:
        """Returns the images as dense float tensors with `dimensions` axes, or raises InvalidInput."""
        found = f"of type {type(images).__name__}"
        if isinstance(images, Tensor):
            if images.layout == torch.strided and not (images.is_meta or images.is_nested):
                if self.inputs is not None:
                    images = self.inputs.images(images, dimensions)
                if images.ndim == dimensions and images.dtype in DTYPES and 0 not in images.shape[-3:]:
                    return images
            shape = "nested" if images.is_nested else list(images.shape)
            found = f"a tensor {shape}, {images.dtype}, {images.layout}, on the device {images.device}"
        shape = ("images", "channels", "height", "width")[-dimensions:]
        raise InvalidInput(
            f"the images of {self.argument} are {found}; give dense float tensors [{', '.join(shape)}] on the scale "
            "that the model was trained with: divided by 255, minus the mean, divided by the standard deviation."
        )


@dataclass(frozen=True, eq=False)
class IndexedImages(ImageSet):
    """Rows of a dataset that can be indexed. Every pass reads the rows again, with the dataset's transforms.

    `loader` is the DataLoader that wraps the dataset. `is_whole` is True if the rows contain every row of the dataset
    once, and False if a sampler selected them. If `num_classes` is set, every image must have a label below it.
    """

    name: str
    dataset: Any
    reading: _ItemReader
    rows: Sequence[int]
    loader: DataLoader[Any] | None = None
    notes: tuple[str, ...] = ()
    is_whole: bool = True
    num_classes: int | None = None

    def __post_init__(self):
        if not len(self.rows):
            raise DataError(f"{self.reading.argument} is empty; give at least one image.")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_labels(self) -> bool:
        # The first image decides, because the labels of all images are known only after all items are read.
        with seeded_draws(0):
            return int(self._read_rows(self.rows[:1])[0].labels[0]) != UNLABELLED

    @property
    def fingerprint(self) -> str:
        """The name, the number of images, and a hash of all row numbers and of up to 64 images with their labels."""
        with seeded_draws(0):  # random transforms give the same images in every call
            batches = [self._read_rows([self.rows[position]])[0] for position in evenly_spaced(len(self))]
        contents = [batch.images.contiguous().view(torch.uint8).numpy().tobytes() for batch in batches]
        contents += [batch.labels.numpy().tobytes() for batch in batches]
        # The rows replace the labels, because only the labels of the sampled images are read.
        return digest(self.name, torch.tensor(self.rows), contents)

    def at(self, positions: Int[Tensor, "chosen"]) -> "IndexedImages":
        return replace(self, rows=[self.rows[position] for position in positions.tolist()])

    def limited_to(self, num_classes: int) -> "IndexedImages":
        """Returns the same images. If an image has no label below `num_classes`, reading it raises DataError."""
        labels = self._labels()
        if labels is not None:  # known before the images are read
            require_labelled(labels, num_classes, self.reading.argument)
        return replace(self, num_classes=num_classes)

    def _pass(self, order: Pass) -> Iterator[Batch]:
        steps = [self.at(positions).rows for positions, _ in order.steps(len(self))]
        for batch in self._read_batches(steps):
            if self.num_classes is not None:
                require_labelled(batch.labels, self.num_classes, self.reading.argument)
            yield batch.to(order.device)

    def read(self, limit: int, normalization: Normalization | None) -> FixedImages:
        """Reads the rows once. If there are more than `limit`, chooses evenly spaced or class-balanced rows."""
        chosen, notes = self, list(self.notes)
        if len(self) > limit:
            chosen = self.at(self._spread(limit).sort().values)
            notes.append(f"{self.reading.argument}: {limit:,} of its {len(self):,} images are used")
        size = BATCH if self.loader is None else self.loader.batch_size or BATCH
        total = -(-len(chosen) // size)
        images = read_once(chosen.batches(size), self.name, total=total, normalization=normalization)
        again = evenly_spaced(len(images), READ_TWICE)
        # If a collate function drops items, rows cannot be compared. Plain tensors never change between readings.
        if len(images) == len(chosen) and (self.loader is not None or type(self.dataset) is not TensorDataset):
            (batch,) = self._read_rows([chosen.rows[position] for position in again])
            if not torch.equal(content_hashes(batch.images), images.hashes[again]):
                notes.append(_one_draw(self.reading.argument, len(images)))
        return replace(images, notes=(*notes, *images.notes))

    def _read_rows(self, rows: Sequence[int]) -> list[Batch]:
        """Reads some rows in this process. Returns one batch if there is a loader, else one per image size."""
        argument, items = self.reading.argument, []
        for row in rows:
            with user_code(f"item {row} of {argument} ({len(self):,} items)", DataError):
                items.append(self.dataset[row])
        where = f"the items {rows[0]} to {rows[-1]}"
        if self.loader is not None:
            with user_code(f"the batch that collate_fn of {argument} makes of {where}", DataError):
                collated = self.loader.collate_fn(items)
            return [_with_rows(self.reading.batch(collated), rows)]
        with user_code(f"an image of {where} of {argument}", DataError):
            found = list(self.reading.by_size(items))
        return [_with_rows(batch, [rows[position] for position in positions]) for positions, batch in found]

    def _read_batches(self, rows: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """Reads batches of rows in the given order, with the DataLoader's worker processes if it has some."""
        loader = self.loader
        if loader is None or not loader.num_workers:
            yield from chain.from_iterable(map(self._read_rows, rows))
            return
        # The user's loader iterates in the order of its own sampler. This loader reads the given rows with the same
        # worker settings.
        row_loader = DataLoader(
            loader.dataset,
            batch_sampler=[list(indices) for indices in rows],
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
        )
        parts = iter(row_loader)
        for number, batch_rows in enumerate(rows):
            what = f"batch {number} of {self.reading.argument} (items {batch_rows[0]} to {batch_rows[-1]})"
            with user_code(what, DataError):
                batch = next(parts)
            yield _with_rows(self.reading.batch(batch), batch_rows)

    def _labels(self) -> Int[Tensor, "rows"] | None:
        """Returns the labels of the rows if the dataset lists them, as torchvision's datasets do, else None."""
        if len(self) > MAX_LISTED:  # the labels may not fit into memory
            return None
        # The listed labels only balance the classes in `take`, because a batch has the labels of its own items. Most
        # torchvision datasets list labels in the attribute `targets`, SVHN in `labels`, and Food101 in `_labels`.
        dataset = self.dataset
        tensors = dataset.tensors[1:2] if isinstance(dataset, TensorDataset) else ()
        listed = [*tensors, *(getattr(dataset, name, None) for name in ("targets", "labels", "_labels"))]
        for values in listed:
            if isinstance(values, Tensor | list | tuple | np.ndarray) and len(values) == len(dataset):
                return _as_labels(values, self.rows)
        names = getattr(dataset, "column_names", None) or ()  # of a Hugging Face dataset
        column = next((key for key in LABEL_KEYS if key in names), None)
        if column is None:
            return None
        # The user's transform is removed, because it may reject a single column.
        plain = self.dataset.with_format(None) if hasattr(self.dataset, "with_format") else self.dataset
        return _as_labels(list(plain[column]), self.rows)


def _with_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Adds each image's row to a batch. Adds none if the collate function dropped items, as rows are then unknown."""
    return replace(batch, index=torch.tensor(rows)) if len(batch) == len(rows) else batch


def _one_draw(argument: str, count: int) -> str:
    return (
        f"{argument} gives other images at every reading (random augmentation or shuffling): {ONE_DRAW} of {count:,} "
        "images is used for everything"
    )


def _as_labels(found: Any, rows: Sequence[int]) -> Int[Tensor, "images"] | None:
    try:
        labels = np.asarray(found.cpu() if isinstance(found, Tensor) else found)[np.asarray(rows)]
    except (TypeError, ValueError, IndexError):  # nested lists, or fewer labels than rows
        return None
    # Negative numbers mean that labels are missing.
    usable = labels.ndim == 1 and labels.dtype.kind in "iub" and labels.min(initial=0) >= 0
    return torch.from_numpy(labels.astype(np.int64)) if usable else None


@dataclass(frozen=True, eq=False)
class _IterableData:
    """An iterable of batches or single items. If it is a list (`is_list`), repeated images are kept."""

    name: str
    source: Iterable[Any]
    reading: _ItemReader
    is_list: bool = False

    def __post_init__(self):
        if isinstance(self.source, Iterator):
            raise InvalidInput(
                f"{self.reading.argument} is an iterator ({type(self.source).__name__}), which can be read once only; "
                "give a list, a DataLoader, or an object whose __iter__ begins anew."
            )

    def read(self, limit: int, normalization: Normalization | None) -> FixedImages:
        """Reads the images once, at most `limit` images. If the data is not a list, repeated images are left out."""
        batches = self._batches()
        first = [*islice(batches, 1)]
        # The length may count batches or items, so it is only used to find out whether the data ends.
        is_endless = _length(self.source, self.reading.argument) is None
        images = read_once(
            chain(first, batches),
            self.name,
            normalization=normalization,
            limit=min(limit, MAX_UNCOUNTED) if is_endless else limit,
            # A sampler, or workers with the same items, may yield an image twice. In a list, repetitions are intended.
            distinct=not self.is_list,
        )
        if not self.is_list and len(first[0]) <= MAX_READ_TWICE:
            again = [*islice(self._batches(), 1)]
            hashes = [[content_hashes(batch.images).tolist() for batch in each] for each in (first, again)]
            if hashes[0] != hashes[1]:
                return replace(images, notes=(_one_draw(self.reading.argument, len(images)), *images.notes))
        return images

    def _batches(self) -> Iterator[Batch]:
        """Yields batches on the CPU, with the position of every image."""
        parts = self._items()
        first = next(parts, None)
        if first is None:
            return
        # The first item shows whether the data yields batches or single items. It is put back afterwards.
        is_batch, parts = self.reading.is_batch(self.reading.fields(first)[0]), chain([first], parts)
        chunks = iter(lambda: list(islice(parts, BATCH)), [])
        singles = (batch for items in chunks for _, batch in self.reading.by_size(items))
        position = 0
        for batch in map(self.reading.batch, parts) if is_batch else singles:
            yield replace(batch, index=torch.arange(position, position + len(batch)))
            position += len(batch)

    def _items(self) -> Iterator[Any]:
        with user_code(f"the first item of {self.reading.argument}", DataError):
            items = iter(self.source)
        end = object()
        for number in count():
            with user_code(f"item {number} of {self.reading.argument}", DataError):
                item = next(items, end)
            if item is end:
                return
            yield item
