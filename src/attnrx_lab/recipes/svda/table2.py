"""Energy retention on CIFAR-10 for three retention ratios rho.

Paper: Prescriptive SVD-Inspired Attention via Spectral Energy Retention
Table: 2, which is Table 7 of the appendix
Command: attnrx reproduce svda/table2
Expected: 31, 23 and 13 % of the directions removed at rho 0.85, 0.90 and 0.95, and no accuracy lost; every number is in
    expected.json
Not stated: what svda/table1 lists. The paper prints 23.05 % and 0.0041 at rho = 0.90 here, and 23.08 % and 0.0039 in
    its Table 1
Time: that of the CIFAR-10 row of svda/table1, whose runs it shares
Hardware: that of svda/table1
"""

from attnrx_lab.papers.recipe import Recipe
from attnrx_lab.papers.svda_tables import ORIGINAL_COLUMNS, PAPER_COLUMNS, PROTOCOL, RHO_ROWS

RECIPE = Recipe(
    title="SVDA, CIFAR-10 over the retention ratio rho",
    rows=RHO_ROWS,
    columns=(*PAPER_COLUMNS, *ORIGINAL_COLUMNS),
    protocol=(PROTOCOL["cifar10"],),
)
