"""Laws of repair: every block comes nearer to the original's, and a map that was only perturbed is restored."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import attnrx as rx
from attnrx.change.realization import repair as module
from attnrx.change.realization.repair import Repair, repair
from attnrx.data.model_data import images_for
from attnrx.support.errors import InvalidInput, InvalidRule, NotSupported
from attnrx.vit.models import answer, blocks_of, family_of
from support import cases
from support.pretrained import BLOCKS, adopted_once

# Those whose blocks add the normalized output of the MLP: it has no target.
NORMS_AFTER = {"vit, norms after", "relative positions by an MLP"}
FEW = Repair(steps=30)
SHARES = [0.1 * 1.05**step for step in range(60)]  # of the products of a repair without a budget: 0.1 to 1.8


def images_of(model: nn.Module, count: int = 32) -> Tensor:
    generator, dtype = torch.Generator().manual_seed(0), next(model.parameters()).dtype
    return torch.randn(count, *family_of(model).input_shape(model), generator=generator).to(dtype)


def halved(model: nn.Module, images: Tensor, rules: str = "hidden=uniform_rank:0.5,metric=weights") -> nn.Module:
    return rx.realize(model, rx.prescribe(rx.diagnose(model, images, moments=True), rules))


@pytest.fixture(scope="module")
def own() -> tuple[nn.Module, Tensor]:
    model = cases.model(cases.CONFIGS["dense"])
    return model, images_of(model, 64)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_architecture_loses_hidden_units_and_is_repaired(name: str, tmp_path: Any) -> None:
    family, _, model = adopted_once(name)
    images = images_of(model)
    diagnosis = rx.diagnose(model, images, moments=True)
    if not family.has_plain_units(model):
        assert family.mlp(model)
        with pytest.raises(InvalidRule, match="only an activation between"):
            rx.prescribe(diagnosis, "hidden=uniform_rank:0.5")
        return
    # The compensation is a fit on these images already, the weights alone are not.
    given = rx.prescribe(diagnosis, "hidden=uniform_rank:0.5,metric=weights")
    small = rx.realize(model, given)
    if all(getattr(second, "bias", None) is not None for _, second in family.mlp(model)):
        masked = rx.realize(model, given, by="mask")
        torch.testing.assert_close(answer(masked, images[:3]), answer(small, images[:3]), rtol=1e-9, atol=1e-9)
    assert family.costs(small).params == sum(parameter.numel() for parameter in small.parameters())
    if name in NORMS_AFTER:
        with pytest.raises(NotSupported, match="norm after the MLP"):
            repair(small, model, images, FEW)
        return
    repaired = repair(small, model, images, FEW)
    assert all(after <= before for before, after in zip(repaired.before, repaired.after, strict=True))
    assert repaired.after[0] < repaired.before[0]
    loaded = rx.load(rx.save(repaired.model, tmp_path / "model"))
    torch.testing.assert_close(answer(loaded, images[:3]), answer(repaired.model, images[:3]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "rules", ["fc1=uniform_rank:4 fc2=uniform_rank:4", "qk=total_rank:0.25 vo=uniform_rank:0.25,metric=weights"]
)
def test_every_map_of_a_block_is_repaired(own: tuple[nn.Module, Tensor], rules: str) -> None:
    """The MLP also corrects what the attention of its block lost."""
    model, images = own
    repaired = repair(halved(model, images, rules), model, images, FEW)
    assert all(after <= before for before, after in zip(repaired.before, repaired.after, strict=True))
    assert repaired.after[-1] < 0.9 * repaired.before[-1]


def test_a_perturbed_second_map_is_restored_in_closed_form(own: tuple[nn.Module, Tensor]) -> None:
    model, images = own
    changed = copy.deepcopy(model)
    linear: Any = family_of(changed).mlp(changed)[1][1]
    with torch.no_grad():
        linear.weight.add_(torch.randn(linear.weight.shape, generator=torch.Generator().manual_seed(0)), alpha=0.1)
        linear.bias.add_(0.3)
    repaired = repair(changed, model, images, Repair(steps=0, ridge=1e-9))
    assert repaired.before[1] > 1e-3 and repaired.after[1] < 1e-6 * repaired.before[1]
    torch.testing.assert_close(repaired.model(images), model(images), rtol=1e-3, atol=1e-3)


def test_steps_come_nearer_than_the_closed_form_alone(own: tuple[nn.Module, Tensor]) -> None:
    model, images = own
    small = halved(model, images)
    closed, both = (repair(small, model, images, Repair(steps=steps)) for steps in (0, 100))
    assert both.after[0] < closed.after[0] < closed.before[0] == both.before[0]


def test_models_stay_as_they_were_and_the_result_repeats(own: tuple[nn.Module, Tensor]) -> None:
    model, images = own
    small = halved(model, images)
    before = [copy.deepcopy(each.state_dict()) for each in (model, small)]
    first, again = (repair(small, model, images, FEW) for _ in range(2))
    for each, state in zip((model, small), before, strict=True):
        assert all(torch.equal(each.state_dict()[name], value) for name, value in state.items())
    assert all(torch.equal(first.model.state_dict()[name], value) for name, value in again.model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in first.model.parameters())
    assert [each.requires_grad for each in first.model.parameters()] == [
        each.requires_grad for each in small.parameters()
    ]


def test_a_model_that_lost_nothing_is_left_alone(own: tuple[nn.Module, Tensor]) -> None:
    model, images = own
    repaired = repair(model, model, images, FEW)
    assert repaired.before == repaired.after == [0.0] * len(repaired.before)
    assert all(torch.equal(repaired.model.state_dict()[name], value) for name, value in model.state_dict().items())


def test_what_cannot_be_repaired_is_refused(own: tuple[nn.Module, Tensor]) -> None:
    model, images = own
    with pytest.raises(InvalidInput, match="at least 16"):
        repair(model, model, images[:15])
    with pytest.raises(InvalidInput, match="MLPs of two linear maps"):
        other = cases.model(cases.CONFIGS["svda-deep"])
        repair(other, model, images)
    with pytest.raises(InvalidInput, match="steps=-1"):
        Repair(steps=-1)
    merged = rx.realize(model, rx.prescribe(model, "tokens=tome:0.5@2"))
    with pytest.raises(NotSupported, match="token policy last"):
        repair(merged, model, images)


class _Products(TorchDispatchMode):
    """Counts the multiply-accumulates of matrix products; torch's counter fails where gradients are taken of leaves."""

    macs = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.macs += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=output) / 2
        return output


