"""SPOT's predictor on attention alone, beside the rule that averages the class token's attention over the layers.

Paper: SPOT: Sparsification with Attention Dynamics via Token Relevance in Vision Transformers
Table: 7
Command: attnrx reproduce spot/table7 --only cifar10_small
Expected: for DeiT-S 79.2 % with the predictor and 73.6 % with the average, both at 2.9 GFLOPS; predictors of less than
    0.01 GFLOPS
Not stated: what spot/table1 lists
Time: that of spot/table2 for every line
Hardware: that of spot/table2
"""

from attnrx_lab.papers import spot_tables as spot

LINES = (
    ("original", spot.ORIGINAL),
    ("averaging across layers", spot.AVERAGE),
    ("SPOT without token features", spot.projected(0)),
    *spot.CONTROLS,
)

RECIPE = spot.spot_recipe(
    "SPOT and an average of attention",
    dict.fromkeys(spot.ABLATED, LINES),
)
