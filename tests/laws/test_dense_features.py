"""Features of all patches from models whose tokens are pruned or merged."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attnrx.exporting import PatchFeatures, export
from attnrx.support.errors import NotSupported
from attnrx.vit.models import answer, attach_tokens_, family_of, library_form, recording_tokens, reduction_of
from attnrx.vit.models.boundary.adoption import adopt
from attnrx.vit.models.parts.vit_parts import POOLINGS
from attnrx.vit.tokens import TokenPolicy, ToMe
from support import cases
from support.cases import REDUCTIONS
from support.pretrained import CASES, HF, TIMM, VIT, adopted_once, inputs, of_timm
from support.token_models import KINDS, original, reduced

OF_TIMM = [name for name, (family, _) in CASES.items() if family is TIMM]
OF_HF = [name for name, (family, _) in CASES.items() if family is HF]
HALF = TokenPolicy(ToMe(), (2,), (0.5,))
OTHER_INPUTS = ("hf ast", "hf vivit", "hf siglip2 tower")  # spectrograms, frames of videos, and patches


def supports_tokens(name: str) -> bool:
    family, _, adopted = adopted_once(name)
    return family.parts(adopted.source).pooling in POOLINGS


def shapes(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return tuple(found.shape)
    return {key: shapes(each) for key, each in found.items()} if isinstance(found, dict) else list(map(shapes, found))


def patches(model: nn.Module, images: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return family_of(model).patch_features(model, inputs(model) if images is None else images)


INTERMEDIATES: tuple[dict[str, Any], ...] = (
    {},
    {"indices": 1, "norm": True, "output_fmt": "NLC"},
    {"indices": [0], "return_prefix_tokens": True, "stop_early": True},
    {"intermediates_only": True, "output_fmt": "NLC"},
    {"output_dict": True, "return_prefix_tokens": True},
)


@pytest.mark.parametrize("name", OF_TIMM)
@torch.no_grad()
def test_timm_methods_return_the_shapes_of_the_original(name: str) -> None:
    _, source, adopted = adopted_once(name)
    small: Any = reduced(name, HALF, "compress") if supports_tokens(name) else None
    images = inputs(adopted)
    for model in (adopted, small):
        if model is None:
            continue
        found: Any = library_form(model)
        assert shapes(found.forward_features(images)) == shapes(source.forward_features(images))
        assert shapes(model.source.forward_features(images)) == shapes(source.forward_features(images))
        known, has_prefix = inspect.signature(source.forward_intermediates).parameters, source.num_prefix_tokens
        for options in INTERMEDIATES:
            # Without tokens before the patches timm's own method fails to return them.
            if not options.keys() <= known.keys() or (options.get("return_prefix_tokens") and not has_prefix):
                continue
            expected = shapes(source.forward_intermediates(images, **options))
            assert shapes(found.forward_intermediates(images, **options)) == expected
            assert shapes(model.source.forward_intermediates(images, **options)) == expected
        if hasattr(source, "get_intermediate_layers"):
            layers = source.get_intermediate_layers(images, 2)
            assert shapes(found.get_intermediate_layers(images, 2)) == shapes(layers)
        assert shapes(found.forward_head(found.forward_features(images))) == shapes(source(images))


@pytest.mark.parametrize("name", OF_TIMM)
@torch.no_grad()
def test_without_pruned_tokens_the_features_are_those_of_the_original(name: str) -> None:
    _, source, adopted = adopted_once(name)
    images, models = inputs(adopted), [adopted]
    if supports_tokens(name):
        models.append(reduced(name, TokenPolicy(ToMe(), (2,), (1.0,)), "compress"))
    for model in models:
        found: Any = library_form(model)
        torch.testing.assert_close(found.forward_features(images), source.forward_features(images))
        pairs = zip(found.forward_intermediates(images)[1], source.forward_intermediates(images)[1], strict=True)
        for own, theirs in pairs:
            torch.testing.assert_close(own, theirs)


@pytest.mark.parametrize("name", OF_HF)
@torch.no_grad()
def test_transformers_outputs_have_the_shapes_of_the_original(name: str) -> None:
    if name in OTHER_INPUTS or not supports_tokens(name):
        pytest.skip("tokens cannot be reduced in this model")
    _, source, adopted = adopted_once(name)
    images, small = inputs(adopted), reduced(name, HALF, "compress")
    for options in ({}, {"output_hidden_states": True}, {"output_hidden_states": True, "return_dict": False}):
        expected = source(pixel_values=images, **options)
        found: Any = library_form(small)(pixel_values=images, **options)
        assert shapes(found) == shapes(expected)
    assert patches(small).shape == patches(adopted).shape


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_requested_features_do_not_change_the_answer(name: str) -> None:
    if not supports_tokens(name):
        pytest.skip("tokens cannot be reduced in this model")
    model: Any = library_form(reduced(name, HALF, "compress"))
    images = inputs(model)
    before = answer(model, images)
    if name not in (*OF_TIMM, *OF_HF) and name in CASES:
        with pytest.raises(NotSupported, match="no method that returns the features"):
            patches(model)
        return
    patches(model)
    if name in OTHER_INPUTS:
        return
    if name in OF_HF:
        output = model(pixel_values=images, output_hidden_states=True)
        for field in {"logits", "pooler_output"} & output.keys():
            # Up to rounding: without hidden states the last block computes only the class token.
            torch.testing.assert_close(output[field], model(pixel_values=images)[field], rtol=1e-12, atol=1e-12)
    else:
        model.forward_intermediates(images)
    assert torch.equal(answer(model, images), before)


@pytest.mark.parametrize("by", ["mask", "compress"])
@pytest.mark.parametrize("pooling", ["token", "avg", "map"])
@torch.no_grad()
def test_features_of_some_depths_do_not_change_the_answer(pooling: str, by: str) -> None:
    model: Any = adopt(TIMM, of_timm(VIT, depth=4, img_size=32, global_pool=pooling))
    attach_tokens_(model, TIMM, TokenPolicy(ToMe(), (2,), (0.5,)), by)
    images, tokens = inputs(model), list[int]()
    blocks = model.source.blocks
    for block in blocks:
        block.register_forward_hook(lambda module, given, found: tokens.append(found.shape[1]))
    expected = model(images)
    for depths in ((1,), (1, 2), (1, 3), (3,)):
        tokens.clear()
        with model.forward_pass(depths):
            found = model.source(images)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        left = 17 if by == "mask" else 9
        assert tokens == [17, *(17 if depth in depths else left for depth in (1, 2, 3))]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_features_mask_equals_compress(kind: str) -> None:
    policy = TokenPolicy.staged(REDUCTIONS[kind], 0.6, (2, 3, 4))
    masked, small = (reduced("deep", policy, by) for by in ("mask", "compress"))
    images = inputs(small)
    torch.testing.assert_close(patches(masked), patches(small), rtol=1e-10, atol=1e-10)
    models: Any = library_form(masked), library_form(small)
    pairs: Any = [model.forward_intermediates(images, intermediates_only=True) for model in models]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_representatives_are_a_partition_of_the_patches(kind: str) -> None:
    """Their numbers are the sizes of merged tokens, and a kept patch represents itself."""
    reducer = REDUCTIONS[kind]
    model = reduced("deep", TokenPolicy.staged(reducer, 0.6, (2, 3, 4)), "compress")
    with recording_tokens(model) as runs:
        patches(model)
    reduction, run = reduction_of(model), runs[-1]
    assert reduction is not None
    found, sizes = run.representatives(), run.sizes
    assert found is not None and sizes is not None and run.patch_indices is not None
    prefix = reduction.shape.layout.prefix
    left = sizes.shape[1] - prefix
    assert found.shape == (3, 16) and int(found.max()) < left and int(found.min()) >= -1
    for token in range(left):
        counts = (found == token).sum(1)
        if reducer.proportional:
            assert torch.equal(counts.double(), sizes[:, prefix + token])
        for image, patch in enumerate(run.patch_indices[:, token].tolist()):
            assert patch < 0 or found[image, patch] == token
    merges = reducer.proportional or reducer.extra or kind.startswith(("dtps", "etps"))
    assert bool((found < 0).any()) != bool(merges)


@pytest.mark.parametrize("kind", ["tome", "ward", "class_attention"])
@torch.no_grad()
def test_the_residual_of_a_patch_is_its_source_plus_its_difference(kind: str) -> None:
    """The definition, patch by patch, for one stage before the last of four layers: the whole difference."""
    model: Any = library_form(reduced("deep", TokenPolicy(REDUCTIONS[kind], (4,), (0.5,)), "compress"))
    images = inputs(model)
    with recording_tokens(model) as runs:
        outputs = model.forward_intermediates(images, output_fmt="NLC", intermediates_only=True)
    run = runs[-1]
    assert run.stages and run.present is not None
    stage, block = run.stages[0], run.present[:, 1:]
    assert torch.equal(stage.before, outputs[2])
    for image in range(len(images)):
        for patch, source in enumerate(stage.sources[image].tolist()):
            difference = outputs[2][image, patch] - stage.remaining[image, source]
            torch.testing.assert_close(outputs[3][image, patch], block[image, source] + difference)


@pytest.mark.parametrize("kind", ["ward", "spvit-halting"])
@torch.no_grad()
def test_exported_features_equal_those_of_the_model(kind: str) -> None:
    model = PatchFeatures(reduced("deep", TokenPolicy.staged(REDUCTIONS[kind], 0.6, (2, 4)), "compress")).eval()
    images = inputs(model.model)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)).module()
    other = -inputs(model.model, 5)
    torch.testing.assert_close(program(other), model(other), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_an_onnx_file_of_features_is_compared_with_the_model(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = reduced("deep", TokenPolicy.staged(ToMe(), 0.6, (2, 4)), "compress").float()
    exported = export(model, tmp_path / "features.onnx", features=True)
    images = inputs(model, 5).float()
    with torch.no_grad():
        torch.testing.assert_close(exported(images), patches(model, images), rtol=1e-4, atol=1e-4)
    assert exported.facts["output"] == "features"
    assert not (tmp_path / "run_features.py").exists()


@pytest.mark.parametrize("name", ["dense", "svda", *cases.LVVITS])
@torch.no_grad()
def test_attnrx_models_have_restored_features(name: str) -> None:
    models = [original(name), *(reduced(name, HALF, by) for by in ("mask", "compress"))]
    full, masked, small = map(patches, models)
    layout = family_of(models[0]).token_layout(models[0])
    assert full.shape == small.shape == (3, layout.patches, full.shape[2])
    torch.testing.assert_close(masked, small, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(small, full, rtol=1e-3)
