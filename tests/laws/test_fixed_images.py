"""A user's data are read once: every pass has the same images, and no two parts of a division share an image."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import attnrx as rx
from attnrx.change.realization.repair import Repair
from attnrx.data import FixedImages, Normalization, distinct_splits, fixed_images, three_parts
from attnrx.data.fixed_images import ONE_DRAW, content_hashes
from attnrx.data.model_data import images_for, splits_for
from attnrx.support.errors import DataError, InvalidInput
from attnrx.support.hardware import cache_folder
from support.comparisons import pixels
from support.pictures import write_folder
from support.planned import CONFIG, original

COUNT = 40
MEAN, STD = CONFIG.mean[0], CONFIG.std[0]


def clean(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    batch = next(pixels(CONFIG, COUNT, seed).batches(COUNT))
    return batch.images, batch.labels


IMAGES, LABELS = clean()
SIZE = IMAGES.shape[-1]


class Rows(Dataset[Any]):
    """Pictures with an index, transformed at every reading."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda image: image):
        self.change = change

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> Any:
        return self.change(IMAGES[row]), int(LABELS[row])


def crop(image: torch.Tensor) -> torch.Tensor:
    """A random crop of an enlarged picture, by torch's generator."""
    top, left = torch.randint(SIZE, (2,)).tolist()
    return torch.cat([image, image], -1).repeat(1, 2, 1)[:, top : top + SIZE, left : left + SIZE]


def crop_by_numpy(image: torch.Tensor) -> torch.Tensor:
    return image.roll(int(np.random.randint(SIZE)), -1)


class Shuffling(IterableDataset[Any]):
    """Yields another order in every pass, by a generator of its own; every worker yields everything."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        for row in self.generator.permutation(COUNT).tolist():
            yield IMAGES[row], int(LABELS[row])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for row in count():
            yield IMAGES[row % COUNT], int(LABELS[row % COUNT])


class Shrinking(Shuffling):
    """Yields fewer images in every pass."""

    left = COUNT

    def __iter__(self) -> Iterator[Any]:
        self.left -= 5
        yield from zip(IMAGES[: self.left], LABELS[: self.left].tolist(), strict=True)


def weighted(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        dataset, 8, sampler=WeightedRandomSampler([1 + row % 3 for row in range(COUNT)], 2 * COUNT), **options
    )


# By form: the data, and whether another reading gives other images.
FORMS: dict[str, tuple[Callable[[], Any], bool]] = {
    "loader": (lambda: DataLoader(Rows(), 8), False),
    "shuffled": (lambda: DataLoader(Rows(), 8, shuffle=True), False),
    "random crops": (lambda: DataLoader(Rows(crop), 8, shuffle=True, drop_last=True), True),
    "random crops by NumPy": (lambda: DataLoader(Rows(crop_by_numpy), 8, shuffle=True), True),
    "random crops by workers": (lambda: DataLoader(Rows(crop), 8, shuffle=True, num_workers=2), True),
    "weighted sampler": (lambda: weighted(Rows()), False),
    "own batches": (lambda: DataLoader(Rows(), batch_sampler=Batches()), False),
    "own iteration": (lambda: Normalizing(TensorDataset((IMAGES * 255).round().byte(), LABELS), 8), False),
    "endless batches": (lambda: Repeating(Rows(), 8, shuffle=True), False),
    "shuffling iterable": (Shuffling, True),
    "loader of an iterable": (lambda: DataLoader(Shuffling(), 8), True),
    "two workers that yield everything": (lambda: DataLoader(Shuffling(), 8, num_workers=2), False),
    "endless": (Endless, False),
    "shrinking": (Shrinking, True),
    "repeated tensors": (lambda: (torch.cat([IMAGES, IMAGES]), torch.cat([LABELS, LABELS])), False),
    "no labels": (lambda: IMAGES, False),
    "splits that overlap": (lambda: {"train": (IMAGES[:30], LABELS[:30]), "test": (IMAGES[10:], LABELS[10:])}, False),
    "named": (lambda: splits_of(pixels(CONFIG, COUNT)), False),
}


class Normalizing(DataLoader[Any]):
    """A loader that changes its batches after they are collated."""

    def __iter__(self) -> Any:
        yield from ((images.float() / 255, labels) for images, labels in super().__iter__())


class Repeating(DataLoader[Any]):
    """A loader that keeps its workers by an endless sampler of batches, as timm's MultiEpochsDataLoader."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))


