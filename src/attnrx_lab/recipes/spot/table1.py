"""SPOT beside the methods that it is compared with, on four backbones.

Paper: SPOT: Sparsification with Attention Dynamics via Token Relevance in Vision Transformers
Table: 1
Command: attnrx reproduce spot/table1 --only vit_tiny --weights vit_tiny_patch16_224.safetensors
Expected: 0.3 points of top-1 lost at most by SPOT on DeiT and 1.5 on LV-ViT-T, at 61 to 69 % of the GFLOPS; every
    number is in expected.json. GFLOPS follow in closed form, but for these: LV-ViT-T at a keep ratio of 0.7 costs 2.3
    (printed 2.0, which 0.5 gives), LV-ViT-S 4.7 (4.5, which it costs without the predictors), DynamicViT on DeiT-S 3.0
    (2.9, without its predictors), and EViT, pruning inside a layer as published, 2.9 on DeiT-S (3.0) and 4.6
    on LV-ViT-S (4.7). Every trained line learns by the same losses. A-ViT trains its halting scores by a
    ponder loss, which is not here: the halting rule alone has a row of its own, without numbers of the paper
Not stated: weight decay, schedule, warm-up, augmentation, precision, seeds, and how the rows of other methods were
    made
Time: that of spot/table2 for every line; ViT-Tiny, one epoch of ImageNette, is a matter of minutes on a CPU (not
    measured)
Hardware: GPUs for DeiT and LV-ViT (needs ImageNet in the folder that ATTNRX_DATA names; one LV-ViT at a
    time, with its published --weights); a CPU for --only vit_tiny and --only cifar10_small
"""

from attnrx_lab.papers import spot_tables as spot

# Keep ratios are 0.7, or what comes nearest to the printed GFLOPS where another budget was printed.
SPOT_65 = spot.at(spot.SPOT, 0.65)
A_VIT = ("A-ViT (trains its halting scores: not here)", None)
HALTING = "the halting rule of A-ViT, untrained"
SPOT_ALONE = (("original", spot.ORIGINAL), ("DynamicViT", spot.DYNAMICVIT), ("SPOT", spot.SPOT))
OWN = (
    ("original", spot.ORIGINAL),
    ("DynamicViT", spot.DYNAMICVIT),
    (HALTING, spot.HALTING_SCORES),
    ("EViT", spot.EVIT),
    ("Zero-TPrune", spot.ZERO_TPRUNE),
    ("SPOT", spot.SPOT),
)
LEFT_OUT = (
    ("IA-RED2 (learns by reinforcement: not here)", None),
    ("RL4EViT (learns by reinforcement: not here)", None),
    ("METR (trains the backbone in its own way: not here)", None),
)
REST = (*spot.CONTROLS, *spot.UNTRAINED)

RECIPE = spot.spot_recipe(
    "SPOT and other reducers",
    {
        "deit_tiny": (*OWN[:2], A_VIT, *OWN[2:4], ("Zero-TPrune", spot.at(spot.ZERO_TPRUNE, 0.8)), *OWN[5:], *REST),
        "deit_small": (
            *OWN[:2],
            A_VIT,
            (HALTING, spot.at(spot.HALTING_SCORES, 0.85)),
            ("EViT", spot.EVIT),
            *LEFT_OUT,
            ("Zero-TPrune", spot.at(spot.ZERO_TPRUNE, 0.75)),
            ("SPOT, keep ratio 0.65", SPOT_65),
            ("SPOT", spot.SPOT),
            *REST,
        ),
        "lvvit_tiny": (*SPOT_ALONE, *REST),
        "lvvit_small": (*SPOT_ALONE[:2], ("EViT", spot.EVIT), *SPOT_ALONE[2:], *REST),
        "vit_tiny": (*OWN, *REST),
        "cifar10_small": (*OWN, *REST),
    },
    (spot.ACCURACY, spot.CHANGE, spot.GFLOPS, spot.PREDICTORS, *spot.OWN_COLUMNS),
)
