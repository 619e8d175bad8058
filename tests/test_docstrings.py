"""The docstrings: every raised error, the paper of every equation, the shapes of tensors, and examples that run."""

import ast
import builtins
import doctest
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import attnrx as rx
from attnrx_lab.rules import control_prescriptions, measure_divergence

SOURCE = Path(__file__).resolve().parents[1] / "src"
MODULES = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
CLASSES: dict[str, list[ast.ClassDef]] = {}  # several modules may have a class of one name
for node in (each for tree in MODULES.values() for each in ast.walk(tree) if isinstance(each, ast.ClassDef)):
    CLASSES.setdefault(node.name, []).append(node)

CITATION = re.compile(r"\b(Eqs?\.|(Theorem|Proposition|Algorithm|Table|Lemma|Section|Figure)s?) \(?\d")
PAPER = re.compile(r"\b(SVDA|IrrAtt|SPOT|LV-ViT)\b|[A-Z]\w+(?: et al\.| and [A-Z]\w+)?,? \(?(?:19|20)\d\d")
SHAPE = re.compile(r"\bshapes?\b|\[[\w.* ]+(, [\w.* ]+)*\]|\bscalars?\b")
WITH_SHAPES = {"Float", "Int", "Bool", "UInt8"}
COLLECTED_BY_NAME = {"Mapping", "dict", "Callable", "Iterator"}  # tensors of different shapes

Function = tuple[str | None, ast.FunctionDef]  # the class, if it is a method


