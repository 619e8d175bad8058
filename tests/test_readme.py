"""Every code block of the README and of the first page of the docs runs, with the extras that its page names alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import named_extras

pytest.importorskip("timm")
ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/index.md")

# In place of what a reader has: pre-trained weights, which would be downloaded, and data. Small, but of the same kinds.
STAND_IN = """
import importlib.util, functools, torch, timm, warnings
from torch.utils.data import TensorDataset
import attnrx as rx
import attnrx.vit.models, attnrx.verbs.shrink, attnrx.data, attnrx.training.losses

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
load, load_data, train = rx.load, rx.load_data, rx.train


def stand_in(source, **given):
    if source == "runs/digits":
        return load("svda:digits")
    if source == "timm:vit_tiny_patch16_224":
        return load(short("vit_tiny_patch16_224"))
    return load(source, **given)


def images(name, **given):
    if name == "digits":
        return load_data(name)
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
    """The extras of the first line of installation, which is above all blocks."""
    found = re.search(r"pip install 'attnrx\[([\w,]+)\]'", (ROOT / page).read_text(encoding="utf-8"))
    assert found is not None
    return found[1].split(",")


@pytest.mark.parametrize("page", PAGES)
def test_the_named_extras_are_those_of_the_package(page: str) -> None:
    names = named_extras.named(extras(page))
    # What the first call needs, after minutes of work: named above it.
    assert {"torch", "timm", "optuna", "onnx", "jinja2"} <= names
    assert "pytest" not in names and "openvino" not in names


@pytest.mark.parametrize(("module", "extra"), [("timm", "timm"), ("optuna", "plan"), ("accelerate", "train")])
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
