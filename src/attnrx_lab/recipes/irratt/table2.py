"""IrrAtt with a low-rank MLP beside channel pruning, for DeiT-B.

Paper: Vision Transformer with Irregular Attention
Table: 2
Command: attnrx reproduce irratt/table2 --only deit_base
Expected: IrrAtt with 45.4 % of the FLOPs and 46.0 % of the parameters at 1.06 points lost; the rows of the
    other methods (VTP, WDPruning, UVC) are quoted as the paper prints them and not measured
Not stated: what irratt/table1 lists
Time: that of irratt/table1, whose runs it shares
Hardware: that of irratt/table1
"""

from attnrx_lab.papers.irratt_tables import CHANGE, COST_COLUMNS, DEIT_BASE, OWN_COLUMNS, SEEDS, VIT_TINY
from attnrx_lab.papers.recipe import Recipe, Row

RECIPE = Recipe(
    title="IrrAtt and channel pruning, DeiT-B",
    rows=(
        Row("IrrAtt 168, VO 32, MLP 304", "deit_base", "irratt-168-mlp"),
        Row("VTP", "deit_base"),
        Row("WDPruning", "deit_base"),
        Row("UVC", "deit_base"),
        Row("ViT-Tiny, IrrAtt 42, VO 32, MLP 76", "vit_tiny", "irratt-168-mlp"),
    ),
    columns=(CHANGE, *COST_COLUMNS[1:], *OWN_COLUMNS),
    protocol=(DEIT_BASE, VIT_TINY),
    seeds=SEEDS,
)
