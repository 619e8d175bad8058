"""Learning which tokens leave: draws to learn from, losses about them, and nothing that breaks at low ratios."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attnrx.data import Augmentation, Normalization, Splits, from_tensors
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.training import TrainingConfig, TrainingRun, train
from attnrx.training.losses import Distillation, LossContext, Task
from attnrx.vit.attention import sized_softmax
from attnrx.vit.models import (
    answer,
    attach_tokens_,
    family_of,
    library_form,
    load_model,
    recording_blocks,
    recording_tokens,
    reduction_of,
    save_model,
)
from attnrx.vit.models.boundary.adoption import adopt
from attnrx.vit.tokens import ClassAttention, TokenPolicy, TokenState
from attnrx.vit.tokens.reducer import best
from attnrx_lab.papers.similarity import TokenSimilarity
from attnrx_lab.tokens import DTPS, DynamicViT, EViT, KeepRatio, Spot, SPViT
from attnrx_lab.tokens import learned_scores as reducing_module
from attnrx_lab.tokens.learned_scores import odds, sampled_keep
from support.cases import REDUCTIONS
from support.pretrained import TIMM, VIT, adopted_once, inputs, of_timm
from support.tiny_runs import at, same, weights
from support.token_models import fits, reduced


def scores(count: int = 200, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        (spread * torch.randn(4, count, 2, generator=generator, dtype=torch.float64)).log_softmax(-1).requires_grad_()
    )


def test_a_draw_is_hard_and_can_be_learned_from() -> None:
    given = scores()
    keep = sampled_keep(given, torch.ones(4, 200))
    assert set(keep.detach().unique().tolist()) == {0.0, 1.0}
    keep.sum().backward()
    assert given.grad is not None
    assert bool((given.grad[..., 0] > 0).all())


def test_patches_are_drawn_as_often_as_their_scores_say() -> None:
    given = torch.tensor([0.2, 0.8]).log().expand(1, 20000, 2)
    assert sampled_keep(given, torch.ones(1, 20000)).mean().item() == pytest.approx(0.2, abs=0.01)


def test_what_has_left_stays_away_and_the_last_patch_never_leaves() -> None:
    there = (torch.arange(200) % 3 == 0).double().expand(4, -1)
    keep = sampled_keep(scores(), there)
    assert bool((keep <= there).all())
    hopeless = torch.stack([torch.full((4, 200), -60.0), torch.zeros(4, 200)], dim=-1).requires_grad_()
    with torch.no_grad():
        hopeless[:, 7, 0] = -50.0
    keep = sampled_keep(hopeless, torch.ones(4, 200))
    assert keep.sum(1).tolist() == [1.0] * 4
    assert bool((keep[:, 7] == 1).all())
    keep.sum().backward()
    assert bool(hopeless.grad.isfinite().all())  # type: ignore[union-attr]


def test_attention_over_sizes_is_exact_and_its_gradient_finite() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (300 * torch.randn(2, 3, 4, 6, generator=generator, dtype=torch.float64)).requires_grad_()
    sizes = torch.tensor([[1.0, 0.0, 3.0, 1.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    attention = sized_softmax(logits, sizes)
    expected = torch.softmax(logits + sizes.detach().log()[:, None, None], dim=-1)
    torch.testing.assert_close(attention, expected, rtol=1e-10, atol=1e-12)
    attention.square().sum().backward()
    assert bool(sizes.grad.isfinite().all())  # type: ignore[union-attr]
    assert bool(logits.grad.isfinite().all())  # type: ignore[union-attr]


def reducing(reducer, ratio: float = 0.5, is_working: bool = False) -> nn.Module:
    """A model of timm as users have it, or a working copy."""
    model = adopt(TIMM, of_timm(VIT, depth=3, img_size=32)).double()
    torch.manual_seed(0)
    attach_tokens_(model, family_of(model), TokenPolicy.staged(reducer, ratio, (2, 3)))
    return model if is_working else library_form(model)


def splits(model: nn.Module) -> Splits:
    scale = Normalization(*family_of(model).normalization(model))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (24, 3, 32, 32), generator=generator, dtype=torch.uint8)
    images = from_tensors("noise", pixels, torch.randint(0, 5, (24,), generator=generator), scale)
    return Splits("noise", images, images.take(8), images.take(8), tuple("abcde"), 3, 32, scale, Augmentation(0))


def run(folder: Path, reducer, *losses, ratio: float = 0.5, is_working: bool = False, **knobs) -> TrainingRun:
    model = reducing(reducer, ratio, is_working)
    settings = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3, "precision": "fp32", "checkpoint_every": 2} | knobs
    config = TrainingConfig(losses=losses or (Task(), KeepRatio()), **settings)
    return train(model, splits(model), config, folder)


@pytest.mark.parametrize("reducer", [Spot(), DynamicViT()], ids=["spot", "dynamicvit"])
@pytest.mark.parametrize("ratio", [0.8, 0.3])
@pytest.mark.slow
def test_training_reaches_the_ratio_that_was_asked_for(reducer, ratio: float, tmp_path: Path) -> None:
    made = run(tmp_path, reducer, KeepRatio(), ratio=ratio, epochs=40, predictor_learning_rate=10.0)
    reported = [record["losses"]["keep_ratio"] for record in made.history]
    assert sum(reported[-5:]) / 5 < 0.03  # without learning about 0.05 at 0.3 and 0.13 at 0.8
    reduction = reduction_of(made.model)
    assert reduction is not None
    images = next(splits(made.model).train.batches(24)).images.double()
    with torch.no_grad():
        with recording_tokens(made.model) as runs:
            made.model.train()(images)
        sampled = [keep.mean().item() for keep in runs[-1].sampled.values()]
        assert sampled == pytest.approx(reduction.policy.keep, abs=0.12)
        made.model.eval()
        small = made.model(images)
        reduction.by = "mask"
        for layer in family_of(made.model).attention(made.model)[1:]:
            assert layer.backend.wanted is not None  # type: ignore[attr-defined]
        torch.testing.assert_close(made.model(images), small, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_working", [False, True])
def test_predictors_learn_at_a_rate_of_their_own(is_working: bool, tmp_path: Path) -> None:
    model = reducing(Spot(), is_working=is_working)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    still = weights(run(tmp_path, Spot(), is_working=is_working, predictor_learning_rate=0.0))
    prefix = "tokens." if is_working else "attnrx_tokens."
    assert still.keys() == before.keys() and any(name.startswith(prefix) for name in before)
    for name, tensor in still.items():
        assert torch.equal(tensor, before[name]) == name.startswith(prefix), name


@pytest.mark.parametrize("reducer", [Spot(), ClassAttention()], ids=["spot", "class attention"])
@pytest.mark.slow
def test_stopped_and_resumed_is_never_stopped(reducer, tmp_path: Path) -> None:
    class Crash(BaseException):
        pass

    def crash() -> None:
        raise Crash

    losses = (Task(), KeepRatio()) if reducer.learned else (Task(),)
    with pytest.raises(Crash), at(3, crash):
        run(tmp_path / "stopped", reducer, *losses)
    assert same(run(tmp_path / "stopped", reducer, *losses), run(tmp_path / "whole", reducer, *losses))
    saved = load_model(tmp_path / "whole")
    assert reduction_of(saved) is not None


def test_tokens_are_compared_with_those_of_the_teacher_where_they_stay(tmp_path: Path) -> None:
    model = reducing(Spot())
    teacher = copy.deepcopy(adopt(TIMM, of_timm(VIT, depth=3, img_size=32)).double())
    folder = str(save_model(tmp_path, teacher))
    images = next(splits(model).test.batches(4)).images.double()
    model.train()
    with recording_blocks(model, family_of(model)) as features, recording_tokens(model) as runs:
        logits = model(images)
    labels, run = torch.zeros(4, dtype=torch.long), runs[-1]
    given = LossContext(model, images, labels, logits, seed=0, features=tuple(features), run=run)
    found = TokenSimilarity(folder)(given)
    with recording_blocks(teacher, family_of(teacher)) as theirs, torch.no_grad():
        teacher(images)
    assert run.sizes is not None
    stay = run.sizes[:, 1:] > 0
    alike = torch.nn.functional.cosine_similarity(features[-1][:, 1:], theirs[-1][:, 1:], dim=-1)
    expected = torch.stack([(1 - alike[i][stay[i]]).mean() for i in range(4)]).mean()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found.backward()
    ratio = KeepRatio()(given).item()
    shares = torch.stack([stay.double().mean(1)])
    assert ratio >= 0
    assert shares.max() <= 1


def test_losses_about_tokens_need_tokens_that_leave() -> None:
    model = adopted_once("vit")[2]
    images = torch.zeros(2, *family_of(model).input_shape(model), dtype=torch.float64)
    given = LossContext(model, images, torch.zeros(2, dtype=torch.long), model(images), seed=0)
    for loss in (KeepRatio(), TokenSimilarity("teacher")):
        with pytest.raises(NotSupported):
            loss(given)
    with pytest.raises(InvalidInput):
        KeepRatio(weight=0.0)


LEARNED = {kind: reducer for kind, reducer in REDUCTIONS.items() if reducer.learned} | {"evit-spot": EViT(Spot())}


def selected(policy: TokenPolicy, patches: int):
    """In the place of a draw: what inference selects, stage by stage."""
    counts = itertools.cycle(policy.counts(patches))

    def draw(scores, there, prunes_one=False):
        kept = best(odds(scores).detach(), (there > 0).to(scores.dtype), next(counts))
        keep = torch.zeros_like(there).scatter(1, kept, 1.0)
        return keep + scores[..., 0] - scores[..., 0].detach()

    return draw


@pytest.mark.parametrize("is_working", [False, True])
@pytest.mark.parametrize("name", ["deep", "hf dinov2", "lvvit"])
@pytest.mark.parametrize("kind", LEARNED)
def test_training_with_the_draws_of_inference_is_inference(
    kind: str, name: str, is_working: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = (2, 4) if name == "deep" else (2,)
    policy = TokenPolicy.staged(LEARNED[kind], 0.5, stages)
    if not fits(name, policy.reducer):
        pytest.skip("it goes by a class token, and the model has none")
    model = reduced(name, policy, "compress")
    model = model if is_working else library_form(model)
    reduction = reduction_of(model)
    assert reduction is not None
    images = inputs(model)
    with torch.no_grad():
        for parameter in reduction.parameters():
            parameter.mul_(0.3)  # so that no probability is so near 0 or 1 that the weights of a package hide mistakes
        small = answer(model, images)
    monkeypatch.setattr(reducing_module, "sampled_keep", selected(policy, reduction.shape.layout.patches))
    reduction.train()
    sampled = answer(model, images)
    torch.testing.assert_close(sampled, small, rtol=1e-10, atol=1e-10)
    sampled.square().sum().backward()
    gradients = [parameter.grad for parameter in reduction.parameters()]
    assert all(own is not None and bool(own.isfinite().all()) for own in gradients)
    assert any(bool((own != 0).any()) for own in gradients if own is not None)


@pytest.mark.parametrize("reducer", [SPViT(), DTPS()], ids=["spvit", "dtps"])
def test_what_leaves_is_taken_along_by_a_gradient(reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every patch of the image matters to the tokens after a stage, those that were drawn to leave too."""
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    state = TokenState(patches, 0, torch.ones(2, 6, dtype=torch.float64), torch.arange(6).expand(2, -1))
    keep = torch.tensor([[1.0, 0, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1]], dtype=torch.float64, requires_grad=True)
    scores = torch.randn(2, 6, 2, generator=generator, dtype=torch.float64).log_softmax(-1).requires_grad_()
    sampled = reducer.sampled(state, keep, scores)
    there = keep.detach() if sampled.added is None else keep.detach().scatter(1, sampled.added, 1.0)
    (sampled.patches * there[..., None]).square().sum().backward()
    assert patches.grad is not None and keep.grad is not None
    assert bool((patches.grad.abs().sum(-1) > 0).all())
    assert bool((keep.grad[keep == 0] != 0).all())
    assert (scores.grad is not None) == (sampled.added is not None)


