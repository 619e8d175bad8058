"""Options of commands: `option` adds one, `add_*` the groups that several commands share, and the types of values.

A type maps the text of an option to its value. It raises ArgumentTypeError with the text and the allowed values; the
parser adds the name of the option.
"""

import argparse
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnrx.cli.parser import Parser
from attnrx.support.text_parsing import share


@dataclass(frozen=True)
class WholeNumber:
    """The type of integers in a closed range, in ASCII digits; `metavar` stands for the value in the help."""

    least: int
    most: int
    metavar: str = "N"

    def __call__(self, text: str) -> int:
        # At most 20 digits: int() of thousands of digits takes quadratic time.
        if not re.fullmatch(r"[-+]?[0-9]{1,20}", text) or not self.least <= int(text) <= self.most:
            raise ArgumentTypeError(f"{text[:60]!r} is not a whole number in {self.least}..{self.most}")
        return int(text)


@dataclass(frozen=True)
class RealNumber:
    """The type of finite numbers in a closed range; with `above`, `least` is excluded."""

    metavar: str
    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    read: Callable[[str], float] = float

    def __call__(self, text: str) -> float:
        try:
            # float() also reads other scripts' digits and 1_000.
            value = self.read(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            value = math.nan
        in_range = self.least <= value <= self.most and not (self.above and value == self.least)
        if not (math.isfinite(value) and in_range):
            raise ArgumentTypeError(f"{text[:60]!r} is not a number {self._range()}")
        return value

    def _range(self) -> str:
        start = f"{'above' if self.above else 'from'} {self.least:g}" if self.least > -math.inf else ""
        end = f"up to {self.most:g}" if self.most < math.inf else ""
        return f"{start} {end}".strip() or "that is finite"


COUNT = WholeNumber(1, 10**9)  # of images, epochs, steps
SEED = WholeNumber(0, 2**63 - 1)  # the nonnegative seeds of torch
RANK = WholeNumber(1, 65_536, "R")
DRAWS, TRIALS = WholeNumber(1, 1000), WholeNumber(1, 1_000_000)
ROUNDS = WholeNumber(2, 100_000)  # one round has no spread, and so no interval
STEPS = WholeNumber(0, 10**6, "STEPS")
THREADS = WholeNumber(1, 1024)  # threads, workers and processes
BATCH = WholeNumber(1, 65_536)
NUMBER = RealNumber("X")
NOT_NEGATIVE = RealNumber("A", 0.0, 1e6)
SHARE = RealNumber("SHARE", 0.0, 1.0, above=True, read=share)
SHARE_REMOVED = RealNumber("SHARE", 0.0, 1.0, read=share)
POINTS = RealNumber("POINTS", 0.0, 100.0)
SPEED = RealNumber("TIMES", 1.0, 100.0, above=True)
OPSET = WholeNumber(18, 23)  # `exporting.onnx_formats.OPSETS`, whose import would load torch for --help


def device(text: str) -> str:
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
    try:
        values = tuple(SEED(part) for part in text.split(","))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}; give seeds with commas between them") from error
    if len(set(values)) < len(values):
        raise ArgumentTypeError(f"{text!r} gives a seed twice")
    return values


def several_shares(text: str) -> tuple[float, ...]:
    """The type of several different shares, with commas between them."""
    return _numbers(text, SHARE)


def several_speeds(text: str) -> tuple[float, ...]:
    """The type of several different speed-ups, with commas between them."""
    return _numbers(text, SPEED)


def _numbers(text: str, kind: RealNumber) -> tuple[float, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}; give numbers with commas between them") from error


def option(
    group: argparse._ActionsContainer, name: str, value: Any, help: str, default: Any = None, **more: Any
) -> None:
    """Adds an option to a parser or a group of it, with its default in brackets after the help.

    `value` is bool for a flag, a tuple of choices, a type of this module, or the placeholder of a text.
    """
    if value is bool:
        more["action"] = "store_true"
    elif isinstance(value, tuple):
        more["choices"] = value
    elif isinstance(value, str):
        more["metavar"] = value
    else:
        # A placeholder that is given replaces that of the type; with None argparse derives one from the option.
        more = {"type": value, "metavar": getattr(value, "metavar", None), **more}
    # The help states every default; one that depends on other options is None here and described in the text.
    if default is not None:
        # An option without help text shows its default alone.
        more["default"], help = default, f"{help} ({default})".strip()
    group.add_argument(name, help=help, **more)


