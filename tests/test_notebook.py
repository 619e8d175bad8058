"""The notebook runs, and what its cells show fits a screen."""

import ast
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

NOTEBOOK = Path(__file__).parents[1] / "docs" / "how-to" / "first_model.ipynb"
MOST_SECONDS = 180  # of one processor, for all cells


@pytest.mark.slow
def test_every_cell_runs_and_shows_at_most_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    names: dict[str, Any] = {}
    began = time.process_time()
    shown: list[object] = []
    try:
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                body = ast.parse("".join(cell["source"]))
                last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
                exec(compile(body, "cell", "exec"), names)
                if isinstance(last, ast.Expr):
                    shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
    finally:
        torch.set_default_dtype(before)
    assert time.process_time() - began < MOST_SECONDS
    assert [type(value).__name__ for value in shown] == [
        "Shrunk", "NoneType", "Prescription", "Evidence", "Diagnosis", "Sentence",
    ]  # fmt: skip
    assert all(len(repr(value)) <= 2000 for value in shown)
