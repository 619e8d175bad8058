"""What SPOT states of its costs: the predictors' overheads and the whole models, recomputed from first principles.

The paper's "GFLOPS" are multiply-accumulates, of the classifier too, with a LayerNorm at five for every feature.
"""

import pytest
import torch

from attnrx.vit.costs import ModelCosts, token_costs
from attnrx.vit.models import build_model, family_of
from attnrx.vit.tokens import Shape, TokenLayout, parse_policy
from attnrx_lab.costs import NORM_MACS, predictor_norm_features
from attnrx_lab.vision_transformer import full_spec

pytest.importorskip("timm")

STAGES = ":0.7@4,7,10"
LAYOUT = TokenLayout(1, 196, class_token=True, pooled="class")


def predictor_price(width: int, heads: int, reducer: str) -> float:
    """GMACs of the predictors alone."""
    specs = (full_spec("dense", width, heads),) * 12
    policy, shape = parse_policy(reducer + STAGES), Shape(width, heads, LAYOUT)
    found = token_costs(policy, shape, specs)
    assert found.tokens == (197,) * 3 + (138,) * 3 + (97,) * 3 + (68,) * 3
    return (found.predictors.macs + NORM_MACS * predictor_norm_features(policy, shape)) / 1e9


# Sections 4.1 to 4.4: recomputed, and as printed.
@pytest.mark.parametrize(
    ("width", "heads", "reducer", "recomputed", "paper"),
    [
        (192, 3, "spot", 0.0325, 0.032),
        (240, 4, "spot", 0.0514, 0.051),
        (384, 6, "spot", 0.1291, 0.129),
        (384, 6, "spot(variance=false)", 0.1199, 0.120),
        (384, 6, "spot(mean=false)", 0.1199, 0.120),
        (384, 6, "spot(mean=false,variance=false)", 0.1115, 0.111),
        (384, 6, "spot(head_averaged=true)", 0.1075, 0.106),
        (384, 6, "spot(head_averaged=true,variance=false)", 0.1062, 0.106),
    ],
)
def test_the_overhead_of_the_predictors(width: int, heads: int, reducer: str, recomputed: float, paper: float) -> None:
    assert predictor_price(width, heads, reducer) == pytest.approx(recomputed, abs=5e-5)
    assert predictor_price(width, heads, reducer) == pytest.approx(paper, abs=1.5e-3)


def whole(name: str, policy: str | None) -> ModelCosts:
    with torch.device("meta"):
        model = build_model(f"timm:{name}")
    return family_of(model).costs(model, tokens=None if policy is None else parse_policy(policy))


def gmacs(costs: ModelCosts) -> float:
    return (costs.macs + costs.classifier_macs) / 1e9


@pytest.mark.parametrize(
    ("name", "dense", "reduced"), [("deit_tiny_patch16_224", 1.3, 0.8), ("deit_small_patch16_224", 4.6, 3.0)]
)
def test_whole_models(name: str, dense: float, reduced: float) -> None:
    assert round(gmacs(whole(name, None)), 1) == dense
    assert round(gmacs(whole(name, "spot" + STAGES)), 1) == reduced


def test_deit_small_before_its_predictors() -> None:
    before, after = whole("deit_small_patch16_224", None), whole("deit_small_patch16_224", "spot" + STAGES)
    assert gmacs(before) == pytest.approx(4.599, abs=5e-4)
    assert gmacs(after) - after.predictors.macs / 1e9 == pytest.approx(2.878, abs=5e-4)
