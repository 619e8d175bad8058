"""Decisions from masks: selected directions with their reasons and the bound of the masked scores."""

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context, Decimal

import torch

from attnrx.decide.diagnostics.spectral_shape import energy
from attnrx.nouns.prescription import ScoreDecision
from attnrx.support.shapes import Bool, Float, Int, Tensor
from attnrx.vit.maps import HEADS, HIDDEN
from attnrx.vit.spectrum import Spectrum

# Sums of shares have rounding errors of about 1e-15. Without this tolerance 0.07 of 100 equal directions would be 8.
TOLERANCE = 1e-12


def rank_positions(
    amount: Float[Tensor, "heads directions"], used: Bool[Tensor, "heads directions"]
) -> Int[Tensor, "heads directions"]:
    """Returns every direction's rank in its head: 0 for the largest amount, ties by index, padding last."""
    # Amounts are not negative, so -1 sorts the padding last. The argsort of a permutation is its inverse.
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
    """Returns a mask of the smallest set of each head that holds this share of the head's amount (SVDA, Eq. 45 for the
    energy).

    Ties are resolved by index. At least one direction is kept; at share 1 all with an amount that is not zero.
    """
    if share == 1:
        # Counted, because a rounded sum can reach its total before the last amounts.
        ranks = ((amount > 0) & used).sum(-1)
    else:
        cumulative = amount.masked_fill(~used, 0.0).sort(dim=-1, descending=True).values.cumsum(-1)
        ranks = (cumulative < (share - TOLERANCE) * cumulative[:, -1:]).sum(-1) + 1
    return largest(amount, used, ranks.clamp(min=1))


def score_bound(spectrum: Spectrum, decision: ScoreDecision) -> Float[Tensor, "heads"]:
    """Bounds the change of any masked score on the same tokens: max |change of strength| * scale (SVDA, Theorem 1, Eq.
    12).

    The bound holds because the rows of query and key have unit length, also where strengths are changed instead of
    removed. It is infinite for dense attention with any change (its rows have any length), and for directions that
    all heads share.
    """
    if decision.keep.shape != spectrum.used.shape:  # shared directions: no bound exists
        return torch.full((len(decision.keep),), math.inf, dtype=torch.float64)
    prescribed = torch.where(decision.keep, decision.strength.double(), 0.0)
    change = torch.where(spectrum.used, spectrum.strength.double() - prescribed, 0.0).abs()
    # The padding column of zeros gives heads without directions the bound 0; amax of an empty row is undefined.
    bound = torch.nn.functional.pad(change, (0, 1)).amax(-1) * spectrum.scale
    return bound if spectrum.has_norms else torch.where(bound == 0, bound, math.inf)


def keep_only(spectrum: Spectrum, keep: Bool[Tensor, "heads directions"], notes: Sequence[str] = ()) -> ScoreDecision:
    """Returns a decision that keeps these directions at their strengths.

    `notes` are remarks, one per head. Removed directions get strength zero, so that decisions can be compared and
    combined by strength alone.
    """
    keep = keep & spectrum.used
    return give_strengths(spectrum, keep, torch.where(keep, spectrum.strength.double(), 0.0), notes)


def give_strengths(
    spectrum: Spectrum,
    keep: Bool[Tensor, "heads directions"],
    strength: Float[Tensor, "heads directions"],
    notes: Sequence[str] = (),
) -> ScoreDecision:
    """Returns a decision that keeps these directions with these strengths."""
    decision = ScoreDecision(keep, strength, ("",) * keep.shape[0])
    # Theorem 1 of SVDA bounds scores; the other maps have none.
    bounds = score_bound(spectrum, decision).tolist() if spectrum.map == "qk" else [0.0] * len(keep)
    reasons = (
        _describe_kept(spectrum, keep, head)
        + (f" ({notes[head]})" if notes else "")
        + _describe_removed(spectrum, keep, head)
        + _describe_bound(bound)
        for head, bound in enumerate(bounds)
    )
    return replace(decision, reasons=tuple(reasons))


def at_most(value: float) -> str:
    """Formats an upper bound with three digits, rounded up."""
    return f"{float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(Decimal(value))):g}"


def _describe_kept(spectrum: Spectrum, keep: Tensor, head: int) -> str:
    rank, total = int(keep[head].sum()), int(spectrum.used[head].sum())
    what = {HEADS: "heads", HIDDEN: "hidden units"}.get(spectrum.map, "directions")
    if not total:
        return f"has no {what}"
    if not rank:
        consequence = "attends uniformly" if spectrum.map == "qk" else "gives its mean"
        return f"keeps none of {total} {what} and {consequence}"
    return f"keeps all {total} {what}" if rank == total else f"keeps {rank} of {total} {what}"


def _describe_removed(spectrum: Spectrum, keep: Tensor, head: int) -> str:
    used, is_removed = spectrum.used[head], spectrum.used[head] & ~keep[head]
    if bool(used.any()) and not bool(spectrum.strength[head][used].any()):
        return "; all strengths are zero"
    if not bool(is_removed.any()):
        return ""
    share = (energy(spectrum.strength.double(), spectrum.used)[head] * keep[head]).sum().item()
    strongest = spectrum.strength[head][is_removed].abs().max().item()
    kept_energy = f": {100 * share:.1f} % of the energy" if keep[head].any() else ""
    return f"{kept_energy}; largest removed strength {strongest:.3g}"


def _describe_bound(bound: float) -> str:
    if bound == 0:
        return ""
    if math.isinf(bound):
        return "; no bound on the scores, as dense rows have any length"
    return f"; no masked score moves by more than {at_most(bound)} (Theorem 1)"
