"""Laws of models without a reader: their MLPs are found by structure, and lose hidden units as any do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnrx as rx
from attnrx.support.errors import NotSupported
from attnrx.support.modules import rows_of
from attnrx.vit.kernels.native_products import NativeLinear
from attnrx.vit.models import family_of, working_copy
from support.pretrained import shaken


def timm_model(name: str, **changes: Any) -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model(name, num_classes=5, **changes)


def gemma() -> nn.Module:
    model = timm_model("gemma4_vit_167m", embed_dim=24, depth=2, num_heads=2, head_dim=12, intermediate_size=40)
    for name, buffer in model.named_buffers():  # the limits of published weights are finite
        if name.endswith(("_min", "_max")):
            buffer.fill_(-9.0 if name.endswith("_min") else 9.0)
    return model


def segformer() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2]}
    config = transformers.SegformerConfig(**shape, decoder_hidden_size=16, num_labels=4, image_size=64)
    return transformers.SegformerForSemanticSegmentation(config)


class Decoder(nn.Module):
    """A convolutional module of a user's: an MLP of 1 x 1 convolutions, one with a wider kernel, and a gated one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 4, 4)
        self.mlp = nn.Sequential(
            nn.Conv2d(12, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(32, 12, 1)
        )
        self.bottleneck = nn.Sequential(nn.Conv2d(12, 20, 3, 2, 2, 2), nn.ReLU(), nn.Conv2d(20, 12, 1))
        self.gate, self.value, self.out = nn.Conv2d(12, 24, 1), nn.Conv2d(12, 24, 1), nn.Conv2d(24, 12, 1)
        self.up = nn.ConvTranspose2d(12, 1, 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        features = features + self.mlp(features)
        features = F.interpolate(self.bottleneck(features), size=features.shape[2:]) + features
        return self.up(features + self.out(self.gate(features).sigmoid() * self.value(features)))


class SwiGLU(nn.Module):
    """A gated MLP of two projections, or of one that makes both halves."""

    def __init__(self, is_packed: bool, bias: bool):
        super().__init__()
        maps = [nn.Linear(12, 40, bias)] if is_packed else [nn.Linear(12, 20, bias), nn.Linear(12, 20, bias)]
        self.maps, self.out = nn.ModuleList(maps), nn.Linear(20, 12, bias)

    def forward(self, tokens: Tensor) -> Tensor:
        values, gate = (part(tokens) for part in self.maps) if len(self.maps) > 1 else self.maps[0](tokens).chunk(2, -1)
        return self.out(F.silu(gate) * values)


class Gated(nn.Module):
    """A mixer with gated MLPs."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 4, 4)
        self.blocks = nn.ModuleList(SwiGLU(is_packed, bias) for is_packed in (False, True))
        self.head = nn.Linear(12, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).flatten(2).mT
        for block in self.blocks:
            tokens = tokens + block(F.layer_norm(tokens, (12,)))
        return self.head(tokens.mean(1))


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "swin": (
        lambda: timm_model(
            "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(1, 2), num_heads=(2, 4)
        ),
        3,
    ),
    "convnext": (lambda: timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), 4),
    "convnext of convolutions": (
        lambda: timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), conv_mlp=True), 4
    ),
    "segformer": (segformer, 4),
    "maxvit": (
        lambda: timm_model("maxvit_rmlp_pico_rw_256", img_size=64, embed_dim=(32,) * 4, depths=(1,) * 4), 8
    ),
    "sam": (
        lambda: timm_model(
            "samvit_base_patch16",
            img_size=64, embed_dim=32, depth=2, num_heads=4, window_size=2,
            global_attn_indexes=(1,),
        ),
        2,
    ),
    "decoder": (Decoder, 3),
    "gated": (Gated, 2),
    "gated without biases": (lambda: Gated(bias=False), 2),
    "gemma": (gemma, 2),
}  # fmt: skip


def shape_of(name: str) -> tuple[int, int, int]:
    side = 32 if name.startswith(("swin", "decoder", "gated")) else 64
    return 3, side, side


@pytest.fixture(scope="module", params=CASES)
def subject(request: pytest.FixtureRequest) -> tuple[str, nn.Module, nn.Module, Tensor]:
    make, depth = CASES[request.param]
    source = shaken(make())
    model = rx.load(source, image_size=shape_of(request.param)[1])
    assert len(family_of(model).mlp(model)) == depth
    return request.param, source, model, torch.randn(12, *shape_of(request.param))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_the_copy_is_exact_and_a_mask_equals_the_smaller_model(
    subject: tuple[str, nn.Module, nn.Module, Tensor], dtype: torch.dtype, limit: float, tmp_path: Path
) -> None:
    name, source, model, images = subject
    source, model, images = source.to(dtype), model.to(dtype), images.to(dtype)
    with torch.no_grad():
        expected = rows_of(source(images))
        torch.testing.assert_close(rows_of(model(images)), expected, rtol=limit, atol=limit)
        given = rx.prescribe(rx.diagnose(model, images, moments=True), "hidden=uniform_rank:0.5")
        small = rx.realize(model, given)
        found = rows_of(small(images))
        if all(getattr(second, "bias", None) is not None for _, second in family_of(model).mlp(model)):
            masked = rx.realize(model, given, by="mask")  # which needs a bias for the mean of what is left out
            torch.testing.assert_close(rows_of(masked(images)), found, rtol=limit, atol=limit)
        assert not torch.equal(found, expected)
        working: Any = working_copy(small)
        torch.testing.assert_close(rows_of(working(images)), found, rtol=limit, atol=limit)
        loaded = rx.load(rx.save(small, tmp_path), factory=None if working.around.creation else CASES[name][0])
        torch.testing.assert_close(rows_of(loaded(images)), found, rtol=0, atol=0)
    assert type(model) is type(small) is type(loaded) is type(source)
    assert [type(part) for part in small.modules()] == [type(part) for part in source.modules()]
    family = family_of(small)
    for smaller in (small, working):
        for (first, second), (wide, _) in zip(family.mlp(smaller), family_of(model).mlp(model), strict=True):
            units: Any = wide
            assert isinstance(first, NativeLinear)
            assert first.out_features == second.in_features == units.out_features // 2
    costs, before = family.costs(small), family_of(model).costs(model)
    assert before.params == sum(parameter.numel() for parameter in source.parameters())
    assert costs.params == sum(parameter.numel() for parameter in small.parameters())
    assert costs.macs < before.macs


def test_a_file_answers_as_the_model(subject: tuple[str, nn.Module, nn.Module, Tensor], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    name, _, model, images = subject
    if name in ("convnext", "gemma"):
        pytest.skip("files of the other cases have the same parts")
    model, images = model.float(), images.float()
    small = rx.realize(model, rx.prescribe(rx.diagnose(model, images, moments=True), "hidden=uniform_rank:0.5"))
    file = rx.export(small, tmp_path / "small.onnx")
    with torch.no_grad():
        torch.testing.assert_close(rows_of(file(images[:2])), rows_of(small(images[:2])), rtol=1e-4, atol=1e-5)


def test_a_model_is_shrunk_to_fewer_macs() -> None:
    make, _ = CASES["swin"]
    source = shaken(make()).float()
    result = rx.shrink(source, torch.randn(120, *shape_of("swin")), macs=0.8)
    before, after = (family_of(model).costs(model).macs for model in (rx.load(source), result.model))
    assert after <= 0.8 * before
    assert result.evidence is not None and type(result.model) is type(source)


def test_what_needs_the_attention_is_refused_by_name(subject: tuple[str, nn.Module, nn.Module, Tensor]) -> None:
    name, _, model, images = subject
    if family_of(model).reads_attention(model):
        pytest.skip(f"the attention of {name} has a reader")
    diagnosis = rx.diagnose(model, images[:4], moments=True)
    for text in ("qk=total_rank:0.5", "vo=total_rank:0.5", "heads=total_rank:0.5"):
        with pytest.raises(NotSupported, match="attention has no reader"):
            rx.prescribe(diagnosis, text)
    if len(diagnosis.layers) > 1:
        with pytest.raises(NotSupported, match="has no reader, so tokens"):
            rx.realize(model, rx.prescribe(diagnosis, "tokens=ward:0.7@2"))
    with pytest.raises(NotSupported, match="has no method that returns the features"):
        family_of(model).patch_features(model, images[:2])


class Mixed(nn.Module):
    """MLPs whose units are not separate, each for another reason."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.stem = kind, nn.Conv2d(3, 12, 8, 8)
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 12)
        self.other, self.norm = nn.Linear(24, 12), nn.LayerNorm(24)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).flatten(2).mT
        units = self.first(tokens)
        extra: Tensor | float = 0.0
        if self.kind == "norm":
            units = self.norm(units)
        elif self.kind == "softmax":
            units = units.softmax(-1)
        elif self.kind == "read twice":
            extra = self.other(units)
        elif self.kind == "shuffled":
            units = units.flip(-1)
        elif self.kind == "tokens":
            units = units - units.mean(1, keepdim=True)
        elif self.kind == "fixed number":
            units = units.reshape(len(units), -1, 24)
        return (tokens + self.second(units.relu()) + extra).mean(1)


