"""Token pruning and merging. A reducer runs before some layers and decides which tokens the next layers process."""

from attnrx.vit.tokens.merging import ToMe, Ward
from attnrx.vit.tokens.policy import REDUCERS, TokenPolicy, parse_policy, parse_reducer, policy_from_dict
from attnrx.vit.tokens.reducer import (
    AttentionReceived,
    ClassAttention,
    LayerStatistic,
    Reducer,
    Reduction,
    SampledTokens,
    Selecting,
    Shape,
    TokenLayout,
    TokenState,
    counted,
    destinations_of,
    gathered_rows,
)

__all__ = [
    "REDUCERS", "AttentionReceived", "ClassAttention", "LayerStatistic", "Reducer", "Reduction", "SampledTokens",
    "Selecting", "Shape", "ToMe", "TokenLayout", "TokenPolicy", "TokenState", "Ward", "counted", "destinations_of",
    "gathered_rows", "parse_policy", "parse_reducer", "policy_from_dict",
]  # fmt: skip
