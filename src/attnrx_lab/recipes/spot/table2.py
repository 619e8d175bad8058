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

from attnrx_lab.papers.spot_tables import (
    ACCURACY,
    CHANGE,
    CONTROLS,
    GFLOPS,
    NO_MEAN,
    NO_VARIANCE,
    ONE_LAYER,
    OWN_COLUMNS,
    PREDICTORS,
    SPOT,
    spot_recipe,
)

LINES = (
    ("SPOT", SPOT),
    ("without the mean over layers", NO_MEAN),
    ("without the variance over layers", NO_VARIANCE),
    ("without both", ONE_LAYER),
    *CONTROLS,
)

RECIPE = spot_recipe(
    "SPOT with less of the attention",
    (ACCURACY, CHANGE, PREDICTORS, GFLOPS, *OWN_COLUMNS),
    dict.fromkeys(("deit_small", "vit_tiny", "cifar10_small"), LINES),
)