@pytest.mark.parametrize("kind", ["norm", "softmax", "read twice", "shuffled", "tokens", "fixed number"])
def test_units_that_are_not_separate_are_not_taken(kind: str) -> None:
    torch.manual_seed(0)
    assert len(family_of(plain := rx.load(Mixed("plain"))).mlp(plain)) == 1
    with pytest.raises(NotSupported, match="Mixed is not supported"):
        rx.load(Mixed(kind))


class Pairs(nn.Module):
    """A loop over attention and MLP that takes a bias besides the tokens."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.qkv, self.proj = 2, nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, tokens: Tensor, bias: Tensor) -> Tensor:
            parts = self.qkv(tokens).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
            return self.proj(F.scaled_dot_product_attention(*parts, attn_mask=bias).transpose(1, 2).flatten(2))

    def __init__(self) -> None:
        super().__init__()
        mlps = [nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(2)]
        self.layers = nn.ModuleList(nn.ModuleList([Pairs.Attention(), mlp]) for mlp in mlps)

    def forward(self, tokens: Tensor, bias: Tensor) -> Tensor:
        for attention, mlp in self.layers:  # type: ignore[misc]
            tokens = tokens + attention(tokens, bias)
            tokens = tokens + mlp(tokens)
        return tokens


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pairs = nn.Conv2d(3, 12, 8, 8), Pairs()
        self.register_buffer("bias", torch.arange(256.0).sin().view(16, 16))

    def forward(self, images: Tensor) -> Tensor:
        return self.pairs(self.stem(images).flatten(2).mT, bias=self.bias).mean(1)


def test_a_loop_over_pairs_that_takes_a_bias_loses_only_hidden_units() -> None:
    images = torch.randn(4, 3, 32, 32)
    model = shaken(Biased()).to(images)
    loaded = rx.load(model, inputs=images)
    assert not family_of(loaded).reads_attention(loaded) and len(family_of(loaded).mlp(loaded)) == 2
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=1e-6)