class Repeated:
    def __init__(self, sampler: Any):
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Batches(BatchSampler):
    """Batches of random rows, some of them twice."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        yield from torch.randint(COUNT, (10, 8)).tolist()


def splits_of(images: Any) -> rx.data.Splits:
    return rx.data.Splits("named", images, images, images.take(20), (), 1, SIZE, Normalization((MEAN,), (STD,)), None)


@pytest.fixture(autouse=True)
def few_of_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnrx.data.user_data.MAX_UNCOUNTED", 100)
    monkeypatch.setattr("attnrx.data.user_data.CANDIDATES", 1000)


def states() -> list[Any]:
    # Not Python's, from which the checks of annotations in the tests draw.
    return [np.random.get_state(legacy=False)["state"]["key"].tolist(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("form", FORMS)
def test_parts_have_no_image_in_common(form: str) -> None:
    """Of pixels, and of rows of the source: two crops of one picture are in one part."""
    make, _ = FORMS[form]
    splits = splits_for(original(), make())
    parts = three_parts(splits)
    batches = [next(part.batches(10 * COUNT)) for part in parts]
    hashes = [set(content_hashes(batch.images).tolist()) for batch in batches]
    assert sum(map(len, hashes)) == sum(map(len, batches)) == len(set.union(*hashes)), "every image is used once"
    assert all(hashes)
    if "overlap" not in form and form != "named":  # rows of one source
        rows = [row for batch in batches for row in batch.index.tolist()]
        assert len(rows) == len(set(rows))


@pytest.mark.parametrize("form", [form for form in FORMS if "overlap" not in form and form != "named"])
def test_every_pass_has_the_images_of_one_reading(form: str) -> None:
    make, differs = FORMS[form]
    vit, given = original(), make()
    before = states()
    data = images_for(vit, given, seed=5)
    assert states() == before, "the random numbers of the caller are those without the reading"
    first, again = (next(data.batches(10 * COUNT)) for _ in range(2))
    assert torch.equal(first.images, again.images) and torch.equal(first.labels, again.labels)
    assert any(ONE_DRAW in note for note in data.notes) == differs
    if form not in ("shrinking", "two workers that yield everything"):
        torch.manual_seed(7)
        repeated = images_for(original(), make(), seed=5)
        assert repeated.fingerprint == data.fingerprint, "one seed gives one draw"


def test_commands_use_an_image_of_several_splits_once(tmp_path: Path) -> None:
    """As `three_parts` does, without decoding: an image of the test is not calibrated on."""
    folder = write_folder(tmp_path, {"train": 6, "validation": 2, "test": 2})
    first = sorted((folder / "test").rglob("*.png"))[0]
    copied = sorted((folder / "train").rglob("*.png"))[0].parent / "copy.png"
    copied.write_bytes(first.read_bytes())
    (copied.parent / "again.png").write_bytes(first.read_bytes())
    splits = rx.load_data(folder)
    found = distinct_splits(splits)
    assert len(splits.train) == len(found.train) + 2
    assert len(splits.test) == len(found.test) and len(splits.validation) == len(found.validation)
    assert any("train: 2 of" in note and "in validation or in test" in note for note in found.notes)
    assert distinct_splits(found) is found
    mapped = distinct_splits(splits.changed(lambda images: images.relabelled(torch.tensor([5, 2, 7]))))
    assert len(mapped.train) == len(found.train) and {5, 2, 7} == {*next(mapped.train.batches(50)).labels.tolist()}


def test_paths_and_loaders_of_the_same_images_are_the_same_set() -> None:
    named = pixels(CONFIG, COUNT)
    parts = three_parts(splits_of(named))
    batch = next(named.batches(COUNT))
    loaded = three_parts(
        splits_for(
            original(),
            {
                "train": DataLoader(TensorDataset(batch.images, batch.labels), 7),
                "test": DataLoader(TensorDataset(*vars_of(named.take(20))), 3),
            },
        )
    )
    hashed = [[part.fingerprint.rpartition(":")[2] for part in found] for found in (parts, loaded)]
    assert hashed[0] == hashed[1]


def vars_of(images: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch = next(images.batches(COUNT))
    return batch.images, batch.labels


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["pictures", "noise", "some noise"])
def test_a_store_has_the_values_that_were_read(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory and in a file; pictures need a byte per value."""
    images = IMAGES.to(dtype).clone()
    if kind != "pictures":
        images[0 if kind == "noise" else 30] = torch.randn(images[0].shape).to(dtype)
    for memory in (fixed_images.MEMORY, 5 * images[0].nbytes // 8):
        monkeypatch.setattr(fixed_images, "MEMORY", memory)
        data = images_for(original(), DataLoader(TensorDataset(images, LABELS), 6))
        assert isinstance(data, FixedImages)
        read = next(data.batches(COUNT))
        assert torch.equal(read.images, images) and read.images.dtype == dtype
        assert (data.store.values.dtype == torch.uint8) == (kind == "pictures")
        assert any("temporary file" in note for note in data.notes) == (memory < 2**30)
        assert sorted(next(data.take(7).batches(7)).index.tolist())[-1] < COUNT
    assert not list(cache_folder().glob(".images.*")), "the file goes with the images"


@pytest.mark.slow
def test_a_smaller_model_from_data_that_differ_between_readings() -> None:
    """The draw is noted in the evidence, in the summary and in the log."""
    loader = DataLoader(Rows(crop), 8, shuffle=True)
    lines: list[str] = []
    found = rx.shrink(original(), loader, macs=0.8, log=lines.append)
    assert found.images is not None and [len(part) for part in found.images] == [13, 13, 14]
    assert ONE_DRAW in found.summary()
    assert any(ONE_DRAW in note for note in found.evidence.about["notes"])
    assert any(ONE_DRAW in line for line in lines)
    clean_found = rx.shrink(original(), DataLoader(Rows(), 8), macs=0.8)
    assert ONE_DRAW not in clean_found.summary()


@pytest.mark.parametrize("form", ["random crops", "shuffling iterable"])
def test_repair_compares_models_on_the_same_images(form: str) -> None:
    """The repaired model is nearer to the original, on images that it was not repaired on."""
    vit, test = original(), clean(seed=11)[0].double()
    slim = rx.realize(vit, rx.prescribe(rx.diagnose(vit, IMAGES, moments=True), "hidden=uniform_rank:0.5"))
    settings = Repair(steps=20)
    repaired = rx.repair(slim, vit, FORMS[form][0](), settings)
    assert all(after <= before for before, after in zip(repaired.before, repaired.after, strict=True))
    distances = [(model(test) - vit(test)).square().mean() for model in (slim, repaired.model)]
    assert distances[1] < distances[0]
    assert any(ONE_DRAW in note for note in repaired.notes)


def test_the_generator_of_a_sampler_is_left_as_it_was() -> None:
    """So a later call draws the same images."""
    generator = torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler([1.0] * COUNT, COUNT, generator=generator)
    state = generator.get_state()
    pixels_of = TensorDataset((IMAGES * 255).round().byte(), LABELS)
    for loader in (
        DataLoader(Rows(), 8, sampler=sampler),
        Normalizing(pixels_of, 8, shuffle=True, generator=generator),
    ):
        first, again = (images_for(original(), loader).fingerprint for _ in range(2))
        assert first == again and torch.equal(generator.get_state(), state)


def test_an_endless_iterable_ends() -> None:
    diagnosis = rx.diagnose(original(), Endless())
    assert diagnosis.about["data"]["images"] == COUNT, "which it yields again and again"
    assert any("only the first 100 images" in note for note in diagnosis.about["notes"])


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_images, "MEMORY", 10 * SIZE**2)  # of images of a byte per value
    monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda **options: Path("/dev/full").open("wb", buffering=0))
    with pytest.raises(DataError, match="cannot write the images to a file"):
        images_for(original(), DataLoader(Rows(), 8))


