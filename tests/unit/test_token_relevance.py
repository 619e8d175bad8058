"""Relevance of patches: what is read off attention is what reducers go by; its statistics are right on known noise."""

import copy
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from attnrx.show.reports import sample_tokens
from attnrx.vit.models import attach_tokens_, family_of, token_run
from attnrx.vit.tokens import AttentionReceived, ClassAttention, Reducer, TokenPolicy, ToMe
from attnrx_lab.clutter import patches_left
from attnrx_lab.tokens import EViT, Random, Spot
from support.pretrained import deep, inputs

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "token_relevance.py"))
averaging_shares, kept, overlap = (BENCHMARK[name] for name in ("averaging_shares", "kept", "overlap"))
running_mean, token_relevance = BENCHMARK["running_mean"], BENCHMARK["token_relevance"]
noise_correlation, noise_to_spread, rank_correlation = (
    BENCHMARK[name] for name in ("noise_correlation", "noise_to_spread", "rank_correlation")
)

DRAWS, IMAGES, LAYERS, PATCHES = 40, 3, 4, 60


def num_pruned(
    model: nn.Module, reducer: Reducer, by: str = "compress", keep: tuple[float, ...] = (0.6, 0.3)
) -> nn.Module:
    reduced = copy.deepcopy(model)
    attach_tokens_(reduced, family_of(reduced), TokenPolicy(reducer, (3, 4), keep), by)
    return reduced.eval()


def noisy(shared: float, seed: int = 0) -> torch.Tensor:
    """One relevance for all layers, and noise of variance 1 of which a share is common to the layers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    common, own = normal(DRAWS, IMAGES, 1, PATCHES), normal(DRAWS, IMAGES, LAYERS, PATCHES)
    signal = torch.linspace(-6, 6, PATCHES, dtype=torch.float64)
    return signal + shared**0.5 * common + (1 - shared) ** 0.5 * own


def test_rank_correlation_sees_order_alone() -> None:
    first = torch.tensor([[0.1, 0.5, 0.2, 9.0]])
    assert rank_correlation(first, first.exp()).item() == pytest.approx(1)
    assert rank_correlation(first, -first).item() == pytest.approx(-1)
    assert rank_correlation(first, torch.ones_like(first)).item() == 0
    ties = torch.tensor([[1.0, 1.0, 2.0]])  # ranks 0.5, 0.5, 2 against 0, 1, 2
    assert rank_correlation(ties, torch.tensor([[1.0, 2.0, 3.0]])).item() == pytest.approx(0.75**0.5)


def test_independent_noise_falls_as_the_paper_says() -> None:
    draws = noisy(shared=0.0)
    shares = averaging_shares(draws)
    torch.testing.assert_close(shares["measured"].mean(0), shares["claimed"][0], rtol=0.08, atol=0)
    torch.testing.assert_close(shares["measured"], shares["independent"], rtol=0.15, atol=0)
    correlation = noise_correlation(draws)
    assert correlation.diagonal(dim1=1, dim2=2).allclose(torch.ones(IMAGES, LAYERS, dtype=torch.float64))
    assert (correlation - torch.eye(LAYERS, dtype=torch.float64)).abs().max() < 0.1


@pytest.mark.parametrize(
    ("reducer", "source"), [(ClassAttention(), "class_attention"), (AttentionReceived(), "attention_received")]
)
@pytest.mark.parametrize("by", ["mask", "compress"])
def test_relevance_is_what_the_reducer_went_by(reducer: Reducer, source: str, by: str) -> None:
    model = deep()
    found = token_relevance(model, inputs(model))[source]
    samples = sample_tokens(num_pruned(model, reducer, by), inputs(model))
    assert torch.equal(samples.left[:, 0], kept(found[:, 1], 9))


@pytest.mark.parametrize(
    "reducer", [Random(seed=2), EViT(), ToMe(), Spot()], ids=lambda reducer: type(reducer).__name__
)
def test_the_same_patches_are_left_masked_and_compressed(reducer: Reducer) -> None:
    model = deep()
    small = num_pruned(model, reducer)
    masked = num_pruned(model, reducer, "mask")
    masked.load_state_dict(small.state_dict())
    left = patches_left(small, inputs(model))
    assert torch.equal(left, patches_left(masked, inputs(model)))
    trail = token_run(small, inputs(model)).trail
    expected = [int((patch_indices[0] >= 0).sum()) for patch_indices in trail]
    assert left[0].sum(-1).tolist() == expected and expected[0] in (8, 9)
    assert not bool((left[:, 1] & ~left[:, 0]).any())
