"""Bad inputs of every kind end in one clear message and exit code 2 or 3: no traceback, no silent acceptance, no hang.

Everything runs in this process through the function behind the command `attnrx`, on files that are made once.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import jaxtyping
import pytest
import torch

import attnrx as rx
from attnrx.cli import main
from attnrx.cli.commands import COMMANDS
from attnrx.decide.planning import PlanSettings
from attnrx.exporting import Program
from attnrx.exporting.exported import SCHEMA
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.support.errors import AttnrxError
from attnrx.support.records import to_dict
from attnrx.support.seals import SEAL, sealed
from attnrx.support.storage import file_sha256, read_json, write_json
from attnrx_lab.vision_transformer import VisionTransformer, ViTConfig, initialize_
from support.edits import ABSENT, edited
from support.pictures import write_folder
from support.time_limits import time_limit

SECONDS = 60
NAN, INFINITY = float("nan"), float("inf")
RULE = "total_rank:0.5"


def small_model() -> torch.nn.Module:
    config = ViTConfig.uniform(
        "dense", width=16, depth=2, heads=2, image_size=16, patch_size=4, channels=3, classes=3, mlp_ratio=2.0
    )
    return initialize_(VisionTransformer(config), seed=0).float().eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its data, diagnosis and prescription of every map and of tokens, evidence and an export."""
    root = tmp_path_factory.mktemp("inputs")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    model = small_model()
    rx.save(model, root / "model")
    data = write_folder(root / "data", {"train": 4, "validation": 2, "test": 2})
    diagnosis = rx.diagnose(model, rx.load_data(data, image_size=16).train)
    diagnosis.save(root / "diagnosis.json")
    prescription = rx.prescribe(
        diagnosis, f"qk={RULE} vo={RULE} fc1=uniform_rank:2 fc2=uniform_rank:2 tokens=random:0.5@2"
    )
    prescription.save(root / "prescription.json")
    rx.prescribe(diagnosis, RULE).save(root / "plain.json")
    findings = (Finding("accuracy", "change", -0.5, "points", limit=-1.0, outcome="holds", low=-0.9, high=0.1, n=100),)
    Evidence(findings, {"rule": {"type": "TopRank"}}).save(root / "evidence.json")
    write_export(root / "model.pt2")
    os.mkfifo(root / "pipe")
    (root / "text.json").write_text("{}")
    (root / "deep.json").write_text("[" * 100_000)
    (root / "deeper.json").write_text('{"a":' * 1_000_000)
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
    jaxtyping.config.update("jaxtyping_disable", True)
    torch.set_default_dtype(torch.float32)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with time_limit(SECONDS):
        yield
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
    places |= {"export": str(root / "model.pt2"), "out": str(tmp_path / "out")}
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
        parser = COMMANDS[name].parser()
        found += [(name, action.option_strings[-1]) for action in parser._actions if action.type is not None]
        assert not [action.dest for action in parser._actions if action.type in (int, float)], "types: cli/options.py"
    return found


UNLIMITED = ("--strength-init", "--strength-learning-rate")  # of a recipe: TrainingConfig refuses what is out of range


@pytest.mark.parametrize(("command", "option"), options())
def test_a_value_outside_the_type_of_an_option_is_refused(command: str, option: str) -> None:
    for text in ("nan", "²", "1_0", "two"):
        refused([command, option, text], f"argument {option}")
    field = option[2:].replace("-", "_")
    if command == "train" and field in {each.name for each in fields(rx.TrainingConfig)}:
        with pytest.raises(AttnrxError, match=field):  # which states the ranges of its fields
            rx.TrainingConfig(**{field: cast(Any, -1)})
        return
    for text in () if option in UNLIMITED else ("-1", "9" * 30):
        refused([command, option, text], f"argument {option}")


