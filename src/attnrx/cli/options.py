"""Building blocks of commands: parser, outcome, options, and functions that load the models and data in the options.

`option` adds one option, and `add_arguments` adds a public function's arguments as options. Other functions named
`add_*` add options that several commands share. An option's type is a function that converts the option's text to its
value. If the text is invalid, this function raises ArgumentTypeError with the text and the allowed values. The parser
adds the name of the option to this message.

The names, defaults and help texts of a function's parameters are parsed from its source code. Importing the function
would import torch, which takes seconds, and --help does not need it. The function is imported only when the user passes
a number, to look up its allowed range (`support.arguments.Kind`).
"""

import argparse
import ast
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import attnrx as rx
from attnrx.support.errors import AttnrxError, InvalidInput, nearest
from attnrx.support.progress import Log
from attnrx.support.registry import Registry
from attnrx.support.text_parsing import LONGEST_NUMBER, NUMBER, share

if TYPE_CHECKING:
    from torch import nn


class UsageError(AttnrxError):
    """An unknown command, or invalid arguments of a command."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of exiting. The message suggests the closest options."""

    def __init__(self, command: str, summary: str, example: str):
        # `add_out` sets these two attributes, and `require_out` uses them after parsing.
        self.writes_folder, self.kind = False, ""  # whether --out is a folder, or else the kind of its file
        super().__init__(
            prog=f"attnrx {command}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example:\n  {example}",
            # This formatter keeps the lines of the example.
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # an abbreviation could become ambiguous with a new option
        )
        output = self.add_argument_group("output")
        output.add_argument("--json", action="store_true", help="print one JSON object and nothing else to stdout")
        output.add_argument(
            "--debug", action="store_true", help="show every trial of a plan, and the traceback of an error"
        )
        plugin = "a file of Python to run first, which adds reducers, rules, losses, checks or methods; repeatable"
        self.add_argument("--plugin", metavar="FILE", action="append", default=[], help=plugin)

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with a hint for unknown options."""
        # The unknown option is parsed from argparse's message, because argparse's exceptions do not contain it.
        unrecognized = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        options = [option for option in self._option_string_actions if option.startswith("--")]
        hint = f": {nearest(unrecognized[1], options)}" if unrecognized else "."
        raise UsageError(f"{message}{hint} See `{self.prog} --help`.")

    def parse_args(self, *given: Any, **named: Any) -> Any:
        """Parses the arguments, and raises InvalidInput for texts that are empty or not UTF-8."""
        namespace = super().parse_args(*given, **named)
        # The texts of all options are checked here, so that no command has to check its own.
        for action in self._actions:
            option = action.option_strings[-1] if action.option_strings else action.dest
            for text in texts_of(getattr(namespace, action.dest, None)):
                if not text.strip():
                    raise InvalidInput(f"{option} is empty; give a value, or omit the option.")
                # Bytes of the command line that are not UTF-8 become surrogates in Python, which are not text.
                if re.search("[\0\ud800-\udfff]", text):
                    raise InvalidInput(
                        f"{option} {text!r} has characters that are not UTF-8 text, or a null character."
                    )
        return namespace


@dataclass(frozen=True)
class Outcome:
    """The result of a command: a record for --json, texts to print, and the exit code."""

    record: Mapping[str, Any]
    shown: tuple[str, ...]
    code: int = 0


@dataclass(frozen=True)
class Command:
    """A command: its name, its line in the overview, an example, and functions that add its options and run it."""

    name: str
    summary: str
    example: str
    options: Callable[[Parser], None]
    run: Callable[[Namespace, Log], Outcome]

    def parser(self) -> Parser:
        """Returns a parser with the command's options."""
        parser = Parser(self.name, self.summary, self.example)
        self.options(parser)
        return parser


COMMANDS = Registry[Command]("command", group="attnrx.commands")


