"""Compressed forms by name, priced: what is counted on the built model is what the closed form says."""

from dataclasses import replace

import pytest

from attnrx.vit.attention import Eager, using
from attnrx.vit.costs import PartCosts, count_params, count_product_macs
from attnrx.vit.models import family_of
from attnrx.vit.spec import AttentionSpec
from attnrx_lab.costs import Compression, priced
from attnrx_lab.vision_transformer import VisionTransformer, ViTConfig, block_costs, full_spec
from support.cases import CONFIGS, images, model

FULL = full_spec("dense", width=12, heads=3)
NO_KEY_BIAS = replace(FULL, biases=("query", "value", "output"))
NO_OUTPUT_BIAS = replace(FULL, biases=("query", "key", "value"))
NO_BIASES = replace(FULL, biases=())
FORMS = ("full", "truncatt:1", "truncatt:3", "cp:1", "cp:5", "cp:12", "irratt:2", "irratt:7", "irratt:11")


def compressed(full: AttentionSpec, compression: Compression) -> ViTConfig:
    """Two layers of the compressed form, and one as it was, so that the layers differ."""
    specs = (full,) * 3
    config = replace(CONFIGS["dense"], attention=(*(compression.spec(full),) * 2, full))
    ranks = compression.mlp_ranks(specs)
    return config if ranks is None else replace(config, mlp_ranks=(*ranks[:2], (None, None)))


@pytest.mark.parametrize(
    ("full", "qk", "vo", "mlp"),
    # Every form with every choice of biases, and either with every choice of the other ranks.
    [
        (full, qk, *((None, None), (2, None), (None, 3), (2, 3))[(row + column) % 4])
        for row, full in enumerate((FULL, NO_KEY_BIAS, NO_OUTPUT_BIAS, NO_BIASES))
        for column, qk in enumerate(FORMS)
    ],
)
def test_closed_form_equals_what_is_allocated_and_what_runs(
    full: AttentionSpec, qk: str, vo: int | None, mlp: int | None
) -> None:
    config = compressed(full, Compression(qk, vo, mlp))
    vit = VisionTransformer(config).double().eval()
    layers = family_of(vit).attention(vit)
    with using(layers, [Eager()] * len(layers)):
        counted = count_product_macs(vit, images(config, 2))
    costs = config.costs()
    assert (costs.params, costs.product_macs) == (count_params(vit), counted)


def test_biases_after_compression() -> None:
    assert Compression("truncatt:2").spec(FULL).biases == ("query", "value", "output")
    assert Compression("cp:2").spec(FULL).biases == ("query", "value", "output")
    assert Compression("full", vo=2).spec(FULL).biases == ("query", "key", "output")
    assert Compression("irratt:7", vo=2).spec(FULL).biases == ("query", "output")
    assert Compression("full", vo=2).spec(NO_OUTPUT_BIAS).biases == ("query", "key", "output")
    assert Compression("truncatt:2", vo=2).spec(NO_BIASES).biases == ()


def test_the_shapes_of_the_forms() -> None:
    mixed = Compression("irratt:7").spec(FULL)
    assert (mixed.form, mixed.blocks, mixed.ranks) == ("mixed", (3, 2, 2), (7, 7, 7))
    assert Compression("truncatt:2", vo=1).spec(FULL).ranks == (2, 2, 2)
    assert Compression("truncatt:2", vo=1).spec(FULL).value_dims == (1, 1, 1)
    shared = Compression("cp:5").spec(FULL)
    assert (shared.form, shared.rows, shared.ranks) == ("shared", (5,), (5, 5, 5))
    assert {Compression(form).spec(FULL).scale for form in FORMS} == {FULL.scale}


@pytest.mark.parametrize("blocks", [(4, 2, 1), (0, 2, 5), (7, 0, 0)])
def test_irratt_costs_depend_on_the_total_only(blocks: tuple[int, ...]) -> None:
    spread = Compression(f"irratt:{sum(blocks)}", vo=2).spec(FULL)
    assert spread.blocks != blocks
    assert block_costs(replace(spread, blocks=blocks), 5, 24).parts == block_costs(spread, 5, 24).parts


@pytest.mark.parametrize("config", CONFIGS)
def test_the_irratt_convention_counts_every_product_and_five_for_every_normalized_feature(config: str) -> None:
    vit = model(CONFIGS[config])
    costs, shape = vit.config.costs(), vit.config
    price = priced(costs)
    layers = family_of(vit).attention(vit)
    with using(layers, [Eager()] * len(layers)):
        products = count_product_macs(vit, images(shape, 1))
    normalized = (2 * shape.depth + 1) * shape.tokens * shape.width
    assert price.macs == products + 5 * normalized
    assert price.params == count_params(vit)


def test_fusion_mixes_the_maps_of_all_blocks_for_every_head() -> None:
    mixed, regular = (block_costs(Compression(form).spec(FULL), 5, 24) for form in ("irratt:2", "truncatt:2"))
    assert (mixed.fusion, regular.fusion) == (PartCosts(9, 25 * 9), PartCosts())
    assert mixed.read_out == PartCosts(0, 25 * 12)  # every head reads its values, also if a block is empty
