"""Generated images: a dataset without files, for smoke tests."""

import torch

from attnrx.data import Augmentation, Normalization, Splits, from_tensors
from attnrx.shapes import Int, Tensor, UInt8

SIZES = {"train": 96, "validation": 32, "test": 64}


def generated_splits(name: str, channels: int, classes: int, side: int) -> Splits:
    """Returns images whose class is the position of a bright square in noise: easy to learn, and deterministic."""
    scale = Normalization.half(channels)
    parts = {}
    for number, (split, count) in enumerate(SIZES.items()):
        labels = torch.arange(count) % classes
        parts[split] = from_tensors(
            f"{name}-generated/{split}", _pictures(labels, (channels, side), classes, number), labels, scale
        )
    return Splits(
        f"{name}-generated",
        **parts,
        class_names=tuple(f"place {number}" for number in range(classes)),
        channels=channels,
        image_size=side,
        normalization=scale,
        augmentation=Augmentation(padding=0, flip=False),
        notes=("the images are generated; numbers measured on them do not transfer to real datasets",),
    )


def _pictures(
    labels: Int[Tensor, "images"], shape: tuple[int, int], classes: int, seed: int
) -> UInt8[Tensor, "images channels side side"]:
    channels, side = shape
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 128, (len(labels), channels, side, side), generator=generator, dtype=torch.uint8)
    half = side // 2
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        row, column = divmod(label % min(classes, 4), 2)
        picture[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 127
    return pictures
