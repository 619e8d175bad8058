"""Energy retention at rho = 0.90 against controls that remove as many directions of every head.

Paper: Prescriptive SVD-Inspired Attention via Spectral Energy Retention
Table: 6
Command: attnrx reproduce svda/table6 --only cifar10
Expected: SVDA as accurate as the random control and 1 to 4 points more accurate than the largest-strength control;
    every number is in expected.json
Not stated: what svda/table1 lists, and the number of draws of the random control (10 here). 'near 0 pp' is read as 0
    to the unit
Time: that of svda/table1, whose runs it shares
Hardware: that of svda/table1
"""

from attnrx_lab.papers.recipe import Recipe
from attnrx_lab.papers.svda_tables import CONTROL_COLUMNS, DATASET_ROWS, PROTOCOL

RECIPE = Recipe(
    title="SVDA, matched controls at rho = 0.90",
    rows=DATASET_ROWS,
    columns=CONTROL_COLUMNS,
    protocol=tuple(PROTOCOL.values()),
)
