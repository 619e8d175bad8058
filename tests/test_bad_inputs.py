"""Bad inputs of every kind end in one clear message and exit code 2 or 3: no traceback, no silent acceptance, no hang.

Everything runs in this process through the function behind the command `attnrx`, on files that are made once.
"""

import importlib
import io
import os
import re
import signal
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType

import jaxtyping
import pytest
import torch

import attnrx as rx
from attnrx.cli import main
from attnrx.cli.commands import COMMANDS
from attnrx.cli.parser import Parser
from attnrx.config import to_dict
from attnrx.evidence import Evidence, Finding
from attnrx.exporting import Program
from attnrx.exporting.exported import SCHEMA
from attnrx.storage import file_sha256, write_json
from pictures import write_folder

SECONDS = 10
NAN, INFINITY = float("nan"), float("inf")
RULE = "total_rank:0.5"


def small_model() -> torch.nn.Module:
    config = rx.ViTConfig.uniform(
        "dense", width=16, depth=2, heads=2, image_size=16, patch_size=4, channels=3, classes=3, mlp_ratio=2.0
    )
    return rx.models.initialize_(rx.models.VisionTransformer(config), seed=0).float().eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its data, diagnosis and prescription of every map and of tokens, evidence, an export and a sweep."""
    root = tmp_path_factory.mktemp("inputs")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    model = small_model()
    rx.save(model, root / "model")
    data = write_folder(root / "data", {"train": 4, "validation": 2, "test": 2})
    diagnosis = rx.diagnose(model, rx.load_data(data, image_size=16).train)
    diagnosis.save(root / "diagnosis.json")
    prescription = rx.prescribe(diagnosis, RULE, values=RULE, mlp="uniform_rank:2", tokens="random:0.5@2")
    prescription.save(root / "prescription.json")
    rx.prescribe(diagnosis, RULE).save(root / "plain.json")
    findings = (Finding("accuracy", "change", -0.5, "points", limit=-1.0, outcome="holds", low=-0.9, high=0.1, n=100),)
    Evidence(findings, {"rule": {"type": "TopRank"}}).save(root / "evidence.json")
    write_export(root / "model.pt2")
    (root / "sweep.toml").write_text('command = "costs {model}"\n[grid]\nmodel = ["svda:digits"]\n')
    os.mkfifo(root / "pipe")
    (root / "text.json").write_text("{}")
    (root / "deep.json").write_text("[" * 100_000)
    (root / "other.bin").write_bytes(b"\xff\xfe\x00")
    torch.set_default_dtype(default)
    return root


def write_export(path: Path) -> None:
    path.write_bytes(b"a program")
    images = {"shape": [3, 16, 16], "precision": "float32", "batch": None, "device": "cpu"}
    facts = {"format": to_dict(Program()), "files": {path.name: file_sha256(path)}, "images": images}
    parts = {"normalization": {"mean": [0.5] * 3, "std": [0.5] * 3}, "class_names": [], "parity": [], "model": {}}
    record = {"kind": "attnrx exported model", "schema": SCHEMA, **facts, **parts}
    write_json(path.with_name(f"{path.name}.json"), record)


@pytest.fixture(autouse=True)
def as_for_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No type checks of arguments, which users do not have either, a cache of the test, and an end to every hang."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"nothing happened for {SECONDS} s")

    jaxtyping.config.update("jaxtyping_disable", True)
    torch.set_default_dtype(torch.float32)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    jaxtyping.config.update("jaxtyping_disable", False)


def refused(words: list[str], expected: str = "") -> str:
    """The message of a command that must refuse its words."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    said = err.getvalue()
    assert code in (2, 3), f"exit code {code} for {words}: {said or out.getvalue()[:300]}"
    assert "Traceback" not in said and "TimeoutError" not in said, said
    messages = [line for line in said.splitlines() if re.match(r"attnrx: (?!warning)", line)]
    assert len(messages) == 1 and len(messages[0]) > 25, said
    assert expected in said, said
    return said


def filled(words: str, root: Path, tmp_path: Path, value: str = "") -> list[str]:
    """The words of a line, in which {name} is a file of the fixture, {out} a new one and {value} the bad input."""
    places = {name: str(root / name) for name in ("model", "data", "pipe")}
    places |= {path.stem: str(path) for path in root.glob("*.json") if path.stem != "model.pt2"}
    places |= {"export": str(root / "model.pt2"), "sweep": str(root / "sweep.toml"), "out": str(tmp_path / "out")}
    return [value if word == "{value}" else word.format(**places) for word in words.split()]


