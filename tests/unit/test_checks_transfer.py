"""Transfer: a fresh head on frozen features learns what is there to learn, and both models are treated alike."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from attnrx.data import LoadedImages, Normalization, from_tensors
from attnrx.show.checks import Comparison
from attnrx.support.errors import InvalidInput
from attnrx.support.modules import evaluating
from attnrx.vit.models import attach_tokens_, family_of, load_model
from attnrx.vit.tokens import AttentionReceived, TokenPolicy
from attnrx_lab.checks import Transfer
from attnrx_lab.checks.transfer import head_features
from support import cases

CONFIG = cases.CONFIGS["dense"]


def bright(count: int, classes: int = 2, noise: int = 40, seed: int = 0) -> LoadedImages:
    """Pictures whose class is how bright they are: any features that see brightness tell the classes apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    shape = (count, CONFIG.channels, CONFIG.image_size, CONFIG.image_size)
    pixels = torch.randint(noise, shape, generator=generator, dtype=torch.uint8)
    pixels = pixels + ((200 // classes) * labels[:, None, None, None]).to(torch.uint8)
    return from_tensors("bright", pixels, labels, Normalization(CONFIG.mean, CONFIG.std))


def comparison(
    candidate: nn.Module | None = None, test: LoadedImages | None = None, batch_size: int = 256
) -> Comparison:
    reference = cases.model(CONFIG)
    return Comparison(candidate or reference, reference, test or bright(40, seed=1), batch_size=batch_size)


def reduced(by: str = "compress") -> nn.Module:
    made = cases.model(CONFIG)
    attach_tokens_(made, family_of(made), TokenPolicy.staged(AttentionReceived(), 0.5, (2,)), by)
    return made


def test_a_head_learns_what_its_features_tell_apart():
    before, after, change = Transfer(bright(64), 2)(comparison(reduced()))
    # With torch 2.11 one of the 40 images is wrong.
    assert before.value == 100.0 and after.value >= 97.5 and change.value == after.value - before.value
    assert change.n == 40 and change.details["training_images"] == 64
    assert before.unit == "%" and change.unit == "points"


def test_features_that_tell_nothing_are_at_chance_and_the_change_says_so():
    blind = cases.model(CONFIG)
    with torch.no_grad():
        blind.patches.weight.zero_()
        blind.norm.weight.zero_()
    before, after, change = Transfer(bright(64), 2, epochs=30, most_drop=10.0)(comparison(blind))
    assert (before.value, after.value, change.value) == (100.0, 50.0, -50.0)
    assert change.outcome == "fails" and change.low is not None and change.high is not None
    assert change.low < -50 < change.high < -10
    # An interval of a share is no point, also where every image is right.
    assert before.low is not None and 80 < before.low < 98 and before.high == 100


def test_identical_models_do_not_differ_at_all():
    check = Transfer(cases.pixels(CONFIG, 30), CONFIG.classes, epochs=3)
    before, after, change = check(comparison(cases.model(CONFIG), cases.pixels(CONFIG, 25, seed=9)))
    assert change.value == 0 and set(change.details["by_seed"]) == {0.0}
    assert before.details["by_seed"] == after.details["by_seed"]


def test_seeds_change_the_head_and_are_averaged():
    data = cases.pixels(CONFIG, 30), CONFIG.classes
    compared = comparison(reduced(), cases.pixels(CONFIG, 50, seed=9))
    several = Transfer(*data, seeds=(0, 1, 2), epochs=2)(compared)
    alone = [Transfer(*data, seeds=(seed,), epochs=2)(compared) for seed in (0, 1, 2)]
    for place, finding in enumerate(several):
        own = [found[place].value for found in alone]
        assert finding.details["by_seed"] == pytest.approx(own)
        assert finding.value == pytest.approx(sum(own) / 3)
    assert len({found[0].value for found in alone}) > 1
    assert several == Transfer(*data, seeds=(0, 1, 2), epochs=2)(compared)


def test_the_order_of_the_images_does_not_matter():
    training, test = cases.pixels(CONFIG, 30), cases.pixels(CONFIG, 25, seed=9)
    mixed = [
        replace(images, rows=torch.randperm(len(images), generator=torch.Generator().manual_seed(4)))
        for images in (training, test)
    ]
    first = Transfer(training, CONFIG.classes, epochs=2)(comparison(reduced(), test, batch_size=25))
    again = Transfer(mixed[0], CONFIG.classes, epochs=2)(comparison(reduced(), mixed[1], batch_size=7))
    reported = [[(each.value, each.low, each.high) for each in findings] for findings in (first, again)]
    assert reported[0] == [pytest.approx(each, abs=1e-9) for each in reported[1]]


def test_tokens_leave_by_mask_or_compression_alike():
    check = Transfer(cases.pixels(CONFIG, 30), CONFIG.classes, seeds=(0,), epochs=2)
    masked, compressed = (
        check(comparison(each, cases.pixels(CONFIG, 25, seed=9))) for each in (reduced("mask"), reduced())
    )
    assert [finding.value for finding in masked] == [finding.value for finding in compressed]


@pytest.mark.parametrize("config", cases.OWN)
def test_features_are_what_the_classifier_was_given(config: str):
    model = cases.own(cases.OWN[config])
    images = cases.images(cases.OWN[config])
    with evaluating([model]):
        rows = head_features(model, family_of(model).heads(model), images)
        assert rows.shape == (len(images), cases.OWN[config].width)
        if config != "lvvit":  # whose patches answer too
            assert torch.allclose(model.classifier(rows), model(images))  # type: ignore[operator]
    assert not any(head._forward_pre_hooks for head in family_of(model).heads(model))


def test_models_of_other_libraries_are_read_at_every_head():
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    torch.set_default_dtype(torch.float32)
    images = torch.randn(3, 3, 32, 32)
    widths = {"vit_tiny_patch16_224": 12, "deit_tiny_distilled_patch16_224": 24}
    for name, width in widths.items():
        model = load_model(timm.create_model(name, **sizes)).eval()
        with evaluating([model]):
            heads = family_of(model).heads(model)
            rows = head_features(model, heads, images)
            answers = [head(part) for head, part in zip(heads, rows.split(12, -1), strict=True)]
            assert torch.allclose(torch.stack(answers).mean(0), model(images), atol=1e-6)
        assert rows.shape == (3, width)
    bare = load_model(timm.create_model("vit_tiny_patch16_224", **{**sizes, "num_classes": 0})).eval()
    assert family_of(bare).heads(bare) == ()
    with pytest.raises(InvalidInput, match=r"candidate has no classification head.*num_classes"):
        Transfer(bright(8), 2)(comparison(bare))
