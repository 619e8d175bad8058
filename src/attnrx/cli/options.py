"""The types of option values, with their ranges.

A type is a function from the text of an option to its value. It raises ArgumentTypeError with the text and the allowed
values; the parser adds the name of the option.
"""

import math
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from attnrx.errors import InvalidInput
from attnrx.serialization.text_parsing import share

PROCESS_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # set by torchrun and accelerate


def integer_type(least: int, most: int) -> Callable[[str], int]:
    """Returns the type of integers in a closed range, in ASCII digits."""

    def integer(text: str) -> int:
        if not re.fullmatch(r"[-+]?[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise ArgumentTypeError(f"{text[:60]!r} is not a whole number in {least}..{most}")
        return int(text)

    return integer


def real(
    least: float = -math.inf, most: float = math.inf, above: bool = False, read: Callable[[str], float] = float
) -> Callable[[str], float]:
    """Returns the type of finite numbers in a closed range; with `above`, `least` is excluded."""

    def number(text: str) -> float:
        try:
            value = read(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most and not (above and value == least)):
            raise ArgumentTypeError(f"{text[:60]!r} is not a number {_range(least, most, above)}")
        return value

    return number


def _range(least: float, most: float, above: bool) -> str:
    start = "" if least == -math.inf else f"above {least:g}" if above else f"from {least:g}"
    end = "" if most == math.inf else f"up to {most:g}"
    return " ".join(filter(None, (start, end))) or "that is finite"


COUNT = integer_type(1, 10**9)  # of images, epochs, steps
SEED = integer_type(0, 2**63 - 1)
RANK = integer_type(1, 65_536)
DRAWS, ROUNDS, TRIALS = integer_type(1, 1000), integer_type(2, 100_000), integer_type(1, 1_000_000)
STEPS = integer_type(0, 10**6)
THREADS = integer_type(1, 1024)  # threads, workers and processes
BATCH = integer_type(1, 65_536)
NUMBER = real()
NOT_NEGATIVE = real(0.0, 1e6)
SHARE = real(0.0, 1.0, above=True, read=share)
SHARE_REMOVED = real(0.0, 1.0, read=share)
POINTS = real(0.0, 100.0)
OPSET = integer_type(18, 23)


def device(text: str) -> str:
    """The type of devices that can run a model."""
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", text):
        raise ArgumentTypeError(f"{text!r} is not a device; give cpu, cuda or cuda:N")
    return text


def batch(text: str) -> int | str:
    """The type of the batch of an exported file: a number of images, or any."""
    if text == "dynamic":
        return text
    try:
        return BATCH(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}; give a number of images, or dynamic for any") from None


def seeds(text: str) -> tuple[int, ...]:
    """The type of distinct comma-separated seeds."""
    try:
        found = tuple(SEED(part) for part in text.split(","))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}; give seeds with commas between them") from error
    if len(set(found)) < len(found):
        raise ArgumentTypeError(f"{text!r} gives a seed twice")
    return found


def require_text(option: str, value: object) -> None:
    """Raises InvalidInput for option values that are empty, contain a null character or are not UTF-8."""
    for text in value if isinstance(value, list | tuple) else (value,):
        if isinstance(text, str) and not text.strip():
            raise InvalidInput(f"{option} is empty; give a value, or omit the option.")
        if isinstance(text, str) and ("\0" in text or not _is_utf8(text)):
            raise InvalidInput(f"{option} {text!r} has characters that are not UTF-8 text, or a null character.")


def require_environment() -> None:
    """Raises InvalidInput for process numbers of a launcher, flags and a cache folder that are not valid."""
    numbers = {}
    for name in PROCESS_VARIABLES:
        text = os.environ.get(name)
        if text is not None and not re.fullmatch(r"[0-9]{1,9}", text):
            raise InvalidInput(f"{name}={text!r} is no number; launch with torchrun or accelerate, or unset it.")
        numbers[name] = int(text or 0)
    if numbers["RANK"] and numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise InvalidInput(
            f"RANK={numbers['RANK']} with WORLD_SIZE={os.environ.get('WORLD_SIZE')}: a rank is below the number of "
            "processes; launch with torchrun or accelerate, or unset both."
        )
    for name, meaning in (("ATTNRX_MEASURE", "never measure"), ("ATTNRX_BUILD", "never build kernels")):
        text = os.environ.get(name, "1")
        if text not in ("", "0", "1"):
            raise InvalidInput(f"{name}={text!r}: give 0 ({meaning}) or 1.")
    cache = os.environ.get("ATTNRX_CACHE")
    if cache and Path(cache).exists() and not Path(cache).is_dir():
        raise InvalidInput(f"ATTNRX_CACHE={cache!r} is not a folder; name a folder, or unset it.")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
