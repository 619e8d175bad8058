"""Tokens that leave: all stay == the original, mask == compress, and the laws that every reducer must keep."""

from typing import Any

import pytest
import torch
from torch import nn

from attnrx.support.errors import NotSupported
from attnrx.vit.models import answer, family_of, library_form, observing, reduction_of, token_run
from attnrx.vit.models.parts.vit_parts import POOLINGS
from attnrx.vit.tokens import REDUCERS, Reducer, TokenPolicy
from attnrx_lab.tokens import DTPS, HaltingScores, MapMoments, Spot
from attnrx_lab.tokens.scores import scores_of
from support import cases
from support.cases import REDUCTIONS
from support.pretrained import CASES, adopted_once, inputs
from support.token_models import KINDS, fits, original, reduced

# One of each way of pooling, of tokens before the patches, and of scaling what a layer adds.
FAMILIES = ("vit", "vit, no class token", "deit, distilled", "dinov2, registers", "hf vit", "hf dinov2")
FAMILIES += ("dinov3", "rotary, mixed", "beit, bias per layer", "relative positions")
FAMILIES += ("vit, attention pooling", "timm siglip", "hf siglip tower")
FAMILIES += ("open_clip, attention pooling",)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return answer(model, inputs(model))


# Every reducer in one family, and every class of reducers in a quarter of them, others in the next.
PAIRS = [("vit", kind) for kind in REDUCTIONS]
PAIRS += [
    (name, kind)
    for row, name in enumerate((*FAMILIES, "dense", "svda", *cases.LVVITS))
    for column, kind in enumerate(KINDS)
    if name != "vit" and (row + column) % 4 == 0
]


def test_every_reducer_is_a_case() -> None:
    # Others register themselves when they are imported, e.g. the oracle of a testbed.
    known = {each for each in REDUCERS.values() if each.__module__.startswith(("attnrx.", "attnrx_lab.tokens"))}
    assert {type(reducer) for reducer in REDUCTIONS.values()} == known


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_mask_equals_compress(name: str, kind: str) -> None:
    reducer = REDUCTIONS[kind]
    if not fits(name, reducer):
        with pytest.raises(NotSupported, match="class token"):
            reduced(name, TokenPolicy(reducer, (2,), (0.5,)), "mask")
        return
    policy = TokenPolicy(reducer, (2,), (0.5,))
    models = [reduced(name, policy, by) for by in ("mask", "compress")]
    masked, small = map(logits, models)
    torch.testing.assert_close(masked, small, rtol=1e-10, atol=1e-10)
    for own in map(library_form, models):  # the library's own code, with hooks
        torch.testing.assert_close(logits(own), small, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(small, logits(original(name)), rtol=1e-6)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_several_stages_mask_equals_compress(kind: str) -> None:
    policy = TokenPolicy.staged(REDUCTIONS[kind], 0.6, (2, 3, 4))
    models = [reduced("deep", policy, by) for by in ("mask", "compress")]
    models += [library_form(model) for model in models]
    masked, small, *others = map(logits, models)
    for each in (masked, *others):
        torch.testing.assert_close(each, small, rtol=1e-10, atol=1e-10)
    trails = [token_run(model, inputs(model)).trail for model in models]
    for trail in trails[1:]:
        assert all(torch.equal(a.sort(1).values, b.sort(1).values) for a, b in zip(trails[0], trail, strict=True))
    added = REDUCTIONS[kind].extra
    assert [stage.shape[1] for stage in trails[1]] == [count + added for count in policy.counts(16)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_an_image_do_not_depend_on_the_batch(kind: str) -> None:
    model = reduced("deep", TokenPolicy.staged(REDUCTIONS[kind], 0.6, (2, 4)), "compress")
    images = inputs(model, 4)
    together = token_run(model, images).trail
    for place in (3, 0):
        trails = zip(token_run(model, images[place : place + 1]).trail, together, strict=True)
        assert all(torch.equal(alone[0], stage[place]) for alone, stage in trails)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_can_leave_few(kind: str) -> None:
    """More than half leaves at once, and then a stage at which almost none does."""
    policy = TokenPolicy(REDUCTIONS[kind], (3, 4), (0.2, 0.2))
    masked, small = (logits(reduced("deep", policy, by)) for by in ("mask", "compress"))
    torch.testing.assert_close(masked, small, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [*CASES, "dense", "svda", *cases.LVVITS])
@pytest.mark.parametrize("by", ["mask", "compress"])
def test_all_tokens_are_the_original_bit_for_bit(name: str, by: str) -> None:
    model = original(name)
    if name in CASES and CASES[name][0].parts(adopted_once(name)[2].source).pooling not in POOLINGS:
        with pytest.raises(NotSupported, match="pools its tokens by"):
            reduced(name, TokenPolicy(REDUCTIONS["random"], (2,), (1.0,)), by)
        return
    reducer = REDUCTIONS["evit" if fits(name, REDUCTIONS["evit"]) else "random"]
    kept = reduced(name, TokenPolicy(reducer, (2,), (1.0,)), by)
    assert torch.equal(logits(kept), logits(model))
    assert torch.equal(logits(library_form(kept)), logits(library_form(model)))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "attention" in name or "siglip" in name])
