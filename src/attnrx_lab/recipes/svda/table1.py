"""Energy retention at rho = 0.90 on four datasets: what is removed, what it saves, how near the models stay.

Paper: Prescriptive SVD-Inspired Attention via Spectral Energy Retention
Table: 1, which is Table 5 of the appendix
Command: attnrx reproduce svda/table1 --only cifar10
Expected: 23 to 49 % of the directions removed, 4 to 8 % of the parameters, 4 to 9 % of the MACs, no accuracy lost;
    every number is in expected.json
Not stated: optimizer, learning rate and schedule, warm-up, weight decay, label smoothing, gradient clipping,
    precision, augmentation, the first strengths, the width of the MLP, how tokens are pooled, what is held out for
    validation. `TrainingConfig` lists what is used here
Time: estimated at some minutes a run on a data-centre GPU (not measured); on 2 CPU cores a step takes about 1.1 s, so
    about 4 hours for 80 epochs and then about an hour of measuring
Hardware: one GPU with 8 GB for the full protocol; `--epochs 4 --control-images 2000` for a CPU
"""

from attnrx_lab.papers.recipe import Recipe
from attnrx_lab.papers.svda_tables import DATASET_ROWS, ORIGINAL_COLUMNS, PAPER_COLUMNS, PROTOCOL

RECIPE = Recipe(
    title="SVDA, energy retention at rho = 0.90",
    rows=DATASET_ROWS,
    columns=(*PAPER_COLUMNS, *ORIGINAL_COLUMNS),
    protocol=tuple(PROTOCOL.values()),
)
