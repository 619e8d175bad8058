"""Accuracy over GFLOPS: SPOT and its controls over the keep ratio.

Paper: SPOT: Sparsification with Attention Dynamics via Token Relevance in Vision Transformers
Table: Figure 4
Command: attnrx reproduce spot/figure4 --only cifar10_small
Expected: accuracy that rises with the keep ratio; the paper draws points and prints those of Table 1 alone
Not stated: what spot/table1 lists, and the numbers behind the drawn points
Time: that of spot/table2 for every line
Hardware: that of spot/table1
"""

from attnrx_lab.papers import spot_tables as spot

RATIOS = (0.5, 0.6, 0.7, 0.8, 0.9)
CONTROLS = (("class attention", spot.CLASS_ATTENTION), ("random", spot.RANDOM))
LINES = (
    ("original", spot.ORIGINAL),
    *((f"SPOT, {ratio:g}", spot.at(spot.SPOT, ratio)) for ratio in RATIOS),
    *((f"{title}, {ratio:g}", spot.at(method, ratio)) for title, method in CONTROLS for ratio in RATIOS[::2]),
)

RECIPE = spot.spot_recipe(
    "SPOT and its controls over the keep ratio",
    dict.fromkeys(spot.SUBJECTS, LINES),
    (spot.ACCURACY, spot.CHANGE, spot.GFLOPS, *spot.OWN_COLUMNS),
)