def command(
    summary: str, example: str, options: Callable[[Parser], None]
) -> Callable[[Callable[[Namespace, Log], Outcome]], Callable[[Namespace, Log], Outcome]]:
    """Returns a decorator that registers a function as the command of the same name."""

    def declare(run: Callable[[Namespace, Log], Outcome]) -> Callable[[Namespace, Log], Outcome]:
        COMMANDS.register(Command(run.__name__, summary, example, options, run))
        return run

    return declare


def texts_of(value: object) -> list[str]:
    """Returns the strings in an argument's value, which is a list if the option accepts several values."""
    # The value of an option with nargs is a list.
    values = value if isinstance(value, list | tuple) else (value,)
    return [each for each in values if isinstance(each, str)]


@dataclass(frozen=True)
class Number:
    """The type of an option that is a number or, with `several`, numbers separated by commas.

    `kind` is a function that receives the module `support.arguments` and returns one of its `Kind` objects, which
    checks the values. The module imports torch, so it is imported only when the option has a value.
    """

    read: type[int] | type[float]
    kind: Callable[[Any], Any] = lambda kinds: kinds.ANY
    metavar: str = "N"
    several: bool = False
    unit: str = ""  # a suffix that may follow the number, e.g. pt

    def __call__(self, text: str) -> Any:
        from attnrx.support import arguments  # imports torch

        kind, parts = self.kind(arguments), text.split(",") if self.several else [text.removesuffix(self.unit)]
        # The text must match a pattern, because int() and float() also accept digits of other scripts, 1_000 and nan.
        form, noun = ("[-+]?[0-9]+", "a whole number") if self.read is int else (f"{NUMBER}%?", "a number")
        unread = [part for part in parts if len(part) > LONGEST_NUMBER or not re.fullmatch(form, part)]
        value, problem = text, f"{text[:60]!r}"
        if unread:
            problem = f"{unread[0][:60]!r} is not {noun}"
        else:
            numbers = tuple(int(part) if self.read is int else share(part) for part in parts)
            value = numbers if self.several else numbers[0]
        # A text may also be allowed, e.g. the batch "dynamic" of an exported file.
        if not kind.accepts(value) or (value is text and kind is arguments.ANY):
            expected = (kind.expected or noun).removesuffix(", or None") + ", with commas between them" * self.several
            raise ArgumentTypeError(f"{problem}: give {expected}")
        return value


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function or a field of a dataclass, as an option: its type, default and help text."""

    value: Any  # an argument of `option`: bool, a type, or the placeholder of a text
    default: Any
    help: str


@cache
def parameters(function: str) -> Mapping[str, Parameter]:
    """Returns the parameters of the public function or dataclass `attnrx.FUNCTION`, by name.

    Raises:
        LookupError: attnrx has no such function.
    """
    node = _definition(rx.HOMES[function], function)
    texts = _described(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        items = [(ast.unparse(each.target), each.annotation, each.value) for each in fields]
    else:
        given, unset = [*node.args.args, *node.args.kwonlyargs], len(node.args.args) - len(node.args.defaults)
        defaults = [*[None] * unset, *node.args.defaults, *node.args.kw_defaults]
        items = [(each.arg, each.annotation, default) for each, default in zip(given, defaults, strict=True)]
    return {
        name: Parameter(_type_of(function, name, hint), _literal(default), texts.get(name, ""))
        for name, hint, default in items
    }


def _definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Returns the definition of a name. If the module only imports the name, searches the module that defines it."""
    path = Path(rx.__file__).parent.joinpath(*module.split(".")[1:])
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    # Blocks of `if TYPE_CHECKING:` are searched, too. A module imports names there that it only loads on first use.
    for node in [each for part in tree.body for each in (part.body if isinstance(part, ast.If) else [part])]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _definition(str(node.module), name)
    raise LookupError(f"{module} does not define {name}")