def check(words: str, files: Path, tmp_path: Path, value: str = "", expected: str = "") -> None:
    before = sorted(tmp_path.rglob("out*"))
    refused(filled(words, files, tmp_path, value), expected)
    assert sorted(tmp_path.rglob("out*")) == before, "a refused command wrote its output"


# Options by their types ------------------------------------------------------------------------------------------


def options() -> list[tuple[str, str]]:
    """Every option of every command that has a type, with the command."""
    found = []
    for name in COMMANDS:
        parser = Parser(name, "a", "b")
        importlib.import_module(f"attnrx.cli.commands.{name}").add(parser)
        found += [(name, action.option_strings[-1]) for action in parser._actions if action.type is not None]
        assert not [action.dest for action in parser._actions if action.type in (int, float)], "types: cli/options.py"
    return found


TRAINING = ("-rate", "-decay", "-clip", "-init", "-epochs", "--joining", "--ema")  # ranges: TrainingConfig


@pytest.mark.parametrize(("command", "option"), options())
def test_a_value_outside_the_type_of_an_option_is_refused(command: str, option: str) -> None:
    for text in ("nan", "²", "1_0", "two", *(() if option.endswith(TRAINING) else ("-1", "9" * 30))):
        refused([command, option, text], f"argument {option}")


# Texts -----------------------------------------------------------------------------------------------------------

TEXTS: dict[str, tuple[str, ...]] = {
    "costs {value}": (
        "svda:nothing",
        "nope:x",
        "svda:",
        ":",
        "timm:",
        "timm:vit_nothing",
        "timm:resnet18",
        "lvvit:huge",
        "/nowhere",
        "x" * 5000,
        "hub:",
        "hub:a/b/c",
        "svda:digits:more",
        "/dev/null",
        "..",
    ),
    "costs svda:digits --tokens {value}": (
        "evit",
        "evit:0.7",
        "evit:0.7@",
        "evit:0.7@4",
        "evit:7@2",
        "evit:-0.7@2",
        "evit:0.7@1",
        "evit:0.7@3,2",
        "evit:0.7@2,2",
        "evit:0.7@1.5",
        "evit:0.7@99",
        "evit:0.7@" + "9" * 30,
        "nothing:0.7@2",
        "tome:0@every",
        "tome:-3@every",
        "tome:9999@every",
        "tome:" + "9" * 30 + "@every",
        "tome:1.5@every",
        "tome:1/2@every",
        "spot(nothing=1):0.7@2",
        "spot(variance=7):0.7@2",
        "spot(variance=true,variance=true):0.7@2",
        "evit:0.001@2",
        "random:0.5/0.9@2,3",
        "random:0.9/0.5@2",
        "(" * 60 + "evit:0.7@2",
        "tome:13@always",
        "evit:0.7@٣",
        "@",
        ":",
    ),
    "costs svda:digits --qk {value}": ("nothing", "cp", "cp:", "cp:0", "cp:-1", "cp:x", "cp:1.5", "irratt:²", "full:3"),
}


@pytest.mark.parametrize(
    ("words", "value"), [(words, value) for words, values in TEXTS.items() for value in values],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_bad_text_is_refused(files: Path, tmp_path: Path, words: str, value: str) -> None:
    check(words, files, tmp_path, value)


# Tables ----------------------------------------------------------------------------------------------------------


def test_cells_of_csv_that_begin_like_a_formula_are_written_as_text(tmp_path: Path) -> None:
    from attnrx.cli.sweep_results import every_number
    from attnrx.results import Ended, Job, Result, Store

    store = Store(tmp_path / "s.sqlite")
    job = Job(
        ("costs", "x"), {"=axis": "=HYPERLINK(1)", "plain": "a", "plus": "+1", "minus": "-1", "at": "@a", "tab": "\ta"}
    )
    store.add([job])
    store.claim()
    store.finish(job, Ended(1.0, {}), [Result("-metric", -1.5, -2.0, 3.0, 4, "@unit")])
    header, row = every_number(store).splitlines()
    assert header.startswith("'=axis,plain,plus")
    assert row == "'=HYPERLINK(1),a,'+1,'-1,'@a,'\ta,'-metric,-1.5,-2.0,3.0,4,'@unit"
