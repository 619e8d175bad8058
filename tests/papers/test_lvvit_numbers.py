"""LV-ViT's published parameters and GMACs, and those of SPOT's Table 1, from the closed form."""

import pytest
import torch

from attnrx.vit.attention import Eager, using
from attnrx.vit.costs import count_params, count_product_macs
from attnrx.vit.models import build_model, family_of
from attnrx.vit.tokens import Reducer, TokenPolicy
from attnrx_lab.costs import NORM_MACS, predictor_norm_features
from attnrx_lab.lvvit import lvvit_config
from attnrx_lab.tokens import DynamicViT, Spot

STAGES = {"t": (4, 7, 10), "s": (5, 9, 13)}


# The table of the authors' code counts S without the classifier of the patches (25.77 M), and M with it (55.83 M).
@pytest.mark.parametrize(
    ("size", "patches", "millions"), [("t", True, 8.53), ("s", True, 26.15), ("s", False, 25.77), ("m", True, 55.83)]
)
def test_parameters(size: str, patches: bool, millions: float) -> None:
    costs = lvvit_config(size, classifies_patches=patches).costs()
    assert round(costs.params / 1e6, 2) == millions


@pytest.mark.parametrize(("size", "exact", "printed"), [("t", 2_868_017_664, 2.9), ("s", 6_551_485_440, 6.6)])
def test_macs_of_the_whole_model(size: str, exact: int, printed: float) -> None:
    with torch.device("meta"):
        model = build_model(f"lvvit:{size}").eval()
        images = torch.empty(1, 3, 224, 224)
    costs = family_of(model).costs(model)
    assert costs.product_macs == exact and round(exact / 1e9, 1) == printed
    assert costs.params == count_params(model)
    layers = family_of(model).attention(model)
    with using(layers, [Eager()] * len(layers)):
        assert count_product_macs(model, images) == exact


def reduced_gmacs(size: str, reducer: Reducer, ratio: float) -> tuple[float, float]:
    """The model with fewer tokens, without and with the predictors, whose norms count five for every feature."""
    with torch.device("meta"):
        model = build_model(f"lvvit:{size}")
    family, policy = family_of(model), TokenPolicy.staged(reducer, ratio, STAGES[size])
    costs = family.costs(model, tokens=policy)
    norms = NORM_MACS * predictor_norm_features(policy, family.token_shape(model))
    return (costs.product_macs - costs.predictors.macs) / 1e9, (costs.product_macs + norms) / 1e9


def test_macs_with_fewer_tokens() -> None:
    """SPOT prints 4.5 for S and 2.0 for T; 0.7 gives the first without the predictors, and 0.5 the second with them."""
    assert [round(value, 3) for value in reduced_gmacs("s", Spot(), 0.7)] == [4.547, 4.676]
    assert [round(value, 3) for value in reduced_gmacs("s", DynamicViT(), 0.7)] == [4.547, 4.651]
    assert [round(value, 3) for value in reduced_gmacs("t", Spot(), 0.7)] == [2.219, 2.271]
    assert [round(value, 3) for value in reduced_gmacs("t", Spot(), 0.5)] == [1.957, 1.998]


@pytest.mark.parametrize(("size", "printed"), [("t", 0.051), ("s", 0.129)])
def test_macs_of_the_predictors(size: str, printed: float) -> None:
    without, whole = reduced_gmacs(size, Spot(), 0.7)
    assert round(whole - without, 3) == printed
