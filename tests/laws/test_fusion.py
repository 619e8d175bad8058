"""Shared directions, one head each: from a CP SlimAtt, trained under the rank constraint, to irregular heads."""

from pathlib import Path

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.data import Augmentation, Normalization, Splits
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.rules import EnergyRetention, prescribe_maps
from attnrx.support.errors import NotSupported
from attnrx.training import TrainingConfig, train
from attnrx.training.losses import LossContext, Task
from attnrx.vit.attention import Eager, using
from attnrx.vit.models import family_of, load_model, save_model
from attnrx_lab.papers.ownership import FusionOwnership, nonnegative_fusion, normalize_fusion_, project_fusion_
from attnrx_lab.rules import FusionOwner, SharedRank
from attnrx_lab.vision_transformer import VisionTransformer
from support import cases
from support.comparisons import pixels

DENSE = cases.CONFIGS["dense"]
IMAGES = pixels(DENSE, 16)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(batch.images.double()) for batch in IMAGES.batches(8)])


@pytest.fixture
def shared() -> VisionTransformer:
    """A CP SlimAtt of five directions a layer."""
    dense = cases.model(DENSE)
    rule = SharedRank(5, form="cp", sweeps=20)
    small = realize(dense, prescribe_maps(diagnose(dense, IMAGES, batch_size=8), rule))
    assert isinstance(small, VisionTransformer)
    return small


def fusions(model) -> list[torch.Tensor]:
    return [layer.scores.get_parameter("strength").detach() for layer in family_of(model).attention(model)]


@pytest.mark.parametrize("rule", [FusionOwner(), EnergyRetention(0.9)], ids=str)
def test_the_mask_of_shared_directions_is_realized_as_heads_with_rows_of_their_own(rule, shared) -> None:
    prescription = prescribe_maps(diagnose(shared, IMAGES, batch_size=8), rule)
    masked, small = (realize(shared, prescription, by=by) for by in ("mask", "compress"))
    torch.testing.assert_close(logits(masked), logits(small), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(logits(small), logits(shared), rtol=1e-6)
    layers = family_of(small).attention(small)
    assert {layer.spec.form for layer in layers} == {"dense"}
    with using(layers, [Eager()] * len(layers)):
        torch.testing.assert_close(logits(masked), logits(small), rtol=1e-10, atol=1e-10)
    if isinstance(rule, FusionOwner):
        assert [sum(ranks) for ranks in prescription.ranks] == [5] * len(layers)
        assert all(bool((layer.qk.keep.sum(0) == 1).all()) for layer in prescription.layers)
        costs = family_of(small).costs(small)
        assert costs.params == sum(parameter.numel() for parameter in small.parameters())
        assert costs.macs < family_of(shared).costs(shared).macs


def test_a_fusion_with_one_head_a_direction_is_squeezed_exactly(shared, tmp_path: Path) -> None:
    with torch.no_grad():
        for fusion in fusions(shared):
            fusion.mul_(fusion.abs() == fusion.abs().amax(0))
    small = realize(shared, prescribe_maps(diagnose(shared, IMAGES, batch_size=8), FusionOwner()))
    torch.testing.assert_close(logits(small), logits(shared), rtol=1e-10, atol=1e-10)
    again = load_model(save_model(tmp_path, small))
    assert torch.equal(logits(again), logits(small))


def test_heads_of_their_own_have_nothing_to_be_squeezed() -> None:
    dense = cases.model(DENSE)
    with pytest.raises(NotSupported, match="fusion_rank"):
        prescribe_maps(diagnose(dense, IMAGES, batch_size=8), FusionOwner())


def test_turning_changes_nothing_and_the_constraint_holds_at_once(shared) -> None:
    before = logits(shared)
    normalize_fusion_(shared)
    torch.testing.assert_close(logits(shared), before, rtol=1e-10, atol=1e-10)
    project_fusion_(shared)
    for fusion in fusions(shared):
        assert bool((fusion >= 0).all())
        torch.testing.assert_close(fusion.norm(dim=0), torch.ones(fusion.shape[1], dtype=fusion.dtype))


def test_the_penalty_counts_heads_and_grows_over_the_run(shared) -> None:
    heads = len(family_of(shared).attention(shared)[0].spec.heads)
    images = next(IMAGES.batches(2)).images.double()
    context = LossContext(shared, images, torch.zeros(2, dtype=torch.long), shared(images), seed=0, progress=0.5)
    for fusion in fusions(shared):
        fusion.fill_(1.0)
    assert FusionOwnership()(context).item() == pytest.approx(0.5 * (heads - 1))
    for fusion in fusions(shared):
        fusion[1:] = 0
    assert FusionOwnership()(context).item() == 0


@pytest.mark.slow
def test_training_under_the_constraint_finds_an_owner_for_every_direction(shared, tmp_path: Path) -> None:
    scale = Normalization(DENSE.mean, DENSE.std)
    names = tuple(map(str, range(DENSE.classes)))
    data = Splits(
        "noise", IMAGES, IMAGES, IMAGES, names, DENSE.channels, DENSE.image_size, scale, Augmentation(0, False)
    )

    def squeezed_apart(model) -> float:
        small = realize(model, prescribe_maps(diagnose(model, IMAGES, batch_size=8), FusionOwner()))
        return float((logits(small) - logits(model)).norm() / logits(model).norm())

    def off_block(model) -> float:
        return max(float((1 - fusion.square().amax(0)).max()) for fusion in fusions(model))

    normalize_fusion_(shared)
    project_fusion_(shared)
    assert off_block(shared) > 0.05
    config = TrainingConfig(
        epochs=30,
        batch_size=8,
        learning_rate=0.02,
        weight_decay=0.0,
        losses=(Task(0.0), FusionOwnership(30.0)),
        precision="fp32",
    )
    with nonnegative_fusion(shared):
        made = train(shared, data, config, tmp_path).model
    assert off_block(made) < 1e-3
    assert all(bool((fusion >= 0).all()) for fusion in fusions(made))
    assert squeezed_apart(made) < 0.1
