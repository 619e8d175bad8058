"""Selects directions per head: a number of the strongest, or the fewest that hold a share of a quantity."""

from attnrx.shapes import Bool, Float, Int, Tensor

# Sums of shares have rounding errors of about 1e-15. Without this tolerance 0.07 of 100 equal directions would be 8.
TOLERANCE = 1e-12


def rank_positions(
    amount: Float[Tensor, "heads directions"], used: Bool[Tensor, "heads directions"]
) -> Int[Tensor, "heads directions"]:
    """Returns every direction's rank in its head: 0 for the largest amount, ties by index, padding last."""
    order = amount.masked_fill(~used, -1.0).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1)


def largest(
    amount: Float[Tensor, "heads directions"], used: Bool[Tensor, "heads directions"], ranks: Int[Tensor, "heads"]
) -> Bool[Tensor, "heads directions"]:
    """Returns a mask of the `ranks` directions of each head with the largest amount; all where a head has fewer."""
    return (rank_positions(amount, used) < ranks[:, None]) & used


def fewest_holding(
    share: float, amount: Float[Tensor, "heads directions"], used: Bool[Tensor, "heads directions"]
) -> Bool[Tensor, "heads directions"]:
    """Returns a mask of the smallest set of each head that holds this share of the head's amount (Eq. 45 for the
    energy).

    Ties are resolved by index. At least one direction is kept; at share 1 all with an amount that is not zero.
    """
    if share == 1:
        ranks = ((amount > 0) & used).sum(-1)
    else:
        held = amount.masked_fill(~used, 0.0).sort(dim=-1, descending=True).values.cumsum(-1)
        ranks = (held < (share - TOLERANCE) * held[:, -1:]).sum(-1) + 1
    return largest(amount, used, ranks.clamp(min=1))
