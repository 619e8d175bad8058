"""Every realization against the original, at rho = 0.90 and at half the directions: what the paper's tables leave open.

Paper: Prescriptive SVD-Inspired Attention via Spectral Energy Retention
Table: none; a comparison of our own with the same runs
Command: attnrx reproduce svda/realizations --only cifar10
Expected: exact equals the mask, and refit is nearer to the original than renormalized, at the same cost. After few
    epochs, with strengths near 1, refit is nearer than the mask, too; once they have spread the mask is the nearest
    (benchmarks/realizations.py). The paper has no such numbers
Not stated: the whole table is this project's; the training is that of svda/table1
Time: that of svda/table1, whose runs it shares
Hardware: that of svda/table1
"""

from attnrx_lab.papers.recipe import Recipe, Row
from attnrx_lab.papers.svda_tables import PROTOCOL, REALIZATION_COLUMNS, TITLES

DATASETS = ("fashion_mnist", "cifar10")
RULES = {"rho-0.90": "rho = 0.90", "share-0.50": "half the directions"}

RECIPE = Recipe(
    title="SVDA, every realization against the original",
    rows=tuple(
        Row(f"{TITLES[dataset]}, {what}", dataset, rule) for dataset in DATASETS for rule, what in RULES.items()
    ),
    columns=REALIZATION_COLUMNS,
    protocol=tuple(PROTOCOL[dataset] for dataset in DATASETS),
)
