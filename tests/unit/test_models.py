"""Names, shapes and refusals of the models."""

from pathlib import Path

import pytest
import torch
from torch import nn

from attnrx.support.errors import CheckpointError, InvalidInput, NotSupported, UnknownName
from attnrx.vit.attention import Attention
from attnrx.vit.models import ViTConfig, build_model, family_of, load_model, model_fingerprint, save_model
from attnrx.vit.models.transformer import sincos_positions
from attnrx.vit.spec import AttentionSpec
from support.cases import CONFIGS, images, model


def test_unknown_names_list_the_nearest() -> None:
    with pytest.raises(UnknownName, match="svda:cifar10"):
        load_model("svda:cifar")
    with pytest.raises(UnknownName, match="svda:digits"):
        build_model("sdva:digits")


def test_foreign_models_are_refused_by_name() -> None:
    with pytest.raises(NotSupported, match=r"torch\.nn\.modules\.linear\.Linear"):
        load_model(nn.Linear(2, 2))


def test_missing_folders_are_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        load_model(tmp_path / "nowhere")


def test_wrong_images_are_refused() -> None:
    with pytest.raises(InvalidInput, match="image_size=8"):
        model(CONFIGS["svda"])(torch.zeros(1, 3, 8, 8))


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
    spec = AttentionSpec.full("svda", 8, 2)
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


def test_the_scale_is_a_stored_fact() -> None:
    spec = AttentionSpec.full("svda", 16, 2).with_ranks((3, 0), (1, 0), "kept")
    assert spec.scale == 8**-0.5


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


@pytest.mark.parametrize("name", ["hf", "timm", "hub", "torchvision", "open_clip", "lvvit", "svda"])
def test_a_folder_may_be_called_like_a_library(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved = model(CONFIGS["svda"])
    save_model(name, saved)
    assert model_fingerprint(load_model(name)) == model_fingerprint(saved)
