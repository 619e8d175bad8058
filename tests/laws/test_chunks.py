"""A batch in chunks gives what the whole batch gives; hooks, training and recording receive the whole batch."""

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.vit.attention import Attention, AttentionCapture, Eager, Explicit, Fused, ScoreFactors, using
from attnrx.vit.attention.backends import explicit
from attnrx.vit.models import chunked_forward, family_of, observing
from attnrx.vit.spec import AttentionSpec
from support.cases import CONFIGS, LVVITS, PATTERNS, images, model, own, prescription


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
        monkeypatch.setattr(chunked_forward, "WARM", 2 * 8 * shape.patches * shape.hidden // torch.get_num_threads())
        logits, seen = counted(vit, inputs)
    assert seen == [2, 2, 1]
    torch.testing.assert_close(logits, whole, rtol=1e-12, atol=1e-12)


def test_watched_and_trained_models_see_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    vit, inputs = model(CONFIGS["svda"]), images(CONFIGS["svda"])
    monkeypatch.setattr(chunked_forward, "WARM", 1)
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


@pytest.mark.parametrize("cached", [0, 10**9])
@pytest.mark.parametrize("pattern", ["half", "ragged"])
@pytest.mark.parametrize("backend", [Explicit, Fused])
def test_written_out_equals_eager_with_any_number_of_images_at_once(
    backend: type[Explicit] | type[Fused], pattern: str, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explicit, "CACHED", cached)
    vit = model(CONFIGS["dense"])
    small = realize(vit, prescription(vit, PATTERNS[pattern]))
    layers, inputs = family_of(small).attention(small), images(CONFIGS["dense"])
    with torch.no_grad(), using(layers, [backend() for _ in layers]):
        logits = small(inputs)
    with torch.no_grad(), using(layers, [Eager() for _ in layers]):
        torch.testing.assert_close(logits, small(inputs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("fused_qkv", [1, 2, 9])
@pytest.mark.parametrize("value_dims", [(4, 4, 4), (1, 4, 2)])
@pytest.mark.parametrize("ranks", [(3, 3, 3), (2, 2, 1), (4, 0, 2)])
def test_heads_of_any_widths_are_written_out_some_images_at_a_time(
    ranks: tuple[int, ...], value_dims: tuple[int, ...], fused_qkv: int, sized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = AttentionSpec("dense", 12, 4, ranks, (0, 1, 2), 0.5, 4, value_ranks=value_dims)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(5, 7, 12, generator=generator, dtype=torch.float64)
    sizes = torch.randint(0, 4, (5, 7), generator=generator).double()  # one of size 0 has left
    sizes[:, 0] = 1
    counted = (lambda: sizes) if sized else (lambda: None)
    layer = Attention(spec, AttentionCapture(counted, print, ())).double().eval()
    truth = layer(tokens).detach()  # where gradients are recorded nothing is written out
    monkeypatch.setattr(explicit, "FEW_TOKENS", 0)
    monkeypatch.setattr(explicit, "CACHED", fused_qkv * 2 * sum(rank > 0 for rank in ranks) * 7 * 7 * 8)
    with torch.no_grad():
        layer.backend = Explicit(counted)
        torch.testing.assert_close(layer(tokens), truth, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer(tokens[:, :2], tokens), truth[:, :2], rtol=1e-12, atol=1e-12)
