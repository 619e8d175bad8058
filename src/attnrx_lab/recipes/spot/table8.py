"""SPOT's predictor on the mean over the heads, and one predictor for all stages.

Paper: SPOT: Sparsification with Attention Dynamics via Token Relevance in Vision Transformers
Table: 8
Command: attnrx reproduce spot/table8 --only cifar10_small
Expected: for DeiT-S 79.5 % with the mean over the heads and 79.4 % with one predictor, against 79.7 %; predictors of
    0.106 and 0.129 GFLOPS. The first is 0.1075 by its own description (18 features) and fits 12 (0.1062): the text
    does not say which six would be left out
Not stated: what spot/table1 lists, and which features the mean over the heads leaves out
Time: that of spot/table2 for every line
Hardware: that of spot/table2
"""

from attnrx_lab.papers import spot_tables as spot

LINES = (
    ("SPOT", spot.SPOT),
    ("head-averaged attention", spot.HEAD_AVERAGED),
    ("one predictor for all stages", spot.SHARED),
    *spot.CONTROLS,
)

RECIPE = spot.spot_recipe(
    "SPOT with coarser information",
    dict.fromkeys(spot.ABLATED, LINES),
)
