"""The closed form is the truth: it equals what is allocated and what runs, it adds up, every direction counts."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from attnrx.change.realization import compressed_spec, realize
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.vit.attention import Eager, using
from attnrx.vit.costs import PartCosts, count_params, count_product_macs
from attnrx.vit.models import family_of
from attnrx_lab.costs import direction_costs, saved_shares
from attnrx_lab.vision_transformer import Transformer, VisionTransformer, block_costs, full_spec
from support.cases import CONFIGS, OWN, PATTERNS, images, model, own, prescription


def compressed(config: str, pattern: str, by: str) -> Transformer:
    original = own(OWN[config])
    result = realize(original, prescription(original, PATTERNS[pattern]), by=by)  # type: ignore[arg-type]
    assert isinstance(result, Transformer)
    return result


def eager_product_macs(vit: Transformer, count: int = 5) -> int:
    layers = family_of(vit).attention(vit)
    with using(layers, [Eager()] * len(layers)):
        return count_product_macs(vit, images(vit.config, count))


@pytest.mark.parametrize("by", ["renormalized", "compress"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("config", OWN)
def test_closed_form_equals_what_is_allocated_and_what_runs(config: str, pattern: str, by: str) -> None:
    vit = compressed(config, pattern, by)
    costs = family_of(vit).costs(vit)
    assert costs.params == count_params(vit)
    assert costs.product_macs == eager_product_macs(vit)


@pytest.mark.parametrize("by", ["renormalized", "compress"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("config", OWN)
def test_a_prescription_is_priced_before_it_is_realized(config: str, pattern: str, by: str) -> None:
    original = own(OWN[config])
    layers = zip(original.config.attention, prescription(original, PATTERNS[pattern]).layers, strict=True)
    specs = tuple(compressed_spec(spec, layer, by == "compress") for spec, layer in layers)  # type: ignore[arg-type]
    vit = compressed(config, pattern, by)
    assert family_of(original).costs(original, specs) == family_of(vit).costs(vit)


@pytest.mark.parametrize("config", OWN)
def test_a_mask_costs_what_the_original_costs(config: str) -> None:
    original = own(OWN[config])
    masked = realize(original, prescription(original, PATTERNS["half"]), by="mask")
    assert family_of(masked).costs(masked) == family_of(original).costs(original)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("config", OWN)
def test_parts_add_up_to_the_whole(config: str, pattern: str) -> None:
    vit = compressed(config, pattern, "renormalized")
    costs = family_of(vit).costs(vit)
    assert sum(part.params for part in costs.parts.values()) == costs.params
    assert sum(part.macs for part in costs.parts.values()) == costs.macs
    assert costs.directions == sum(sum(spec.ranks) for spec in vit.config.attention)
    record = costs.to_record()
    assert (record["params"], record["macs"]) == (costs.params, costs.macs)


@pytest.mark.parametrize(("form", "norms"), [("dense", "none"), ("svda", "kept"), ("svda", "original")])
def test_every_direction_but_the_last_saves_its_own_costs(form: str, norms: str) -> None:
    full = full_spec(form, width=12, heads=3)
    for rank in range(full.original_rank, 1, -1):
        larger = block_costs(full.with_ranks((rank, 4, 2), full.heads, norms), tokens=5, hidden=24)
        smaller = block_costs(full.with_ranks((rank - 1, 4, 2), full.heads, norms), tokens=5, hidden=24)
        assert smaller.total + direction_costs(replace(full, norms=norms), tokens=5) == larger.total


def test_the_last_direction_of_a_head_also_saves_its_read_out() -> None:
    full = full_spec("svda", width=12, heads=3)
    one = block_costs(full.with_ranks((1, 4, 4), full.heads, "kept"), tokens=5, hidden=24).total
    none = block_costs(full.with_ranks((0, 4, 4), full.heads, "kept"), tokens=5, hidden=24).total
    assert none + direction_costs(full, tokens=5) + PartCosts(0, 5 * 5 * full.head_dim) == one


@pytest.mark.parametrize("config", ["svda", "svda-deep", "dense"])
def test_the_linear_saving_equals_the_difference(config: str) -> None:
    original = CONFIGS[config]
    halved = tuple(
        spec.with_ranks(tuple(rank // 2 for rank in spec.ranks), spec.heads, spec.norms) for spec in original.attention
    )
    before, after = original.costs(), original.costs(halved)
    found = saved_shares(before, 0.5)
    assert found == pytest.approx((1 - after.params / before.params, 1 - after.macs / before.macs), rel=1e-12)
    assert 0 < found[0] < 1


def test_a_layer_without_heads_costs_its_output_bias() -> None:
    config = CONFIGS["svda"]
    empty = replace(config.attention[0], ranks=(), heads=())
    vit = VisionTransformer(config.with_layer(0, empty)).eval()
    costs = family_of(vit).costs(vit)
    assert costs.layers[0].value_output == PartCosts(config.width, 0)
    assert costs.params == count_params(vit)
    assert costs.product_macs == eager_product_macs(vit)


def test_macs_are_per_image() -> None:
    vit = model(CONFIGS["svda"])
    assert eager_product_macs(vit, count=1) == eager_product_macs(vit, count=7)
    with pytest.raises(InvalidInput, match="empty"):
        eager_product_macs(vit, count=0)


def test_an_operation_that_torch_cannot_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = model(CONFIGS["svda"])
    for operation in [known for known in flop_registry if "scaled_dot_product" in str(known)]:
        monkeypatch.delitem(flop_registry, operation)
    with pytest.raises(NotSupported, match=r"scaled_dot_product.*eager"):
        count_product_macs(vit, images(vit.config))
    assert torch.is_tensor(vit(images(vit.config)))
