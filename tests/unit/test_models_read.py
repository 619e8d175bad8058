"""Models of torchvision, open_clip and users: read by a reader, saved, loaded and refused by name."""

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, NotSupported, UnknownName, UserCodeError
from attnrx.support.modules import rows_of
from support.pretrained import MODULE, OWN, OwnAttention, OwnViT, adopted_once, inputs, of_hf, shaken


def logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(images)


def test_a_model_of_ones_own_is_adopted_and_left_alone() -> None:
    model = shaken(OwnViT())
    before, attributes = str(model), set(vars(model))
    adopted = rx.load(model, reader=OWN)
    torch.testing.assert_close(logits(adopted, inputs(adopted)), logits(model, inputs(adopted)), rtol=0, atol=1e-12)
    assert str(model) == before and set(vars(model)) == attributes
    with pytest.raises(NotSupported, match=r"reader=attnrx\.Reader"):
        rx.load(model)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: 1 / 0, r"the factory of .*OwnViT.* raised ZeroDivisionError"),
        (lambda: None, r"the factory of .*OwnViT returned None"),
        (lambda: nn.Linear(2, 2), r".+"),
    ],
)
def test_a_factory_that_fails_or_returns_no_such_model_is_named(
    factory: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    rx.save(rx.load(shaken(OwnViT()), reader=OWN), tmp_path)
    with pytest.raises(AttnrxError, match=message):
        rx.load(tmp_path, factory=factory)


@pytest.mark.parametrize("factory", [None, lambda: OwnViT()])
def test_a_smaller_model_of_ones_own_is_saved_and_loaded(
    factory: Callable[[], nn.Module] | None, tmp_path: Path
) -> None:
    adopted = rx.load(shaken(OwnViT()), reader=OWN, factory=factory)
    images = inputs(adopted, 8)
    data = torch.utils.data.TensorDataset(images, torch.zeros(8, dtype=torch.long))
    rules = "qk=total_rank:0.5 vo=uniform_rank:0.5 fc1=uniform_rank:0.5 tokens=tome:1@2"
    small = rx.realize(adopted, rx.prescribe(rx.diagnose(adopted, data), rules))
    rx.save(small, tmp_path)
    again = rx.load(tmp_path, factory=factory)
    assert torch.equal(logits(again, images), logits(small, images))
    assert isinstance(rx.models.family_of(small).library_model(small), OwnViT)
    moved = copy.deepcopy(small)
    assert torch.equal(logits(moved, images), logits(small, images))


def test_a_folder_names_a_class_and_runs_nothing(tmp_path: Path) -> None:
    rx.save(rx.load(shaken(OwnViT()), reader=OWN), tmp_path)
    script = "import sys, attnrx; attnrx.load(sys.argv[1])"
    found = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "the class support.pretrained:OwnViT of this model has not been imported" in found.stderr
    assert "of different models" not in found.stderr
    origin = adopted_once("own")[2].origin
    for name in ("os:system", "builtins:exec", "torch:nn", "support.pretrained:shaken"):
        with pytest.raises(NotSupported, match="has not been imported"):
            MODULE.create(name, origin.arguments)


def test_arguments_create_the_class_again() -> None:
    wider = shaken(OwnViT(width=24))
    with pytest.raises(NotSupported, match="changed after it was created"):
        rx.load(wider, reader=OWN)
    adopted = rx.load(wider, reader=replace(OWN, arguments={"width": 24}))
    assert rx.models.family_of(adopted).attention(adopted)[0].spec.width == 24
    with pytest.raises(UserCodeError, match=r"attnrx\.Reader\(arguments=\{'size': 24\}\) raised TypeError"):
        rx.load(wider, reader=replace(OWN, arguments={"size": 24}))
    with pytest.raises(NotSupported, match="cannot be saved as JSON"):
        rx.load(wider, reader=replace(OWN, arguments={"width": nn.Identity()}))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "scale": ({"scale": None}, "its scale.*The first block that differs is block 1 of 2"),
    "order": ({"projections": ("to_k", "to_v", "to_q", "mix")}, "the order of its projections"),
    "projections": ({"projections": ("qkv", "mix")}, "the attention OwnAttention has no module qkv"),
    "attention": ({"attention": "attn"}, r"block 0 \(OwnBlock\) has no module attn"),
    "heads": ({"heads": "num_heads"}, "has no attribute num_heads"),
    "maps": ({"maps": ("0", "1")}, "ffn.1 is a GELU"),
    "head": ({"head": "nowhere"}, "it has no module nowhere"),
    "patches": ({"patches": "stages"}, "not the convolution"),
    "tokens": ({"prefix_tokens": 2}, "receive 5 tokens, and prefix_tokens=2"),
    "shape": ({"input_shape": (3, 20, 16)}, "do not tile"),
    "other size": ({"input_shape": (3, 24, 24)}, r"of shape \(2, 3, 24, 24\) it raises RuntimeError"),
    "number of heads": ({"heads": 5}, r"attention with 5 heads and .* shapes \[\(12, 12\)"),
    "no heads": ({"heads": 0}, r"heads=0\): give a number of 1 or more"),
    "zero scale": ({"scale": 0.0}, r"scale=0.0\): give a positive number"),
    "no class token": ({"prefix_tokens": 0}, "prefix_tokens=0 with pooling=.class.: give"),
    "no blocks": ({"blocks": "final"}, "final has no blocks"),
    "weights": ({"returns_weights": True}, "its attention computes something else.*stages.0 raises TypeError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reader_is_refused_by_name(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises((NotSupported, InvalidInput), match=message):
        rx.load(shaken(OwnViT()), reader=replace(OWN, **changes))


class GroupedAttention(OwnAttention):
    """Attention whose heads share the keys."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads)
        self.to_k = nn.Linear(width, width // heads, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, count, width = tokens.shape
        query, value = (part(tokens).view(batch, count, self.heads, -1).mT for part in (self.to_q, self.to_v))
        weights = (query.mT @ self.to_k(tokens)[:, None].mT).softmax(-1)
        return self.mix((weights @ value.mT).transpose(1, 2).reshape(batch, count, width))


def test_shared_keys_are_refused_by_their_shape() -> None:
    model = OwnViT()
    for block in model.stages:
        block.attend = GroupedAttention(12, 3)
    with pytest.raises(NotSupported, match=r"3 heads and .* \[\(12, 12\), \(4, 12\)"):
        rx.load(shaken(model), reader=OWN)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(12, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values, gate = self.first(tokens).chunk(2, -1)
        return self.second(values * gate.sigmoid())


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(tokens).softmax(-1))


class Activated(Mixing):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(tokens)))


@pytest.mark.parametrize(
    ("kind", "maps", "is_read"),
    [
        (Gated, ("first", "second"), False),
        (Mixing, ("first", "second"), False),
        (Activated, ("second", "first"), False),
        (Activated, ("first", "second"), True),
        (Gated, None, True),
    ],
)
def test_hidden_units_that_depend_on_each_other_are_found(
    kind: type[nn.Module], maps: tuple[str, str] | None, is_read: bool
) -> None:
    def make() -> OwnViT:
        model = OwnViT()
        for block in model.stages:
            block.ffn = kind()
        return model

    reader = replace(OWN, maps=maps)
    if is_read:
        assert isinstance(rx.load(shaken(make()), reader=reader, factory=make), nn.Module)
    else:
        with pytest.raises(NotSupported, match=r"in block 0 more than an activation.*State maps=None"):
            rx.load(shaken(make()), reader=reader, factory=make)


def test_a_wrong_pooling_is_found() -> None:
    class Mean(OwnViT):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            tokens = torch.cat([self.cls.expand(len(images), -1, -1), self.stem(images).flatten(2).mT], dim=1)
            for block in self.stages:
                tokens = block(tokens)
            return self.classify(self.final(tokens).mean(1))

    with pytest.raises(NotSupported, match=r"the head uses other tokens.*The outputs of all 2 blocks are equal"):
        rx.load(shaken(Mean()), reader=OWN, factory=Mean)


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "tuple": (lambda logits: (logits, None), "returns a tuple for 2 images, not one row"),
    "dictionary": (lambda logits: {"logits": logits}, "returns a dict for 2 images"),
    "tokens": (lambda logits: logits[:, None], r"returns the shape \(2, 1, 5\)"),
    "numbers": (lambda logits: logits[:, 0], r"returns the shape \(2,\)"),
    "error": (lambda logits: [][1], "cannot be adopted: with images of shape .* it raises IndexError: list index"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_model_must_return_one_row_per_image(name: str) -> None:
    convert, message = OUTPUTS[name]

    class Other(OwnViT):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return convert(super().forward(images))

    with pytest.raises(NotSupported, match=message):
        rx.load(shaken(Other()), reader=OWN, factory=Other)


def test_the_first_block_that_differs_is_named_with_its_part() -> None:
    for part, reason in (("attend", "its attention computes something else"), ("ffn", "the MLP or a norm")):
        model = shaken(OwnViT(depth=3))
        module: Any = model.stages[1].get_submodule(part)
        base = type(module)
        # Another class, because hooks are refused by name before.
        doubled = {"forward": lambda self, *given, base=base: 2 * base.forward(self, *given)}
        module.__class__ = type("Doubled", (base,), doubled)
        with pytest.raises(NotSupported, match=f"{reason}.*first block that differs is block 2 of 3"):
            rx.load(model, reader=replace(OWN, arguments={"depth": 3}))


def test_attention_to_other_tokens_and_masks_are_refused() -> None:
    adopted: Any = copy.deepcopy(adopted_once("torchvision")[2])
    layer, tokens = adopted.source.encoder.layers[0].self_attention, torch.randn(2, 5, 12)
    assert layer(tokens, tokens, tokens, need_weights=False)[1] is None
    with pytest.raises(NotSupported, match="other tokens"):
        layer(tokens, tokens + 1, tokens + 1)
    with pytest.raises(NotSupported, match="attn_mask"):
        layer(tokens, tokens, tokens, attn_mask=torch.ones(5, 5))


def test_models_of_torchvision_are_loaded_by_name(tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        built = rx.models.build_model("torchvision:vit_b_16")
    assert rx.models.family_of(built).costs(built).params == 86_567_656  # as torchvision's documentation states
    with pytest.raises(UnknownName, match="vit_b_16"):
        rx.load("torchvision:vit_b_61")
    with pytest.raises(NotSupported, match="the class ResNet has no reader"):
        rx.load("torchvision:resnet18", pretrained=False)
    with pytest.raises(InvalidInput, match="choose one"):
        rx.load("torchvision:vit_b_16", weights=tmp_path, pretrained=True)
    torch.save(models.VisionTransformer(16, 8, 1, 3, 12, 24).state_dict(), tmp_path / "small.pth")
    with pytest.raises(CheckpointError, match="do not fit"):
        rx.load("torchvision:vit_b_32", weights=tmp_path / "small.pth")


MLPS = "fc1=uniform_rank:0.5 fc2=uniform_rank:0.5"
DINOV3 = {"hidden_size": 24, "num_attention_heads": 3, "num_register_tokens": 4, "key_bias": False}
TOWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "dinov3": (lambda: of_hf("DINOv3ViTModel", **DINOV3), f"qk=total_rank:0.75 vo=total_rank:0.5 {MLPS}"),
    "clip": (
        lambda: of_hf("CLIPVisionModelWithProjection", projection_dim=7),
        f"qk=total_rank:0.5 vo=total_rank:0.5 {MLPS}",
    ),
    "own": (lambda: shaken(OwnViT()), "qk=total_rank:0.5 vo=total_rank:0.5"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_goes_from_diagnosis_to_a_file_for_onnx(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    make, rules = TOWERS[name]
    model = rx.load(make().float(), reader=OWN if name == "own" else None)
    images = inputs(model, 16).float()
    data = torch.utils.data.TensorDataset(images, torch.arange(16) % 4)
    small = rx.realize(model, rx.prescribe(rx.diagnose(model, data), f"{rules} tokens=tome:1@2"))
    evidence = rx.verify(small, model, data)
    assert any(finding.details.get("quantity") == "divergence" for finding in evidence.findings)
    rx.save(small, tmp_path / "small")
    loaded = rx.load(tmp_path / "small")
    assert torch.equal(rows_of(logits(loaded, images)), rows_of(logits(small, images)))
    exported = rx.export(small, tmp_path / "small.onnx")
    embeddings = logits(rx.models.working_copy(small), images[:4])
    torch.testing.assert_close(logits(exported, images[:4]), embeddings, rtol=1e-4, atol=1e-4)
