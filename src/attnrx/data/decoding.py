"""From the bytes of an image file to uint8 pixels, and what to do when that fails."""

import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from attnrx.errors import DataError, InvalidInput
from attnrx.shapes import Tensor, UInt8

Policy = Literal["raise", "skip"]

CHUNK = 256  # images per task, so that scheduling costs little compared with decoding


def threads() -> int:
    """Returns how many images are decoded at once: decoding releases the GIL, so one thread per usable core."""
    return max(1, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


@dataclass
class CorruptImages:
    """The policy for images that cannot be decoded (`raise` or `skip`), and the messages of those found."""

    policy: Policy = "raise"
    found: list[str] = field(default_factory=list)

    def __post_init__(self):
        if self.policy not in ("raise", "skip"):
            raise InvalidInput(f"on_corrupt={self.policy!r}: choose 'raise' or 'skip'.")

    def report(self, error: DataError) -> None:
        """Raises the error, or remembers it."""
        if self.policy == "raise":
            raise DataError(
                f"{error} Repair or remove it, or pass on_corrupt='skip' to leave such images out."
            ) from error
        self.found.append(str(error))


def decode(content: bytes | bytearray | memoryview, channels: int | None) -> UInt8[Tensor, "channels height width"]:
    """Decodes an image to grey (1 channel), RGB (3) or, with None, to the one of the two that it is.

    Raises ValueError with the reason when that cannot be done; a truncated file cannot be decoded.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as file:
            if file.mode == "I;16":
                grey = torch.from_numpy((np.array(file) >> 8).astype(np.uint8))[None]
                return grey.expand(channels or 1, -1, -1)
            if file.mode in ("I", "F"):
                raise ValueError(f"its pixels are of kind {file.mode!r}, not 8 or 16 bits a channel")
            mode = "L" if channels == 1 or (channels is None and file.mode in ("1", "L", "LA")) else "RGB"
            pixels = np.array(file if file.mode == mode else file.convert(mode))
    except UnidentifiedImageError:
        raise ValueError("it is empty, or no image of a known format") from None
    except Exception as error:  # Pillow's readers raise many types: SyntaxError, struct.error, EOFError
        raise ValueError(str(error) or type(error).__name__) from error
    return torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1)


def decode_all(
    picture: Callable[[int], UInt8[Tensor, "channels height width"]],
    count: int,
    shape: tuple[int, int, int],
    corrupt: CorruptImages,
) -> tuple[UInt8[Tensor, "kept channels height width"], list[int]]:
    """Decodes `count` images into one tensor, several at once; returns it with the positions that could be decoded."""
    pixels = torch.empty(count, *shape, dtype=torch.uint8)
    broken: dict[int, DataError] = {}

    def work(first: int) -> None:
        for position in range(first, min(first + CHUNK, count)):
            try:
                pixels[position] = picture(position)
            except DataError as error:
                broken[position] = error
                if corrupt.policy == "raise":
                    return

    pool = ThreadPoolExecutor(threads())
    try:
        for task in [pool.submit(work, first) for first in range(0, count, CHUNK)]:
            task.result()
            if broken and corrupt.policy == "raise":
                break
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C and the first corrupt image stop the rest
    for position in sorted(broken):
        corrupt.report(broken[position])
    kept = [position for position in range(count) if position not in broken]
    return (pixels[kept] if broken else pixels), kept
