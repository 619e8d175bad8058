"""Energy retention on CIFAR-10 against matched controls, for three retention ratios rho.

Paper: Prescriptive SVD-Inspired Attention via Spectral Energy Retention
Table: 8
Command: attnrx reproduce svda/table8
Expected: SVDA as accurate as the random control and 1 to 2.5 points more accurate than the largest-strength control;
    every number is in expected.json
Not stated: what svda/table1 lists, and the number of draws of the random control (10 here)
Time: that of the CIFAR-10 row of svda/table1, whose runs it shares
Hardware: that of svda/table1
"""

from attnrx_lab.papers.recipe import Recipe
from attnrx_lab.papers.svda_tables import CONTROL_COLUMNS, PROTOCOL, RHO_ROWS

RECIPE = Recipe(
    title="SVDA, CIFAR-10 matched controls over the retention ratio rho",
    rows=RHO_ROWS,
    columns=CONTROL_COLUMNS,
    protocol=(PROTOCOL["cifar10"],),
)
