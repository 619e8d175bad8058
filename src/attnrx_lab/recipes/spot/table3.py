"""Soft methods, in which something of what leaves stays, by their own scores and by SPOT's of one layer.

Paper: SPOT: Sparsification with Attention Dynamics via Token Relevance in Vision Transformers
Table: 3
Command: attnrx reproduce spot/table3 --only cifar10_small
Expected: 0.1 to 0.2 points more with SPOT's scores, at 0.8 GFLOPS for DeiT-T and 2.9 to 3.0 for DeiT-S; every number is
    in expected.json. SPViT is printed at 2.9 for DeiT-S and costs 3.0 here: of its paper only the packaging is here,
    with DynamicViT's predictor in place of its selector
Not stated: what spot/table1 lists, and the training of the methods that SPOT is combined with
Time: that of spot/table2 for every line
Hardware: that of spot/table2
"""

from attnrx_lab.papers import spot_tables as spot

LINES = (
    ("SPViT", spot.SPVIT),
    ("SPViT + SPOT", spot.SPVIT_SPOT),
    ("dTPS", spot.DTPS),
    ("dTPS + SPOT", spot.DTPS_SPOT),
    ("class attention, the rest packaged (EViT)", spot.EVIT),
    *spot.CONTROLS,
)

RECIPE = spot.spot_recipe(
    "Soft methods with SPOT's scores",
    dict.fromkeys(("deit_tiny", "deit_small", "vit_tiny", "cifar10_small"), LINES),
)
