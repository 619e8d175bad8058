"""Fused QKV: queries, keys and values as one matrix product."""

import pytest
import torch

from attnrx.vit.attention import Attention
from attnrx.vit.spec import AttentionSpec

SPECS = {
    "dense": AttentionSpec("dense", 12, 4, (4, 4, 4), (0, 1, 2), 0.5, 4, "none"),
    "no query bias": AttentionSpec("dense", 12, 4, (4, 4, 4), (0, 1, 2), 0.5, 4, "none", biases=("value", "output")),
    "no bias": AttentionSpec("dense", 12, 4, (4, 4, 4), (0, 1, 2), 0.5, 4, "none", biases=()),
    "ragged": AttentionSpec("svda", 12, 4, (4, 1, 2), (0, 1, 2), 0.5, 4, "kept", value_ranks=(4, 2, 1)),
    "rank 0": AttentionSpec("dense", 12, 4, (0, 0, 0), (0, 1, 2), 0.5, 4, "none"),
}
TOKENS = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def fresh(name: str) -> Attention:
    torch.manual_seed(0)
    layer = Attention(SPECS[name]).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


@pytest.mark.parametrize("name", SPECS)
def test_inference_gives_what_recorded_products_give(name: str) -> None:
    layer = fresh(name)
    expected = layer(TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(layer(TOKENS), expected, rtol=1e-12, atol=1e-12)


def test_a_projection_that_is_watched_is_computed_by_itself() -> None:
    layer, seen = fresh("dense"), []
    hook = layer.scores.key.register_forward_hook(lambda *given: seen.append(given[-1]))
    with torch.no_grad():
        expected = layer(TOKENS)
        assert len(seen) == 1
        hook.remove()
        torch.testing.assert_close(layer(TOKENS), expected, rtol=1e-12, atol=1e-12)
    assert len(seen) == 1
