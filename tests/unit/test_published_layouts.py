"""Datasets as their authors publish them, in a few files each: the right classes and splits, or a remedy."""

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from attnrx.data import DATASETS, Splits, load_data
from attnrx.data.published import LISTED_SPLITS, open_published
from attnrx.support.errors import DataError
from support.pictures import encoded, everything, write_tree

TEN = tuple(f"ten-{number}" for number in range(10))
HUNDRED = tuple(f"hundred-{number}" for number in range(100))
WORDNET = ("n01440764", "n01443537", "n01484850")


def pixels(count: int, *shape: int, shade: int = 0) -> np.ndarray:
    """Images of one shade each, by which they are found again."""
    shades = np.arange(count, dtype=np.uint8).reshape(-1, *(1 for _ in shape)) + np.uint8(shade)
    return np.broadcast_to(shades, (count, *shape)).copy()


def cifar10_binary(root: Path) -> Path:
    root = root / "cifar-10-batches-bin"
    root.mkdir(parents=True)
    for number, name in enumerate((*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")):
        labels = np.arange(10, dtype=np.uint8)
        rows = np.concatenate([labels[:, None], pixels(10, 3072, shade=10 * number)], axis=1)
        (root / f"{name}.bin").write_bytes(rows.tobytes())
    (root / "batches.meta.txt").write_text("\n".join(TEN) + "\n\n")
    return root


def cifar10_python(root: Path) -> Path:
    root = root / "cifar-10-batches-py"
    root.mkdir(parents=True)
    for number, name in enumerate((*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")):
        content = {b"data": pixels(10, 3072, shade=10 * number), b"labels": list(range(10)), b"batch_label": b"a"}
        (root / name).write_bytes(pickle.dumps(content, protocol=2))
    (root / "batches.meta").write_bytes(pickle.dumps({b"label_names": [name.encode() for name in TEN]}, protocol=2))
    return root


def cifar100_binary(root: Path) -> Path:
    root = root / "cifar-100-binary"
    root.mkdir(parents=True)
    for number, name in enumerate(("train", "test")):
        fine = np.arange(100, dtype=np.uint8)
        rows = np.concatenate([fine[:, None] // 5, fine[:, None], pixels(100, 3072, shade=100 * number)], axis=1)
        (root / f"{name}.bin").write_bytes(rows.tobytes())
    (root / "fine_label_names.txt").write_text("\n".join(HUNDRED))
    return root


def cifar100_python(root: Path) -> Path:
    root = root / "cifar-100-python"
    root.mkdir(parents=True)
    for number, name in enumerate(("train", "test")):
        content = {b"data": pixels(100, 3072, shade=100 * number), b"fine_labels": list(range(100))}
        (root / name).write_bytes(pickle.dumps(content, protocol=2))
    meta = {b"fine_label_names": [name.encode() for name in HUNDRED]}
    (root / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    return root


def fashion_mnist(root: Path) -> Path:
    """As torchvision leaves it: FashionMNIST/raw/, here with one file packed and one not."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name, count in (("train", 20), ("t10k", 10)):
        head = [0x803, count, 28, 28]
        images = np.array(head, dtype=">u4").tobytes() + pixels(count, 28, 28).tobytes()
        labels = np.array([0x801, count], dtype=">u4").tobytes() + bytes(number % 10 for number in range(count))
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    return root / "FashionMNIST"


def listed(root: Path, layout: dict[str, str]) -> Path:
    write_tree(root / "images", "cat dog", 6)
    for number, name in enumerate(layout.values()):
        (root / name).parent.mkdir(exist_ok=True)
        suffix = "" if name.startswith("meta") else ".png"
        (root / name).write_text("".join(f"{c}/{i}-{number}{suffix}\n" for i, c in enumerate(("cat", "dog"))))
    if (root / "meta").exists():
        for file in root.glob("images/*/*.png"):
            file.rename(file.with_suffix(".jpg"))
    return root


def food101(root: Path) -> Path:
    return listed(root / "food-101", LISTED_SPLITS[0])


def dtd(root: Path) -> Path:
    return listed(root / "dtd", LISTED_SPLITS[1])


def tiny_imagenet(root: Path) -> Path:
    root = root / "tiny-imagenet-200"
    write_tree(root / "train", " ".join(f"{word}/images" for word in WORDNET), 4)
    write_tree(root, "val/images test/images", 3)
    files = sorted(path.name for path in (root / "val" / "images").iterdir())
    rows = [f"{file}\t{word}\t0\t0\t8\t8\n" for file, word in zip(files, reversed(WORDNET), strict=True)]
    (root / "val" / "val_annotations.txt").write_text("".join(rows))
    return root


def imagenet(place: Path) -> Path:
    """The training images by class, and the validation and test images in one folder each."""
    write_tree(place / "train", " ".join(WORDNET), 4)
    for split, count in (("val", 3), ("test", 2)):
        (place / split).mkdir()
        for number in range(1, count + 1):
            (place / split / f"ILSVRC2012_{split}_{number:08d}.JPEG").write_bytes(
                encoded(number - 1, number, kind="jpeg")
            )
    return place


def imagenet_with_devkit(root: Path) -> Path:
    from scipy.io import savemat

    root = imagenet(root / "imagenet")
    folder = root / "ILSVRC2012_devkit_t12" / "data"
    folder.mkdir(parents=True)
    # The devkit's numbers are in another order than the WordNet ids.
    rows = [(1, WORDNET[2], "c"), (2, WORDNET[0], "a"), (3, WORDNET[1], "b"), (1001, "n00001740", "entity")]
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O")]
    savemat(folder / "meta.mat", {"synsets": np.array(rows, dtype=kinds)[:, None]})
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text("2\n3\n1\n")
    return root


def imagenet_of_kaggle(root: Path) -> Path:
    root = root / "kaggle"
    imagenet(root / "ILSVRC" / "Data" / "CLS-LOC")
    rows = [f"ILSVRC2012_val_{n:08d},{word} 1 2 3 4 {word} 5 6 7 8\n" for n, word in enumerate(WORDNET, 1)]
    (root / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(rows))
    return root


def imagenet_c(root: Path) -> Path:
    write_tree(root / "imagenet-c" / "noise" / "gaussian_noise" / "3", " ".join(WORDNET), 2)
    return root / "imagenet-c" / "noise" / "gaussian_noise" / "3"


def eurosat(root: Path) -> Path:
    return write_tree(root / "EuroSAT_RGB", "AnnualCrop Forest Highway", 10)


# Layout -> the classes, and the images to train on, for validation and to test on.
LAYOUTS: dict[Callable[[Path], Path], tuple[tuple[str, ...], tuple[int, int, int]]] = {
    cifar10_binary: (TEN, (40, 10, 10)),
    cifar10_python: (TEN, (40, 10, 10)),
    cifar100_binary: (HUNDRED, (100, 0, 100)),
    cifar100_python: (HUNDRED, (100, 0, 100)),
    fashion_mnist: (tuple("0123456789"), (10, 10, 10)),
    food101: (("cat", "dog"), (2, 0, 2)),
    dtd: (("cat", "dog"), (2, 2, 2)),
    tiny_imagenet: (WORDNET, (9, 3, 3)),
    imagenet_with_devkit: (WORDNET, (9, 3, 3)),
    imagenet_of_kaggle: (WORDNET, (9, 3, 3)),
    imagenet_c: (WORDNET, (0, 0, 6)),
    eurosat: (("AnnualCrop", "Forest", "Highway"), (21, 3, 6)),
}


def loaded(path: Path, sizes: tuple[int, int, int]) -> Splits:
    """With no image held out where a class has one only."""
    return load_data(path, validation_share=0.1 if sizes[1] else 0)


@pytest.mark.parametrize("write", LAYOUTS, ids=lambda write: write.__name__)
def test_classes_and_splits_are_the_authors(write: Callable[[Path], Path], tmp_path: Path) -> None:
    classes, sizes = LAYOUTS[write]
    splits = loaded(write(tmp_path), sizes)
    assert splits.class_names == classes
    for count, images in zip(sizes, (splits.train, splits.validation, splits.test), strict=True):
        if count:
            assert len(images) == count


@pytest.mark.parametrize("write", [cifar10_binary, cifar10_python, cifar100_binary, cifar100_python])
def test_pixels_and_labels_belong_together(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """An image's shade states its number in its file, and the number its class."""
    splits = loaded(write(tmp_path), LAYOUTS[write][1])
    images, labels, _ = everything(splits, "test")
    name, first = ("cifar10", 50) if len(splits.class_names) == 10 else ("cifar100", 100)
    assert torch.equal(images[:, 0, 5, 5].round().long() - first, labels)
    assert splits.image_size == 32 and splits.normalization == DATASETS[name].normalization


@pytest.mark.parametrize("write", [imagenet_with_devkit, imagenet_of_kaggle, tiny_imagenet])
def test_labels_of_a_file_are_those_of_the_images(write: Callable[[Path], Path], tmp_path: Path) -> None:
    opened = open_published(write(tmp_path))
    stored = opened.splits["validation"]
    by_file = {Path(stored.where(at)).name: int(stored.labels[at]) for at in range(3)}
    expected = [2, 1, 0] if write is tiny_imagenet else [0, 1, 2]
    assert [by_file[name] for name in sorted(by_file)] == expected


REFUSED: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "no labels": (imagenet_with_devkit, "ILSVRC2012_devkit_t12", r"put the extracted devkit .* or Kaggle's LOC_val"),
    "a batch": (cifar10_python, "data_batch_3", r"data_batch_3 is missing; extract the whole archive"),
    "an image": (food101, "images/cat/0-0.jpg", r"train\.txt lists .*0-0.*not there"),
    "a listed image": (dtd, "images/cat/0-0.png", r"train1\.txt lists .*0-0.*not there"),
    "a validation image": (tiny_imagenet, "val/images/0-0.png", r"lists .*0-0.png, which is not there"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_is_named(case: str, tmp_path: Path) -> None:
    write, lost, message = REFUSED[case]
    root = write(tmp_path)
    (root / lost).rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=message):
        load_data(root)


@pytest.mark.parametrize(
    ("write", "file"),
    [
        (cifar10_binary, "test_batch.bin"),
        (cifar10_python, "test_batch"),
        (fashion_mnist, "raw/t10k-images-idx3-ubyte.gz"),
        (fashion_mnist, "raw/t10k-labels-idx1-ubyte"),
        (imagenet_with_devkit, "ILSVRC2012_devkit_t12/data/meta.mat"),
    ],
)
def test_a_damaged_file_is_named(write: Callable[[Path], Path], file: str, tmp_path: Path) -> None:
    path = write(tmp_path) / file
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataError, match=rf"{path.name}.*(damaged|cannot be read)"):
        load_data(tmp_path / next(iter(path.relative_to(tmp_path).parts)))


class Calls:
    """Its pickle calls a function, as an attacker's would."""

    def __reduce__(self):
        return print, ("code of the file ran",)


def test_code_in_a_pickle_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = cifar10_python(tmp_path)
    (root / "data_batch_1").write_bytes(pickle.dumps({b"data": Calls()}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_1 is damaged.*names .*print.*nothing of it was run"):
        load_data(root)
    assert "code of the file ran" not in capsys.readouterr().out


def test_a_folder_of_several_datasets_is_refused(tmp_path: Path) -> None:
    cifar10_binary(tmp_path)
    fashion_mnist(tmp_path)
    with pytest.raises(DataError, match=r"several datasets \(raw, idx files, cifar-10-batches-bin, CIFAR-10\)"):
        load_data(tmp_path)


def test_corruptions_and_severities_are_no_classes_and_no_splits(tmp_path: Path) -> None:
    imagenet_c(tmp_path)
    write_tree(tmp_path / "imagenet-c" / "blur" / "defocus_blur" / "3", " ".join(WORDNET), 2)
    for folder in ("imagenet-c", "imagenet-c/noise"):
        with pytest.raises(DataError, match=r"Give the folder whose folders are the classes, e\.g\. .*/3"):
            load_data(tmp_path / folder)
