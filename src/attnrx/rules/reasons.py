"""Decisions with their reasons: one sentence per head, with the numbers that a reviewer would ask for."""

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, Context, Decimal

import torch

from attnrx.diagnostics.spectral_shape import energy
from attnrx.prescription import LayerPrescription
from attnrx.rules.bounds import score_bound
from attnrx.shapes import Bool, Float, Tensor
from attnrx.spectrum import Spectrum


def keeping(
    spectrum: Spectrum, keep: Bool[Tensor, "heads directions"], notes: Sequence[str] = ()
) -> LayerPrescription:
    """Decides that these directions stay as they are, and all heads; `notes` adds a remark per head to its reason.

    What does not stay has strength zero, so that decisions can be compared and combined by strength alone.
    """
    keep = keep & spectrum.used
    strength = torch.where(keep, spectrum.strength.double(), 0.0)
    return with_reasons(spectrum, keep, strength, notes)


def with_reasons(
    spectrum: Spectrum,
    keep: Bool[Tensor, "heads directions"],
    strength: Float[Tensor, "heads directions"],
    notes: Sequence[str] = (),
) -> LayerPrescription:
    """Decides that these directions stay with these strengths, and all heads."""
    heads = torch.ones(keep.shape[0], dtype=torch.bool)
    silent = LayerPrescription(keep, strength, heads, ("",) * keep.shape[0])
    bounds = score_bound(spectrum, silent).tolist()
    sentences = []
    for head, bound in enumerate(bounds):
        note = f" ({notes[head]})" if notes else ""
        sentences.append(_kept(spectrum, keep, head) + note + _lost(spectrum, keep, head) + _promise(bound))
    return LayerPrescription(keep, strength, heads, tuple(sentences))


def at_most(value: float) -> str:
    """Spells a number that must not be exceeded with three digits, rounded up."""
    return f"{float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(Decimal(value))):g}"


def _kept(spectrum: Spectrum, keep: Tensor, head: int) -> str:
    rank, total = int(keep[head].sum()), int(spectrum.used[head].sum())
    if not total:
        return "has no directions"
    if not rank:
        return f"keeps none of {total} directions and attends uniformly"
    return f"keeps all {total} directions" if rank == total else f"keeps {rank} of {total} directions"


def _lost(spectrum: Spectrum, keep: Tensor, head: int) -> str:
    removed = spectrum.used[head] & ~keep[head]
    if not bool(removed.any()):
        return ""
    share = (energy(spectrum.strength.double(), spectrum.used)[head] * keep[head]).sum().item()
    strongest = spectrum.strength[head][removed].abs().max().item()
    kept = f": {100 * share:.1f} % of the energy" if keep[head].any() else ""
    return f"{kept}; largest removed strength {strongest:.3g}"


def _promise(bound: float) -> str:
    if bound == 0:
        return ""
    if math.isinf(bound):
        return "; no bound on the scores, as dense rows have any length"
    return f"; no masked score moves by more than {at_most(bound)} (Theorem 1)"
