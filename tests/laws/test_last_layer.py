"""The last-layer class-token shortcut computes fewer tokens, and does not change the logits."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.vit.attention import Attention
from attnrx.vit.models import family_of, library_form, recording_blocks, use_backend, working_copy
from attnrx.vit.models.boundary.adoption import adopt
from attnrx.vit.models.working.token_hooks import attach_tokens_
from support.pretrained import CASES, TIMM, adopted_once, of_timm

# Models that pool all patches, or by attention; of the classifiers of DINOv2 the class token and the mean.
POOLING = ("vit, norms after", "vit, no class token", "vit, mean pooled", "hf clip", "hf siglip", "hf siglip tower")
POOLING += ("open_clip, mean pooled", "open_clip, mean before the norm")
POOLING += ("hf beit", "hf beit, one bias", "hf data2vec", "hf yolos", "hf dpt", "hf videomae", "hf siglip2 tower")
POOLING += ("hf ijepa", "hf ijepa, backbone", "hf dinov2", "hf dinov2, gated MLP", "hf dinov2, registers")
POOLING += ("open_clip, attention pooling",)
POOLING += tuple(
    name for name, (family, make) in CASES.items() if family is TIMM and family.parts(make()).pooling != "class"
)
ANSWERING = {name: name not in POOLING for name in CASES}


def fresh(name: str) -> Any:
    return copy.deepcopy(adopted_once(name)[2])


def batch(model: Any, count: int = 3) -> torch.Tensor:
    shape = family_of(model).input_shape(model)
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@contextmanager
def seen_by_the_last_mlp(model: Any) -> Iterator[list[int]]:
    """Counts the tokens by a function that replaces the MLP's own, which nobody can tell from it."""
    seen: list[int] = []
    family: Any = family_of(model)
    mlp = family.blocks(model.source)[-1].get_submodule(family.parts(model.source).mlp[0])
    own = mlp.forward

    def counting(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape[1])
        return own(tokens)

    mlp.forward = counting
    try:
        yield seen
    finally:
        del mlp.forward


def tokens_through(model: Any, inputs: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    with torch.no_grad(), seen_by_the_last_mlp(model) as seen:
        return model(inputs), seen


@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_that_of_all_tokens(name: str) -> None:
    model = fresh(name)
    inputs, family = batch(model), CASES[name][0]
    with torch.no_grad():
        whole = model.answer(inputs)
    answer, seen = tokens_through(model, inputs)
    torch.testing.assert_close(answer, whole, rtol=1e-10, atol=1e-10)
    prefix = family.parts(model.source).prefix_tokens
    assert seen == [prefix if ANSWERING[name] else prefix + family.positions(model)]
    assert (model.last is not None) == ANSWERING[name]
    assert tokens_through(copy.deepcopy(model), inputs)[1] == seen
    assert tokens_through(family.build(family.describe(model)).eval().double(), inputs)[1] == seen


def test_a_block_whose_norms_come_after_gets_what_it_is_given() -> None:
    model: Any = adopt(TIMM, of_timm("vit_base_patch16_rpn_224", class_token=True, global_pool="token"))
    inputs = batch(model)
    with torch.no_grad():
        whole = model.answer(inputs)
    answer, seen = tokens_through(model, inputs)
    torch.testing.assert_close(answer, whole, rtol=1e-10, atol=1e-10)
    assert seen == [1]


@pytest.mark.parametrize("name", ["vit", "deit, distilled", "hf vit"])
@pytest.mark.parametrize("policy", [None, "ward:0.5@2", "tome:1@every", "evit:0.5@2", "random:0.5@2"])
@pytest.mark.parametrize("by", ["mask", "compress"])
def test_the_answer_is_that_of_all_tokens_where_ranks_are_cut_and_tokens_leave(
    name: str, policy: str | None, by: str
) -> None:
    model = fresh(name)
    family, inputs = family_of(model), batch(model)
    cut = family.attention(model)[1].spec.with_ranks((1, 2, 2), (2, 0, 1), "none")
    family.set_attention_(model, 1, Attention(cut).double())
    if policy is not None:
        attach_tokens_(model, family, rx.tokens.parse_policy(policy), by)
    with torch.no_grad():
        whole = model.answer(inputs)
    answer, seen = tokens_through(model, inputs)
    torch.testing.assert_close(answer, whole, rtol=1e-10, atol=1e-10)
    assert seen == [family.token_layout(model).prefix]


@pytest.mark.parametrize("backend", ["auto", "fused", "eager"])
def test_every_backend_gives_the_same_and_eager_leaves_nothing_out(backend: str) -> None:
    model = fresh("vit")
    inputs, layout = batch(model), family_of(model).token_layout(model)
    wanted = tokens_through(model, inputs)[0]
    use_backend(model, backend)
    answer, seen = tokens_through(model, inputs)
    torch.testing.assert_close(answer, wanted, rtol=1e-10, atol=1e-10)
    assert seen == [layout.tokens if backend == "eager" else layout.prefix]


def test_a_head_of_rank_0_leaves_nothing_out() -> None:
    model = fresh("vit")
    family = family_of(model)
    cut = family.attention(model)[1].spec.with_ranks((0, 2, 2), (2, 0, 1), "none")
    family.set_attention_(model, 1, Attention(cut).double())
    inputs = batch(model)
    answer, seen = tokens_through(model, inputs)
    with torch.no_grad():
        torch.testing.assert_close(answer, model.answer(inputs), rtol=0, atol=0)
    assert seen == [family.token_layout(model).tokens]


def test_whoever_watches_or_trains_the_last_layer_sees_all_tokens() -> None:
    model: Any = fresh("vit")
    inputs, layout = batch(model), family_of(model).token_layout(model)
    block = model.source.blocks[-1]
    for module in (block, block.attn.attention, block.norm2, model.source.norm):
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            shapes: list[Any] = []
            handle = register(lambda _, given, *rest, into=shapes: into.append(given[0].shape[1]))
            assert tokens_through(model, inputs)[1] == [layout.tokens] == shapes
            handle.remove()
    with recording_blocks(model, family_of(model)) as blocks:
        assert tokens_through(model, inputs)[1] == [layout.tokens]
        assert blocks[-1].shape[1] == layout.tokens
    assert tokens_through(model.train(), inputs)[1] == [layout.tokens]
    assert tokens_through(model.eval(), inputs)[1] == [layout.prefix]
    with torch.no_grad():
        assert model.source.forward_features(inputs).shape[1] == layout.tokens  # the model inside is whole


def test_a_failed_call_leaves_the_model_whole() -> None:
    model: Any = fresh("vit")
    inputs, layout = batch(model), family_of(model).token_layout(model)
    head = model.source.head
    model.source.head = nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        model(inputs)
    model.source.head = head
    with torch.no_grad():
        assert model.source.forward_features(inputs).shape[1] == layout.tokens


def test_a_classifier_that_reads_all_tokens_gets_them() -> None:
    model: Any = library_form(fresh("vit"))
    inputs, layout = batch(model), family_of(model).token_layout(model)
    model.reset_classifier(4, global_pool="avg")
    model.double().eval()
    answer, seen = tokens_through(working_copy(model), inputs)
    assert seen == [layout.tokens] and answer.shape == (3, 4)
    with torch.no_grad():
        torch.testing.assert_close(answer, model(inputs), rtol=1e-10, atol=1e-10)


def test_gradients_are_those_of_all_tokens() -> None:
    model = fresh("vit")
    found = []
    for run in (model, model.answer):
        model.zero_grad()
        inputs = batch(model).requires_grad_()
        run(inputs).square().sum().backward()
        found.append([inputs.grad, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
