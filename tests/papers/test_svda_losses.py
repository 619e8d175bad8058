"""The losses of the SVDA paper against literal transcriptions, one head and one image at a time."""

import math

import pytest
import torch

from attnrx.support.errors import InvalidInput
from attnrx.training.losses import LossContext
from attnrx.training.step import strengths_of
from attnrx.vit.models import family_of, observing
from attnrx_lab.perturbation import PerturbationRobustness, TargetRank, step_noise
from support.cases import CONFIGS, images, model


def context(config: str, seed: int = 0) -> LossContext:
    vit, inputs = model(CONFIGS[config]), images(CONFIGS[config], 4)
    return LossContext(vit, inputs, torch.zeros(4, dtype=torch.long), vit(inputs), seed)


@pytest.mark.parametrize("config", ["svda", "svda-one-head", "svda-deep"])
def test_target_rank_is_equation_28(config: str) -> None:
    given = context(config)
    terms = []
    for layer in family_of(given.model).attention(given.model):
        for sigma in layer.spectrum().strength:
            energy = [float(s) ** 2 for s in sigma]
            shares = [e / sum(energy) for e in energy]
            rank = math.exp(-sum(p * math.log(p) for p in shares))
            terms.append((rank - 2.5) ** 2)
    assert TargetRank(2.5)(given).item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)


def test_target_rank_of_some_layers() -> None:
    given = context("svda-deep")
    layers = family_of(given.model).attention(given.model)
    each = [TargetRank(2.5, layers=(number + 1,))(given) for number in range(len(layers))]
    assert TargetRank(2.5, layers=(1, 3))(given).item() == pytest.approx((each[0] + each[2]).item() / 2, rel=1e-12)
    TargetRank(2.5, layers=(2,))(given).backward()
    assert [strength.grad is not None for strength in strengths_of(given.model)[:3]] == [False, True, False]
    with pytest.raises(InvalidInput, match="no layer 9"):
        TargetRank(2.5, layers=(1, 9))(given)


def test_target_rank_pulls_the_rank_to_the_target() -> None:
    given = context("svda-deep")
    loss = TargetRank(3.0)
    strengths = strengths_of(given.model)
    with torch.no_grad():
        strengths[0][0] = 0.0  # a direction without strength has a finite slope too
    optimizer = torch.optim.Adam(strengths, lr=0.1)
    for _ in range(120):
        optimizer.zero_grad()
        value = loss(given)
        value.backward()
        optimizer.step()
    assert loss(given).item() < 1e-3


@pytest.mark.parametrize("config", ["svda", "dense"])
def test_perturbation_robustness_is_equation_34(config: str) -> None:
    given = context(config, seed=3)
    noisy = given.images + 0.2 * step_noise(given)

    def attention(inputs: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        with observing(given.model, family_of(given.model), lambda _, each: seen.append(each.attention)):
            given.model(inputs)
        return seen

    terms = []
    for clean, moved in zip(attention(given.images), attention(noisy), strict=True):
        for image in range(4):
            for head in range(clean.shape[1]):
                terms.append(torch.linalg.matrix_norm(clean[image, head] - moved[image, head]).item() ** 2)
    assert PerturbationRobustness(0.2)(given).item() == pytest.approx(sum(terms) / len(terms), rel=1e-10)
    last = terms[-len(terms) // len(family_of(given.model).attention(given.model)) :]
    of_last = PerturbationRobustness(0.2, layers=(len(family_of(given.model).attention(given.model)),))(given)
    assert of_last.item() == pytest.approx(sum(last) / len(last), rel=1e-10)