def _described(docstring: str) -> dict[str, str]:
    """Returns help texts from a docstring's `Args` and `Attributes`, without initial capitals, backticks or periods."""
    texts = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE):
        for name, text in re.findall(r"^    (\w+): (.*\n?(?:^ {5,}.*\n?)*)", section, re.MULTILINE):
            text = " ".join(text.split()).removesuffix(".").replace("`", "")
            texts[name] = text if text[1:2].isupper() else text[:1].lower() + text[1:]
    return texts


def _literal(default: ast.expr | None) -> Any:
    try:
        return None if default is None else ast.literal_eval(default)
    except ValueError:  # the name of a constant
        return None


def _type_of(function: str, name: str, hint: ast.expr | None) -> Any:
    if isinstance(hint, ast.Subscript) and ast.unparse(hint.value) == "Literal":
        return ast.literal_eval(hint.slice)
    words = set(re.findall(r"\w+", "" if hint is None else ast.unparse(hint)))
    if "bool" in words:
        return bool
    for read in (float, int):
        if read.__name__ in words:
            # Only functions have `kinds`. The fields of a dataclass are validated by its `__post_init__`.
            return Number(
                read,
                lambda kinds: getattr(getattr(rx, function), "kinds", {}).get(name, kinds.ANY),
                "N" if read is int else "X",
                several=bool(words & {"Sequence", "tuple"}),
            )
    return "TEXT"


COUNT = Number(int, lambda kinds: kinds.COUNT)  # a number of images, epochs or steps
SEED = Number(int, lambda kinds: kinds.SEED)
BATCH = Number(int, lambda kinds: kinds.BATCH)
STEPS = Number(int, lambda kinds: kinds.whole(0, 10**6), "STEPS")
POINTS = Number(float, lambda kinds: kinds.number(0.0, 100.0, above=False), "POINTS", unit="pt")


def device(text: str) -> str:
    """Returns the value of --device if it names an available device. argparse calls this function as the option's type.

    Raises:
        ArgumentTypeError: torch finds no such device.
    """
    from attnrx.support.arguments import DEVICE  # imports torch

    if not DEVICE.accepts(text):
        raise ArgumentTypeError(f"{text[:60]!r}: give {DEVICE.expected}")
    return text


def option(
    group: argparse._ActionsContainer, name: str, value: Any, help: str, default: Any = None, **more: Any
) -> None:
    """Adds an option to a parser or to one of its groups. The help ends with the default in brackets.

    `value` is bool for a flag, a tuple of choices, a type of this module, or the placeholder of a text option.
    """
    if value is bool:
        more["action"] = "store_true"
    elif isinstance(value, tuple):
        more["choices"] = value
    elif isinstance(value, str):
        more["metavar"] = value
    else:
        # A `metavar` in `more` replaces the type's placeholder. If it is None, argparse derives one from the option.
        more = {"type": value, "metavar": getattr(value, "metavar", None), **more}
    # The help shows every default. If a default depends on other options, it is None here, and the help describes it.
    if default is not None:
        # If there is no help text, only the default is shown.
        more["default"], help = default, f"{help} ({default})".strip()
    group.add_argument(name, help=help.replace("%", "%%"), **more)  # argparse applies % to the help


def add_arguments(group: argparse._ActionsContainer, function: str, *names: str, **values: Any) -> None:
    """Adds arguments of the public function or dataclass `attnrx.FUNCTION` as options, with their help.

    For the arguments in `names`, the types come from the function's signature. `values` maps other arguments to a type,
    or to the placeholder that the help shows for their value. If the user omits an option, its value is None, and
    `given_arguments` leaves it out. The function then uses its own default, which the help shows.
    """
    options_of = group.get_default("options_of") or {}
    group.set_defaults(options_of={**options_of, function: (*options_of.get(function, ()), *names, *values)})
    for name, value in {**dict.fromkeys(names), **values}.items():
        parameter = parameters(function)[name]
        if value is None:
            value = parameter.value
        elif isinstance(value, str) and isinstance(parameter.value, Number):
            value = replace(parameter.value, metavar=value)
        # If the default is not a plain value, or depends on other arguments, the help text describes it in brackets.
        states_default = parameter.help.endswith(")") or any(parameter.default is each for each in (None, False, ()))
        help = parameter.help if states_default else f"{parameter.help} ({parameter.default})"
        option(group, f"--{name.replace('_', '-')}", value, help)


