"""TruncAtt, CP SlimAtt and IrrAtt at the same ranks: what each costs, exactly, and what each loses.

Paper: Vision Transformer with Irregular Attention
Table: 1
Command: attnrx reproduce irratt/table1 --only vit_tiny --weights vit_tiny_patch16_224.safetensors
Expected: 35.2 to 75.5 % of the FLOPs of attention, 44.7 to 90.7 % of all, and 0.4 to 2.6 points of top-1 lost after
    fine-tuning; every number is in expected.json. Costs are exact, but for one cell: the attention of DeiT-B with
    CP 168 is printed as 49.7 %, and the convention that gives all other cells gives 49.614 %
Not stated: losses, label smoothing, augmentation, precision, seeds, and how fine-tuning runs for DeiT-S (Table 3 of
    its appendix lists AdamW, its rates and the warm-up for DeiT-B)
Time: the paper states 1.5 to 2 days on an A100 for each fine-tuned row of DeiT. ViT-Tiny, which is not fine-tuned, is
    a matter of minutes on a CPU
Hardware: one GPU with 80 GB for DeiT (--only deit_small, deit_base; needs ImageNet in the folder that ATTNRX_DATA
    names); a CPU for --only vit_tiny and for --tiny
"""

from attnrx_lab.papers import irratt_tables as irratt
from attnrx_lab.papers.recipe import Recipe

RECIPE = Recipe(
    title="TruncAtt, CP SlimAtt and IrrAtt",
    rows=(
        *irratt.method_rows("DeiT-S", irratt.DEIT_SMALL, irratt.SMALL),
        *irratt.method_rows("DeiT-B", irratt.DEIT_BASE, irratt.BASE),
        *irratt.method_rows("ViT-Tiny", irratt.VIT_TINY, irratt.SMALL // 2),
    ),
    columns=(irratt.ACCURACY, irratt.CHANGE, *irratt.COST_COLUMNS, *irratt.OWN_COLUMNS),
    protocol=(irratt.DEIT_SMALL, irratt.DEIT_BASE, irratt.VIT_TINY),
    seeds=irratt.SEEDS,
)
