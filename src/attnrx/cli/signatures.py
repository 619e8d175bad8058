"""The parameters of public functions as options of commands: names, types, defaults and help.

They are read from the source, because importing a function imports torch, which takes seconds and --help does not need.
The range of a value is that of the function (`support.arguments.Kind`), which is imported when a value is given.
"""

import ast
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import attnrx as rx


@dataclass(frozen=True)
class Number:
    """The type of a number, or of `several` with commas between them: reads the text, and accepts values of a kind.

    `kind` returns the kind of the value, given the module `support.arguments`, which is imported with the first value.
    """

    read: type[int] | type[float]
    kind: Callable[[Any], Any] = lambda kinds: kinds.ANY
    metavar: str = "N"
    several: bool = False
    unit: str = ""  # which may follow

    def __call__(self, text: str) -> Any:
        hint = "; give numbers with commas between them" if self.several else ""
        if self.several:
            value = tuple(self._number(part, hint) for part in text.split(","))
        else:
            value = self._number(text.removesuffix(self.unit), hint)
        from attnrx.support import arguments  # imports torch

        kind = self.kind(arguments)
        if not kind.accepts(value):
            raise ArgumentTypeError(f"{text[:60]!r}: give {kind.expected.removesuffix(', or None')}{hint}")
        return value

    def _number(self, text: str, hint: str) -> int | float:
        # Up to 40 digits, because int() of thousands of digits takes quadratic time. Not by float() alone, which reads
        # the digits of other scripts too, 1_000 and nan.
        match = re.fullmatch(r"[-+]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:e[-+]?[0-9]{1,3})?(%?)", text)
        if match is None or (self.read is int and not re.fullmatch(r"[-+]?[0-9]+", text)):
            noun = "a whole number" if self.read is int else "a number"
            raise ArgumentTypeError(f"{text[:60]!r} is not {noun}{hint}")
        return self.read(text) if not match[1] else float(text[:-1]) / 100


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function, or a field of a dataclass: the type of its option, its default, and its help."""

    value: Any  # as `options.option` takes it: bool, a type, or the placeholder of a text
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
    """Returns the definition of a name in a module, or in the one that it is imported from."""
    path = Path(rx.__file__).parent.joinpath(*module.split(".")[1:])
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _definition(str(node.module), name)
    raise LookupError(f"{module} does not define {name}")


def _described(docstring: str) -> dict[str, str]:
    """Returns the texts of the sections `Args` and `Attributes` as help: no capital, no code marks, no full stop."""
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
    words = set(re.findall(r"\w+", "" if hint is None else ast.unparse(hint)))
    if "bool" in words:
        return bool
    for read in (float, int):
        if read.__name__ in words:
            # Fields of a dataclass have no kinds here: its `__post_init__` validates them.
            return Number(
                read,
                lambda kinds: getattr(getattr(rx, function), "kinds", {}).get(name, kinds.ANY),
                "N" if read is int else "X",
                several=bool(words & {"Sequence", "tuple"}),
            )
    return "TEXT"
