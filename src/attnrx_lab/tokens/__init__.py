"""Token reducers from papers, which prune or merge by learned or fixed scores, and the random control.

attnrx imports this package through the entry points of the group `attnrx.parts`. The import happens when you name a
reducer, or load a file that names one.
"""

from attnrx.vit.tokens import REDUCERS
from attnrx_lab.tokens.fusing import DTPS, EViT, Soft, SPViT
from attnrx_lab.tokens.keep_ratio import KeepRatio
from attnrx_lab.tokens.learned_scores import DynamicViT, Predicting
from attnrx_lab.tokens.pitome import PiToMe
from attnrx_lab.tokens.random import Random, image_keys
from attnrx_lab.tokens.scores import ATS, AttentionAverage, EvoViT, HaltingScores, HeadSelector
from attnrx_lab.tokens.spot import MapMoments, Spot
from attnrx_lab.tokens.zero_tprune import ZeroTPrune

__all__ = [
    "ATS",
    "DTPS",
    "AttentionAverage",
    "DynamicViT",
    "EViT",
    "EvoViT",
    "HaltingScores",
    "HeadSelector",
    "KeepRatio",
    "MapMoments",
    "PiToMe",
    "Predicting",
    "Random",
    "SPViT",
    "Soft",
    "Spot",
    "ZeroTPrune",
    "image_keys",
]  # fmt: skip

for _kind in (
    Random,
    AttentionAverage,
    EViT,
    DynamicViT,
    Spot,
    ZeroTPrune,
    HaltingScores,
    HeadSelector,
    SPViT,
    DTPS,
    PiToMe,
    ATS,
    EvoViT,
):
    REDUCERS.register(_kind)
