"""The pictures of tokens show what left a model, for every family, and leave the model as it was."""

import copy
import re

import pytest
import torch
from torch import nn

from attnrx.show.reports import ReportContent, sample_tokens
from attnrx.show.reports.page import render
from attnrx.show.reports.samples import patch_picture
from attnrx.support.errors import InvalidInput
from attnrx.vit.models import attach_tokens_, family_of, reduction_of, token_run
from attnrx.vit.tokens import AttentionReceived, Reducer, TokenPolicy, ToMe, Ward
from attnrx_lab.tokens import PiToMe, Random
from support import cases, report_content
from support.pretrained import adopted_once


def reduced(model: nn.Module, reducer: Reducer, by: str = "compress", keep: float = 0.5) -> nn.Module:
    attach_tokens_(model, family_of(model), TokenPolicy(reducer, (2,), (keep,)), by)
    return model.eval()


def images(model: nn.Module, count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *family_of(model).input_shape(model), generator=generator, dtype=torch.float64)


def model_of(name: str) -> nn.Module:
    return copy.deepcopy(cases.model(cases.CONFIGS[name]) if name in cases.CONFIGS else adopted_once(name)[2])


@pytest.mark.parametrize(
    ("name", "grid", "prefix"),
    [
        ("svda", (2, 2), 0),
        ("vit", (2, 2), 1),
        ("deit, distilled", (2, 2), 2),
        ("vit, wide images", (2, 3), 1),
        ("hf vit", (2, 2), 1),
    ],
)
@pytest.mark.parametrize("by", ["mask", "compress"])
def test_samples_of_every_family(name: str, grid: tuple[int, int], prefix: int, by: str) -> None:
    model = reduced(model_of(name), AttentionReceived(), by)
    samples = sample_tokens(model, images(model), ("a", "b"))
    patches = grid[0] * grid[1]
    assert samples.grid == grid
    assert samples.left.sum(-1).tolist() == [[patches // 2], [patches // 2]]
    assert samples.tokens == (prefix + patches // 2,)
    assert 0 <= samples.images.min() and samples.images.max() <= 1
    page = render(ReportContent("tokens", tokens=samples))
    assert f"{patches // 2} of {patches} patches left" in page


def test_sampling_leaves_the_model_as_it_was() -> None:
    model = reduced(model_of("vit"), Ward())
    reduction = reduction_of(model)
    assert reduction is not None
    policy = reduction.policy
    sample_tokens(model, images(model))
    assert reduction.policy is policy and "tables" not in vars(policy.reducer)


def test_a_picture_covers_what_left() -> None:
    left = torch.tensor([[True, False], [True, True]])
    svg = patch_picture("cat", "tokens-0", left)
    veil, outline = re.findall(r'<path class="(?:veil|outline)" d="([^"]*)"', svg)
    assert veil == "M1 0h1v1h-1z"
    assert outline.count("M") == 2  # its left side and its lower side
    assert 'href="#tokens-0"' in svg
    whole = patch_picture("cat", "tokens-0", torch.ones(2, 2, dtype=torch.bool), "data:image/png;base64,AA")
    assert "veil" not in whole and 'id="tokens-0"' in whole


@pytest.mark.parametrize("reducer", [Ward(), ToMe(), PiToMe()], ids=["ward", "tome", "pitome"])
@pytest.mark.parametrize("by", ["mask", "compress"])
def test_merged_patches_are_grouped_as_in_the_tokens(reducer: Reducer, by: str) -> None:
    model = report_content.spread_model()
    attach_tokens_(model, family_of(model), TokenPolicy(reducer, (2, 3), (0.7, 0.5)), by)
    samples = sample_tokens(model, images(model, 3))
    groups, left = samples.groups, samples.left
    assert groups is not None
    assert bool(left.gather(2, groups).all())  # every patch is in the token of a patch that is left
    for image, stage in ((image, stage) for image in range(3) for stage in range(2)):
        assert set(groups[image, stage].tolist()) == set(left[image, stage].nonzero().flatten().tolist())
    same = groups[:, 0, :, None] == groups[:, 0, None]
    later = groups[:, 1, :, None] == groups[:, 1, None]
    assert bool((later | ~same).all())  # merged patches stay together
    reduction, run = reduction_of(model), token_run(model, images(model, 3))
    assert reduction is not None and run.sizes is not None
    sizes = torch.zeros(3, 64, dtype=torch.float64)
    last, prefix = run.patch_indices, reduction.shape.layout.prefix
    assert last is not None
    sizes.scatter_(1, last, run.sizes[:, prefix:].double())
    counted = torch.zeros_like(sizes).scatter_add(1, groups[:, 1], torch.ones(3, 64, dtype=torch.float64))
    assert torch.allclose(counted, sizes.where(sizes > 0, torch.zeros_like(sizes)))
    assert reduction.policy.reducer is reducer
    page = render(ReportContent("merged", tokens=samples))
    assert "Merged patches are outlined together" in page and 'class="group"' in page and 'class="veil"' not in page


def test_patches_that_the_kernel_merges_are_grouped() -> None:
    """In float32, in which the C++ kernel merges."""
    model = reduced(model_of("vit").float(), Ward())
    samples = sample_tokens(model, images(model).float())
    assert samples.groups is not None
    assert bool(samples.left.gather(2, samples.groups).all())
    for groups, left in zip(samples.groups[:, 0], samples.left[:, 0], strict=True):
        assert set(groups.tolist()) == set(left.nonzero().flatten().tolist())


def test_groups_are_outlined_and_filled() -> None:
    left, groups = torch.tensor([[True, True, False]]), torch.tensor([[0, 1, 1]])
    svg = patch_picture("cat", "tokens-0", left, groups=groups, fills={1: "#102030"})
    assert re.findall(r'<path class="(\w+)" d="([^"]*)"', svg) == [("group", "M1 0h2v1h-2z"), ("seam", "M1 0v1")]
    assert 'fill="#102030"' in svg


def test_models_that_cannot_be_sampled_are_refused() -> None:
    model = model_of("vit")
    with pytest.raises(InvalidInput, match="has no token policy"):
        sample_tokens(model, images(model))
    small = reduced(model_of("vit"), Random())
    with pytest.raises(InvalidInput, match="no image"):
        sample_tokens(small, images(model, 0))
    with pytest.raises(InvalidInput, match="1 labels for 2 images"):
        sample_tokens(small, images(model, 2), ("one",))
