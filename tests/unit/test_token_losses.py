"""The losses of token reducers of other papers, against their equations."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.training.losses import (
    HaltingPrior,
    KeepRatio,
    Loss,
    LossContext,
    MultiExit,
    PerturbationRobustness,
    PolicyGradient,
    Ponder,
    Task,
)
from attnrx.training.losses.halting import ponder
from attnrx.training.losses.reinforcement import reinforced
from attnrx.vit.models import TokenRun, attach_tokens_, family_of, recording_blocks, recording_tokens, reduction_of
from attnrx.vit.tokens import DynamicViT, EViT, HaltingScores, Reducer, TokenPolicy, TokenState
from attnrx.vit.tokens.learned_scores import HeadSelectorPredictor, head_mean
from support.pretrained import TIMM, VIT, of_timm


def reducing(reducer: Reducer) -> nn.Module:
    """A ViT of three layers and 16 patches, of which eight and then four remain."""
    model = TIMM.adopt(of_timm(VIT, depth=3, img_size=32)).double()
    torch.manual_seed(0)
    attach_tokens_(model, family_of(model), TokenPolicy.staged(reducer, 0.5, (2, 3)))
    return model.train()


def context_of(model: nn.Module, straight_through: bool = True, progress: float = 1.0) -> LossContext:
    reduction = reduction_of(model)
    assert reduction is not None
    reduction.straight_through = straight_through
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(6, 3, 32, 32, generator=generator, dtype=torch.float64)
    torch.manual_seed(2)
    with recording_blocks(model, family_of(model)) as features, recording_tokens(model) as runs:
        logits = model(images)
    labels, run = torch.tensor([0, 1, 2, 3, 4, 0]), runs[-1]
    return LossContext(model, images, labels, logits, 4, features=tuple(features), run=run, progress=progress)


def run_of(context: LossContext) -> TokenRun:
    assert context.run is not None
    return context.run


def test_ponder_is_the_layers_and_the_remainder() -> None:
    first, second, third = torch.tensor([[[0.2, 0.995, 0.4]], [[0.9, 0.3, 0.1]], [[0.5, 0.5, 0.5]]])
    present = torch.ones(1, 3)
    layers = [(first, present), (second, present), (third, torch.tensor([[1.0, 1.0, 0.0]]))]
    # The first patch halts after two layers, r = 1 - 0.2; the second after one, r = 1; the third is pruned after two.
    assert float(ponder(layers, 0.01)) == pytest.approx(((2 + 0.8) + (1 + 1) + (2 + 0.6)) / 3)


def test_ponder_of_a_model_counts_the_layers_of_every_patch() -> None:
    context = context_of(reducing(HaltingScores()))
    scores = [torch.sigmoid(5.0 * tokens[:, 1:, 0] - 10.0).tolist() for tokens in context.features[:2]]
    expected = 0.0
    for image, (eight, four) in enumerate(zip(*(stage.tolist() for stage in run_of(context).trail), strict=True)):
        for patch in range(16):
            before = [scores[0][image][patch]] if patch in eight else []
            before += [scores[1][image][eight.index(patch)]] if patch in four else []
            expected += 1 + len(before) + 1 - sum(before)
    assert Ponder()(context).item() == pytest.approx(expected / (6 * 16))


def test_halting_scores_of_a_mask_are_those_of_the_smaller_model() -> None:
    # Before layer 2 one of the 16 patches leaves, and a fused token comes: 16 tokens as before, in other places.
    found = []
    for by in ("mask", "compress"):
        model = TIMM.adopt(of_timm(VIT, depth=3, img_size=32)).double()
        policy = TokenPolicy(EViT(HaltingScores(beta=0.0)), (2, 3), (0.95, 0.5))
        attach_tokens_(model, family_of(model), policy, by)
        context = context_of(model.train())
        found.append([loss(context).item() for loss in (Ponder(), HaltingPrior())])
    assert found[0] == pytest.approx(found[1])


def test_the_halting_prior_is_a_divergence_from_a_gaussian() -> None:
    context = context_of(reducing(HaltingScores()))
    reduction = reduction_of(context.model)
    assert reduction is not None
    means = []
    for tokens in context.features:
        scores = torch.sigmoid(5.0 * tokens[:, 1:, 0] - 10.0)
        means.append(float(scores.mean()))
    shares = [mean / sum(means) for mean in means]
    target = [math.exp(-((layer - 1.75) ** 2) / 2) for layer in (1, 2, 3)]  # 1 + 0.5 + 0.25 layers
    expected = sum(share * math.log(share / weight * sum(target)) for share, weight in zip(shares, target, strict=True))
    assert HaltingPrior()(context).item() == pytest.approx(expected)
    assert HaltingPrior(depth=1.75)(context).item() == pytest.approx(expected)


def test_the_policy_gradient_is_minus_the_log_probability_times_the_advantage() -> None:
    probabilities = torch.tensor([[0.9, 0.4, 0.2]])
    scores = torch.stack([probabilities.log(), (1 - probabilities).log()], dim=-1)
    keeps = [torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0, 0.0]])]
    found = reinforced([scores, scores], keeps, [torch.tensor([[2.0]]), torch.tensor([[3.0, 7.0, -1.0]])])
    first = -2 * (math.log(0.9) + math.log(0.6) + math.log(0.2)) / 3
    second = -(3 * math.log(0.9) - math.log(0.8)) / 2  # the second patch was dropped before
    assert float(found) == pytest.approx((first + second) / 2)


def test_the_rewards_are_those_of_the_papers() -> None:
    right, keep = torch.tensor([True, False]), torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    (by_stage,) = PolicyGradient(penalty=0.5)._rewards(right, [keep])
    assert by_stage.tolist() == [[1 - 0.25**2], [-0.5]]
    (by_patch,) = PolicyGradient("patch", "mean", saving=0.25)._rewards(right, [keep])
    torch.testing.assert_close(by_patch, torch.tensor([[0.75, 1.25, 1.25, 1.25], [-1.25, -1.25, -0.75, -0.75]]))


@pytest.mark.parametrize("loss", [PolicyGradient(), PolicyGradient("patch", "mean")], ids=["ia-red2", "rl4evit"])
def test_predictors_learn_by_the_policy_gradient_alone(loss: Loss) -> None:
    model = reducing(DynamicViT())
    reduction = reduction_of(model)
    assert reduction is not None
    context = context_of(model, straight_through=False, progress=0.99)
    Task()(context).backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in reduction.parameters())
    backbone = next(model.parameters()).grad
    assert backbone is not None and bool(backbone.any())
    model.zero_grad()
    loss(context).backward()
    assert all(bool(stage.scores[0].weight.grad.any()) for stage in reduction.stages)  # type: ignore[union-attr, index]
    assert model.training


def test_stages_begin_to_learn_one_after_another() -> None:
    model = reducing(DynamicViT())
    reduction = reduction_of(model)
    assert reduction is not None
    PolicyGradient()(context_of(model, straight_through=False, progress=0.4)).backward()
    first, second = (stage.scores[0].weight.grad for stage in reduction.stages)  # type: ignore[union-attr, index]
    assert first is not None and second is None


def test_a_stage_that_keeps_every_patch_has_no_share_to_learn() -> None:
    # The numbers are those of the second stage, the only one that samples.
    model = TIMM.adopt(of_timm(VIT, depth=3, img_size=32)).double()
    torch.manual_seed(0)
    attach_tokens_(model, family_of(model), TokenPolicy(DynamicViT(), (2, 3), (1.0, 0.5)))
    context = context_of(model.train(), straight_through=False)
    (keep,), (scores,) = run_of(context).sampled, run_of(context).keep_scores
    assert KeepRatio()(context).item() == pytest.approx(float((keep.mean(1) - 0.5).square().mean()))
    logits = model.eval()(context.images)
    model.train()
    right = [given.argmax(-1) == context.labels for given in (context.logits, logits)]
    # Half of the patches remain at inference: an image has a reward of 1 - 0.5^2 or the penalty -1.
    baseline = torch.where(right[1], 0.75, -1.0).double()
    reward = torch.where(right[0], 1 - keep.mean(1).square(), -1.0)
    expected = float(reinforced([scores], [keep.detach()], [(reward - baseline)[:, None].detach()]))
    assert PolicyGradient()(context).item() == pytest.approx(expected)


def test_exits_are_the_classifier_on_early_class_tokens() -> None:
    model = reducing(EViT())
    context = context_of(model)
    norm, (classifier,) = family_of(model).pooled_norm(model), family_of(model).heads(model)
    for share in (0.0, 1.0):
        expected = 0.0
        for tokens in context.features[:2]:
            answer = classifier(norm(tokens)[:, 0])
            if share:
                final = context.logits.softmax(-1)
                expected += float((final * (final.log() - answer.log_softmax(-1))).sum(1).mean()) / 2
            else:
                expected += float(nn.functional.cross_entropy(answer, context.labels)) / 2
        assert MultiExit(distilled=share)(context).item() == pytest.approx(expected)


def test_a_classifier_of_pooled_patches_has_no_exits() -> None:
    model = TIMM.adopt(of_timm(VIT, depth=3, img_size=32, global_pool="avg")).double()
    attach_tokens_(model, family_of(model), TokenPolicy.staged(EViT(), 0.5, (2, 3)))
    with pytest.raises(NotSupported, match="reads the class token alone"):
        MultiExit()(context_of(model.train()))


@pytest.mark.parametrize("reducer", [DynamicViT(), HaltingScores()], ids=str)
def test_maps_under_noise_are_compared_before_tokens_leave(reducer: Reducer) -> None:
    context = context_of(reducing(reducer))
    other = KeepRatio() if reducer.learned else Ponder()
    alone = other(context).item()
    assert PerturbationRobustness(layers=(1,))(context).item() > 0
    assert other(context).item() == alone  # it reads the tokens of the training pass
    for layers in ((), (1, 2)):
        with pytest.raises(NotSupported, match="at most layers=1"):
            PerturbationRobustness(layers=layers)(context)


def test_a_selector_by_heads_weights_their_probabilities() -> None:
    keep = torch.tensor([0.9, 0.2])  # of two heads, for one patch
    scores = torch.stack([keep, 1 - keep], dim=-1).log()[None, :, None]
    found = head_mean(scores, torch.tensor([[[0.5, 0.25]]]).log())
    wanted = (0.5 * 0.9 + 0.25 * 0.2) / 0.75
    torch.testing.assert_close(found.exp(), torch.tensor([[[wanted, 1 - wanted]]]))


def test_a_head_scores_its_own_share_of_the_features() -> None:
    torch.manual_seed(0)
    predictor = HeadSelectorPredictor(8, 2)
    predictor.get_parameter("head_weights.2.bias").data.copy_(torch.tensor([0.0, -100.0]))  # the second head is ignored
    tokens = torch.randn(1, 4, 8)
    state = TokenState(tokens, 1, torch.ones(1, 4), torch.arange(3)[None])
    alone = predictor.scores(predictor.features(tokens[:, 1:, :4], torch.ones(1, 3)))
    torch.testing.assert_close(predictor(state), alone)
    torch.testing.assert_close(predictor(state).exp().sum(-1), torch.ones(1, 3))
    with pytest.raises(NotSupported, match="no multiple of 3"):
        HeadSelectorPredictor(8, 3)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Ponder(epsilon=0.0), "between 0 and 1"),
        (lambda: PolicyGradient(credit="token"), "one of stage, patch"),
        (lambda: PolicyGradient(baseline="none"), "one of greedy, mean"),
        (lambda: PolicyGradient(saving=-1.0), "0 or more"),
        (lambda: PolicyGradient(penalty=float("nan")), "penalty=nan"),
        (lambda: HaltingPrior(depth=float("nan")), "depth=nan"),
        (lambda: HaltingPrior(depth=0.0), "1 or more, or None"),
        (lambda: HaltingPrior(depth=3.5)(context_of(reducing(HaltingScores()))), "3 layers at most"),
        (lambda: MultiExit(distilled=1.5), "at most 1"),
    ],
)
def test_impossible_options_of_losses_are_refused(make, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        make()


@pytest.mark.parametrize("loss", [Ponder(), HaltingPrior(), PolicyGradient()], ids=str)
def test_losses_without_their_reducer_are_refused(loss: Loss) -> None:
    with pytest.raises(NotSupported, match="omit"):
        loss(replace(context_of(reducing(EViT()))))
