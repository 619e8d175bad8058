"""A compressed model is compressed again: its heads have different widths, and mask == compress still holds."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.support.errors import NoOpPrescription
from attnrx.vit.models import family_of
from support import cases
from support.comparisons import pixels

CONFIG = cases.ViTConfig.uniform("dense", width=16, depth=2, heads=4, **cases.TINY)
# Rules that make irregular widths, and rules that keep all or most of the value features of the narrow heads.
RULES = (
    "vo=total_rank:0.5,scope=model",
    "vo=total_rank:0.9,minimum=0",
    "vo=total_rank:0.6,metric=weights",
    "vo=top_rank:3",
    "heads=total_rank:0.75 vo=total_rank:0.6",
    "heads=total_rank:0.5",
    "qk=total_rank:0.6",
    "hidden=total_rank:0.5",
    "fc1=uniform_rank:0.3",
)


@pytest.fixture(scope="module")
def subject() -> tuple[nn.Module, Tensor, Callable[[nn.Module, str], rx.Prescription]]:
    data = pixels(CONFIG, 24)
    images = torch.cat([batch.images for batch in data.batches(24)]).double()

    def prescribe(model: nn.Module, rules: str) -> rx.Prescription:
        return rx.prescribe(rx.diagnose(model, data, moments=True), rules)

    return cases.model(CONFIG).double().eval(), images, prescribe


# Every rule is the first and the second of three pairs. Factored maps of an MLP are no single matrix, which `hidden`
# and a second factorization need.
PAIRS = [
    (first, second)
    for row, first in enumerate(RULES)
    for column, second in enumerate(RULES)
    if (row + column) % 3 == 0 and not (first.startswith("fc1") and second[:3] in ("fc1", "hid"))
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_mask_equals_compress_on_a_compressed_model(subject, first: str, second: str) -> None:
    model, images, prescribe = subject
    once = rx.realize(model, prescribe(model, first))
    try:
        prescription = prescribe(once, second)
    except NoOpPrescription:
        return  # the first rule removed as much already
    masked, small = (rx.realize(once, prescription, by=by) for by in ("mask", "compress"))
    torch.testing.assert_close(masked(images), small(images), rtol=1e-9, atol=1e-9)
    assert prescribed_costs(once, prescription) == family_of(small).costs(small)
    # No head has more value features than before.
    for before, after in zip(family_of(once).attention(once), family_of(small).attention(small), strict=True):
        widths = dict(zip(before.spec.heads, before.spec.value_dims, strict=True))
        assert all(width <= widths[head] for head, width in zip(after.spec.heads, after.spec.value_dims, strict=True))


def test_a_share_of_the_values_is_one_of_the_remaining_values(subject) -> None:
    model, _, prescribe = subject
    once = rx.realize(model, prescribe(model, "vo=total_rank:0.9,minimum=0"))
    (before, *_), (after, *_) = (
        [sum(attention.spec.value_dims) for attention in family_of(each).attention(each)]
        for each in (once, rx.realize(once, prescribe(once, "vo=total_rank:0.5")))
    )
    assert (before, after) == (14, 7)


@pytest.mark.parametrize("name", ["fc1", "fc2"])
def test_a_map_of_rank_one_survives_the_disk(subject, name: str, tmp_path) -> None:
    model, images, prescribe = subject
    prescription = prescribe(model, f"{name}=top_rank:1")
    read = rx.Prescription.load(prescription.save(tmp_path / "prescription.json"))
    assert torch.equal(rx.realize(model, read)(images), rx.realize(model, prescription)(images))
