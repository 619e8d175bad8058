"""Images a second with SPOT, by the inputs of its predictor and the keep ratio.

Paper: SPOT: Sparsification with Attention Dynamics via Token Relevance in Vision Transformers
Table: Figure 7
Command: attnrx reproduce spot/figure7 --only vit_tiny
Expected: more images a second with fewer tokens and with less information; the paper draws curves and states 3,880
    images a second, more than 1.5 times the original's, for one variant of DeiT-S at 3.0 GFLOPS on its GPU
Not stated: batch size, precision and software of the measurement, and the numbers behind the drawn curves
Time: about 20 minutes for DeiT-S on two CPU cores, estimated and not measured; less for the others
Hardware: any; an accelerator is used where there is one. No data and no weights are needed
"""

from attnrx_lab.papers import spot_tables as spot

RATIOS = (0.5, 0.7, 0.9)
METHODS = (
    ("SPOT", spot.SPOT),
    ("without the mean over layers", spot.NO_MEAN),
    ("without the variance over layers", spot.NO_VARIANCE),
    ("without both", spot.ONE_LAYER),
    ("without token features", spot.projected(0)),
    ("class attention", spot.CLASS_ATTENTION),
    ("random", spot.RANDOM),
)
LINES = tuple((f"{title}, {ratio:g}", spot.at(method, ratio)) for title, method in METHODS for ratio in RATIOS)

RECIPE = spot.speed_recipe("Images a second with SPOT", dict.fromkeys(spot.ABLATED, LINES))