@torch.no_grad()
def test_a_pooling_by_attention_counts_a_merged_token_as_its_patches(name: str) -> None:
    model: Any = reduced(name, TokenPolicy(REDUCTIONS["tome"], (2,), (0.5,)), "compress")
    pooler: Any = family_of(model).pooler(model)
    calls = list[Any]()
    pooler.register_forward_hook(lambda *call: calls.append(call[1:]), with_kwargs=True)
    logits(model)
    ((tokens, options, found),) = calls
    keys = tokens[min(len(tokens) - 1, 1)]
    sizes = next(options[name] for name in ("key_padding_mask", "attn_mask") if name in options).exp().round().long()
    assert sizes.max() > 1
    for index, count in enumerate(sizes.flatten(1)):
        repeated = keys[index].repeat_interleave(count, 0)[None]
        given = (repeated,) if len(tokens) == 1 else (tokens[0][index : index + 1], repeated, repeated)
        expected = pooler.forward(*given)
        pairs = zip(*((each if isinstance(each, tuple) else (each,))[:1] for each in (found, expected)), strict=True)
        for mine, theirs in pairs:
            torch.testing.assert_close(mine[index : index + 1], theirs, rtol=1e-10, atol=1e-10)


# Random scores are hashes of indices, merging by turns and sampling along the patches go by their order.
@pytest.mark.parametrize(
    "kind", [kind for kind in REDUCTIONS if kind not in ("random", "tome", "ats") and not kind.startswith("ward")]
)
def test_the_order_of_the_patches_does_not_matter(kind: str) -> None:
    """Shuffled patches with their positions give the same answer: a reducer goes by what a token is."""
    model = reduced("vit", TokenPolicy(REDUCTIONS[kind], (2,), (0.5,)), "compress")
    before = logits(model)
    prefix, order = 1, torch.tensor([2, 0, 3, 1])

    def shuffled(module: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        tokens = given[0]
        return (torch.cat([tokens[:, :prefix], tokens[:, prefix:][:, order]], dim=1),)

    model.source.blocks[0].register_forward_pre_hook(shuffled)  # type: ignore[union-attr]
    torch.testing.assert_close(logits(model), before, rtol=1e-10, atol=1e-10)


def test_streaming_moments_are_those_of_stored_maps() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = torch.rand(5, 2, 3, 7, 7, generator=generator, dtype=torch.float64)
    moments = MapMoments.of(maps[0])
    for attention in maps[1:3]:
        moments = moments.add_layer(attention)
    kept = torch.tensor([[0, 2, 3, 6], [0, 1, 4, 5]])
    moments = moments.at(kept)
    left = torch.stack([maps[:, image][..., kept[image], :][..., kept[image]] for image in range(2)], dim=1)
    for attention in left[3:]:
        moments = moments.add_layer(attention)
    torch.testing.assert_close(moments.mean, left.mean(0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(moments.variance, left.var(0, correction=0), rtol=1e-12, atol=1e-14)


def test_spot_sees_the_moments_of_the_maps_it_passed() -> None:
    """The moments at the last stage are those of the maps of all layers, between the tokens that are left."""
    model = reduced("deep", TokenPolicy.staged(Spot(projected=0), 0.6, (2, 4)), "compress")
    reduction = reduction_of(model)
    assert reduction is not None
    state = []
    decide = reduction.policy.reducer.relevance  # type: ignore[attr-defined]

    def spy(self, given, predictor):
        state.append(given)
        return decide(given, predictor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Spot, "relevance", spy)
        logits(model)
    plain, maps = original("deep"), []
    with observing(plain, family_of(plain), lambda _, shown: maps.append(shown.attention)):
        logits(plain)
    torch.testing.assert_close(state[0].statistic.mean, maps[0])
    assert state[1].statistic.count == 3
    assert state[1].attention.shape[-1] == 1 + 9


def test_halting_scores_add_up_over_the_layers_passed() -> None:
    """At a stage the sum is over every layer before it, and of the patches that are left."""
    reducer = HaltingScores(gamma=0.5, beta=-1.0)
    model = reduced("deep", TokenPolicy(reducer, (3, 4), (0.6, 0.4)), "compress")
    state, decide = [], HaltingScores.relevance

    def spy(self, given, predictor):
        state.append(given)
        return decide(self, given, predictor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HaltingScores, "relevance", spy)
        logits(model)
    plain, gave = original("deep"), []
    for block in plain.source.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(lambda module, given, tokens: gave.append(tokens))
    logits(plain)
    sums = torch.sigmoid(0.5 * torch.stack(gave[:2])[:, :, 1:, 0] - 1.0).sum(0)
    torch.testing.assert_close(scores_of(state[0]), sums)
    left = sums.gather(1, state[1].patch_indices)
    torch.testing.assert_close(scores_of(state[1]), left + torch.sigmoid(0.5 * state[1].patches[..., 0] - 1.0))


@pytest.mark.parametrize("reducer", [Spot(shared=True), DTPS(Spot(shared=True))])
def test_stages_can_share_one_predictor(reducer: Reducer) -> None:
    reduction = reduction_of(reduced("deep", TokenPolicy.staged(reducer, 0.6, (2, 3, 4)), "compress"))
    assert reduction is not None
    assert len(reduction.stages) == 1
    assert {id(reduction.predictor(stage)) for stage in range(3)} == {id(reduction.stages[0])}
