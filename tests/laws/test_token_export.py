"""Exported == eager: what leaves a model is chosen in the exported program as it is in the model."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from attnrx.change.realization import realize
from attnrx.exporting import FORMATS, export
from attnrx.vit.models import answer, attach_tokens_, family_of
from attnrx.vit.tokens import TokenPolicy
from support import cases
from support.cases import PATTERNS, REDUCTIONS
from support.pretrained import adopted_once, deep, inputs
from support.token_models import KINDS, fits, reduced

# Each kind of reducer on a model of timm, and on one of ours, of transformers, or LV-ViT; some with two stages.
PAIRS = [("vit", kind) for kind in KINDS]
PAIRS += [
    (name, kind)
    for row, name in enumerate(("dense", "hf vit", "lvvit"))
    for column, kind in enumerate(KINDS)
    if (row + column) % 3 == 0 and fits(name, REDUCTIONS[kind])
]
POOLERS = ("timm siglip", "hf siglip tower", "open_clip, attention pooling")
PAIRS += [(name, kind) for name in POOLERS for kind in ("ward", "random")]
STAGED = ("random", "tome", "ward", "spot")


def exported(model: nn.Module, dynamic: bool) -> nn.Module:
    batch = {0: torch.export.Dim("batch", min=2, max=64)} if dynamic else None
    with torch.no_grad():
        return torch.export.export(model, (inputs(model),), dynamic_shapes=(batch,)).module()


def require_same(model: nn.Module, program: nn.Module, count: int = 3) -> None:
    """On images that the export has not seen."""
    images = -inputs(model, count)
    with torch.no_grad():
        torch.testing.assert_close(program(images), model(images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_exported_equals_eager(name: str, kind: str) -> None:
    model = reduced(name, TokenPolicy(REDUCTIONS[kind], (2,), (0.5,)), "compress")
    require_same(model, exported(model, dynamic=False))


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("name", POOLERS)
@pytest.mark.slow
def test_a_pooling_by_attention_has_the_sizes_of_tokens_in_files(name: str, to: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime" if to == "onnx" else to)
    model = reduced(name, TokenPolicy(REDUCTIONS["ward"], (2,), (0.5,)), "compress").float()
    images = inputs(model, 5).float()
    with torch.no_grad():
        found = export(model, tmp_path / f"small{FORMATS[to].suffix}", to)(images)
        torch.testing.assert_close(found, answer(model, images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", STAGED)
@pytest.mark.slow
def test_one_export_is_for_batches_of_any_size(kind: str) -> None:
    model = reduced("deep", TokenPolicy.staged(REDUCTIONS[kind], 0.6, (2, 4)), "compress")
    program = exported(model, dynamic=True)
    require_same(model, program, 3)
    require_same(model, program, 7)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("hf beit, one bias", "tome"), pytest.param("beit, bias per layer", "evit", marks=pytest.mark.slow)],
)
def test_biases_of_the_pairs_that_are_left_are_exported_for_any_batch(name: str, kind: str, tmp_path: Path) -> None:
    model = copy.deepcopy(adopted_once(name)[2]).float()
    attach_tokens_(model, family_of(model), TokenPolicy(REDUCTIONS[kind], (2,), (0.5,)), "compress")
    file, images = export(model, tmp_path / "model.onnx"), inputs(model, 3).float()
    with torch.no_grad():
        torch.testing.assert_close(file(images), model(images), rtol=1e-4, atol=1e-4)


def test_patches_in_their_order_are_exported_for_batches_of_any_size() -> None:
    model = adopted_once("hf mae")[2]
    require_same(model, exported(model, dynamic=True), 5)


@pytest.mark.slow
def test_a_model_that_lost_directions_heads_and_tokens_is_exported() -> None:
    small = realize(deep(), cases.prescription(deep(), PATTERNS["head-removed"]))  # type: ignore[arg-type]
    assert family_of(small).attention(small)[0].spec.heads == (1, 2)
    attach_tokens_(small, family_of(small), TokenPolicy.staged(REDUCTIONS["attention_average"], 0.6, (2, 4)), heads=3)
    require_same(small, exported(small.eval(), dynamic=True), 5)
