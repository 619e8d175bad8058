"""Every backend equals the eager one, gradients included, at every rank."""

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization import realize
from attnrx.support.errors import NotSupported, UnknownName
from attnrx.vit.attention import Eager, Fused, Observation, Observed, using
from attnrx.vit.kernels.compilation import native_library
from attnrx.vit.models import family_of, observing
from support.cases import CONFIGS, PATTERNS, images, model, prescription


@pytest.mark.parametrize("pattern", PATTERNS)
def test_fused_equals_eager_in_half_precision(pattern: str) -> None:
    config, dtype = CONFIGS["svda"], torch.bfloat16
    vit = model(config)
    small = realize(vit, prescription(vit, PATTERNS[pattern])).to(dtype)
    inputs = images(config).to(dtype)
    truth = small.double()(inputs.double())
    small = small.to(dtype)
    tolerance = 40 * torch.finfo(dtype).eps * truth.abs().max().item()
    torch.testing.assert_close(small(inputs).double(), truth, rtol=0, atol=tolerance)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("config", CONFIGS)
def test_observing_changes_nothing_and_sees_every_layer(config: str, pattern: str) -> None:
    vit = model(CONFIGS[config])
    small = realize(vit, prescription(vit, PATTERNS[pattern]))
    family, inputs = family_of(small), images(CONFIGS[config])
    seen: dict[int, Observation] = {}
    before = [layer.backend for layer in family.attention(small)]
    with observing(small, family, seen.__setitem__), torch.no_grad():
        logits = small(inputs)
    torch.testing.assert_close(logits, small(inputs), rtol=1e-10, atol=1e-10)
    assert sorted(seen) == list(range(len(family.attention(small))))
    assert [layer.backend for layer in family.attention(small)] == before
    for layer, observation in seen.items():
        spec = family.attention(small)[layer].spec
        uniform = [head for head, rank in enumerate(spec.ranks) if rank == 0]
        flat = observation.attention[:, uniform]
        torch.testing.assert_close(flat, torch.full_like(flat, 1 / flat.shape[-1]))


def test_observed_output_is_what_the_layer_adds() -> None:
    vit = model(CONFIGS["svda"])
    family = family_of(vit)
    seen: dict[int, Observation] = {}
    outputs: list[torch.Tensor] = []
    attention = family.attention(vit)[0]

    def keep(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        outputs.append(output)

    hook = attention.register_forward_hook(keep)
    with observing(vit, family, seen.__setitem__), torch.no_grad():
        vit(images(CONFIGS["svda"]))
    hook.remove()
    added = torch.einsum("bhnd,hdw->bnw", seen[0].output, seen[0].readout)
    added = added + attention.output.get_parameter("bias")
    torch.testing.assert_close(added, outputs[0])


def test_backends_come_back_after_an_error() -> None:
    vit = model(CONFIGS["svda"])
    layers = family_of(vit).attention(vit)
    before = [layer.backend for layer in layers]

    def fail(seen: Observation) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), using(layers, [Observed(fail, torch.zeros(3, 4, 12)) for _ in layers]):
        vit(images(CONFIGS["svda"]))
    assert [layer.backend for layer in layers] == before


def test_kept_padding_follows_the_weights() -> None:
    """The padded weights are kept between calls without gradients: changed weights must be seen all the same."""
    config = CONFIGS["svda"]
    vit = model(config)
    small = realize(vit, prescription(vit, PATTERNS["ragged-falling"]))
    inputs = images(config)
    with torch.no_grad():
        small(inputs)
        for parameter in small.parameters():
            parameter.mul_(1.1)
        logits = small(inputs)
        layers = family_of(small).attention(small)
        with using(layers, [Eager() for _ in layers]):
            torch.testing.assert_close(logits, small(inputs), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(small.float()(inputs.float()).double(), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pattern", ["half", "ragged", "zero", "head-removed"])
@pytest.mark.parametrize("config", ["svda", "dense"])
def test_every_named_backend_equals_eager_in_float32(config: str, pattern: str) -> None:
    vit = model(CONFIGS[config])
    small, inputs = realize(vit, prescription(vit, PATTERNS[pattern])).float(), images(CONFIGS[config]).float()
    with torch.no_grad():
        truth = rx.use_backend(small, "eager")(inputs)
        built = ("native",) if native_library() else ()
        for name in ("auto", "fused", *built):
            layers = family_of(rx.use_backend(small, name)).attention(small)
            assert {type(layer.backend).__name__.lower() for layer in layers} == {name}
            torch.testing.assert_close(small(inputs), truth, rtol=0, atol=1e-4 * float(truth.abs().max()))


def test_backends_are_refused_by_name_and_where_they_could_change_nothing() -> None:
    vit = model(CONFIGS["dense"])
    with pytest.raises(UnknownName, match="did you mean 'fused'"):
        rx.use_backend(vit, "fusd")
    with pytest.raises(NotSupported, match="no attention of attnrx"):
        rx.use_backend(nn.Linear(2, 2), "fused")
    layers = family_of(vit).attention(vit)
    with (
        using(layers, [Observed(lambda seen: None, torch.zeros(3, 4, 12)) for _ in layers]),
        pytest.raises(NotSupported, match="token reducer"),
    ):
        rx.use_backend(vit, Fused())


def test_a_token_reducer_keeps_its_attention_when_the_backend_changes() -> None:
    vit, inputs = model(CONFIGS["svda-deep"]), images(CONFIGS["svda-deep"])
    small = realize(vit, rx.prescribe(vit, "tokens=attention_received:0.5@3"))
    with torch.no_grad():
        expected = small(inputs)
        changed = rx.use_backend(small, "fused")
        # The attention of the layer before the stage scores its patches.
        names = [type(layer.backend).__name__ for layer in family_of(small).attention(small)]
        assert names[1] == "AttentionCapture" and names[0] == "Fused"
        torch.testing.assert_close(changed(inputs), expected)
