"""What a portable model may be, its plan, its folder, and what is refused before the work."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.decide.planning import PlanSettings
from attnrx.decide.planning.uniform import Sizes, UniformCosts, UniformFrontier, UniformSpace
from attnrx.support.errors import CheckpointError, InvalidInput, InvalidRule, NotSupported
from attnrx.vit.models import model_fingerprint, stock_form
from attnrx.vit.models.boundary.stock import Stock
from support.command_line import call

timm = pytest.importorskip("timm")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SIZES: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


def original(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**SIZES, **changes}).float().eval()


def images(count: int = 24) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


@pytest.fixture(scope="module")
def adopted() -> nn.Module:
    return rx.load(original())


@pytest.fixture(scope="module")
def diagnosis(adopted: nn.Module) -> rx.Diagnosis:
    return rx.diagnose(adopted, images(), moments=True)


def widths(model: nn.Module) -> list[int]:
    return [*rx.models.hidden_units(rx.models.family_of(model).mlp(model))]


def test_a_prescription_is_rounded_to_the_multiple(adopted: nn.Module, diagnosis: rx.Diagnosis) -> None:
    found = rx.prescribe(diagnosis, "hidden=total_rank:0.45", portable=True)
    assert found.about["portable"] and widths(rx.realize(adopted, found)) == [40, 40]
    stated = rx.prescribe(diagnosis, "hidden=total_rank:0.45,multiple=2", portable=True, multiple=2)
    assert widths(rx.realize(adopted, stated)) == [44, 44]


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        ("qk=total_rank:0.5", NotSupported, "portable=True with qk: .* Prescribe hidden="),
        ("hidden=total_rank:0.5 tokens=ward:0.5@2", NotSupported, "portable=True with tokens"),
        ("hidden=energy_retention:0.5", InvalidRule, "a portable model has the same number in all layers"),
    ],
)
def test_a_prescription_of_anything_else_is_refused(
    diagnosis: rx.Diagnosis, rules: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        rx.prescribe(diagnosis, rules, portable=True)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("qk=total_rank:0.5", "blocks.0.attn is of attnrx"),
        ("tokens=ward:0.5@2", "tokens are pruned or merged by attnrx"),
    ],
)
def test_a_model_that_its_library_has_no_parts_for_is_not_saved(
    adopted: nn.Module, diagnosis: rx.Diagnosis, rules: str, text: str, tmp_path: Path
) -> None:
    model = rx.realize(adopted, rx.prescribe(diagnosis, rules))
    with pytest.raises(NotSupported, match=text):
        rx.save(model, tmp_path / "model", portable=True)
    assert not (tmp_path / "model").exists()


# Loads a folder by the code of its card, where attnrx cannot be imported, and stores what it answers.
CHILD = """
import re, sys
from pathlib import Path
sys.modules["attnrx"] = None
import torch
folder = Path(sys.argv[1])
code = re.search(r"```python\\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
names = {}
exec(code.replace("path/to/this/folder", str(folder)), names)
with torch.no_grad():
    output = names["model"](torch.load(folder / "images.pt"))
torch.save(output if isinstance(output, torch.Tensor) else output[0], folder / "answers.pt")
"""


def of_transformers() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, image_size=16, patch_size=8
    )
    model = transformers.ViTForImageClassification(config).float().eval()
    for index, weight in enumerate(model.parameters()):  # layers that differ
        nn.init.normal_(weight, std=0.02 * 1.1**index)
    return model


@pytest.mark.parametrize("make", [original, of_transformers])
def test_layers_of_different_widths_have_code_of_their_own(make: Any, tmp_path: Path) -> None:
    model = rx.load(make())
    found = rx.diagnose(model, images(), moments=True)
    rules = "hidden=energy_retention:0.9"
    small: Any = rx.realize(model, rx.prescribe(found, rules))
    assert len({*widths(small)}) == 2
    folder = rx.save(small, tmp_path / "model", portable=True)
    assert len((folder / "modeling.py").read_text().splitlines()) <= 60
    again = rx.load(folder)
    assert widths(again) == widths(small) and model_fingerprint(again) == model_fingerprint(small)
    torch.save(images(3), folder / "images.pt")
    (tmp_path / "child.py").write_text(CHILD)
    child = [sys.executable, "-W", "ignore", str(tmp_path / "child.py"), str(folder)]
    done = subprocess.run(child, capture_output=True, text=True, env={**os.environ, "HF_HOME": str(tmp_path / "hub")})
    assert done.returncode == 0, done.stderr[-2000:]
    with torch.no_grad():
        output = small.eval()(images(3))
    expected = output if isinstance(output, torch.Tensor) else output[0]
    assert torch.equal(torch.load(folder / "answers.pt"), expected)
    rx.save(model, folder)
    assert not (folder / "modeling.py").exists()


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit, self.head = original(), nn.Linear(5, 3).float()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.vit(pixels))


def with_another_head() -> nn.Module:
    model: Any = original()
    model.head = nn.Linear(24, 4).float()
    return model


@pytest.mark.parametrize(
    ("make", "more", "text"),
    [
        (lambda: Mine().eval(), {}, "Mine cannot be portable: a portable model is a plain Vision Transformer of timm"),
        (with_another_head, {}, "its head is not the one that timm creates.*num_classes=10"),
        (lambda: original(act_layer=nn.GELU), {}, "a class of layers as act_layer"),
        (original, {"multiple": 96}, "has 96 hidden units, and no smaller multiple of 96"),
    ],
)
def test_a_model_is_refused_before_the_work(make: Any, more: dict[str, Any], text: str) -> None:
    lines: list[str] = []
    with pytest.raises(NotSupported, match=text):
        rx.shrink(make(), images(), macs=0.8, portable=True, log=lines.append, **more)
    assert lines == ["[1 of 8] loading the model"]


def test_a_multiple_is_that_of_a_portable_model(diagnosis: rx.Diagnosis, tmp_path: Path) -> None:
    for attempt in (
        lambda: rx.shrink(original(), images(), macs=0.8, multiple=8),
        lambda: rx.elastic(original(), images(), tmp_path / "sizes", macs=(0.8,), multiple=8),
        lambda: rx.prescribe(diagnosis, "hidden=total_rank:0.5", multiple=8),
    ):
        with pytest.raises(InvalidInput, match="multiple=8 is that of a portable"):
            attempt()
    with pytest.raises(InvalidInput, match="portable=True with axes"):
        PlanSettings(portable=True, axes=("qk",))


def test_the_library_creates_the_model_with_its_modes_and_frozen_weights(
    adopted: nn.Module, diagnosis: rx.Diagnosis
) -> None:
    model: Any = rx.realize(adopted, rx.prescribe(diagnosis, "hidden=total_rank:0.5", portable=True))
    model.train()
    model.norm.eval()
    model.cls_token.requires_grad_(False)
    found: Any = stock_form(model)
    assert found.training and not found.norm.training
    assert not found.cls_token.requires_grad and found.pos_embed.requires_grad
    assert found._model_args["mlp_ratio"] == 2.0 and model_fingerprint(found) == model_fingerprint(model)
    assert type(found) is type(original())
    half = stock_form(rx.load(original().half()))
    assert {weight.dtype for weight in half.parameters()} == {torch.float16}


def test_the_plan_is_the_largest_width_within_the_budget(adopted: nn.Module, diagnosis: rx.Diagnosis) -> None:
    settings = PlanSettings.preset("quick", portable=True)
    found = rx.plan(adopted, diagnosis, "params=0.7x", images(), images(40)[24:], settings=settings)
    small = rx.realize(adopted, found.prescription)
    total = sum(weight.numel() for weight in original().parameters())
    assert widths(small) == [32, 32] and found.prescription.about["portable"] and found.cost <= 0.7
    assert sum(weight.numel() for weight in small.parameters()) / total == pytest.approx(found.cost)
    assert found.explained == ("every layer: 32 of 96 hidden units and 3 of 3 heads, which timm creates by itself",)
    with pytest.raises(NotSupported, match=r"params=0.1 is out of reach: portable models keep at least 0\.\d+"):
        rx.plan(adopted, diagnosis, "params=0.1x", images(), images(40)[24:], settings=settings)


def test_a_latency_follows_the_macs_between_two_timed_models(adopted: nn.Module, diagnosis: rx.Diagnosis) -> None:
    space = UniformSpace.of_class(adopted, diagnosis, PlanSettings(portable=True))
    shares = {"unchanged": 1.0, "middle": 0.9}
    timer: Any = SimpleNamespace(latency_shares=lambda models, rounds: shares, settings=SimpleNamespace(whole_rounds=2))
    costs = UniformCosts.timed(space, timer, images())  # type: ignore[arg-type]
    middle = Sizes(space.widths[1:][len(space.widths[1:]) // 2], 3)
    assert costs.total(space.unchanged) == pytest.approx(1.0) and costs.total(middle) == pytest.approx(0.9)
    frontier = UniformFrontier(space, costs)
    step = frontier.at(0.92)
    wider = Sizes(step.choices.hidden + 8, 3)  # type: ignore[attr-defined]
    assert step.cost <= 0.92 < costs.total(wider) and frontier.cheapest < 0.9 < frontier.nothing
    with pytest.raises(NotSupported, match="faster=2 is out of reach"):
        frontier.at(0.5)


def test_heads_are_pruned_where_the_class_states_their_number() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=16, patch_size=8
    )
    model = rx.load(transformers.ViTModel(config).float().eval())
    found = rx.diagnose(model, images(), moments=True)
    space = UniformSpace.of_class(model, found, PlanSettings(portable=True))
    assert space.axes == ("heads", "hidden") and space.numbers_of_heads == (3, 2, 1)
    frontier = UniformFrontier(space, UniformCosts(space, "params"))
    assert [step.choices.heads for step in frontier.steps(0.75)] == [3, 2, 1]  # type: ignore[attr-defined]
    small: Any = stock_form(rx.realize(model, rx.prescribe(found, "heads=total_rank:2", portable=True)))
    assert small.config.num_attention_heads == 2 and small.config.head_dim == 8
    assert Stock(rx.load(original())).arguments(96, 2) is None  # timm states none of other numbers


@pytest.fixture(scope="module")
def saved(adopted: nn.Module, diagnosis: rx.Diagnosis, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = rx.realize(adopted, rx.prescribe(diagnosis, "hidden=total_rank:0.5", portable=True))
    return rx.save(model, tmp_path_factory.mktemp("saved") / "model", portable=True)


def test_a_folder_is_replaced_by_one_of_attnrx_and_back(saved: Path, adopted: nn.Module, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    assert "timm.create_model('local-dir:path/to/this/folder'" in (folder / "README.md").read_text()
    rx.save(adopted, folder)
    assert not (folder / "attnrx.json").exists() and widths(rx.load(folder)) == [96, 96]
    rx.save(rx.load(saved), folder, portable=True)
    assert {path.name for path in folder.iterdir()} == {path.name for path in saved.iterdir()}
    assert widths(rx.load(folder)) == [48, 48]


def test_a_file_of_the_library_that_was_edited_is_not_overwritten(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "label_names": ["cat"]}))
    assert widths(rx.load(folder)) == [48, 48]
    with pytest.raises(InvalidInput, match=r"config\.json would be overwritten, and attnrx did not write it"):
        rx.save(rx.load(saved), folder, portable=True)


@pytest.mark.parametrize("name", ["attnrx.json", "model.safetensors"])
def test_a_damaged_folder_is_refused(saved: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(
        content.replace(b'"depth": 2', b'"depth": 9') if name == "attnrx.json" else content[:-8]
    )
    with pytest.raises(CheckpointError, match=r"was changed after it was written|was truncated or tampered with"):
        rx.load(folder)


def test_every_size_of_an_elastic_model_is_a_checkpoint_of_the_library(tmp_path: Path) -> None:
    sizes = rx.elastic(original(), images(36), tmp_path / "sizes", params=(0.8,), portable=True)
    assert len(sizes.sizes) == 2 and max(widths(rx.load(sizes.folder, params=0.9))) < 96
    for size in sizes.sizes:
        model = timm.create_model(f"local-dir:{sizes.folder / size.name}", pretrained=True).float().eval()
        again = rx.load(sizes.folder / size.name)
        with torch.no_grad():
            assert torch.equal(model(images(3)), again(images(3)))
    with pytest.raises(InvalidInput, match="was made with portable True, not None"):
        rx.elastic(original(), images(36), tmp_path / "sizes", params=(0.8, 0.7))


def test_commands_print_the_code_that_loads_the_result(
    adopted: nn.Module, diagnosis: rx.Diagnosis, tmp_path: Path
) -> None:
    rx.save(adopted, tmp_path / "original")
    diagnosis.save(tmp_path / "diagnosis.json")
    prescription = "--prescription", tmp_path / "prescription.json"
    rules = "--rules", "hidden=total_rank:0.5", "--portable"
    assert call("prescribe", tmp_path / "diagnosis.json", *rules, "--out", prescription[1]).code == 0
    done = call("realize", tmp_path / "original", *prescription, "--out", tmp_path / "small")
    assert done.code == 0, done.err
    names: dict[str, Any] = {}
    exec(done.out.partition("without attnrx:")[2], names)
    assert names["model"].blocks[0].mlp.fc1.out_features == 48