def test_a_dataset_with_random_crops_is_trained_on_and_read_again(tmp_path: Path) -> None:
    """Every epoch has other crops, and a finished run is that of the same data."""
    data = {"train": DataLoader(Rows(crop), 8, shuffle=True), "validation": (IMAGES, LABELS)}
    train = splits_for(original(), data, training=True).train
    first, second = (next(train.batches(8)).images for _ in range(2))
    assert not torch.equal(first, second)
    vit, config = copy.deepcopy(original()), rx.TrainingConfig(epochs=1, batch_size=8)
    run = rx.train(vit, data, config, tmp_path / "run")
    again = rx.train(copy.deepcopy(original()), data, config, tmp_path / "run")
    assert again.history == run.history
    with pytest.raises(InvalidInput, match="its own order"):
        rx.train(vit, {**data, "train": weighted(Rows())}, config, tmp_path / "weighted")


def test_of_many_test_images_some_are_verified_on() -> None:
    batches = {"train": clean(), "test": clean(seed=4)}
    named = replace(splits_of(pixels(CONFIG, COUNT)), test=pixels(CONFIG, COUNT, 4))
    for splits in (splits_for(original(), batches), named):
        parts = three_parts(splits, 4, 4, verified=10)
        assert [len(part) for part in parts] == [4, 4, 10]
        assert f"test: 10 of {COUNT} images are used" in parts.notes
    # Of a test that is a part of the training images, the others are planned on.
    parts = three_parts(splits_for(original(), {"train": clean(), "test": (IMAGES[:30], LABELS[:30])}), 5, 5, 10)
    assert [len(part) for part in parts] == [5, 5, 10]


