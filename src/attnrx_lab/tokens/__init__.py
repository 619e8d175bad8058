"""Token reducers of other papers, for comparisons with those of `attnrx.vit.tokens`.

An entry point of the group `attnrx.parts` imports this package wherever a text or a file names a reducer.
"""

from attnrx.vit.tokens import register_reducer
from attnrx_lab.tokens.fusing import DTPS, SPViT
from attnrx_lab.tokens.pitome import PiToMe
from attnrx_lab.tokens.scores import ATS, EvoViT, HaltingScores, HeadSelector
from attnrx_lab.tokens.zero_tprune import ZeroTPrune

__all__ = ["ATS", "DTPS", "EvoViT", "HaltingScores", "HeadSelector", "PiToMe", "SPViT", "ZeroTPrune"]

for _name, _kind in {
    "zero_tprune": ZeroTPrune,
    "halting_scores": HaltingScores,
    "head_selector": HeadSelector,
    "spvit": SPViT,
    "dtps": DTPS,
    "pitome": PiToMe,
    "ats": ATS,
    "evo_vit": EvoViT,
}.items():
    register_reducer(_name, _kind)
