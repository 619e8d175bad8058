"""Embeddings that are made smaller and searched for in an index of the original's vectors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization.distillation import Distill
from attnrx.cli import options
from attnrx.cli.commands import COMMANDS
from attnrx.nouns.effort import EFFORTS, Effort
from attnrx.show.checks import Index
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.vit.outputs import KINDS

SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 2}


def tower(num_classes: int = 0) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SIZES, num_classes=num_classes).eval()
    return rx.load(model, outputs="classes" if num_classes else "embedding")


def pixels(count: int, seed: int = 0) -> torch.Tensor:
    # Few directions and noise: random images would be equally far from each other.
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(12, 3 * 32 * 32, generator=torch.Generator().manual_seed(9))
    images = torch.randn(count, 12, generator=generator) @ shared / 2
    return images.reshape(count, 3, 32, 32) + 0.3 * torch.randn(count, 3, 32, 32, generator=generator)


def small_tower(model: nn.Module, images: torch.Tensor) -> nn.Module:
    diagnosis = rx.diagnose(model, images[:64], moments=True)
    return rx.realize(model, rx.prescribe(diagnosis, "qk=total_rank:0.5 hidden=uniform_rank:0.5"))


def recall(small: nn.Module, model: nn.Module, images: torch.Tensor) -> float:
    return rx.verify(small, model, images, [Index()]).findings[1].value


def test_a_distillation_of_directions_finds_more_neighbours_in_the_old_index() -> None:
    model, images = tower(), pixels(256)
    small = small_tower(model, images)
    fitted = rx.distill(small, model, images, Distill(8, batch=32, directions=True))
    assert fitted.after[0] < 0.7 * fitted.before[0] and fitted.learning_rate is not None
    before, after = (recall(each, model, pixels(200, seed=1)) for each in (small, fitted.model))
    assert after > before + 1
    # Lengths are free: a longer vector is as near.
    longer = copy.deepcopy(model)
    with torch.no_grad():
        norm: Any = longer.norm
        norm.weight.mul_(3)
        norm.bias.mul_(3)
    same = rx.distill(longer, model, images[:32], Distill(1, directions=True))
    assert same.before[0] == pytest.approx(0, abs=1e-7)
    assert rx.distill(longer, model, images[:32], Distill(1)).before[0] > 1
    with pytest.raises(InvalidInput, match="fits embeddings, and this model returns logits"):
        rx.distill(tower(5), tower(5), images[:32], Distill(1, directions=True))


def test_every_effort_distills_for_an_index() -> None:
    for name in EFFORTS:
        without, kept = (Effort.of(name, KINDS["embedding"], 1e9, keep_index=keep) for keep in (False, True))
        assert kept.keep_index and kept.distill_epochs >= 2 > 0 == without.keep_index
        assert kept.fitted_images >= max(without.fitted_images, 1024) and kept.predicted_images == 512
        large = Effort.of(name, KINDS["embedding"], 2e10, keep_index=True)
        assert (large.distill_epochs == 0) == (name == "quick")


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "classes": (lambda: tower(5), {"macs": 0.8, "keep_index": True}, "keep_index=True is about embeddings.*leave it"),
    "recall of classes": (lambda: tower(5), {"recall": 0.9}, "recall=0.9 is about embeddings.*another target"),
    "two measures": (tower, {"recall": 0.9, "divergence": lambda a, b: (a - b).square().sum(-1)}, "leave the diverg"),
    "all neighbours": (tower, {"recall": 1.0}, "recall"),
    "two targets": (tower, {"recall": 0.9, "macs": 0.5}, "exactly one"),
    "few images": (tower, {"macs": 0.8, "keep_index": True}, "images are left to verify on.*needs 12"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_for_an_index_is_refused_before_the_work(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, arguments, message = REFUSED[case]
    monkeypatch.setattr("attnrx.workflows.shrink.diagnose", lambda *_, **__: pytest.fail("it began to work"))
    with pytest.raises(InvalidInput, match=message):
        rx.shrink(make(), pixels(24), **arguments)


def test_the_options_of_the_command_are_those_of_shrink() -> None:
    parser = COMMANDS["shrink"].parser()
    words = ["tower", "--data", "images", "--recall", "98%"]
    given = options.given_arguments(parser.parse_args(words), "shrink")
    assert given["recall"] in ("98%", 0.98) and not given.get("keep_index")
    words = ["tower", "--data", "images", "--macs", "0.6", "--keep-index"]
    assert options.given_arguments(parser.parse_args(words), "shrink")["keep_index"] is True


@pytest.mark.slow
def test_an_index_is_kept_better_with_the_argument() -> None:
    # Enough images for a distillation of some steps, and a model that loses neighbours without it.
    model, images, others = tower(), pixels(2000), pixels(200, seed=1)
    found = {keep: rx.shrink(model, images, macs=0.3, keep_index=keep) for keep in (False, True)}
    recalls = {keep: recall(shrunk.model, model, others) for keep, shrunk in found.items()}
    assert recalls[True] > recalls[False] + 1 > 31, recalls
    for keep, shrunk in found.items():
        assert shrunk.evidence.about.get("keep_index", False) is keep and len(shrunk.evidence.of("index")) == 4
        assert "neighbours are found in the old index" in shrunk.summary()


@pytest.mark.slow
def test_a_recall_is_kept_on_other_images_or_refused() -> None:
    model, images = tower(), pixels(400)
    found = rx.shrink(model, images, recall="80%")
    (claim,) = [each for each in found.evidence.claims if each.check == "index"]
    assert claim.limit == pytest.approx(80) and claim.value > 75 and found.plan is not None
    costs = [rx.models.family_of(each).costs(each).macs for each in (found.model, model)]
    assert costs[0] < costs[1] and found.plan.target == "recall=0.8"
    with pytest.raises(NotSupported, match="recall=1: no plan is expected to lose so little"):
        rx.shrink(model, images, recall=1 - 1e-12)
    with pytest.raises(InvalidInput, match="give it to shrink"):
        rx.plan(model, rx.diagnose(model, images, moments=True), "recall=0.9", images[:32], images[32:64])
