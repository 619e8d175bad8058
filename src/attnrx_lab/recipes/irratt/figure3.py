"""How nearly the fusion matrix of CP SlimAtt is block-diagonal, layer by layer.

Paper: Vision Transformer with Irregular Attention
Table: Figure 3
Command: attnrx reproduce irratt/figure3 --only vit_tiny --weights vit_tiny_patch16_224.safetensors
Expected: one block for each head after the columns are sorted and rescaled; the paper draws one layer of a fine-tuned
    model and prints no number
Not stated: how many sweeps the fit takes and where it starts, and which layer is drawn
Time: some minutes on one CPU core for each model
Hardware: a CPU; only the weights are read. For a fine-tuned model, give its folder:
    --model runs/irratt/deit_base/seed-0/train/cp-168-mlp
"""

from functools import partial

from attnrx_lab.papers.fusion_pages import fusions_page
from attnrx_lab.papers.irratt_tables import BLOCK_COLUMNS, FIGURE_3, FUSIONS, SEEDS, layer_rows
from attnrx_lab.papers.recipe import Recipe

RECIPE = Recipe(
    title="Blocks of the fusion matrices of CP SlimAtt",
    rows=(*layer_rows("DeiT-B", "deit_base", 12), *layer_rows("ViT-Tiny", "vit_tiny", 12)),
    columns=BLOCK_COLUMNS,
    protocol=(FUSIONS["deit_base"], FUSIONS["vit_tiny"]),
    seeds=SEEDS,
    draw=partial(fusions_page, shares=(FIGURE_3,)),
)
