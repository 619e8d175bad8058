"""What can be known before the work is checked before the work: no model is loaded, and nothing is measured."""

import io
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

import attnrx as rx
from attnrx.cli import main
from attnrx.cli.commands import COMMANDS
from attnrx.cli.options import require_inputs
from attnrx.decide.planning import planner
from attnrx.support import optional
from attnrx.support.errors import AttnrxError, NotSupported
from support import cases

WRONG: dict[str, tuple[str, str]] = {
    "shrink without data": ("shrink svda:digits --data /nowhere --macs 0.5 --out {out}", "nothing at '/nowhere'"),
    "shrink to a format": ("shrink svda:digits --data digits --macs 0.5 --to onx --out {out}", "did you mean 'onnx'"),
    "shrink into a file": ("shrink svda:digits --data digits --macs 0.5 --out {file}/x", "is not a folder"),
    "shrink with a map": ("shrink svda:digits --data digits --macs 0.5 --label-map {file} --out {out}", "{file}"),
    "elastic without data": ("elastic svda:digits --data nix.parquet --macs 0.5 --out {out}", "at 'nix.parquet'"),
    "elastic into a file": ("elastic svda:digits --data digits --macs 0.5 --out {file}/x", "is not a folder"),
    "compare without data": ("compare svda:digits --data nix --methods a=total_rank:0.5 --out {out}", "nix"),
    "train with other columns": ("train svda:digits --data {file} --label-column no --out {out}", "{file}"),
    "export to a format": ("export svda:digits --to onx --out {out}.onnx", "did you mean 'onnx'"),
}


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses to build or load any model."""

    def work(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("attnrx.workflows.load.load_model", work)
    monkeypatch.setattr("attnrx.vit.models.build_model", work)


@pytest.mark.parametrize("name", WRONG)
def test_a_command_names_what_is_wrong_before_it_loads_a_model(name: str, tmp_path: Path, idle: None) -> None:
    (tmp_path / "file.parquet").write_text("no table")
    places = {"out": str(tmp_path / "out"), "file": str(tmp_path / "file.parquet")}
    words, expected = WRONG[name]
    err = io.StringIO()
    with redirect_stderr(err):
        code = main(words.format(**places).split())
    assert code in (2, 3) and expected.format(**places) in err.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("library", "extra", "call"),
    [
        ("jinja2", "report", lambda: rx.elastic("svda:digits", "digits", "sizes", macs=(0.5,))),
        ("openvino", "openvino", lambda: rx.shrink("svda:digits", "digits", macs=0.5, to="openvino")),
        ("onnxruntime", "onnx", lambda: rx.shrink("svda:digits", "digits", macs=0.5, to="onnx")),
        ("nncf", "int8", lambda: rx.shrink("svda:digits", "digits", macs=0.5, to="int8")),
        ("nncf", "int8", lambda: rx.shrink("svda:digits", "digits", macs=0.5, to="openvino(precision=int8)")),
    ],
)
def test_a_missing_library_is_named_with_its_extra_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, idle: None, library: str, extra: str, call: Callable[[], object]
) -> None:
    installed = optional.is_installed
    monkeypatch.setattr(optional, "is_installed", lambda name: name != library and installed(name))
    with pytest.raises(NotSupported, match=rf"needs {library}.*attnrx\[{extra}\]"):
        call()


def test_a_target_below_every_plan_is_refused_by_the_cost_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = cases.CONFIGS["svda-deep"]
    model, images = cases.model(config), cases.pixels(config, 24)
    diagnosis = rx.diagnose(model, images, moments=True)

    def measure(*_: Any, **__: Any) -> Any:
        raise AssertionError("sensitivities were measured")

    monkeypatch.setattr(planner, "measure_sensitivities", measure)
    with pytest.raises(NotSupported, match=r"macs=0.001 is out of reach.*keep at least 0\.\d+ of the macs"):
        rx.plan(model, diagnosis, "macs=0.001x", images, cases.pixels(config, 24, 4))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_inputs_of_every_command_can_be_checked(name: str) -> None:
    parser = COMMANDS[name].parser()
    options = {action.dest: action.default for action in parser._actions}
    if "data" in options:
        require_inputs(Namespace(**{**options, "data": "digits"}))
        with pytest.raises(AttnrxError, match="nowhere"):
            require_inputs(Namespace(**{**options, "data": "/nowhere"}))