def test_a_budget_leaves_fewer_images_then_fewer_steps(own: tuple[nn.Module, Tensor]) -> None:
    """By the products that torch counts, gradients included; in float64, which no kernel of attnrx takes."""
    model, _ = own
    model = copy.deepcopy(model).double()
    small, images = halved(model, images_of(model, 64)), images_of(model, 320)

    def counted(settings: Repair) -> tuple[float, str]:
        with _Products() as products:
            repaired = repair(small, model, images, settings)
        assert all(after <= before for before, after in zip(repaired.before, repaired.after, strict=True))
        return products.macs, " ".join(repaired.notes)

    whole, notes = counted(Repair(steps=100))
    assert "within" not in notes
    macs, notes = counted(Repair(steps=100, macs=0.6 * whole))
    assert 0.6 * 0.6 < macs / whole < 1.1 * 0.6 and re.search(r"128 of 320 images and \d\d? steps", notes), notes
    budgets = (module.within_budget(model, small, Repair(steps=100, macs=share * whole), 320) for share in SHARES)
    found = [(count, knobs.steps) for knobs, count in budgets]
    assert found == sorted(found) and found[0][0] == 128 and found[-1] == (320, 100)
    assert all(steps == 100 for count, steps in found if count > 128) and len({count for count, _ in found}) > 2


def test_a_repair_in_bfloat16_is_as_good(own: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = copy.deepcopy(own[0]).float(), own[1].float()
    small = halved(model, images)
    exact = repair(small, model, images, FEW)
    monkeypatch.setattr(module, "has_fast_bfloat16", lambda device: True)
    rounded = repair(small, model, images, replace(FEW, bfloat16=True))
    assert rounded.before == pytest.approx(exact.before, rel=0.02) and rounded.before != exact.before
    assert rounded.after == pytest.approx(exact.after, rel=0.1)
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.float32}
    monkeypatch.setattr(module, "has_fast_bfloat16", lambda device: False)
    assert repair(small, model, images, replace(FEW, bfloat16=True)).after == exact.after


def test_gradients_of_large_models_are_those_of_few_images(own: tuple[nn.Module, Tensor], monkeypatch: Any) -> None:
    model, images = own
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    many = module.token_importance(model, images_for(model, images, "images"))
    monkeypatch.setattr(module, "GRAPH_MACS", 4.5 * family_of(model).costs(model).macs)
    few = module.token_importance(model, images_for(model, images, "images"))
    handle.remove()
    assert sizes == [16] * 4 + [4] * 16
    for ones, others in zip(many, few, strict=True):
        torch.testing.assert_close(others, ones, rtol=0.5, atol=0.2)  # of other draws


def test_blocks_that_lost_nothing_are_left_alone(own: tuple[nn.Module, Tensor]) -> None:
    """They get other tokens than those of the model, behind a block that lost something."""
    model, images = own
    rules = "hidden=by_layer(uniform_rank:0.5,metric=weights; total_rank:1.0,metric=weights)"
    repaired = repair(halved(model, images, rules), model, images, FEW)
    assert repaired.after[0] < repaired.before[0] and repaired.after[1] == repaired.before[1] > 0
    first, second = blocks_of(model, family_of(model)), blocks_of(repaired.model, family_of(model))
    assert all(
        torch.equal(one, other) for one, other in zip(first[1].parameters(), second[1].parameters(), strict=True)
    )
