"""Loads the data and the models (with or without weights) that experiments need, or tiny replacements for both."""

from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from attnrx.data import Augmentation, Columns, Normalization, Splits, from_tensors, load_data
from attnrx.support.shapes import Bool, Tensor
from attnrx.vit.models import build_model, family_of
from attnrx.workflows.load import load
from attnrx_lab.papers.experiment import Experiment, first_images

TINY_DIRECTIONS, TINY_SIDE, TINY_CLASSES = 8, 8, 4
HELD_OUT = 0.1  # the share of training images to validate on, if a dataset has no validation images
WATCHED = 10_000  # training images on which a training reports accuracy, if no images are held out
SIZES = {"train": 96, "validation": 32, "test": 64}


@lru_cache(maxsize=8)  # creating an outline takes longer than a tiny run, and many runs need the same one
def outline_of(model: str) -> nn.Module:
    """Builds a model without weights on the meta device. If only its files describe its shapes, the model is loaded."""
    library, colon, _ = model.partition(":")
    # The shapes of a saved folder or a Hugging Face checkpoint are in its files.
    if not colon or library == "hf" or Path(model).exists():
        return load(model)
    with torch.device("meta"):
        return build_model(model)


def tiny_twin(outline: nn.Module, seed: int, depth: int = 2) -> nn.Module:
    """Returns a small attnrx model with random weights, and with as many heads as the model `outline`."""
    heads = len(family_of(outline).attention(outline)[0].spec.heads)
    return build_model(
        "dense:cifar10",
        seed=seed,
        image_size=TINY_SIDE,
        patch_size=TINY_SIDE // 2,
        width=TINY_DIRECTIONS * heads,
        depth=depth,
        heads=heads,
        classes=TINY_CLASSES,
    ).eval()


@dataclass(frozen=True)
class DatasetExperiment(Experiment):
    """An experiment with one original model and one dataset.

    `subject` is the name of the original. `model` and `weights` are passed to `load`. If `model` is None, the original
    is one of `spot.ORIGINALS`, which is trained first. `dataset`, `label_column` and `test_column` are passed to
    `load_data`. If the dataset has no validation images, a share `held_out` of the training images is used for
    validation. With `held_out=0` the model is trained on all images, as in the papers, and the accuracy during training
    is measured on some of them. With `tiny`, the experiment uses a tiny model and generated images.
    """

    subject: str
    model: str | None
    dataset: str
    _: KW_ONLY
    seed: int = 0
    weights: str | None = None
    label_column: str | None = None
    test_column: str | None = None
    test_images: int | None = None
    held_out: float = HELD_OUT
    tiny: bool = False

    def pretrained(self) -> nn.Module:
        assert self.model is not None
        return load(self.model, weights=self.weights).eval()

    def data_for(self, model: nn.Module, seed: int = 0) -> Splits:
        """Loads the data at a model's image size."""
        _, size, _ = family_of(model).input_shape(model)
        columns = Columns(label_column=self.label_column, test_column=self.test_column)
        splits = load_data(self.dataset, image_size=size, seed=seed, validation_share=self.held_out, columns=columns)
        if self.held_out:
            return splits
        note = f"no image is held out of training: its validation accuracy is over {WATCHED:,} images that it trains on"
        return replace(splits, validation=first_images(splits.train, WATCHED), notes=(*splits.notes, note))


def generated_splits(name: str, channels: int, classes: int, side: int) -> Splits:
    """Generates images that are easy to learn. The class is the position of a bright square in noise."""
    scale, half = Normalization.half(channels), side // 2
    parts = {}
    for number, (split, count) in enumerate(SIZES.items()):
        labels = torch.arange(count) % classes
        generator = torch.Generator().manual_seed(number)  # different noise in each split
        # The noise is below 128, so adding the square's 127 does not overflow uint8.
        pixels = torch.randint(0, 128, (count, channels, side, side), generator=generator, dtype=torch.uint8)
        for picture, label in zip(pixels, labels.tolist(), strict=True):
            row, column = divmod(label % min(classes, 4), 2)  # there are only four places
            picture[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 127
        parts[split] = from_tensors(f"{name}-generated/{split}", pixels, labels, scale)
    return Splits(
        f"{name}-generated",
        **parts,
        class_names=tuple(f"place {number}" for number in range(classes)),
        channels=channels,
        image_size=side,
        normalization=scale,
        augmentation=Augmentation(padding=0, flip=False),  # shifts and flips would move the square
        notes=("the images are generated; numbers measured on them do not transfer to real datasets",),
    )


def generated_objects(split: str, classes: int, patches: int) -> Bool[Tensor, "images patches"]:
    """Returns which of `patches` x `patches` patches the bright square covers in each image of `generated_splits`."""
    half = patches // 2
    masks = torch.zeros(SIZES[split], patches, patches, dtype=torch.bool)
    for number, mask in enumerate(masks):
        row, column = divmod(number % classes % min(classes, 4), 2)  # image `number` has the label number % classes
        mask[row * half : (row + 1) * half, column * half : (column + 1) * half] = True
    return masks.flatten(1)