def given_arguments(arguments: Namespace, function: str) -> dict[str, Any]:
    """Returns the values of a function's flags, and of all other options that the user passed (see `add_arguments`)."""
    values = {name: getattr(arguments, name) for name in arguments.options_of[function]}
    return {name: value for name, value in values.items() if value is not None}


# The syntax of token policies, for help texts.
POLICY = (
    "NAME[(knob=value,...)]:RATIO@LAYERS, e.g. ward:0.7@4,7,10 (keeps 0.7 of the remaining patches before the layers "
    "4, 7 and 10, counted from 1), class_attention:0.8/0.5@4,7 (shares of all patches), or tome:13@every (merges 13 "
    "patches before every layer but the first)"
)


def add_model(parser: argparse.ArgumentParser, purpose: str = "") -> None:
    folders = "a folder saved by attnrx or transformers"
    kinds = (
        f"{folders}, timm:NAME, hf:ID, hub:OWNER/NAME, or a name that an installed package registers, for fresh weights"
    )
    parser.add_argument("model", help=f"{purpose}: {kinds}" if purpose else kinds)
    option(parser, "--weights", "FILE", "the weights of a model that is given by its name, in a local file")
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    kinds = "a .pt2 file, or a repository of transformers that names code (auto_map)"
    option(parser, "--trust", bool, f"open what can run any code of its author: {kinds}")


def model_argument(source: str, device: str | None, weights: str | None = None, trust: bool = False) -> "nn.Module":
    """Loads a model onto the requested device, by default CUDA if it is available."""
    return rx.load(source, weights=weights, trust=trust).to(device or default_device())


def add_device(parser: Parser) -> None:
    option(parser, "--device", device, "cpu, cuda or cuda:N (cuda where there is one)")


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def is_fresh(source: str) -> bool:
    """Returns whether a model's source names an architecture, e.g. timm:NAME, and not a folder, a file or a hub id."""
    # A path may also contain a colon, so a source that exists as a path is not a name.
    return ":" in source and not source.startswith("hub:") and not Path(source).exists()


def add_data(parser: argparse.ArgumentParser, purpose: str, *, required: bool = True) -> None:
    """Adds the option --data for the dataset, and options that say how to load it."""
    group = parser.add_argument_group("data")
    kinds = "a known name (digits, cifar10 ...), hf:owner/name, or a path to parquet or a folder of images"
    option(group, "--data", "NAME", f"{purpose}: {kinds}", required=required)
    option(group, "--image-column", "COLUMN", "the column that holds the images, in tables")
    option(group, "--label-column", "COLUMN", "the column that holds the labels, in tables")
    mapped = "JSON with the model's class number of every class of the data, by name (ImageNet subsets need none)"
    option(group, "--label-map", "FILE", mapped)
    option(group, "--test-column", "COLUMN", "a column of true and false: test only on rows it marks")


def load_splits(arguments: Namespace, **shape: Any) -> "rx.data.Splits":
    return rx.load_data(arguments.data, columns=_columns(arguments), **shape)


def splits_argument(
    model: "nn.Module", arguments: Namespace, log: Log | None = None, distinct: bool = False
) -> "rx.data.Splits":
    """Loads the dataset with the model's preprocessing, and logs how it was loaded.

    With `distinct`, an image in several splits is used only once.

    Raises:
        InvalidInput: The file of --label-map is not a JSON object.
    """
    path = arguments.label_map
    splits = rx.adapt_preprocessing(load_splits(arguments), model, None if path is None else _label_map(path))
    splits = rx.data.distinct_splits(splits) if distinct else splits
    if log is not None:
        for note in splits.notes:
            log(f"{splits.name}: {note}")
    return splits


