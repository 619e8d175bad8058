"""Models whose head was replaced, as most are that were fine-tuned: adopted, saved, loaded, exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.data.model_data import num_classes
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.vit.models import family_of
from attnrx.vit.models.working.adoption_proof import build_part, describe_part
from attnrx.vit.outputs import output_kind_of

timm = pytest.importorskip("timm")
SIZE, WIDTH = 16, 32


def of_timm(**options: Any) -> Any:
    small = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **small, **options)


def of_transformers() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * WIDTH,
    }
    return ViTForImageClassification(ViTConfig(**sizes, image_size=SIZE, patch_size=8))


def linear(classes: int = 10) -> nn.Module:
    return nn.Linear(WIDTH, classes)


def layers() -> nn.Module:
    parts = nn.LayerNorm(WIDTH, eps=1e-3), nn.Dropout(0.1), nn.Linear(WIDTH, 24, bias=False), nn.GELU("tanh")
    return nn.Sequential(*parts, nn.Sequential(nn.BatchNorm1d(24), nn.LeakyReLU(0.2)), nn.Linear(24, 7))


# How a user replaces the head: the model, the path of its head, and the new one.
HEADS: dict[str, tuple[Callable[[], Any], str, Callable[[], nn.Module]]] = {
    "timm, linear": (of_timm, "head", linear),
    "timm, layers": (of_timm, "head", layers),
    "timm, none": (of_timm, "head", nn.Identity),
    "timm, one output": (of_timm, "head", lambda: linear(1)),
    "transformers, linear": (of_transformers, "classifier", linear),
    "transformers, layers": (of_transformers, "classifier", layers),
}


def replaced(name: str) -> Any:
    torch.manual_seed(0)
    make, path, head = HEADS[name]
    model = make()
    model.set_submodule(path, head())
    for parameter in model.parameters():  # timm's fresh head is zero
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def outputs(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(images)
    return found if isinstance(found, torch.Tensor) else found.logits


IMAGES = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", HEADS)
def test_a_model_with_another_head_keeps_it(name: str, tmp_path: Path) -> None:
    model = replaced(name)
    expected = outputs(model, IMAGES)
    adopted = rx.load(model)
    assert torch.allclose(outputs(adopted, IMAGES), expected, atol=1e-10)
    slim = rx.realize(adopted, rx.prescribe(rx.diagnose(adopted, IMAGES), "qk=total_rank:0.5 tokens=ward:1@2"))
    rx.save(slim, tmp_path / "slim")
    loaded = rx.load(tmp_path / "slim")
    assert torch.equal(outputs(loaded, IMAGES), outputs(slim, IMAGES))
    assert outputs(slim, IMAGES).shape == expected.shape
    assert output_kind_of(loaded) == output_kind_of(adopted)
    # The library's model of the same head, the anchor of measurements.
    twin = family_of(loaded).library_model(loaded).eval()
    assert outputs(twin, IMAGES).shape == expected.shape
    costs = family_of(loaded).costs(loaded)
    assert costs.params == sum(parameter.numel() for parameter in loaded.parameters())


def test_what_another_head_answers() -> None:
    kinds = {name: output_kind_of(rx.load(replaced(name))).name for name in HEADS}
    assert kinds["timm, none"] == "embedding" and kinds["timm, one output"] == "binary_logit"
    assert {kinds[name] for name in HEADS if "linear" in name or "layers" in name} == {"logits"}
    assert num_classes(rx.load(replaced("timm, layers"))) == 7
    assert num_classes(rx.load(replaced("transformers, linear"))) == 10


def test_the_names_of_classes_go_with_the_head() -> None:
    """timm finds the 1,000 names of ImageNet by `num_classes`, which stays when `head` is replaced."""
    model = of_timm()
    assert model.num_classes == 1000 and len(family_of(rx.load(model)).class_names(rx.load(model))) == 1000
    model.head = linear(10)
    assert model.num_classes == 1000 and family_of(rx.load(model)).class_names(rx.load(model)) == ()
    named = of_transformers()
    named.config.id2label, named.config.label2id = {0: "cat", 1: "dog"}, {"cat": 0, "dog": 1}
    assert family_of(rx.load(named)).class_names(rx.load(named)) == ("cat", "dog")
    named.classifier = linear(3)
    assert family_of(rx.load(named)).class_names(rx.load(named)) == ()


class Head(nn.Linear):
    """A class of the user's own."""


def test_other_changes_are_refused_by_name() -> None:
    model = of_timm()
    model.head = nn.Sequential(linear(3), nn.Softmax(-1))
    with pytest.raises(NotSupported, match=r"changed after it was created.* layers of torch.nn: Sequential, Identity"):
        rx.load(model)


@pytest.mark.parametrize(
    "described",
    [
        {},
        {"layer": "Bilinear", "arguments": {}},
        {"layer": "Linear", "arguments": {"in_features": "many", "out_features": 2}},
        {"layer": "Linear", "arguments": {"in_features": 2}},
        {"layer": "Sequential", "parts": {"a.b": {"layer": "Identity", "arguments": {}}}},
        {"layer": "Sequential", "parts": [1]},
    ],
)
def test_a_file_cannot_describe_anything_else(described: Any) -> None:
    with pytest.raises(InvalidInput, match="describes no layer"):
        build_part(described)


def test_a_part_is_described_by_all_that_it_prints() -> None:
    for part in (layers(), nn.RMSNorm(8, eps=0.1), nn.ELU(2.0), nn.Flatten(2), nn.Mish(), nn.Hardswish(), nn.Tanh()):
        described = describe_part(part)
        assert described is not None and repr(build_part(described)) == repr(part)
    assert describe_part(Head(2, 2)) is None and describe_part(nn.Sequential(Head(2, 2))) is None
