"""CUDA == CPU: backends, tokens, changed weights, the workflow; and what is measured on the device."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization import realize
from attnrx.change.realization.distillation import Distill
from attnrx.change.realization.repair import Repair
from attnrx.show.checks import Fidelity
from attnrx.vit.attention import Backend, Eager, Fused, using
from attnrx.vit.costs import Conditions, LatencyProtocol, compare_latency, compare_memory
from attnrx.vit.models import attach_tokens_, family_of, library_form
from attnrx.vit.tokens import TokenPolicy, parse_policy
from support import cases
from support.cases import CONFIGS, PATTERNS, REDUCTIONS, images, model, prescription
from support.layers import LAYERS, by_definition
from support.pretrained import deep
from support.pretrained import inputs as inputs_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a CUDA device with a CPU, and there is none"),
]

DEVICE = "cuda"
HALF = (torch.float32, torch.bfloat16, torch.float16)


def small_of(config: str, pattern: str) -> nn.Module:
    vit = model(CONFIGS[config])
    return realize(vit, prescription(vit, PATTERNS[pattern]))


def with_tokens(vit: nn.Module, policy: TokenPolicy) -> nn.Module:
    """The model with this policy and random predictors."""
    reduction = attach_tokens_(vit, family_of(vit), policy, "compress")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in reduction.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return vit.eval()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("backend", [Fused, Eager])
def test_backends_equal_the_definition(backend: type[Backend], name: str) -> None:
    case = LAYERS[name]
    expected = by_definition(case.layer(backend()), case.inputs())
    layer, tokens = case.layer(backend(), torch.float32).to(DEVICE), case.inputs(torch.float32).to(DEVICE)
    with torch.no_grad():
        found = layer(tokens).cpu().double()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("config", ["svda", "dense"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_named_backends_equal_float64(pattern: str, config: str, dtype: torch.dtype) -> None:
    small = small_of(config, pattern).to(dtype)
    inputs = images(CONFIGS[config]).to(dtype)
    truth = copy.deepcopy(small).double()(inputs.double()).detach()
    placed = small.to(DEVICE)
    with torch.no_grad():
        for name in ("auto", "fused"):
            found = rx.use_backend(placed, name)(inputs.to(DEVICE)).cpu().double()
            close = 60 * torch.finfo(dtype).eps * float(truth.abs().max())
            torch.testing.assert_close(found, truth, rtol=0, atol=close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", [Fused, Eager])
@pytest.mark.parametrize("config", CONFIGS)
def test_gradients_equal_those_of_a_cpu(config: str, backend: type[Backend]) -> None:
    small, inputs = small_of(config, "ragged-falling"), images(CONFIGS[config])
    gradients = []
    for device in ("cpu", DEVICE):
        placed = copy.deepcopy(small).to(device)
        with torch.no_grad():
            placed(inputs.to(device))  # fills what is cached
        layers = family_of(placed).attention(placed)
        with using(layers, [backend() for _ in layers]):
            loss = placed(inputs.to(device)).square().sum()
            weights = [weight for weight in placed.parameters() if weight.numel()]
            found = torch.autograd.grad(loss, weights, allow_unused=True)
        gradients.append([each.cpu() for each in found if each is not None])
    for on_cpu, on_device in zip(*gradients, strict=True):
        torch.testing.assert_close(on_device, on_cpu, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("keep", [0.5, 0.2])  # 0.2: merging needs several rounds
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_tokens_equal_those_of_a_cpu(kind: str, keep: float) -> None:
    """Pruning and merging, with deterministic algorithms required: of equal scores the same tokens are kept."""
    vit = with_tokens(copy.deepcopy(deep()), TokenPolicy(REDUCTIONS[kind], (2,), (keep,)))  # with a class token
    inputs = inputs_of(vit)
    with torch.no_grad():
        on_cpu = vit(inputs)
        for each in (vit, library_form(vit)):
            on_device = copy.deepcopy(each).to(DEVICE)(inputs.to(DEVICE)).cpu()
            torch.testing.assert_close(on_device, on_cpu, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("pattern", ["half", "ragged-falling"])
@pytest.mark.parametrize("config", ["svda", "dense"])
def test_outputs_are_those_of_the_present_weights(config: str, pattern: str) -> None:
    placed, inputs = small_of(config, pattern).to(DEVICE), images(CONFIGS[config]).to(DEVICE)
    changes = (
        lambda weight: weight.mul_(1.1),
        lambda weight: weight.data.add_(0.01),
        lambda weight: weight.view(-1)[: weight.numel() // 2].mul_(0.5),
        lambda weight: setattr(weight, "data", weight.data * 1.2),
    )
    with torch.inference_mode():
        placed(inputs)
    with torch.no_grad():
        for change in changes:
            before = placed(inputs)
            for parameter in placed.parameters():
                change(parameter)
            after = placed(inputs)
            assert not torch.allclose(after, before)
            torch.testing.assert_close(after, copy.deepcopy(placed)(inputs), rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["ward:0.5@2", "ward(relevance=0.3):0.5@2", "class_attention:0.5@2"])
def test_a_pass_does_not_wait_for_the_device(policy: str) -> None:
    """Kernels are launched ahead of the device; a wait would cost its latency at every layer."""
    small = copy.deepcopy(deep()) if "ward:" not in policy else small_of("dense", "ragged-falling")
    inputs = inputs_of(small) if "ward:" not in policy else images(CONFIGS["dense"])
    placed, inputs = with_tokens(small, parse_policy(policy)).float().to(DEVICE), inputs.float().to(DEVICE)
    for each in (placed, library_form(placed)):
        with torch.no_grad():
            each(inputs)
            torch.cuda.set_sync_debug_mode("error")
            try:
                each(inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_outputs(dtype: torch.dtype) -> None:
    small, inputs = small_of("dense", "ragged-falling").float().to(DEVICE), images(CONFIGS["dense"]).float().to(DEVICE)
    with torch.no_grad():
        expected = small(inputs)
        with torch.autocast(DEVICE, dtype):
            found = small(inputs)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.05 * float(expected.abs().max()))


def test_the_workflow_decides_as_on_a_cpu(tmp_path: Path) -> None:
    vit = model(CONFIGS["dense"])
    data = cases.pixels(CONFIGS["dense"], 40)
    rules = "qk=total_rank:0.6 vo=total_rank:0.7 hidden=total_rank:0.7 tokens=ward:0.5@2"
    found = {}
    for device in ("cpu", DEVICE):
        placed = copy.deepcopy(vit).to(device)
        state = torch.cuda.get_rng_state() if device == DEVICE else None
        given = rx.prescribe(rx.diagnose(placed, data, moments=True), rules)
        small = realize(placed, given)
        if state is not None:
            assert torch.equal(torch.cuda.get_rng_state(), state)
        assert {str(weight.device.type) for weight in small.parameters()} == {device}
        found[device] = given, small, rx.verify(small, placed, data, [Fidelity()], prescription=given)
    (on_cpu, slim, evidence), (on_device, placed_slim, placed_evidence) = found["cpu"], found[DEVICE]
    for layer, other in zip(on_cpu.layers, on_device.layers, strict=True):
        assert torch.equal(layer.qk.keep, other.qk.keep.cpu())
    specs = [[layer.spec for layer in family_of(each).attention(each)] for each in (slim, placed_slim)]
    assert specs[0] == specs[1]
    inputs = images(CONFIGS["dense"])
    with torch.no_grad():
        torch.testing.assert_close(placed_slim(inputs.to(DEVICE)).cpu(), slim(inputs), rtol=1e-6, atol=1e-6)
    for one, other in zip(evidence.findings, placed_evidence.findings, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-5, abs=1e-8), one.claim
    loaded = rx.load(rx.save(placed_slim, tmp_path / "slim", prescription=on_device))
    with torch.no_grad():
        torch.testing.assert_close(loaded(inputs), slim(inputs), rtol=1e-5, atol=1e-5)


def test_repair_and_distillation_come_nearer_on_the_device() -> None:
    vit = model(CONFIGS["dense"]).to(DEVICE)
    inputs = images(CONFIGS["dense"], 96)
    rules = "hidden=uniform_rank:0.5,metric=weights"
    small = realize(vit, rx.prescribe(rx.diagnose(vit, inputs, moments=True), rules))
    repaired = rx.repair(small, vit, inputs, Repair(steps=20))
    assert all(after <= before for before, after in zip(repaired.before, repaired.after, strict=True))
    settings = Distill(epochs=4, learning_rates=(3e-3,), batch=16)
    assert (distilled := rx.distill(small, vit, inputs, settings)).after < distilled.before
    assert {weight.device.type for weight in distilled.model.parameters()} == {DEVICE}


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_latency_and_memory_are_measured(precision: str) -> None:
    vit, small = model(CONFIGS["dense"]), small_of("dense", "one")
    conditions = Conditions(DEVICE, precision)
    latency = compare_latency(small, vit, images(CONFIGS["dense"]), LatencyProtocol(conditions, rounds=4, warmup=2))
    assert latency.clock == "cuda" and latency.candidate.median > 0
    assert latency.hardware == torch.cuda.get_device_name()
    memory = compare_memory(small, vit, images(CONFIGS["dense"], 64), conditions)
    assert memory.candidate.weights < memory.reference.weights and memory.reference.activations > 0
    itself = compare_memory(vit, vit, images(CONFIGS["dense"], 64), conditions)
    assert itself.candidate == itself.reference


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compiled_merging_gives_what_the_model_gives(precision: str) -> None:
    small = with_tokens(small_of("dense", "ragged"), parse_policy("ward:0.5@2"))
    eager, compiled = (Conditions(DEVICE, precision, compiled=on) for on in (False, True))
    inputs = eager.prepare_images(images(CONFIGS["dense"]))
    with compiled.held():
        expected = eager.prepare(small)(inputs)
        found = compiled.prepare(small)(inputs)
    close = 60 * torch.finfo(inputs.dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=close)
