"""Every how-to of the documentation runs, and prints what its page shows, numbers aside."""

import importlib.util
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest

import attnrx as rx

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "docs" / "how-to"
# A process of its own for each, forked from one that has imported what takes long.
FORKS = "forkserver" in multiprocessing.get_all_start_methods()
PROCESSES = multiprocessing.get_context("forkserver") if FORKS else multiprocessing.get_context("spawn")
PROCESSES.set_forkserver_preload(["attnrx.workflows.shrink", "attnrx_lab.comparison", "timm"])


def _literate() -> ModuleType:
    """The module that makes pages of how-tos; it is no part of the package."""
    spec = importlib.util.spec_from_file_location("literate", FOLDER.parent / "making" / "literate.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["literate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


literate = _literate()


def _run(path: Path, out: Path, environment: dict[str, str]) -> None:
    os.chdir(out.parent)
    for name in ("MODEL", "DATA", "LAYERS", "NAME", "EPOCHS", "PATCH", "BATCH", "TARGET", "OUT"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        out.write_text(json.dumps({"printed": literate.run(path)}))
    except BaseException:
        out.write_text(json.dumps({"failed": traceback.format_exc()}))


def _printed(path: Path, out: Path, **environment: str) -> list[str]:
    """Runs a how-to in a process of its own, with these variables set, and gives what its cells printed."""
    process = PROCESSES.Process(target=_run, args=(path, out, environment))
    process.start()
    process.join(timeout=300)
    assert process.exitcode == 0
    done = json.loads(out.read_text())
    assert "failed" not in done, done["failed"]
    return done["printed"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: the model that they share is trained once, and read by the others."""
    return tmp_path_factory.mktemp("how-to")


@pytest.mark.parametrize("path", literate.how_tos(FOLDER), ids=lambda path: path.stem)
def test_a_how_to_runs_and_prints_what_its_page_shows(path: Path, folder: Path):
    pytest.importorskip("timm", reason="what the pages show was printed with a model of timm")
    printed = _printed(path, folder / f"{path.stem}.json")
    again = f"python docs/making/literate.py docs/how-to/{path.name} writes anew what the page shows"
    assert literate.without_numbers(printed) == literate.without_numbers(literate.recorded(path)), again


def test_a_how_to_runs_on_a_model_and_images_of_yours(tmp_path: Path):
    model = rx.save(rx.models.build_model("dense:digits", patch_size=4).float(), tmp_path / "mine")
    printed = _printed(FOLDER / "smaller.py", tmp_path / "smaller.json", MODEL=str(model), DATA="digits")
    assert not (tmp_path / "runs").exists()
    assert printed[-1] == literate.recorded(FOLDER / "smaller.py")[-1]


def test_cells_are_prose_and_code_and_what_they_print():
    source = (
        '"""For readers of the file."""\n\n# %% [markdown]\n# # Title\n#\n# Words.\n\n# %%\nprint("a")\n\n# %%\nx = 1\n'
    )
    assert [(cell.kind, cell.text) for cell in literate.cells(source)] == [
        ("prose", "# Title\n\nWords."),
        ("code", 'print("a")'),
        ("code", "x = 1"),
    ]
    page = literate.page(source, ["| a |\n|---|\n| 1 |\n", "one 1\n"], "name")
    assert "For readers" not in page
    assert '```python\nprint("a")\n```\n\n| a |\n|---|\n| 1 |\n\n```python' in page
    assert 'title="prints"}\none 1\n```' in page and "[name.py](name.py)" in page


def test_numbers_may_differ_and_words_may_not():
    reported = literate.without_numbers
    assert reported(["loss 0.250, 1e-05 left\n"]) == reported(["loss  1,250.5, 0.0 left"])
    assert reported(["| 92.2 % | -0.3 [-1.4, +0.8] |"]) == reported(["| 100 %   | +0.0 [0.0, 1] |"])
    assert reported(["every claim holds"]) != reported(["some claim fails"])
