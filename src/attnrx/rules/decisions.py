"""Decisions and their reasons: one sentence per head, with the relevant numbers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context, Decimal

import torch

from attnrx.diagnostics.spectral_shape import energy
from attnrx.prescription import ScoreDecision
from attnrx.rules.bounds import score_bound
from attnrx.shapes import Bool, Float, Tensor
from attnrx.spectrum import Spectrum

NO_STRENGTH = "all strengths are zero"


def keep_only(
    spectrum: Spectrum,
    keep: Bool[Tensor, "heads directions"],
    notes: Sequence[str] = (),
    heads: Bool[Tensor, "heads"] | None = None,
) -> ScoreDecision:
    """Returns a decision that keeps these directions at their strengths, and these heads (default: all).

    `notes` are remarks, one per head. Removed directions get strength zero, so that decisions can be compared and
    combined by strength alone.
    """
    keep = keep & spectrum.used
    return give_strengths(spectrum, keep, torch.where(keep, spectrum.strength.double(), 0.0), notes, heads)


def give_strengths(
    spectrum: Spectrum,
    keep: Bool[Tensor, "heads directions"],
    strength: Float[Tensor, "heads directions"],
    notes: Sequence[str] = (),
    heads: Bool[Tensor, "heads"] | None = None,
) -> ScoreDecision:
    """Returns a decision that keeps these directions with these strengths, and these heads (default: all)."""
    kept_heads = torch.ones(keep.shape[0], dtype=torch.bool) if heads is None else heads
    decision = ScoreDecision(keep, strength, kept_heads, ("",) * keep.shape[0])
    reasons = []
    for head, bound in enumerate(score_bound(spectrum, decision).tolist()):
        note = f" ({notes[head]})" if notes else ""
        bound_text = _describe_bound(bound) if spectrum.of == "qk" else ""
        rest = _describe_removed(spectrum, keep, head) + bound_text if kept_heads[head] else ""
        reasons.append(_describe_kept(spectrum, decision, head) + note + rest)
    return replace(decision, reasons=tuple(reasons))


def at_most(value: float) -> str:
    """Formats an upper bound with three digits, rounded up."""
    return f"{float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(Decimal(value))):g}"


def _describe_kept(spectrum: Spectrum, decision: ScoreDecision, head: int) -> str:
    rank, total = int(decision.keep[head].sum()), int(spectrum.used[head].sum())
    if not decision.heads[head]:
        return "is removed"
    if not total:
        return "has no directions"
    if not rank:
        consequence = "attends uniformly" if spectrum.of == "qk" else "gives its mean"
        return f"keeps none of {total} directions and {consequence}"
    return f"keeps all {total} directions" if rank == total else f"keeps {rank} of {total} directions"


def _describe_removed(spectrum: Spectrum, keep: Tensor, head: int) -> str:
    used, removed = spectrum.used[head], spectrum.used[head] & ~keep[head]
    if bool(used.any()) and not bool(spectrum.strength[head][used].any()):
        return f"; {NO_STRENGTH}"
    if not bool(removed.any()):
        return ""
    share = (energy(spectrum.strength.double(), spectrum.used)[head] * keep[head]).sum().item()
    strongest = spectrum.strength[head][removed].abs().max().item()
    kept = f": {100 * share:.1f} % of the energy" if keep[head].any() else ""
    return f"{kept}; largest removed strength {strongest:.3g}"


def _describe_bound(bound: float) -> str:
    if bound == 0:
        return ""
    if math.isinf(bound):
        return "; no bound on the scores, as dense rows have any length"
    return f"; no masked score moves by more than {at_most(bound)} (Theorem 1)"
