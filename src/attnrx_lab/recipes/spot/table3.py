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

from attnrx_lab.papers.spot_tables import (
    ACCURACY,
    CHANGE,
    CONTROLS,
    DTPS,
    DTPS_SPOT,
    EVIT,
    GFLOPS,
    OWN_COLUMNS,
    PREDICTORS,
    SPVIT,
    SPVIT_SPOT,
    spot_recipe,
)

LINES = (
    ("SPViT", SPVIT),
    ("SPViT + SPOT", SPVIT_SPOT),
    ("dTPS", DTPS),
    ("dTPS + SPOT", DTPS_SPOT),
    ("class attention, the rest packaged (EViT)", EVIT),
    *CONTROLS,
)

RECIPE = spot_recipe(
    "Soft methods with SPOT's scores",
    (ACCURACY, CHANGE, PREDICTORS, GFLOPS, *OWN_COLUMNS),
    dict.fromkeys(("deit_tiny", "deit_small", "vit_tiny", "cifar10_small"), LINES),
)
