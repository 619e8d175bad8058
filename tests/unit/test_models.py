"""Names, shapes and refusals of the models."""

from pathlib import Path

import pytest
import torch

from attnrx.support.errors import InvalidInput
from attnrx.vit.attention import Attention
from attnrx.vit.models import build_model, family_of, load_model, model_fingerprint, save_model
from attnrx_lab.vision_transformer import ViTConfig, full_spec, sincos_positions
from support.cases import CONFIGS, images, model


def test_seeds_decide_the_weights() -> None:
    one, again, other = (build_model("svda:digits", seed=seed) for seed in (1, 1, 2))
    assert model_fingerprint(one) == model_fingerprint(again) != model_fingerprint(other)


def test_dense_and_svda_twins_differ_only_in_their_strengths() -> None:
    svda, dense = build_model("svda:digits", seed=3), build_model("dense:digits", seed=3)
    ours, theirs = svda.state_dict(), dense.state_dict()
    assert {name for name in ours if name not in theirs} == {f"layers.{i}.attention.scores.strength" for i in range(3)}


def test_positions_tell_all_patches_apart() -> None:
    table = sincos_positions(4, 16)
    assert table.shape == (16, 16)
    assert torch.unique(table, dim=0).shape[0] == 16
    torch.testing.assert_close(table.square().sum(-1), torch.full((16,), 8.0))


def test_tokens_are_permuted_with_their_patches() -> None:
    """Attention has no order of its own: permuting the tokens permutes what every layer gives."""
    spec = full_spec("svda", 8, 2)
    attention = Attention(spec)
    tokens, order = torch.randn(2, 5, 8), torch.randperm(5)
    torch.testing.assert_close(attention(tokens)[:, order], attention(tokens[:, order]))


@pytest.mark.parametrize("strength", [0.0, -1.0, float("nan"), float("inf")])
def test_strengths_start_positive_and_finite(strength: float) -> None:
    with pytest.raises(InvalidInput, match="strength="):
        build_model("svda:digits", strength=strength)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"patch_size": 5}, "does not divide"),
        ({"width": 6, "heads": 2}, "multiple of 4"),
        ({"heads": 5}, "cannot be divided"),
        ({"depth": 0}, "at least one layer"),
        ({"mean": (0.1,)}, "means"),
    ],
)
def test_impossible_configurations_say_why(facts: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ViTConfig.uniform("svda", **{"width": 16, "heads": 4, **facts})


def test_half_precision_stays_finite() -> None:
    vit = build_model("svda:digits").eval()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.isfinite(vit.to(dtype)(torch.randn(2, 1, 16, 16).to(dtype))).all()


def test_scores_are_bounded_by_the_largest_strength() -> None:
    """Theorem 1's premise: |score| <= max|strength| * scale."""
    from attnrx.vit.models import observing

    vit, worst = model(CONFIGS["svda"]), []
    layers = family_of(vit).attention(vit)
    with observing(vit, family_of(vit), lambda layer, seen: worst.append((layer, seen.scores.abs().amax((0, 2, 3))))):
        vit(images(CONFIGS["svda"]))
    for layer, largest in worst:
        limit = layers[layer].spectrum().strength.abs().amax(-1) * layers[layer].spec.scale
        assert (largest <= limit * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", ["hf", "timm", "svda"])
def test_a_folder_may_be_called_like_a_library(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved = model(CONFIGS["svda"])
    save_model(name, saved)
    assert model_fingerprint(load_model(name)) == model_fingerprint(saved)
