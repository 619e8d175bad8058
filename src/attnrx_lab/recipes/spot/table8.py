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

from attnrx_lab.papers.spot_tables import (
    ACCURACY,
    CHANGE,
    CONTROLS,
    GFLOPS,
    HEAD_AVERAGED,
    OWN_COLUMNS,
    PREDICTORS,
    SHARED,
    SPOT,
    spot_recipe,
)

LINES = (
    ("SPOT", SPOT),
    ("head-averaged attention", HEAD_AVERAGED),
    ("one predictor for all stages", SHARED),
    *CONTROLS,
)

RECIPE = spot_recipe(
    "SPOT with coarser information",
    (ACCURACY, CHANGE, PREDICTORS, GFLOPS, *OWN_COLUMNS),
    dict.fromkeys(("deit_small", "vit_tiny", "cifar10_small"), LINES),
)