@pytest.mark.parametrize("is_working", [False, True])
@pytest.mark.parametrize(
    ("name", "switch"), [("vit", "set_grad_checkpointing"), ("hf vit", "gradient_checkpointing_enable")]
)
def test_pruned_tokens_are_not_computed_again_for_gradients(name: str, switch: str, is_working: bool) -> None:
    model: Any = copy.deepcopy(adopted_once(name)[2])
    attach_tokens_(model, family_of(model), TokenPolicy(DynamicViT(), (2,), (0.5,)), "mask")
    model = model if is_working else library_form(model)
    images = torch.zeros(2, *family_of(model).input_shape(model), dtype=torch.float64)
    getattr(model.source if is_working else model, switch)()
    with pytest.raises(NotSupported, match="gradient checkpointing computes the blocks again"):
        model.train()(images)
    with torch.no_grad():
        assert answer(model.eval(), images).shape[0] == 2


@pytest.mark.parametrize("reducer", [Spot(), SPViT(), DTPS()], ids=["spot", "spvit", "dtps"])
@pytest.mark.slow
def test_a_low_keep_ratio_is_trained_with_one_token_at_least(
    reducer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One patch of sixteen is left at both stages; with predictors that learn fast, most draws would leave none."""
    model = adopt(TIMM, of_timm(VIT, depth=3, img_size=32)).double()
    attach_tokens_(model, family_of(model), TokenPolicy(reducer, (2, 3), (0.0625, 0.0625)))
    model = library_form(model)
    teacher = str(save_model(tmp_path / "teacher", adopted_teacher()))
    losses = (Task(), KeepRatio(), Distillation(teacher), TokenSimilarity(teacher))
    least, draw = [], reducing_module.sampled_keep

    def look(*given, **options) -> torch.Tensor:
        keep = draw(*given, **options)
        least.append(keep.sum(1).min().item())
        return keep

    monkeypatch.setattr(reducing_module, "sampled_keep", look)
    settings = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3, "precision": "fp32"}
    config = TrainingConfig(losses=losses, predictor_learning_rate=100.0, **settings)  # type: ignore[arg-type]
    made = train(model, splits(model), config, tmp_path / "run")
    assert len(least) == 12 and min(least) >= 1
    assert all(math.isfinite(value) for record in made.history for value in record["losses"].values())
    assert all(bool(parameter.isfinite().all()) for parameter in made.model.parameters())
    with torch.no_grad():
        assert bool(made.model(next(splits(model).test.batches(4)).images.double()).isfinite().all())


def adopted_teacher() -> nn.Module:
    return adopt(TIMM, of_timm(VIT, depth=3, img_size=32)).double()
