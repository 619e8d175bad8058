"""How unequally the heads share a total rank: the ranks of every layer, sorted, head by head.

Paper: Vision Transformer with Irregular Attention
Table: Figure 2
Command: attnrx reproduce irratt/figure2 --only vit_tiny --weights vit_tiny_patch16_224.safetensors
Expected: ranks that rise from head to head: every layer has heads of low and of high rank; the paper draws densities
    and prints no number
Not stated: how many sweeps the fit takes and where it starts
Time: some minutes on one CPU core for each model
Hardware: a CPU; only the weights are read
"""

from functools import partial

from attnrx_lab.papers.fusion_pages import ranks_page
from attnrx_lab.papers.irratt_tables import FIGURE_2, FUSIONS, PLACE_COLUMNS, SEEDS, place_rows
from attnrx_lab.papers.recipe import Recipe

RECIPE = Recipe(
    title="Ranks of the heads at a quarter of the directions, over the layers",
    rows=(*place_rows("DeiT-S", "deit_small", 6), *place_rows("ViT-Tiny", "vit_tiny", 3)),
    columns=PLACE_COLUMNS,
    protocol=(FUSIONS["deit_small"], FUSIONS["vit_tiny"]),
    seeds=SEEDS,
    draw=partial(ranks_page, shares=(FIGURE_2,)),
)
