"""Losses of models whose tokens are sampled, and the selector by heads."""

import pytest
import torch
from torch import nn

from attnrx.support.errors import NotSupported
from attnrx.training.losses import LossContext
from attnrx.vit.models import attach_tokens_, family_of, recording_blocks, recording_tokens
from attnrx.vit.models.boundary.adoption import adopt
from attnrx.vit.tokens import Reducer, TokenPolicy, TokenState
from attnrx_lab.perturbation import PerturbationRobustness
from attnrx_lab.tokens import DynamicViT, KeepRatio
from attnrx_lab.tokens.scores import HeadSelectorPredictor, head_mean
from support.pretrained import TIMM, VIT, of_timm


def reducing(reducer: Reducer) -> nn.Module:
    """A ViT of three layers and 16 patches, of which eight and then four remain."""
    model = adopt(TIMM, of_timm(VIT, depth=3, img_size=32)).double()
    torch.manual_seed(0)
    attach_tokens_(model, family_of(model), TokenPolicy.staged(reducer, 0.5, (2, 3)))
    return model.train()


def context_of(model: nn.Module) -> LossContext:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(6, 3, 32, 32, generator=generator, dtype=torch.float64)
    torch.manual_seed(2)
    with recording_blocks(model, family_of(model)) as features, recording_tokens(model) as runs:
        logits = model(images)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    return LossContext(model, images, labels, logits, 4, features=tuple(features), run=runs[-1])


def test_a_stage_that_keeps_every_patch_has_no_share_to_learn() -> None:
    # The numbers are those of the second stage, the only one that samples.
    model = adopt(TIMM, of_timm(VIT, depth=3, img_size=32)).double()
    torch.manual_seed(0)
    attach_tokens_(model, family_of(model), TokenPolicy(DynamicViT(), (2, 3), (1.0, 0.5)))
    context = context_of(model.train())
    assert context.run is not None
    (keep,) = context.run.sampled.values()
    assert KeepRatio()(context).item() == pytest.approx(float((keep.mean(1) - 0.5).square().mean()))


def test_maps_under_noise_are_compared_before_tokens_leave() -> None:
    context = context_of(reducing(DynamicViT()))
    alone = KeepRatio()(context).item()
    assert PerturbationRobustness(layers=(1,))(context).item() > 0
    assert KeepRatio()(context).item() == alone  # it reads the tokens of the training pass
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