COMPLETE = {
    "bench": "svda:digits --methods a=total_rank:0.5 --out {out}",
    "compare": "{model} --data {data} --methods a=total_rank:0.5 --out {out}",
    "costs": "svda:digits",
    "demo": "--out {out}",
    "diagnose": "{model} --data {data} --out {out}",
    "export": "{model} --to program --out {out}.pt2",
    "figures": "{diagnosis} --out {out}",
    "prescribe": "{diagnosis} --rules total_rank:0.5 --out {out}.json",
    "push": "{model} owner/name",
    "realize": "{model} --prescription {plain} --out {out}",
    "report": "--prescription {plain} --out {out}.html",
    "reproduce": "svda/table1 --out {out}",
    "shrink": "{model} --data {data} --macs 0.5 --out {out}",
    "elastic": "{model} --data {data} --macs 0.7,0.5 --out {out}",
    "train": "{model} --data {data} --out {out}",
    "verify": "{model} --reference {model} --data {data} --out {out}.json",
}


def texts() -> list[tuple[str, str]]:
    """Every option that takes a text."""
    found = []
    for name in COMMANDS:
        parser = COMMANDS[name].parser()
        free = (each for each in parser._actions if each.option_strings and each.nargs is None and not each.choices)
        found += [(name, each.option_strings[-1]) for each in free if each.type is None]
    return found


@pytest.mark.parametrize(("command", "option"), texts())
def test_an_empty_text_is_refused(files: Path, tmp_path: Path, command: str, option: str) -> None:
    words = [command, *filled(COMPLETE[command], files, tmp_path), option, ""]
    refused(words, f"{option} is empty")


@pytest.mark.parametrize("text", ["a\0b", "\udcff", " "])
@pytest.mark.parametrize("command", ["costs", "train"])
def test_texts_that_are_no_names_are_refused(files: Path, tmp_path: Path, command: str, text: str) -> None:
    option = {"costs": "--tokens", "train": "--data"}[command]
    refused([command, *filled(COMPLETE[command], files, tmp_path), option, text], option)


# Texts -----------------------------------------------------------------------------------------------------------

