"""Every code block of the README and of the first page of the docs runs, with the extras that its page names alone."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from attnrx.cli.main import parsed
from attnrx.data.loading import DATASETS
from support import named_extras

timm = pytest.importorskip("timm")
ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/index.md")

# In place of what a reader has: pre-trained weights, which would be downloaded, and data. Small, but of the same kinds.
STAND_IN = """
import importlib.util, functools, torch, timm, warnings
from torch.utils.data import TensorDataset
import attnrx as rx
import attnrx.vit.models, attnrx.workflows.shrink, attnrx.data, attnrx.training.losses

warnings.simplefilter("ignore")
torch.manual_seed(0)
torch.set_num_threads(1)
create = timm.create_model
# A quarter of the layers suffices for `shrink`, whose target is a speed; other blocks have tokens before layer 10.
SMALL = {"depth": 3} if SHRINKS else {
    "depth": 10, "embed_dim": 48, "num_heads": 3, "img_size": 32, "patch_size": 8, "num_classes": 10
}


def short(name, pretrained=False, **changes):
    return create(name, pretrained=False, **{**SMALL, **changes}).eval()


timm.create_model = short
dataset = TensorDataset(torch.randn(48, 3, 224, 224), torch.arange(48))
loader = torch.utils.data.DataLoader(dataset, batch_size=32)
load, train = rx.load, rx.train


def stand_in(source, **given):
    if source == "timm:vit_tiny_patch16_224":
        return load(short("vit_tiny_patch16_224"))
    return load(source, **given)


def images(name, **given):
    from attnrx.data import from_tensors, Normalization
    pixels = torch.randint(0, 256, (96, 3, 32, 32), dtype=torch.uint8)
    halves = Normalization((0.5,) * 3, (0.5,) * 3)
    parts = [from_tensors(each, pixels, torch.arange(96) % 10, halves) for each in "abc"]
    return rx.data.Splits("noise", *parts, tuple("0123456789"), 3, 32, halves, AUGMENTATION)


AUGMENTATION = rx.data.Augmentation(padding=0, flip=False)
rx.load, rx.load_data = stand_in, images
rx.save(load(short("vit_tiny_patch16_224")), "teacher")
"""


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def extras(page: str) -> list[str]:
    """The extras of the line of installation, which is above all blocks."""
    found = re.search(r"pip install '\.\[([\w,]+)\]'", (ROOT / page).read_text(encoding="utf-8"))
    assert found is not None
    return found[1].split(",")


def commands(page: str) -> list[str]:
    """Returns the lines of the blocks for a shell, then the commands with arguments in the text of the page."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for kind, block in fence.findall(text) if kind in ("", "bash") for line in block.splitlines()]
    inline = re.findall(r"`((?:attnrx|make|pip)\s[^`]+)`", fence.sub("", text))
    return [*lines, *(" ".join(each.split()) for each in inline)]


@pytest.mark.parametrize("page", PAGES)
def test_the_named_extras_are_those_of_the_package(page: str) -> None:
    names = named_extras.named(extras(page))
    # What the first call needs, after minutes of work: named above it.
    assert {"torch", "timm", "onnx", "jinja2"} <= names
    assert "pytest" not in names and "openvino" not in names


@pytest.mark.parametrize(("module", "extra"), [("timm", "timm"), ("accelerate", "train")])
def test_modules_of_other_extras_cannot_be_imported(module: str, extra: str) -> None:
    assert module in named_extras.Refusing(["onnx"]).refused
    assert module not in named_extras.Refusing([extra]).refused and "torch" not in named_extras.Refusing([]).refused


