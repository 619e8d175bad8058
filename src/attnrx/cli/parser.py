"""The parser of a command, and the options that several commands share."""

import argparse
import re
from typing import Any, NoReturn

from attnrx.cli.options import BATCH, COUNT, SEED, device, require_text
from attnrx.cli.outputs import FILE
from attnrx.errors import AttnrxError, nearest


class UsageError(AttnrxError):
    """An unknown command, or invalid arguments of a command."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError with the closest options instead of exiting."""

    def __init__(self, command: str, summary: str, example: str):
        self.writes: str = FILE  # FILE or FOLDER for --out, and the kind of file that attnrx writes there
        self.kind: str | None = None
        super().__init__(
            prog=f"attnrx {command}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        output = self.add_argument_group("output")
        output.add_argument("--json", action="store_true", help="print one JSON object and nothing else to stdout")
        output.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with a hint for unknown options."""
        unrecognized = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        options = [option for option in self._option_string_actions if option.startswith("--")]
        hint = f": {nearest(unrecognized[1], options)}" if unrecognized else "."
        raise UsageError(f"{message}{hint} See `{self.prog} --help`.")

    def parse_args(self, *given: Any, **named: Any) -> Any:
        """Parses the arguments; raises InvalidInput for texts that are empty or not UTF-8."""
        found = super().parse_args(*given, **named)
        for action in self._actions:
            option = action.option_strings[-1] if action.option_strings else action.dest
            require_text(option, getattr(found, action.dest, None))
        return found


# The syntax of token policies, for help texts.
POLICY = (
    "NAME[(knob=value,...)]:RATIO@LAYERS, e.g. evit:0.7@4,7,10 (keeps 0.7 of the remaining patches before the layers "
    "4, 7 and 10, counted from 1), class_attention:0.8/0.5@4,7 (shares of all patches), or tome:13@every (merges 13 "
    "patches before every layer but the first)"
)


def add_model(parser: Parser, purpose: str = "") -> None:
    """Adds the model, --weights and --trust."""
    folders = "a folder saved by attnrx or transformers"
    kinds = f"{folders}, timm:NAME, hf:ID, hub:OWNER/NAME, or a name such as svda:cifar10 for fresh weights"
    parser.add_argument("model", help=f"{purpose}: {kinds}" if purpose else kinds)
    parser.add_argument("--weights", metavar="FILE", help="the weights of timm:NAME or lvvit:SIZE, in a local file")
    add_trust(parser)


def add_trust(parser: Parser) -> None:
    """Adds --trust, which allows native code to be loaded."""
    parser.add_argument("--trust", action="store_true", help="load an AOTInductor package, which is native code")


def add_data(parser: Parser, purpose: str, *, required: bool = True) -> None:
    """Adds the dataset and the options for reading it."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        required=required,
        metavar="NAME",
        help=f"{purpose}: a known name (digits, cifar10 ...), hf:owner/name, or a path to parquet, images or shards",
    )
    group.add_argument(
        "--on-corrupt", choices=("raise", "skip"), default="raise", help="what to do with a corrupt image (raise)"
    )
    group.add_argument("--image-column", metavar="COLUMN", help="the column that holds the images, in tables")
    group.add_argument("--label-column", metavar="COLUMN", help="the column that holds the labels, in tables")
    group.add_argument(
        "--label-map",
        metavar="FILE",
        help="JSON with the model's class number of every class of the data, by name (ImageNet subsets need none)",
    )
    group.add_argument("--test-column", metavar="COLUMN", help="a column of true and false: test only on rows it marks")


def add_split(parser: Parser, default: str) -> None:
    """Adds --split and --images."""
    parser.add_argument("--split", choices=("train", "validation", "test"), default=default, help=f"({default})")
    parser.add_argument("--images", type=COUNT, metavar="N", help="use the first N images only, balanced over classes")


def add_running(parser: Parser, batch_size: int) -> None:
    """Adds --batch-size, --seed and --device."""
    parser.add_argument("--batch-size", type=BATCH, default=batch_size, metavar="N", help=f"({batch_size})")
    parser.add_argument("--seed", type=SEED, default=0, help="seeds every random draw (0)")
    add_device(parser)


def add_device(parser: Parser) -> None:
    """Adds --device."""
    parser.add_argument("--device", type=device, metavar="DEVICE", help="cpu, cuda or cuda:N (cuda where there is one)")


def add_backend(parser: Parser) -> None:
    """Adds --backend."""
    parser.add_argument(
        "--backend",
        choices=("auto", "autotuned", "eager", "explicit", "flex", "fused", "native", "ragged"),
        help="the attention backend; chosen: the fastest, autotuned once for this machine (auto)",
    )


def add_out(
    parser: Parser, what: str, default: str | None = None, *, writes: str = FILE, kind: str | None = None
) -> None:
    """Adds --out, required without a default. See `outputs.require_out`."""
    described = f"{what} ({default})" if default else what
    parser.add_argument("--out", required=default is None, default=default, metavar="PATH", help=described)
    parser.writes, parser.kind = writes, kind


def add_methods(parser: Parser, shares: str) -> None:
    """Adds --methods, and --shares or --macs at which they are compared."""
    parser.add_argument(
        "--methods",
        nargs="+",
        required=True,
        metavar="NAME=RULES",
        help="each 'NAME=RULES [refine=STEPS]', with the rules of `attnrx prescribe`, e.g. 'both=qk=total_rank:{share} "
        "tokens=evit:{share}@4,7,10', where {share} stands for the share kept (a rule without a map is that of qk), or "
        "'NAME=baseline:BASELINE [maps=MAP,MAP]': svd, asvd, fwsvd, fwsvd_outputs or svd_llm on all linear maps or "
        "on some of query, key, value, output, fc1 and fc2, or torch_pruning",
    )
    points = parser.add_mutually_exclusive_group()
    points.add_argument("--shares", metavar="S,S", help=f"shares kept ({shares})")
    points.add_argument(
        "--macs",
        metavar="S,S",
        help="shares of the model's MACs, e.g. 0.9,0.8,0.5: every method at the largest {share} that costs no more",
    )
