"""The imports: no circle, no climb against the layers, and no optional library at import time."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "src").rglob("*.py"))
}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yields what runs when a module or one of its functions does: `import_module("attnrx...")` is an import too."""
    for node in ast.iter_child_nodes(tree):
        # The first is for type checkers alone, the second runs in a process of its own.
        if (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING") or (
            isinstance(node, ast.FunctionDef) and node.name == "_main"
        ):
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "relative imports hide the layer"
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))
        yield from imported(node)


def own_module(name: str) -> str | None:
    """Returns the module of this repository that an imported name is or comes from."""
    return name if name in SOURCES else (own_module(name.rpartition(".")[0]) if "." in name else None)


def imports_of_modules() -> dict[str, set[str]]:
    # The package itself has no code but the public names, which it imports on first use.
    modules = {name: path for name, path in SOURCES.items() if name != "attnrx"}
    found = {
        name: {own_module(each) for each in imported(ast.parse(path.read_text()))} for name, path in modules.items()
    }
    return {name: {each for each in own if each in modules and each != name} for name, own in found.items()}


def test_no_module_imports_itself_through_others() -> None:
    imports = imports_of_modules()
    done: set[str] = set()
    while ready := [name for name, own in imports.items() if name not in done and own <= done]:
        done |= set(ready)
    assert not sorted(imports.keys() - done)


def test_no_module_imports_from_a_layer_above() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in (each for each in contracts if each["type"] == "layers"):
        (package,) = contract["containers"]
        rank = {
            f"{package}.{room.strip()}": index
            for index, layer in enumerate(contract["layers"])
            for room in layer.split("|")
        }

        def room_of(module: str, rank: dict[str, int] = rank) -> str | None:
            return next((room for room in rank if f"{module}.".startswith(f"{room}.")), None)

        climbs = [
            f"{name} imports {other}"
            for name, own in imports_of_modules().items()
            for other in own
            if (here := room_of(name)) and (there := room_of(other)) and here != there and rank[there] <= rank[here]
        ]
        assert not climbs


def test_importing_the_package_imports_no_optional_library() -> None:
    optional = ("timm", "transformers", "datasets", "torchvision", "sklearn", "jinja2", "accelerate", "attnrx_lab")
    code = f"import sys, attnrx; print(sorted(set(sys.modules) & set({optional!r})))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# Calls that can run code of a file's author, unless their arguments prevent it.
OPENERS = {
    "from_pretrained", "from_config", "create_model", "load_dataset", "from_parquet", "read_schema", "read_metadata",
    "read_table", "aoti_load_package", "torch.load", "torch.export.load", "onnx.load", "InferenceSession", "read_model",
}  # fmt: skip


def test_one_module_opens_what_others_made() -> None:
    found = set()
    for module, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in OPENERS or name.rpartition(".")[2] in OPENERS:
                found.add(module)
    assert found == {"attnrx.support.foreign_files"}
