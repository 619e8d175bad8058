"""Inputs of SPOT's predictor from the tokens themselves: from all features down to none.

Paper: SPOT: Sparsification with Attention Dynamics via Token Relevance in Vision Transformers
Table: Figure 5
Command: attnrx reproduce spot/figure5 --only cifar10_small
Expected: 3.0 GFLOPS with as many token features as the width of DeiT-S, 2.9 with none, and there 79.2 % top-1; the
    figure prints no other number
Not stated: what spot/table1 lists, and the numbers behind the drawn points
Time: that of spot/table2 for every line
Hardware: that of spot/table2
"""

from attnrx_lab.papers import spot_tables as spot

WIDTHS = {"deit_small": 384, "vit_tiny": 192, "cifar10_small": 64}
DIVISORS = {1: "as many token features as the width", 2: "1/2", 4: "1/4", 8: "1/8", 16: "1/16"}


def lines(width: int) -> tuple[spot.Line, ...]:
    """Returns the line of every number of token features, and the controls."""
    shares = (
        (title, spot.SPOT if divisor == 1 else spot.projected(width // divisor)) for divisor, title in DIVISORS.items()
    )
    return (*shares, ("no token features", spot.projected(0)), *spot.CONTROLS)


RECIPE = spot.spot_recipe(
    "SPOT with fewer token features",
    {subject: lines(width) for subject, width in WIDTHS.items()},
)