# What parsers refuse is in unit/test_rules_text.py, test_tokens_text.py and the like; these are of every option.
TEXTS: dict[str, tuple[str, ...]] = {
    "costs {value}": (
        "svda:nothing", "nope:x", "svda:", ":", "timm:", "timm:resnet18", "/nowhere", "x" * 5000, "hub:a/b/c",
        "svda:digits:more", "/dev/null", "..",
    ),
    "prescribe {diagnosis} --rules {value} --out {out}.json": (
        "nothing", "top_rank", "top_rank:" + "9" * 5000, "top_rank:2147483648", "top_rank:nan",
        "energy_retention:1e999", "total_rank:-3", "uniform_rank:9.5", "random_matched()", "&",
        "(" * 60 + "top_rank:1" + ")" * 60,
        "total_rank:0.5,metric=nothing", "top_rank=3", "{share}", "energy_retention:{share}", "qk=", "=top_rank:1",
        "mlp=uniform_rank:2", "qk=top_rank:1 qk=top_rank:2", "top_rank:1 vo=top_rank:2", "qk=vo=top_rank:2",
        "vo=total_rank:0.5,metric=softmax", "vo=norm_clip:1", "fc1=uniform_rank:8,metric=mix", "fc2=remove_heads",
        "tokens=random:0.5@99", "tokens=",
    ),
    "costs svda:digits --tokens {value}": (
        "evit", "evit:0.7@4", "evit:0.7@99", "evit:0.7@" + "9" * 30, "tome:9999@every", "tome:" + "9" * 30 + "@every",
        "evit:0.001@2", "random:0.5/0.9@2,3", "evit:0.7@٣", "@",
    ),
    "verify {model} --reference {model} --data {data} --out {out}.json --checks {value}": (
        "nothing", "accuracy,", "accuracy(nothing=1)", "robustness(severities=9)", "accuracy(", ",",
    ),
    "compare {model} --data {data} --out {out} --methods {value}": (
        "a", "a=nothing:1", "a=baseline:nothing", "a=qk=top_rank:2 repair=-1", "a=top_rank:2+more=1",
    ),
    "compare {model} --data {data} --out {out} --methods a=total_rank:{{share}} --shares {value}": (
        "0", "nan", "0.5,,0.2", "half", "0.5;0.2",
    ),
    "bench svda:digits --out {out} --methods a=total_rank:0.5 --batches {value}": ("0", "1,x", "1.5", ","),
    "bench svda:digits --out {out} --methods a=total_rank:0.5 --threads {value}": ("0", "99999", "two"),
    "bench svda:digits --out {out} --methods a=total_rank:0.5 --runtime {value}": ("nothing", "onnx(opset=3)", "int8("),
    "train {model} --data {data} --out {out} --losses {value}": (
        "nothing", "target_rank", "target_rank:nan", "target_rank:rank=1:rank=2", "task:2", "distillation",
        "distillation:/nowhere", "perturbation_robustness:-1",
    ),
    "export {model} --out {out}.onnx --to {value}": ("onnx(", "onnx(opset=3)", "onnx(nothing=1)", "int8(images=0)"),
    "reproduce {value} --out {out}": ("nothing", "svda", "svda/table99", "../svda/table1", "/etc/passwd"),
    "reproduce svda/table1 --out {out} --only {value}": ("nothing", "CIFAR"),
    "push {model} {value}": ("name", "a/b/c", "owner/", "own er/name"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "value"), [(words, value) for words, values in TEXTS.items() for value in values],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_bad_text_is_refused(files: Path, tmp_path: Path, words: str, value: str) -> None:
    check(words, files, tmp_path, value)


LINES = (
    "", "nothing", "train", "costs svda:digits --nothing",
    "prescribe {deeper} --rules total_rank:0.5 --out {out}.json",
    "realize {model} --prescription {deeper} --out {out}",
    "realize {model} --prescription {plain} --out {model}",
    "realize svda:digits --prescription {plain} --out {out}", "realize {model} --prescription {pipe} --out {out}",
    "realize {model} --prescription /dev/null --out {out}",
    "realize {model} --prescription {diagnosis} --out {out}",
    "realize {model} --prescription {plain} --out {out} --by refit",
    "diagnose {model} --data {data} --out {out} --device meta",
    "diagnose {model} --data {data} --out {out} --images 9999",
    "diagnose {model} --data {data} --out {out} --divergence nothing",
    "diagnose {pipe} --data {data} --out {out}", "diagnose {model} --data {pipe} --out {out}",
    "diagnose timm:vit_tiny_patch16_224 --weights {pipe} --data {data} --out {out}",
    "diagnose timm:vit_tiny_patch16_224 --weights {plain} --data {data} --out {out}",
    "diagnose lvvit:s --weights {plain} --data {data} --out {out}",
    "prescribe {diagnosis} --out {out}", "prescribe {pipe} --rules total_rank:0.5 --out {out}.json",
    "prescribe {diagnosis} --rules total_rank:0.5 --macs 0.5 --out {out}",
    "prescribe {model} --rules total_rank:0.5 --out {out}.json",
    "prescribe {diagnosis} --weights {plain} --rules total_rank:0.5 --out {out}.json",
    "report --evidence {plain} --out {out}",
    "report --diagnosis {evidence} --out {out}",
    "report {pipe} --out {out}", "report --diagnosis {pipe} --out {out}",
    "report --candidate /nowhere --out {out}",
    "report --candidate {model} --data {data} --out {out}", "report --evidence /dev/zero --out {out}",
    "verify {model} --reference /nowhere --data {data} --out {out}",
    "verify {export} --reference {model} --data {data} --out {out}",
    "verify {export} --trust --reference {model} --data {data} --prescription {pipe} --out {out}",
    "verify {model} --reference svda:digits --data {data} --out {out}",
    "verify {model} --reference {model} --data {data} --checks promises --out {out}",
    "verify {model} --reference {model} --data {data} --diagnosis {deep} --out {out}",
    "export {model} --to program --out {out}.onnx", "export {model} --to int8 --out {out}.onnx",
    "export /nowhere --out {out}.onnx", "export {pipe} --out {out}.onnx",
    "train {model} --data {data} --out {out} --ema 1", "train {model} --data {data} --out {out} --warmup-epochs 99",
    "train {model} --data {data} --out {out} --no-task",
    "train {model} --data {data} --out {out} --teacher {model}",
    "train {model} --data {data} --out {out} --min-learning-rate 1", "train {model} --data {data} --out {plain}",
    "push /nowhere owner/name", "push {data} owner/name", "demo --data /nowhere --out {out}",
    "demo --data {pipe} --out {out}",
)  # fmt: skip


@pytest.mark.parametrize("words", LINES)
def test_a_line_that_makes_no_sense_is_refused(files: Path, tmp_path: Path, words: str) -> None:
    if not words:
        assert main([]) == 2
        return
    check(words, files, tmp_path)


# Files that were edited ------------------------------------------------------------------------------------------

# Single fields of prescriptions, diagnoses and evidence are in unit/test_file_validation.py.
SPEC = "model.attention.tuple[1]"
PLANNED = {
    "expected": {name: {"value": 0.1, "spread": 0.1, "images": 9} for name in ("divergence", "agreement", "change")},
    "measured": None,
}
CLOCKED = {"faster": 1.6, "batch": 1, "threads": 1, "precision": "float32", "clock": "wall", "in_subprocess": False}
REALIZED = {"by": "compress", "norms": "refit", "calibration_images": 8}
EDITS: dict[str, tuple[tuple[str, Any], ...]] = {
    "prescription": (
        ("about.plan", {}), ("about.plan", edited(PLANNED, "expected.agreement.images", 0)),
        ("about.plan", edited(PLANNED, "measured", {**CLOCKED, "batch": 2**40})),
        ("about.realized", []), ("about.realized", {**REALIZED, "by": "magic"}),
        ("about.realized", {**REALIZED, "refine": -1}), ("rules.tokens", "random:0.5@99"), ("tokens.trained", True),
        ("fingerprint", "0" * 16), ("schema", 99), ("layers[1].vo.units[0].rank", 99),
    ),
    "diagnosis": (("layers[1].mlp[0].inputs", 0), ("layers[1].mlp[0].metrics", ["nothing"]), ("schema", 0)),
    "config": (
        ("model.attention.tuple[1]", ABSENT), ("model.attention", 3), ("model.attention.tuple", []),
        ("model.image_size", 10**6), ("model.image_size", 16.5), ("model.patch_size", 5), ("model.classes", 10**9),
        ("model.classes", 4), ("model.channels", 1), ("model.mlp_ratio", 1e300), ("model.mean", [0.5]),
        ("model.std.tuple[0]", 0), ("model.type", "Other"), ("model.type", []), ("model.more", 1),
        ("model.mlp_ranks", {"tuple": [{"tuple": [1, 1]}]}), (f"{SPEC}.width", 10**7), (f"{SPEC}.heads", 3),
        (f"{SPEC}.ranks.tuple[0]", -1), (f"{SPEC}.scale", 0), (f"{SPEC}.form", "other"), (f"{SPEC}.norms", "kept"),
        ("tokens", {"policy": {"type": "x"}, "by": "mask", "heads": 2}), ("family", "other"), ("weights_sha256", "0"),
        ("model", None), ("schema", 99), ("kind", ABSENT),
    ),
    "export": (
        ("files", {"../model.pt2": "0"}), ("files", {"model.pt2": 3}), ("images.shape", [3]), ("images.batch", 0),
        ("images.precision", "int3"), ("images.device", "meta"), ("normalization", 3), ("class_names", 3),
        ("format", {"type": "Other"}), ("kind", "x"), ("images", None),
    ),
}  # fmt: skip
USES = {
    "prescription": "realize {model} --prescription FILE --out {out}",
    "diagnosis": "prescribe FILE --rules qk=total_rank:0.5 vo=total_rank:0.5 fc1=uniform_rank:2 --out {out}.json",
    "config": "costs FOLDER",
    "export": "verify FILE --trust --reference {model} --data {data} --out {out}.json",
}


@pytest.mark.parametrize(
    ("kind", "field", "value"), [(kind, *edit) for kind, edits in EDITS.items() for edit in edits], ids=str
)
def test_an_edited_file_is_refused(files: Path, tmp_path: Path, kind: str, field: str, value: Any) -> None:
    place = write_edited_copy(files, tmp_path, kind, field, value)
    words = filled(USES[kind].replace("FILE", "{{place}}").replace("FOLDER", "{{place}}"), files, tmp_path)
    refused([str(place) if word == "{place}" else word for word in words])
    assert not list(tmp_path.glob("out*"))


def write_edited_copy(files: Path, tmp_path: Path, kind: str, field: str, value: Any) -> Path:
    """An edited copy beside copies of what belongs to it; a config is sealed anew, as somebody who knows how would."""
    if kind == "config":
        folder = tmp_path / "edited"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes((files / "model/model.safetensors").read_bytes())
        record = edited(read_json(files / "model/config.json"), field, value)
        record.pop(SEAL)
        (folder / "config.json").write_text(json.dumps(sealed(record)))
        return folder
    name = "model.pt2.json" if kind == "export" else f"{kind}.json"
    (tmp_path / name).write_text(json.dumps(edited(read_json(files / name), field, value)))
    for beside in (files / "model.pt2",) if kind == "export" else files.glob(f"{kind}.json.tensors-*"):
        (tmp_path / beside.name).write_bytes(beside.read_bytes())
    return tmp_path / ("model.pt2" if kind == "export" else name)


@pytest.mark.parametrize("layers", [3000, 99_000])
@pytest.mark.slow
def test_a_resealed_config_of_many_layers_is_refused_before_it_is_built(
    files: Path, tmp_path: Path, layers: int
) -> None:
    layer = read_json(files / "model/config.json")["model"]["attention"]["tuple"][0]
    folder = write_edited_copy(files, tmp_path, "config", "model.attention.tuple", [layer] * layers)
    refused(["costs", str(folder)], "config.json")


# Datasets --------------------------------------------------------------------------------------------------------


NAMES = (
    "nothing", "/dev/zero", "train-{0..3}.tar", "t-{0..999999999}.tar", "s3://bucket/a.tar", "pipe:ls", "hf:",
    "~nobody-of-this-name/set", "x" * 5000, "[", "http://", "digits.parquet",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda text: text[:40])
def test_a_name_of_no_dataset_is_refused(files: Path, tmp_path: Path, name: str) -> None:
    """What may be wrong in a dataset is in unit/test_data_errors.py."""
    refused(["diagnose", str(files / "model"), "--data", name, "--out", str(tmp_path / "out.json")])


# The environment -------------------------------------------------------------------------------------------------

VARIABLES = (
    {"WORLD_SIZE": "two"}, {"RANK": "first"}, {"RANK": "-1"}, {"RANK": "3", "WORLD_SIZE": "2"}, {"RANK": "1"},
    {"LOCAL_RANK": "x"},
    {"WORLD_SIZE": ""}, {"ATTNRX_MEASURE": "maybe"}, {"ATTNRX_BUILD": "maybe"}, {"ATTNRX_CACHE": "/dev/null"},
    {"ATTNRX_CACHE": __file__}, {"ATTNRX_DATA": "/nowhere"}, {"ATTNRX_DATA": "/dev/null"},
)  # fmt: skip


@pytest.mark.parametrize("variables", VARIABLES, ids=str)
def test_a_bad_environment_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused(
        ["diagnose", str(files / "model"), "--data", "cifar10", "--out", str(tmp_path / "out")], next(iter(variables))
    )


# Python ----------------------------------------------------------------------------------------------------------


def tied() -> torch.nn.Module:
    model: Any = small_model()
    model.layers[1].attention = model.layers[0].attention
    return model


def mixed() -> torch.nn.Module:
    model: Any = small_model()
    model.layers[1].mlp.fc1.weight.data = model.layers[1].mlp.fc1.weight.data.double()
    return model


def on_meta() -> torch.nn.Module:
    return small_model().to("meta")


MODELS = (tied, mixed, on_meta)
VERBS: dict[str, Callable[[torch.nn.Module, Any, Path], object]] = {
    "save": lambda model, splits, folder: rx.save(model, folder / "out"),
    "diagnose": lambda model, splits, folder: rx.diagnose(model, splits.train),
    "verify": lambda model, splits, folder: rx.verify(model, small_model(), splits.test),
    "prescribe": lambda model, splits, folder: rx.prescribe(model, "tokens=tome:2@every"),
    "train": lambda model, splits, folder: rx.train(model, splits, rx.TrainingConfig(epochs=1, batch_size=4), folder / "out"),  # noqa: E501
    "export": lambda model, splits, folder: rx.export(model, folder / "out.pt2", "program"),
}  # fmt: skip


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_model_without_ordinary_weights_is_refused(
    files: Path, tmp_path: Path, make: Callable[[], torch.nn.Module], verb: str
) -> None:
    splits = rx.adapt_preprocessing(rx.load_data(files / "data", image_size=16), small_model())
    with pytest.raises(AttnrxError, match=r"shares one tensor|mixes floating-point types|no weights"):
        VERBS[verb](make(), splits, tmp_path)
    assert not list(tmp_path.glob("out*"))


def verify(**changes: Any) -> object:
    model = small_model()
    given = {"reference": model, "data": torch.zeros(2, *rx.models.family_of(model).input_shape(model)), **changes}
    return rx.verify(model, **given)


def other_prescription() -> rx.Prescription:
    model: Any = small_model()
    with torch.no_grad():
        model.classifier.bias[0] += 1
    return rx.prescribe(model, "tokens=tome:2@every")


# Values of wrong types are passed on purpose, which is what `type: ignore` is for here.
# More types of every argument are in laws/test_wrong_arguments.py.
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "load(None)": (lambda: rx.load(None), "load(source=None)"),  # type: ignore[arg-type]
    "load_data of an empty text": (lambda: rx.load_data(""), "load_data(name_or_path='')"),
    "learning rate": (lambda: rx.TrainingConfig(learning_rate=NAN), "learning_rate"),
    "patch_size": (lambda: ViTConfig.uniform(patch_size=0), "patch_size"),
    "image_size of a model": (lambda: ViTConfig.uniform(image_size=2**20), "image_size"),
    "share as text": (lambda: rx.load("elastic", macs="0.5"), "macs='0.5'"),  # type: ignore[arg-type]
    "one budget for several sizes": (
        lambda: rx.elastic(small_model(), torch.zeros(1), "elastic", macs=0.5),  # type: ignore[arg-type]
        "elastic(macs=0.5): give budgets",
    ),
    "verify a path": (lambda: verify(reference="runs/cifar10"), "'runs/cifar10' is not a folder"),
    "verify by a name": (lambda: verify(checks=["accuracy"]), "the checks ['accuracy']: give instances"),
    "verify by another prescription": (lambda: verify(prescription=other_prescription()), "was made for the model"),
    "agreement": (lambda: rx.checks.Fidelity(least_agreement=101.0), "least_agreement=101.0): give a share"),
    "half an epoch": (lambda: rx.TrainingConfig(epochs=1.5), "(epochs=1.5): give a positive whole number"),  # type: ignore[arg-type]
    "rule": (lambda: rx.rules.parse_rule("top_rank:2147483648"), "0 or more, at most 2147483647."),
    "search without a seed": (lambda: PlanSettings(seed=None), "seed=None"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_a_bad_argument_is_refused(name: str) -> None:
    call, expected = CALLS[name]
    with pytest.raises(AttnrxError, match=re.escape(expected)):
        call()
