"""The imports: no circles between modules, and no optional library at import time."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for path in (ROOT / "src").rglob("*.py") if "recipes" not in path.parts)


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
