"""Cached weights are those of the present parameters, however these were changed."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

from attnrx.vit.attention import Attention, Auto
from attnrx.vit.kernels import cached_weights, native_products
from attnrx.vit.kernels.native_products import NativeLinear
from attnrx.vit.models.mlp import FusedMLP, LowRankLinear
from attnrx.vit.spec import AttentionSpec
from support.layers import LAYERS
from support.pretrained import adopted_once, inputs

RAGGED = AttentionSpec("svda", 12, 4, (4, 1, 2), (0, 1, 2), 0.5, 4, "kept", value_ranks=(4, 2, 1))
TOKENS = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))


def doubled(parameters: list[Tensor]) -> list[Tensor]:
    return [2 * parameter.detach() for parameter in parameters]


def fused(module: nn.Module, parameters: list[Tensor]) -> None:
    torch.optim.AdamW(parameters, lr=0.1, fused=True).step()


@torch.no_grad()
def written(module: nn.Module, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.mul_(2)


def loaded(module: nn.Module, parameters: list[Tensor]) -> None:
    module.load_state_dict({name: 2 * tensor for name, tensor in module.state_dict().items()})


def assigned(module: nn.Module, parameters: list[Tensor]) -> None:
    module.load_state_dict({name: 2 * tensor for name, tensor in module.state_dict().items()}, assign=True)


def moved(module: nn.Module, parameters: list[Tensor]) -> None:
    module.double().float()
    written(module, parameters)


def replaced(module: nn.Module, parameters: list[Tensor]) -> None:
    for name, parameter in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, nn.Parameter(parameter.detach() * 2))


def scaled_data(module: nn.Module, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.data.mul_(2)


def swapped_data(module: nn.Module, parameters: list[Tensor]) -> None:
    for parameter, value in zip(parameters, doubled(parameters), strict=True):
        parameter.data = value


def one_element_of_data(module: nn.Module, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.data.view(-1)[-1] += 3


def exchanged_elements_of_data(module: nn.Module, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.data.copy_(parameter.data.flatten().flip(0).view_as(parameter))


def numpy_view(module: nn.Module, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.detach().numpy()[...] *= 2


def from_vector(module: nn.Module, parameters: list[Tensor]) -> None:
    vector_to_parameters(2 * parameters_to_vector(module.parameters()).detach(), module.parameters())


def averaged(module: nn.Module, parameters: list[Tensor]) -> None:
    average = AveragedModel(module, avg_fn=lambda mine, other, _: 0.5 * (mine + other))
    average.module = module
    other = copy.deepcopy(module)
    written(other, list(other.parameters()))
    average.n_averaged += 1
    average.update_parameters(other)


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(module: nn.Module, parameters: list[Tensor]) -> None:
    for owner in list(module.modules()):
        if isinstance(getattr(owner, "weight", None), nn.Parameter):
            parametrize.register_parametrization(owner, "weight", Double())
    scaled_data(module, list(module.parameters()))


CHANGES = (
    fused, written, loaded, assigned, moved, replaced, scaled_data, swapped_data, one_element_of_data,
    exchanged_elements_of_data, numpy_view, from_vector, averaged, parametrized,
)  # fmt: skip


def mlp() -> FusedMLP:
    return FusedMLP(NativeLinear(12, 20), nn.GELU(), LowRankLinear(20, 12, 3))


def adopted(name: str) -> nn.Module:
    return copy.deepcopy(adopted_once(name)[2])


# Every module that caches weights, or passes them to a kernel: heads of different ranks, shared directions in blocks,
# linear maps, biases of pairs.
CONSUMERS: dict[str, Callable[[], nn.Module]] = {
    "attention of different ranks": lambda: Attention(RAGGED),
    "attention": lambda: Attention(AttentionSpec.full("dense", 12, 3)),
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


def require_present_weights(name: str, change: Callable[[nn.Module, list[Tensor]], None]) -> None:
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


@pytest.mark.parametrize("name", CONSUMERS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_module_answers_as_a_copy_of_it_does(name: str, change: Callable[..., None]) -> None:
    require_present_weights(name, change)


@pytest.mark.parametrize("change", [scaled_data, one_element_of_data, exchanged_elements_of_data, numpy_view])
def test_weights_are_present_without_a_compiler(change: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cached_weights, native_products):
        monkeypatch.setattr(module, "native_library", lambda: None)
    require_present_weights("attention of different ranks", change)


def test_weights_of_inference_mode_are_cached_and_present() -> None:
    with torch.inference_mode():
        layer = Attention(RAGGED).eval().float()
        before = layer(TOKENS.float())
        for parameter in layer.parameters():
            parameter.mul_(2)
        assert torch.equal(layer(TOKENS.float()), copy.deepcopy(layer)(TOKENS.float()))
        assert not torch.equal(layer(TOKENS.float()), before)
