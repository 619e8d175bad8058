"""Outputs are those of the present weights, however these were changed."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attnrx.vit.attention import Attention, Auto
from attnrx.vit.kernels import native_products
from attnrx.vit.kernels.native_products import NativeLinear
from attnrx.vit.models.parts.mlp import FusedMLP, LowRankLinear
from attnrx.vit.spec import AttentionSpec
from attnrx_lab.vision_transformer import full_spec
from support.layers import LAYERS
from support.pretrained import adopted_once, inputs

RAGGED = AttentionSpec("svda", 12, 4, (4, 1, 2), (0, 1, 2), 0.5, 4, "kept", value_ranks=(4, 2, 1))
TOKENS = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def written(module: nn.Module, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.mul_(2)


def assigned(module: nn.Module, parameters: list[Tensor]) -> None:
    module.load_state_dict({name: 2 * tensor for name, tensor in module.state_dict().items()}, assign=True)


def replaced(module: nn.Module, parameters: list[Tensor]) -> None:
    for name, parameter in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, nn.Parameter(parameter.detach() * 2))


def scaled_data(module: nn.Module, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.data.mul_(2)


def numpy_view(module: nn.Module, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.detach().numpy()[...] *= 2


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(module: nn.Module, parameters: list[Tensor]) -> None:
    for owner in list(module.modules()):
        if isinstance(getattr(owner, "weight", None), nn.Parameter):
            parametrize.register_parametrization(owner, "weight", Double())
    scaled_data(module, list(module.parameters()))


CHANGES = (written, assigned, replaced, scaled_data, numpy_view, parametrized)


def mlp() -> FusedMLP:
    return FusedMLP(NativeLinear(12, 20), nn.GELU(), LowRankLinear(20, 12, 3))


def adopted(name: str) -> nn.Module:
    return copy.deepcopy(adopted_once(name)[2])


# Every module that computes values of its weights, or passes them to a kernel: heads of different ranks, shared
# directions in blocks, linear maps, biases of pairs.
CONSUMERS: dict[str, Callable[[], nn.Module]] = {
    "attention of different ranks": lambda: Attention(RAGGED),
    "attention": lambda: Attention(full_spec("dense", 12, 3)),
    "mixed": lambda: LAYERS["mixed"].layer(Auto()),
    "linear": lambda: NativeLinear(12, 7),
    "mlp": mlp,
    "bias of a table": lambda: adopted("beit, bias per layer"),
    "bias of a library": lambda: adopted("relative positions"),
    "bias of windows": lambda: adopted("hf beit, one bias"),
}


@pytest.fixture(autouse=True)
def small_products_run_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native_products, "LEAST_MACS", 0)
    monkeypatch.setattr(native_products, "LEAST_ROWS", 1)
    yield


def inputs_of(name: str, module: nn.Module) -> Tensor:
    if name.startswith("bias"):
        return inputs(module).float()
    return (LAYERS["mixed"].inputs() if name == "mixed" else TOKENS).float()


@pytest.mark.parametrize("name", CONSUMERS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_module_answers_as_a_copy_of_it_does(name: str, change: Callable[..., None]) -> None:
    torch.manual_seed(0)
    module = CONSUMERS[name]().eval().float()
    given = inputs_of(name, module)
    with torch.no_grad():
        before = module(given)
        assert torch.equal(module(given), before)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    change(module, [parameter for parameter in module.parameters() if parameter.numel()])
    with torch.no_grad():
        after = module(given)
        assert not torch.allclose(after, before)
        assert torch.equal(copy.deepcopy(module)(given), after)


def test_weights_of_inference_mode_are_present() -> None:
    with torch.inference_mode():
        layer = Attention(RAGGED).eval().float()
        before = layer(TOKENS.float())
        for parameter in layer.parameters():
            parameter.mul_(2)
        assert torch.equal(layer(TOKENS.float()), copy.deepcopy(layer)(TOKENS.float()))
        assert not torch.equal(layer(TOKENS.float()), before)