# The syntax of token policies, for help texts.
POLICY = (
    "NAME[(knob=value,...)]:RATIO@LAYERS, e.g. evit:0.7@4,7,10 (keeps 0.7 of the remaining patches before the layers "
    "4, 7 and 10, counted from 1), class_attention:0.8/0.5@4,7 (shares of all patches), or tome:13@every (merges 13 "
    "patches before every layer but the first)"
)


def add_model(parser: argparse.ArgumentParser, purpose: str = "") -> None:
    folders = "a folder saved by attnrx or transformers"
    kinds = f"{folders}, timm:NAME, hf:ID, hub:OWNER/NAME, or a name such as svda:cifar10 for fresh weights"
    parser.add_argument("model", help=f"{purpose}: {kinds}" if purpose else kinds)
    option(parser, "--weights", "FILE", "the weights of timm:NAME or lvvit:SIZE, in a local file")
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    option(parser, "--trust", bool, "open a .pt2 file (program, aotinductor), which can run any code of its author")


def add_data(parser: argparse.ArgumentParser, purpose: str, *, required: bool = True) -> None:
    """Adds the dataset and the options for reading it."""
    group = parser.add_argument_group("data")
    kinds = "a known name (digits, cifar10 ...), hf:owner/name, or a path to parquet, images or shards"
    option(group, "--data", "NAME", f"{purpose}: {kinds}", required=required)
    option(group, "--on-corrupt", ("raise", "skip"), "what to do with a corrupt image", "raise")
    option(group, "--image-column", "COLUMN", "the column that holds the images, in tables")
    option(group, "--label-column", "COLUMN", "the column that holds the labels, in tables")
    mapped = "JSON with the model's class number of every class of the data, by name (ImageNet subsets need none)"
    option(group, "--label-map", "FILE", mapped)
    option(group, "--test-column", "COLUMN", "a column of true and false: test only on rows it marks")


def add_mixed_data(parser: Parser) -> None:
    """Adds a second dataset whose images are mixed into the training images, for commands that calibrate on these."""
    purpose = "training images of a second dataset in turns with those of --data, without labels; small ones are tiled"
    option(parser, "--mix-data", "NAME", purpose)
    option(parser, "--mix-times", COUNT, "images of --mix-data per image of --data (1)")


def add_split(parser: Parser, default: str) -> None:
    option(parser, "--split", ("train", "validation", "test"), "", default)
    option(parser, "--images", COUNT, "use the first N images only, balanced over classes")


def add_running(parser: Parser, batch_size: int) -> None:
    option(parser, "--batch-size", BATCH, "", batch_size)
    option(parser, "--seed", SEED, "seeds every random draw", 0)
    add_device(parser)


def add_device(parser: Parser) -> None:
    option(parser, "--device", device, "cpu, cuda or cuda:N (cuda where there is one)")


def add_backend(parser: Parser) -> None:
    backends = ("auto", "autotuned", "eager", "explicit", "flex", "fused", "native", "ragged")
    purpose = "the attention backend; chosen: the fastest, autotuned once for this machine (auto)"
    option(parser, "--backend", backends, purpose)


def add_out(parser: Parser, what: str, default: str | None = None, *, folder: bool = False, kind: str = "") -> None:
    """Adds --out, required without a default: a folder, or a file of this kind. See `parser.require_out`."""
    option(parser, "--out", "PATH", what, default, required=default is None)
    parser.writes_folder, parser.kind = folder, kind


def add_methods(parser: Parser, shares: str) -> None:
    """Adds --methods, and --shares or --macs at which they are compared."""
    syntax = (
        "each 'NAME=RULES [refine=STEPS] [repair=STEPS] [distill=EPOCHS]', with the rules of `attnrx prescribe`, e.g. "
        "'both=qk=total_rank:{share} tokens=evit:{share}@4,7,10', where {share} stands for the share kept (a rule "
        "without a map is that of qk), or "
        "'NAME=baseline:BASELINE': svd, asvd, fwsvd or svd_llm on all linear maps, or corp, "
        "snapvit, vtp, wdpruning, uvc, diffrate, torch_pruning"
    )
    option(parser, "--methods", "NAME=RULES", syntax, nargs="+", required=True)
    # Methods are compared at equal shares kept or at equal costs, and never at both.
    points = parser.add_mutually_exclusive_group()
    option(points, "--shares", "S,S", f"shares kept ({shares})")
    costs = "shares of the model's MACs, e.g. 0.9,0.8,0.5: every method at the largest {share} that costs no more"
    option(points, "--macs", "S,S", costs)
