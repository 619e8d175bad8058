"""The source as a reader meets it: one meaning per name, plain words, no work at import time."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for path in (ROOT / "src").rglob("*.py") if "recipes" not in path.parts)
RECIPES = sorted((ROOT / "src" / "attnrx_lab" / "recipes").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Commands share one interface: every module of one defines these two.
OF_COMMANDS = {"add", "run"}
NOT_IN_USE = re.compile(
    r"\b(told|said|asked|hears|nobody|spoilt|occasion|apart|contenders?|peers|shipped|examination)\b"
    r"|\b(the truth|written out|nothing changed|tokens leave|leaving tokens|what nobody reads|the house)\b",
    re.IGNORECASE,
)


def test_every_class_and_public_function_has_a_name_of_its_own() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(ROOT / "src")))
    repeated = {name: paths for name, paths in where.items() if len(paths) > 1 and name not in OF_COMMANDS}
    assert not repeated


@pytest.mark.parametrize("path", [*SOURCES, *RECIPES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_words_are_those_of_the_field(path: Path) -> None:
    found = [
        f"{number}: {line.strip()}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NOT_IN_USE.search(line)
    ]
    assert not found, found


def test_no_module_imports_itself_through_others() -> None:
    names = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path for path in SOURCES}
    imports: dict[str, set[str]] = {}
    for name, path in names.items():
        nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom) and node.module]
        found = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names} | {n.module for n in nodes}
        imports[name] = {each for each in found if each in names and not each.endswith("__init__")}
    done: set[str] = set()
    while ready := [name for name, own in imports.items() if name not in done and own <= done]:
        done |= set(ready)
    assert not sorted(imports.keys() - done)


def test_importing_the_package_imports_no_optional_library() -> None:
    optional = (
        "timm",
        "transformers",
        "datasets",
        "torchvision",
        "sklearn",
        "optuna",
        "jinja2",
        "accelerate",
        "attnrx_lab",
    )
    code = f"import sys, attnrx; print(sorted(set(sys.modules) & set({optional!r})))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
