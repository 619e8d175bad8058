"""A batch in chunks gives what the whole batch gives; hooks, training and recording receive the whole batch."""

import pytest
import torch

from attnrx.vit.attention import Fused, ScoreFactors, using
from attnrx.vit.models import family_of, observing
from attnrx.vit.models.working import adopted
from support.cases import CONFIGS, LVVITS, images, model, own


class Counting(Fused):
    """Remembers how many images every call saw."""

    def __init__(self):
        self.seen: list[int] = []

    def attend(self, factors: ScoreFactors, value: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(value))
        return super().attend(factors, value)


def counted(vit: torch.nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Gives the logits, and how many images every call of the first attention saw."""
    backend = Counting()
    with using(family_of(vit).attention(vit)[:1], [backend]):
        return vit(inputs), backend.seen


@pytest.mark.parametrize("config", ["svda", "dense", "lvvit"])
def test_parts_give_what_the_whole_gives(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {**CONFIGS, **LVVITS}[config]
    vit, inputs = own(shape), images(shape)
    with torch.no_grad():
        whole, seen = counted(vit, inputs)
        assert set(seen) == {5}
        monkeypatch.setattr(adopted, "WARM", 2 * 8 * shape.patches * shape.hidden // torch.get_num_threads())
        logits, seen = counted(vit, inputs)
    assert seen == [2, 2, 1]
    torch.testing.assert_close(logits, whole, rtol=1e-12, atol=1e-12)


def test_watched_and_trained_models_see_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    vit, inputs = model(CONFIGS["svda"]), images(CONFIGS["svda"])
    monkeypatch.setattr(adopted, "WARM", 1)
    with torch.no_grad():
        assert counted(vit, inputs)[1] == [1] * 5
        seen: list[int] = []
        with observing(vit, family_of(vit), lambda layer, each: seen.append(len(each.value))):
            vit(inputs)
        assert seen == [5] * len(family_of(vit).attention(vit))
        hook = vit.layers[0].register_forward_hook(lambda *given: None)
        assert counted(vit, inputs)[1] == [5]
        hook.remove()
        assert counted(vit.train(), inputs)[1] == [5]
    assert counted(vit.eval(), inputs)[1] == [5]
