"""Linear maps in 8 bits as fits see them: what is rounded, by how much, and that fits correct it."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attnrx as rx
from attnrx.change.realization.distillation import Distill, distill
from attnrx.change.realization.repair import Repair, repair
from attnrx.exporting import parse_format
from attnrx.support import rounding
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.rounding import EightBits, rounded, rounded_inputs, rounded_rows
from attnrx.vit.models import family_of
from support import cases
from support.planned import made, spanned
from support.pretrained import of_timm


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outlier_model(model: nn.Module, size: float = 0.0) -> nn.Module:
    """Makes one hidden unit in every MLP larger than the others by this size, as in pre-trained models."""
    with torch.no_grad():
        for pair in family_of(model).mlp(model):
            first, second = cast(tuple[nn.Linear, nn.Linear], pair)
            first.bias[0] += size
            second.weight[:, 1:] *= 3.0
    return model


def test_inputs_and_rows_have_as_many_values_as_8_bits() -> None:
    inputs, weight = 3 * draws(500, 7) + 1, draws(5, 4000)
    found = rounded_inputs(inputs, inputs.min(), inputs.max())
    step = (inputs.max() - inputs.min()) / 255
    assert len(found.unique()) <= 256 and (found - inputs).abs().max() <= 0.51 * step
    assert rounded_inputs(torch.zeros(1), inputs.min(), inputs.max()).item() == 0.0
    rows = rounded_rows(weight)
    for row, exact in zip(rows, weight, strict=True):
        assert len(row.unique()) <= 255 and (row - exact).abs().max() <= 0.51 * exact.abs().max() / 127
        assert row.abs().max() == pytest.approx(exact.abs().max().item())


def test_the_range_covers_what_was_calibrated_on_and_no_more() -> None:
    linear, images = nn.Linear(6, 4, dtype=torch.float64), [draws(40, 6), 2 * draws(40, 6, seed=1)]
    run = rounded(linear, images, 8)
    with torch.no_grad():
        for each in images:
            assert 0 < (run(each) - linear(each)).abs().max() < 0.05
        far = 50 * images[0]
        assert (run(far) - linear(far)).abs().max() > 1.0  # cut off


def test_large_channels_do_not_cost_the_others_their_precision() -> None:
    linear, inputs = nn.Linear(6, 4, dtype=torch.float64), draws(200, 6)
    inputs[:, 0] *= 1000
    with torch.no_grad():
        linear.weight[:, 0] /= 1000
        exact, run = linear(inputs), rounded(linear, [inputs], 8)
        low, high = inputs.min(), inputs.max()
        plain = F.linear(rounded_inputs(inputs, low, high), rounded_rows(linear.weight), linear.bias)
        assert (run(inputs) - exact).std() < 0.1 * (plain - exact).std()


def test_gradients_pass_and_the_mean_error_of_an_output_is_zero() -> None:
    linear, inputs = nn.Linear(6, 4, dtype=torch.float64), draws(200, 6)
    run = rounded(linear, [inputs], 8)
    (run(inputs) - linear(inputs)).mean(0).abs().max().backward()
    assert (run(inputs) - linear(inputs)).mean(0).abs().max() < 1e-12
    (found,), (exact,) = (torch.autograd.grad(each(inputs).square().mean(), [linear.weight]) for each in (run, linear))
    assert F.cosine_similarity(found.flatten(), exact.flatten(), dim=0) > 0.99


def test_other_maps_in_a_later_pass_are_refused() -> None:
    one, other, bits = nn.Linear(6, 4).double(), nn.Linear(5, 4).double(), EightBits()
    with bits.calibrating():
        bits.pass_(lambda: one(draws(3, 6)))
    with pytest.raises(NotSupported, match="differ from one pass to the next"):
        bits.pass_(lambda: other(draws(3, 5)))


def test_outputs_err_by_as_much_as_a_file_of_8_bits(tmp_path: Any) -> None:
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    model = rx.load(of_timm("vit_tiny_patch16_224", depth=2)).float().eval()
    images = draws(64, 3, 16, 16).float()
    with torch.no_grad():
        exact, run = model(images), rounded(model, images.split(16), 8)
        emulated = run(images)
        file = rx.export(model, tmp_path / "m.xml", "openvino(precision=int8,images=64)", calibration=images)
        of_file = file(images)
    assert 0.5 < (emulated - exact).std() / (of_file - exact).std() < 2.0


def test_a_map_that_8_bits_cannot_hold_is_computed_in_float() -> None:
    inputs = draws(200, 6)
    inputs[:, 0] *= 1e4  # this channel's range goes into the weights, which lose the others' precision
    for share, is_float in ((1.0, True), (1e-4, False)):
        linear = nn.Linear(6, 4, dtype=torch.float64)
        with torch.no_grad():
            linear.weight[:, 0] *= share
            inputs[: len(inputs) // 2, 0] = 0
            error = (rounded(linear, [inputs], 8)(inputs) - linear(inputs)).abs().max()
        assert bool(error == 0) == is_float


@pytest.mark.parametrize("form", ["int8(images=64)", "openvino(precision=int8,images=64)"])
def test_files_leave_such_maps_in_float(form: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in parse_format(form).libraries:
        pytest.importorskip(library)
    model = outlier_model(rx.load(of_timm("vit_tiny_patch16_224", depth=2)).float().eval(), 300.0)
    images = draws(64, 3, 16, 16).float()

    def error(name: str) -> float:
        path = tmp_path / f"{name}{parse_format(form).suffix}"
        with torch.no_grad():
            return float((rx.export(model, path, form, calibration=images)(images) - model(images)).std())

    found = error("found")
    monkeypatch.setattr(rounding, "INEXACT", torch.inf)
    assert 0 < found < 0.7 * error("all")


def test_fits_with_8_bits_lower_what_the_rounded_model_loses() -> None:
    model = outlier_model(cases.model(cases.CONFIGS["dense"]))
    images = cases.images(cases.CONFIGS["dense"], 64)
    knobs = Distill(8, (3e-5, 1e-4, 3e-4), 16, bits=8)
    exact, found = distill(model, model, images, replace(knobs, bits=None)), distill(model, model, images, knobs)
    assert exact.before == exact.after and exact.before[0] < 1e-28
    assert 0 < found.after[0] < 0.9 * found.before[0]


def test_a_repair_with_8_bits_fits_the_rounded_blocks_and_freezes_what_was_frozen() -> None:
    space = spanned()
    small = made(space, space.uniform("mlp", 4))
    small.requires_grad_(False)
    images = draws(32, *family_of(space.model).input_shape(space.model))
    exact, found = (repair(small, space.model, images, Repair(20, bits=bits)) for bits in (None, 8))
    assert all(one != other for one, other in zip(exact.before, found.before, strict=True))
    assert sum(found.after) < sum(found.before)
    assert not any(parameter.requires_grad for parameter in found.model.parameters())


def test_other_numbers_of_bits_are_refused() -> None:
    for settings in (Distill, Repair):
        with pytest.raises(InvalidInput, match="bits"):
            settings(bits=4)