class Listed(Dataset[Any]):
    """A dataset of many rows that lists its labels."""

    def __init__(self, targets: Any):
        self.targets, self.rows = targets, []

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> Any:
        self.rows.append(row)
        return IMAGES[row % COUNT] + row, int(self.targets[row])


def test_of_many_rows_only_some_are_read() -> None:
    data = Listed(torch.arange(1000) // 100)
    found = images_for(original(), data, limit=20)
    assert next(found.batches(20)).labels.bincount().tolist() == [2] * 10
    assert len(set(data.rows)) == 20 and any("20 of its 1,000 images" in note for note in found.notes)
    # 8 bytes for every row would be 8 GB.
    huge = Listed(range(10**9))
    huge.targets = type("Targets", (), {"__len__": lambda self: 10**9, "__getitem__": lambda self, row: row % 7})()
    assert len(images_for(original(), huge, limit=8)) == 8 and max(huge.rows) > 8 * 10**8
    train = splits_for(original(), Listed(torch.arange(2000) // 200), training=True).train
    assert next(train.take(20).batches(20)).labels.bincount().tolist() == [2] * 10
    with pytest.raises(DataError, match="states a length of"):
        splits_for(original(), Long(2**62), training=True)


class Raising(Rows):
    def __init__(self, error: BaseException, at: int = 17):
        super().__init__()
        self.error, self.at = error, at

    def __getitem__(self, row: int) -> Any:
        if row == self.at:
            raise self.error
        return super().__getitem__(row)


class Dying(Rows):
    def __getitem__(self, row: int) -> Any:
        import os

        os._exit(3)


class Breaking(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(IMAGES[:9], LABELS[:9].tolist(), strict=True)
        raise OSError("the connection was lost")


class Long(Rows):
    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length


def collate(items: list[Any]) -> Any:
    raise KeyError("pixel_values")


# By kind: the data, the text that names what failed, and the cause.
FAULTS: dict[str, tuple[Callable[[], Any], str, type[BaseException]]] = {
    "item": (
        lambda: Raising(ValueError("bad file")),
        r"item 17 of data \(40 items\) .*ValueError: bad file",
        ValueError,
    ),
    "item of a loader": (lambda: DataLoader(Raising(ZeroDivisionError()), 8), "item 17 of data", ZeroDivisionError),
    "item of a worker": (
        lambda: DataLoader(Raising(ValueError("bad file")), 8, num_workers=2),
        r"batch 2 of data \(items 16 to 23\)",
        ValueError,
    ),
    "a worker that dies": (lambda: DataLoader(Dying(), 8, num_workers=1), "batch 0 of data", RuntimeError),
    "collate_fn": (lambda: DataLoader(Rows(), 8, collate_fn=collate), "collate_fn of data", KeyError),
    "iterable": (Breaking, "item 9 of data raised OSError: the connection was lost", OSError),
    "loader of an iterable": (lambda: DataLoader(Breaking(), 4), "item 2 of data", OSError),
    "negative length": (lambda: Long(-1), "the length of data", ValueError),
    "huge length": (lambda: Long(2**70), "the length of data", OverflowError),
    "length that is too large": (lambda: Long(50), "item 40 of data", IndexError),
    "sampler": (lambda: DataLoader(Rows(), 8, sampler=[0, 1, 99]), "item 99 of data", IndexError),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.slow) if "worker" in fault else fault for fault in FAULTS]
)
def test_errors_of_a_users_code_are_named(fault: str) -> None:
    make, text, cause = FAULTS[fault]
    with pytest.raises(DataError, match=text) as caught:
        rx.diagnose(original(), make())
    assert isinstance(caught.value.__cause__, cause)
