"""The budgets of the house style: no file over 400 lines, no function over 60, short functions as a rule."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "attnrx"
FILES = sorted(SOURCE.rglob("*.py"))


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    long = [node.name for node in functions(ast.parse(text)) if length(node) > 60]
    assert not long, f"over 60 lines: {long}"


def test_nine_functions_in_ten_have_at_most_30_lines() -> None:
    lengths = sorted(length(node) for path in FILES for node in functions(ast.parse(path.read_text())))
    assert lengths[int(0.9 * len(lengths))] <= 30


def test_no_file_is_a_drawer() -> None:
    assert not [path for path in FILES if path.stem in {"utils", "helpers", "common", "misc"}]


def test_nothing_is_pickled() -> None:
    forbidden = ("torch.load(", "torch.save(", "import pickle", "pickle.")
    found = [path.stem for path in FILES if any(word in path.read_text() for word in forbidden)]
    # What a process and the one it starts say to each other is no checkpoint: it lies in a folder that only they have,
    # and is gone with the call.
    assert found == ["apart"]
