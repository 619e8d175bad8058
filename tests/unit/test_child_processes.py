"""Child processes run no program of the current folder, search it last, and are started in one place."""

import ast
import importlib
import os
import sys
from pathlib import Path

import pytest

from attnrx.support import subprocess_runner
from attnrx.support.subprocess_runner import run_in_subprocess
from attnrx.vit.kernels import compilation

SOURCES = Path(subprocess_runner.__file__).parents[2]
NAMES = ("torch", "numpy", "json", "pickle", "sitecustomize", "usercustomize", "attnrx", "timm", "encodings")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which every module and program notes the process that runs it."""
    folder, marks = tmp_path / "planted", tmp_path / "marks"
    marks.mkdir()
    for place in (folder, folder / "inside"):
        place.mkdir()
        for name in NAMES:
            (place / f"{name}.py").write_text(f"import os; open({str(marks)!r} + f'/{name}-{{os.getpid()}}', 'w')\n")
        for name in compilation.COMPILERS:
            (place / name).write_text(f"#!/bin/sh\ntouch {marks}/{name}-0\n")
            (place / name).chmod(0o755)
    monkeypatch.chdir(folder)
    return marks


def ran(marks: Path) -> list[str]:
    """What ran in another process than this one, whose own path belongs to the user."""
    return [mark.name for mark in marks.iterdir() if mark.name.rpartition("-")[2] != str(os.getpid())]


@pytest.mark.slow
def test_modules_that_this_process_imported_from_the_current_folder_are_imported_again_and_no_others(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a model of a class beside the user's script can be timed."""
    package = Path("models_of_mine")
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "small.py").write_text("def answer():\n    return 42\n")
    monkeypatch.setattr(sys, "path", [*sys.path, ""])  # last: the planted modules are not imported by this process
    importlib.invalidate_caches()
    try:
        small = importlib.import_module("models_of_mine.small")
        assert run_in_subprocess(small.answer) == 42
    finally:
        for name in ("models_of_mine", "models_of_mine.small"):
            sys.modules.pop(name, None)
    assert not ran(planted)


def test_a_compiler_in_the_current_folder_is_not_run(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f":.:inside:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    compiler = compilation.cpp_compiler()
    if not compiler:
        pytest.skip("there is no compiler")
    assert Path(compiler[0]).is_absolute() and not Path(compiler[0]).is_relative_to(Path.cwd())
    compilation.output_of([*compiler, "--version"])
    assert not ran(planted)


def test_processes_are_started_in_one_module() -> None:
    """Other ways to start one would have another path, folder and environment."""
    starts = {"subprocess", "multiprocessing", "_posixsubprocess", "pty"}
    calls = ("system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "startfile")
    allowed = {"attnrx/support/subprocess_runner.py": {"subprocess", "os.fork"}}
    for path in sorted(SOURCES.rglob("*.py")):
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names} & starts
            elif isinstance(node, ast.ImportFrom):
                found |= {(node.module or "").partition(".")[0]} & starts
                found |= {alias.name for alias in node.names if alias.name == "ProcessPoolExecutor"}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                found |= {f"os.{node.attr}"} if node.attr.startswith(("exec", "spawn", *calls)) else set()
        assert found <= allowed.get(str(path.relative_to(SOURCES)), set()), path
