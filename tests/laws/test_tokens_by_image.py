"""Laws of policies by image: images of a batch do not affect each other, mask == compress, the mean is as requested."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.vit.kernels import compilation
from attnrx.vit.models import attach_tokens_, costs_by_image, family_of, reduction_of, token_run
from attnrx.vit.models.token_reduction import compressed_state
from attnrx.vit.tokens import TokenPolicy, Ward, parse_policy, parse_reducer
from support import cases
from support.pretrained import adopted_once
from support.token_models import drawn

FAMILIES = ("vit", "vit, no class token", "dinov2, registers", "hf dinov2", "dinov3", "rotary, mixed", "dense")
WARD = {True: "ward(relevance=0.3)", False: "ward"}


def original(name: str) -> nn.Module:
    return cases.own(cases.OWN[name]) if name in cases.OWN else adopted_once(name)[2]


def images_of(model: nn.Module, count: int) -> torch.Tensor:
    """Images of different contrast, so that their costs differ."""
    generator, dtype = torch.Generator().manual_seed(3), next(model.parameters()).dtype
    noise = torch.randn(count, *family_of(model).input_shape(model), generator=generator).to(dtype)
    return noise * torch.linspace(0.02, 2, count, dtype=dtype)[:, None, None, None]


def text_of(model: nn.Module, keep: str = "mean=0.6@2") -> str:
    layout = family_of(model).token_layout(model)
    return f"tokens={WARD[layout.class_token]}:{keep}"


def realized(name: str, by: str = "compress", keep: str = "mean=0.6@2") -> tuple[nn.Module, nn.Module, torch.Tensor]:
    model = original(name)
    images = images_of(model, 12)
    small = rx.realize(model, rx.prescribe(model, text_of(model, keep)), by=by, calibration=images)
    return model, small.eval(), images


def kept_by(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return (token_run(model, images).trail[-1] >= 0).sum(1)


@pytest.mark.parametrize("name", FAMILIES)
def test_images_of_a_batch_do_not_affect_each_other(name: str) -> None:
    _, small, images = realized(name)
    with torch.no_grad():
        together = small(images)
        counts = kept_by(small, images)
        assert len(set(counts.tolist())) > 1  # else the law says nothing
        for index, image in enumerate(images):
            torch.testing.assert_close(small(image[None]), together[index : index + 1], rtol=1e-8, atol=1e-9)
            assert int(kept_by(small, image[None])) == int(counts[index])


@pytest.mark.parametrize("name", FAMILIES)
def test_mask_and_compression_are_equal(name: str) -> None:
    _, small, images = realized(name)
    _, masked, _ = realized(name, "mask")
    with torch.no_grad():
        torch.testing.assert_close(masked(images), small(images), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("keep", ["mean=0.6@2", "mean=1@every"])
def test_the_mean_over_the_calibration_images_is_as_requested(keep: str) -> None:
    model, small, images = realized("vit", keep=keep)
    reduction, patches = reduction_of(small), family_of(model).token_layout(model).patches
    assert reduction is not None and len(reduction.policy.thresholds) == len(reduction.policy.layers)
    wanted = reduction.policy.keep[-1] * patches
    assert float(kept_by(small, images).double().mean()) == pytest.approx(wanted, abs=1)
    costs = costs_by_image(small, family_of(small), images)
    whole = family_of(model).costs(model).macs
    assert len(costs) == len(images) and sum(each.macs for each in costs) < len(images) * whole
    assert len({each.macs for each in costs}) > 1
    assert costs_by_image(model, family_of(model), images)[0].macs == whole


@pytest.mark.parametrize("keep", ["mean=0.5@2", "mean=0.999@2"])
def test_all_and_no_pairs_are_merged(keep: str) -> None:
    """The largest and the smallest reduction of one stage have finite thresholds, which are written and read."""
    _, small, images = realized("vit", keep=keep)
    reduction = reduction_of(small)
    assert reduction is not None and parse_policy(str(reduction.policy)) == reduction.policy
    assert len(set(kept_by(small, images).tolist())) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_where_nothing_is_cheap_enough_the_outputs_are_identical(name: str) -> None:
    model = original(name)
    images, small = images_of(model, 3), copy.deepcopy(model)
    attach_tokens_(small, family_of(small), TokenPolicy(Ward(), (2,), (0.5,), by_image=True, thresholds=(0.0,)))
    with torch.no_grad():
        torch.testing.assert_close(small.eval()(images), model(images), rtol=1e-10, atol=1e-10)


def test_a_saved_model_and_its_text_have_the_thresholds(tmp_path: Path) -> None:
    _, small, images = realized("vit")
    reduction = reduction_of(small)
    assert reduction is not None
    assert parse_policy(str(reduction.policy)) == reduction.policy
    loaded = rx.load(rx.save(small, tmp_path / "small"))
    with torch.no_grad():
        assert torch.equal(loaded(images), small(images))
    again = rx.realize(original("vit"), rx.prescribe(original("vit"), f"tokens={reduction.policy}"))
    with torch.no_grad():
        assert torch.equal(again.eval()(images), small(images))


def test_the_mean_costs_are_verified() -> None:
    """And the products of an image are those that PyTorch counts."""
    model, small, images = realized("vit", keep="mean=0.6@2")
    evidence = rx.verify(small, model, images, checks=(rx.checks.Costs(),))
    (saved,) = [finding for finding in evidence.findings if finding.details.get("quantity") == "MACs"]
    macs = [each.macs for each in costs_by_image(small, family_of(small), images)]
    assert saved.details["candidate"] == round(sum(macs) / len(macs)) and saved.details["least"] == min(macs)
    assert all(finding.outcome in ("holds", "reported") for finding in evidence.findings)
    single = rx.verify(small, model, images[:1], checks=(rx.checks.Costs(),)).findings[1]
    assert single.details["candidate"] == macs[0] and single.details["standard_deviation"] is None


def test_features_of_all_patches_are_restored() -> None:
    _, small, images = realized("vit")
    family = family_of(small)
    with torch.no_grad():
        features = family.patch_features(small, images)
        one = family.patch_features(small, images[:1])
    assert features.shape[1] == family.token_layout(small).patches
    torch.testing.assert_close(features[:1], one, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("text", ["ward:mean=0.6@2", "ward:mean=3@every", "ward(relevance=0.3):0.7<6.25/0.5<1e-05@2,4"])
def test_text(text: str) -> None:
    policy = parse_policy(text)
    assert policy.by_image and str(policy) == text and parse_policy(str(policy)) == policy


def test_what_is_not_possible_is_refused(tmp_path: Path) -> None:
    model, small, _ = realized("vit")
    with pytest.raises(InvalidInput, match="pass calibration images"):
        rx.realize(model, rx.prescribe(model, "tokens=ward:mean=0.6@2"))
    for text in ("tome:mean=0.7@2", "evit:0.7<3@2"):
        with pytest.raises(InvalidInput, match="has no cost"):
            parse_policy(text)
    with pytest.raises(InvalidInput, match="thresholds for 2 stages"):
        parse_policy("ward:0.7<3/0.5@2,4")
    with pytest.raises(InvalidInput, match="at most every second one"):
        rx.realize(model, rx.prescribe(model, "tokens=ward:mean=0.3@2"), calibration=images_of(model, 8))
    with pytest.raises(NotSupported, match="fixed shapes"):
        rx.export(small, tmp_path / "small.onnx")


@pytest.mark.skipif(compilation.native_library() is None, reason="the kernel needs a C++ compiler")
@pytest.mark.parametrize("text", ["ward", "ward(lengths=false)", "ward(relevance=0.4)"])
@pytest.mark.parametrize(("images", "patches"), [(3, 196), (4, 21), (2, 5), (1, 2)])
def test_the_kernel_equals_the_operations(text: str, images: int, patches: int) -> None:
    """For images that already have different numbers of patches, at several thresholds."""
    reducer, state = parse_reducer(text), drawn(images, patches, sized=True)
    attention = state.class_attention
    assert attention is not None
    sizes = state.sizes.clone()
    for image in range(images):
        sizes[image, patches + 1 - min(image, patches - 1) :] = 0
    state = replace(state, sizes=sizes, unmasked=False, class_attention=attention * (sizes > 0)[:, None])
    for threshold in (-1.0, 40.0, 90.0, float("inf")):
        found = reducer.native_merge_by_cost(state, threshold)
        assert found is not None
        reduction = reducer.reduce_by_cost(state, lambda costs, limit=threshold: limit)
        tokens, left, indices, *_ = compressed_state(state, reduction)
        torch.testing.assert_close(found[1], left)
        there = left[:, 1:] > 0
        assert torch.equal(found[2][there], indices[there]) and bool((found[2][~there] == -1).all())
        torch.testing.assert_close(found[0][:, 1:][there], tokens[:, 1:][there], rtol=0, atol=1e-5)
        assert reduction.destinations is not None and torch.equal(found[3], reduction.destinations)


def test_an_image_of_one_patch_merges_nothing() -> None:
    state = drawn(2, 3, sized=True)
    sizes = state.sizes.clone()
    sizes[:, 2:] = 0  # as after earlier stages: one patch is present
    reduction = parse_reducer("ward").reduce_by_cost(
        replace(state, sizes=sizes, unmasked=False), lambda costs: math.inf
    )
    assert reduction.kept.tolist() == [[0], [0]] and reduction.destinations is not None
