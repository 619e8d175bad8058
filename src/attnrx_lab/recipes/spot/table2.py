"""Inputs of SPOT's predictor from the attention across the layers: the mean, the variance, both, neither.

Paper: SPOT: Sparsification with Attention Dynamics via Token Relevance in Vision Transformers
Table: 2
Command: attnrx reproduce spot/table2 --only cifar10_small
Expected: 79.4 to 79.5 % for DeiT-S, against 79.7 % with all; predictors of 0.120, 0.120 and 0.111 GFLOPS. Which of the
    first two lines leaves out the mean is lost in the text; both are expected to be 0.3 points around what is printed
Not stated: what spot/table1 lists, and which of the first two lines is without the mean
Time: the paper trains 80 epochs of ImageNet on eight GPUs for each line. CIFAR-10, measured on one core of a busy
    machine: 16 minutes for the original, which all recipes share, and 1.5 minutes for every line and seed
Hardware: GPUs for DeiT-S (--only deit_small; needs ImageNet in the folder that ATTNRX_DATA names); a CPU for the rest
"""

from attnrx_lab.papers import spot_tables as spot

LINES = (
    ("SPOT", spot.SPOT),
    ("without the mean over layers", spot.NO_MEAN),
    ("without the variance over layers", spot.NO_VARIANCE),
    ("without both", spot.ONE_LAYER),
    *spot.CONTROLS,
)

RECIPE = spot.spot_recipe(
    "SPOT with less of the attention",
    dict.fromkeys(spot.ABLATED, LINES),
)