@pytest.mark.filterwarnings("ignore::attnrx.support.errors.ScaleWarning")
@pytest.mark.parametrize("page", PAGES)
def test_every_line_of_a_block_names_what_there_is(page: str) -> None:
    """A line of the README read `prescription.layers[0].reasons`, which no layer has."""
    import attnrx as rx

    for block in blocks(page):
        compile(block, page, "exec")
        for name in re.findall(r"\brx\.(\w+)", block):
            assert hasattr(rx, name), name
    model = rx.load("svda:digits", seed=0)
    images = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    prescription = rx.prescribe(rx.diagnose(model, [images]), "qk=total_rank:0.5")
    for block in blocks(page):
        for path in re.findall(r"prescription(?:\.\w+|\[\d\])+", block):
            eval(path, {"prescription": prescription})


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), [(page, number) for page in PAGES for number in range(len(blocks(page)))])
def test_a_block_runs_with_the_extras_that_its_page_names(page: str, number: int, tmp_path: Path) -> None:
    lines = blocks(page)[number]
    if "import attnrx" not in lines:
        lines = f"import attnrx as rx\n{lines}"
    lines = re.sub(r"take\(\d+\)", "take(32)", lines).replace("epochs=4", "epochs=1")
    lines = lines.replace('Distillation("timm:vit_tiny_patch16_224"', 'Distillation("teacher"')  # not downloaded
    # After the imports of the block, which would bind the names again.
    file = tmp_path / "block.py"
    file.write_text(f"SHRINKS = {'shrink' in lines}\n{STAND_IN}\n{lines}", encoding="utf-8")
    command = [sys.executable, str(Path(named_extras.__file__)), ",".join(extras(page)), str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if "shrink" in lines:
        assert "x faster" in done.stdout or "x the speed" in done.stdout
        written = {path.name for path in (tmp_path / "faster").iterdir()}
        assert {"model.safetensors", "model.onnx", "report.html", "README.md"} <= written


def test_the_first_block_is_short() -> None:
    assert sum(bool(line.strip()) for line in blocks("README.md")[0].splitlines()) <= 10


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def of_attnrx(page: str) -> list[list[str]]:
    """Returns the words of the page's commands of attnrx that have options; `attnrx report` in a text has none."""
    return [words for words in map(words_of, commands(page)) if words[0] == "attnrx" and len(words) > 2]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one_that_a_test_runs(page: str) -> None:
    """A line for another program would be run by no test."""
    assert {words_of(command)[0] for command in commands(page)} <= {"attnrx", "make", "pip"}
    assert of_attnrx(page)


@pytest.mark.parametrize("page", PAGES)
def test_extras_that_are_installed_are_in_pyproject(page: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = [words_of(command)[-1] for command in commands(page) if command.startswith("pip")]
    assert installed
    for requirement in installed:
        found = re.fullmatch(r"\.\[([\w,]+)\]", requirement)
        assert found and set(found[1].split(",")) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make_are_in_the_makefile(page: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for command in commands(page):
        words = words_of(command.partition("&&")[0])
        if words[0] == "make":
            done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_accepted_as_it_is_written(page: str) -> None:
    """Its options, and the names of what is downloaded, for which the next test has other words."""
    for _, *words in of_attnrx(page):
        arguments = parsed(words)[2]
        library, _, name = (getattr(arguments, "model", None) or "").partition(":")
        assert library != "timm" or timm.is_model(name)
        data = getattr(arguments, "data", None)
        assert data is None or data in (*DATASETS, "photos") or data.endswith(".parquet")


# What is downloaded, and what is local in its place; no other word of a command is replaced.
REPLACED = {
    "timm:vit_tiny_patch16_224": "vit",
    "cifar10": "images.parquet",
    "imagenette": "images.parquet",
    "photos": "images.parquet",  # of the user
    "fine_tuned.pt": "vit-of-few-layers",
}
# Options behind those of the page, where it would take hours.
SHORT = {"train": ("--epochs", "1"), "reproduce": ("--tiny", "--seeds", "7"), "bench": ("--rounds", "2")}
BUSY = "Measure on an idle machine"  # the answer to a promised speed where other programs run
SHELL = """
import io
from contextlib import redirect_stderr
from pathlib import Path
import numpy as np, timm, torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL.Image import fromarray
import attnrx as rx
from attnrx.cli import main

torch.manual_seed(0)
torch.set_num_threads(1)
size = {"img_size": 64, "patch_size": 8, "embed_dim": 96, "num_classes": 10}
for name, changes in {"vit": {"depth": 10, **size}, "vit-of-few-layers": {"depth": 3}}.items():
    rx.save(rx.load(timm.create_model("vit_tiny_patch16_224", **changes).eval()), name)
draw, kinds = np.random.default_rng(0), Features({"image": Image(), "label": ClassLabel(10)})
pixels = [fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(200)]
Dataset.from_dict({"image": pixels, "label": [*range(10)] * 20}, kinds).to_parquet("images.parquet")
for words in COMMANDS:
    print("# command:", *words, flush=True)
    with redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    refused = errors.getvalue().strip().rpartition("\\n")[2]
    if BUSY in refused and {"--faster", "latency=0.6x"} & {*words}:
        continue
    assert code in (0, 1), errors.getvalue()[-3000:]  # 1: done, and a claim fails on images of noise
    assert "--out" not in words or Path(words[words.index("--out") + 1]).exists()
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_run_with_the_extras_that_their_page_names(page: str, tmp_path: Path) -> None:
    """All of a page in their order and in one folder, because they read each other's files."""
    lines = []
    for _, *words in of_attnrx(page):
        # The scenario of a recipe has the name of a data set, and is none.
        pairs = zip(["", *words[:-1]], words, strict=True)
        words = [word if before == "--only" else REPLACED.get(word, word) for before, word in pairs]
        if {"--faster", "latency=0.6x"} & {*words}:  # a target of speed needs maps that take most of the time
            words = ["vit-of-few-layers" if word == "vit" else word for word in words]
        lines.append([*words, *SHORT.get(words[0], ())])
    file = tmp_path / "commands.py"
    file.write_text(f"COMMANDS = {json.dumps(lines)}\nBUSY = {BUSY!r}\n{SHELL}", encoding="utf-8")
    command = [sys.executable, str(Path(named_extras.__file__)), ",".join(extras(page)), str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("# command: ") == len(lines)