def _columns(arguments: Namespace) -> "rx.data.Columns":
    # Not every command with data has the options for columns.
    image, label, test = (getattr(arguments, f"{name}_column", None) for name in ("image", "label", "test"))
    return rx.data.Columns(image_column=image, label_column=label, test_column=test)


def _label_map(path: str) -> dict[str, int]:
    label_map = rx.serialization.read_json(path)
    # read_json accepts any JSON, e.g. a list, so the type is checked here.
    if not isinstance(label_map, dict):
        raise InvalidInput(f'--label-map {path}: give a JSON object, e.g. {{"tench": 0, "church": 497}}.')
    return label_map


def add_split(parser: Parser, default: str) -> None:
    option(parser, "--split", ("train", "validation", "test"), "", default)
    option(parser, "--images", COUNT, "use the first N images only, balanced over classes")


def chosen_images(splits: "rx.data.Splits", arguments: Namespace) -> "rx.data.ImageSet":
    images: rx.data.ImageSet = getattr(splits, arguments.split)
    return images if arguments.images is None else images.take(arguments.images)


def require_inputs(arguments: Namespace) -> None:
    """Checks the dataset, its columns, the label map, the formats and the output folder before a model is loaded.

    Raises:
        InvalidInput: The file of --label-map is not a JSON object.
    """
    data, to = (getattr(arguments, name, None) for name in ("data", "to"))
    if data is None and to is None:
        return
    from attnrx.workflows.load import preflight  # imports torch

    # Only the commands shrink and elastic have an effort, and they write a folder with a report.
    opset = getattr(arguments, "opset", None)
    onnx = "onnx" if opset is None else f"onnx(opset={opset})"
    texts = to, None if to or getattr(arguments, "no_onnx", True) else onnx
    formats, has_report = [rx.exporting.parse_format(text) for text in texts if text], hasattr(arguments, "effort")
    preflight(folder=arguments.out if has_report else None, formats=formats, report=has_report)
    if getattr(arguments, "label_map", None) is not None:
        _label_map(arguments.label_map)
    if data is not None:
        preflight(data=data, columns=_columns(arguments))


def add_running(parser: Parser, batch_size: int) -> None:
    option(parser, "--batch-size", BATCH, "", batch_size)
    option(parser, "--seed", SEED, "seeds every random draw", 0)
    add_device(parser)


def parse_losses(
    texts: Sequence[str], shared: Mapping[str, str] | None = None, task: bool = True
) -> "tuple[rx.losses.Loss, ...]":
    """Returns the losses for training. If `task` is true and no text names a task loss, the default task loss is first.

    `shared` holds default values of parameters, e.g. the teacher and its weights. They apply to all losses that have
    these parameters.

    Raises:
        InvalidInput: A text names a task loss although `task` is false, no loss uses one of the parameters in `shared`,
            or there are no losses.
    """
    losses = tuple(rx.losses.parse_loss(text, shared) for text in texts)
    has_task = any(isinstance(loss, rx.losses.Task) for loss in losses)
    if has_task and not task:
        raise InvalidInput("the losses contain the task, and --no-task excludes it; give one of the two.")
    # An option without effect is an error, because the user expects an effect.
    unused = [knob for knob in shared or {} if not any(hasattr(loss, knob) for loss in losses)]
    if unused:
        raise InvalidInput(
            f"a {unused[0]} was given, and none of the losses uses one; add distillation or "
            "feature_distillation to the losses."
        )
    if not losses and not task:
        raise InvalidInput("without the task and without other losses there is nothing to learn; give --losses.")
    return losses if has_task or not task else (rx.losses.Task(), *losses)


def add_out(parser: Parser, what: str, default: str | None = None, *, folder: bool = False, kind: str = "") -> None:
    """Adds --out, a folder or a file of this `kind` (see `main.require_out`). Without a default, --out is required."""
    option(parser, "--out", "PATH", what, default, required=default is None)
    parser.writes_folder, parser.kind = folder, kind