def functions(tree: ast.Module) -> Iterator[Function]:
    """Yields the functions and the methods of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, each) for each in node.body if isinstance(each, ast.FunctionDef))


def public(tree: ast.Module) -> Iterator[Function]:
    for owner, node in functions(tree):
        if not node.name.startswith("_") and not (owner or "").startswith("_"):
            yield owner, node


def name_of(node: ast.AST | None) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


@cache
def with_bases(name: str) -> tuple[str, ...]:
    """Returns a class and all classes that it inherits from, by name."""
    if name in CLASSES:
        stated = [base for each in CLASSES[name] for base in each.bases]
        bases = [name_of(base.value if isinstance(base, ast.Subscript) else base) for base in stated]
    else:
        bases = [base.__name__ for base in getattr(getattr(builtins, name, object), "__bases__", ())]
    return (name, *(each for base in bases if base != name for each in with_bases(base)))


def documented(owner: str | None, function: ast.FunctionDef) -> str:
    """Returns the docstrings of a function, of its class, and of what a method overrides."""
    found = [ast.get_docstring(function)]
    for each in with_bases(owner) if owner else ():
        for kind in CLASSES.get(each, ()):
            overridden = (node for _, node in functions(ast.Module([kind], [])) if node.name == function.name)
            found += [ast.get_docstring(kind), *map(ast.get_docstring, overridden)]
    return "\n".join(text for text in found if text)


class Raised:
    """The errors that a function of a module raises, itself or in private functions of the module that it calls."""

    def __init__(self, tree: ast.Module):
        self.private = {(owner, node.name): node for owner, node in functions(tree) if node.name.startswith("_")}

    def by(self, owner: str | None, nodes: list[ast.stmt], calls: frozenset = frozenset()) -> set[str]:
        return {name for node in nodes for name in self._of(owner, node, calls)}

    def _of(self, owner: str | None, node: ast.AST, calls: frozenset) -> Iterator[str]:
        if isinstance(node, ast.Try):
            caught = {name_of(each) for handler in node.handlers for each in _types(handler)}
            inside = self.by(owner, node.body, calls)
            yield from (name for name in inside if not caught & {*with_bases(name)})
            for handler in node.handlers:
                yield from self.by(owner, handler.body, calls)
            yield from self.by(owner, [*node.orelse, *node.finalbody], calls)
            return
        if isinstance(node, ast.Raise):
            name = name_of(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            made_by = self.private.get((None, name))
            name = name_of(made_by.returns) if made_by else name
            # Not those of abstract methods, and no private ones, except kinds of public errors.
            if (name[:1].isupper() and name != "NotImplementedError") or "AttnrxError" in with_bases(name):
                yield name
        if isinstance(node, ast.Call):
            of_self = isinstance(node.func, ast.Attribute) and name_of(node.func.value) in ("self", "cls")
            called = (owner if of_self else None, name_of(node.func))
            if called in self.private and called not in calls:
                yield from self.by(owner, self.private[called].body, calls | {called})
        for child in ast.iter_child_nodes(node):
            yield from self._of(owner, child, calls)


def _types(handler: ast.ExceptHandler) -> list[ast.expr]:
    if handler.type is None:
        return [ast.Name("BaseException")]
    return handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]


def test_public_functions_name_the_errors_that_they_raise() -> None:
    """In `Raises:` or a sentence with "raises"; a command is called by `main` alone, which prints errors."""
    missing = []
    for path, tree in MODULES.items():
        raised = Raised(tree)
        for owner, function in public(tree):
            if any(isinstance(each, ast.Call) and name_of(each.func) == "command" for each in function.decorator_list):
                continue
            text = " ".join(re.findall(r"[Rr]aises\b(.*)", documented(owner, function), re.DOTALL))
            for name in sorted(raised.by(owner, function.body)):
                named = {*with_bases(name)} - {"Exception", "BaseException", "object"}
                if not named & {*re.findall(r"\w+", text)}:
                    missing.append(f"{path}:{function.lineno} {function.name} raises {name}")
    assert not missing, "\n".join(missing)


def commented(source: str) -> Iterator[tuple[int, str]]:
    """Yields the first line and the text of every comment; lines that follow one another are one."""
    first, last, text = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1:
            yield first, text
            first, text = token.start[0], ""
        last, text = token.start[0], f"{text} {token.string[1:].strip()}"
    yield first, text


def test_citations_name_the_paper() -> None:
    missing = []
    for path, tree in MODULES.items():
        source, texts = (SOURCE / path).read_text(), []
        if not CITATION.search(source):  # comments are slow to find
            continue
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else ():
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    texts.append((node, statement.lineno, str(statement.value.value)))
        for line, text in commented(source):
            around = (doc for node, _, doc in texts if not isinstance(node, ast.Module) and _holds(node, line))
            texts.append((tree, line, f"{text} {' '.join(around)}" if CITATION.search(text) else ""))
        missing += [
            f"{path}:{line} {text[:80]}" for _, line, text in texts if CITATION.search(text) and not PAPER.search(text)
        ]
    assert not missing, "\n".join(missing)


def _holds(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", line + 1) <= line <= getattr(node, "end_lineno", 0)


def has_no_shape(annotation: ast.AST | None) -> bool:
    """Whether an annotation has a tensor of which it states no shape."""
    if isinstance(annotation, ast.Subscript):
        if name_of(annotation.value) in WITH_SHAPES | COLLECTED_BY_NAME:
            return False
        return has_no_shape(annotation.slice)
    if isinstance(annotation, ast.BinOp):
        return has_no_shape(annotation.left) or has_no_shape(annotation.right)
    if isinstance(annotation, ast.Tuple):
        return any(map(has_no_shape, annotation.elts))
    return name_of(annotation) == "Tensor"


def test_public_functions_state_the_shapes_of_tensors() -> None:
    """In the annotation or in words; "any shape" is one, and tensors in mappings have none in common."""
    missing = []
    for path, tree in MODULES.items():
        for owner, function in public(tree):
            given = function.args
            arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg])]
            tensors = [each.arg for each in arguments if has_no_shape(each.annotation)]
            if tensors and not SHAPE.search(documented(owner, function)):
                missing.append(f"{path}:{function.lineno} {function.name}({', '.join(tensors)})")
    assert not missing, "\n".join(missing)


DOCUMENTED = {
    **{name: getattr(rx, name) for name in rx.HOMES},
    **{each.__name__: each for each in (control_prescriptions, measure_divergence)},
}
EXAMPLES = sorted(name for name, each in DOCUMENTED.items() if ">>> " in (each.__doc__ or ""))
SLOW_EXAMPLES = ("elastic", "export", "plan", "repair", "shrink", "train")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_EXAMPLES else name for name in EXAMPLES]
)
@pytest.mark.usefixtures("single_precision")
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with `rx`, `timm` and `torch` imported, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"rx": rx, "timm": pytest.importorskip("timm"), "torch": torch}
    example = doctest.DocTestParser().get_doctest(DOCUMENTED[name].__doc__, names, name, None, None)
    printed = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(example, out=printed.write)
    assert not printed.getvalue(), printed.getvalue()


def test_the_functions_of_the_readme_have_examples() -> None:
    assert len(EXAMPLES) >= 19
