"""From a diagnosis and a rule to a prescription."""

import math
from typing import Any

import torch

from attnrx.config import to_dict
from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput, InvalidRule, NothingChanged
from attnrx.prescription import LayerPrescription, Prescription
from attnrx.rules.bounds import score_bound
from attnrx.rules.rule import Rule, readings_needed
from attnrx.spectrum import Spectrum


def prescribe(diagnosis: Diagnosis, rule: Rule) -> Prescription:
    """Lets the rule decide about every layer; a rule that would leave the model as it is raises NothingChanged.

    The prescription records the rule, everything the diagnosis says about its model and data, and under
    `score_bounds` how far the mask can move the scores of each head on the same tokens (Theorem 1), or null
    where there is no such law.
    """
    if not isinstance(rule, Rule):
        raise InvalidInput(
            f"prescribe was given {rule!r} for a rule; use e.g. EnergyRetention(0.9) or parse_rule(text)."
        )
    if not diagnosis.layers:
        raise InvalidInput(f"prescribe({rule}) found a diagnosis without layers; diagnose a model that has attention.")
    require_readings(diagnosis, rule)
    layers = tuple(rule.decide(diagnosis, layer) for layer in range(len(diagnosis.layers)))
    spectra = [layer.spectrum for layer in diagnosis.layers]
    if not any(_changes(spectrum, layer) for spectrum, layer in zip(spectra, layers, strict=True)):
        raise NothingChanged(_nothing(spectra, layers, rule))
    bounds = [score_bound(spectrum, layer).tolist() for spectrum, layer in zip(spectra, layers, strict=True)]
    known = [[bound if math.isfinite(bound) else None for bound in heads] for heads in bounds]
    about: dict[str, Any] = {**diagnosis.about, "rule": str(rule), "score_bounds": known}
    return Prescription(layers, to_dict(rule), diagnosis.fingerprint, about)


def require_readings(diagnosis: Diagnosis, rule: Rule) -> None:
    """Refuses a diagnosis that lacks a reading which the rule needs, before anything is decided."""
    for index, layer in enumerate(diagnosis.layers):
        missing = [name for name in readings_needed(rule) if name not in layer.readings]
        if missing:
            raise InvalidRule(
                f"{rule} needs {' and '.join(missing)}, which the diagnosis of layer {index} does not have; it has "
                f"{', '.join(sorted(layer.readings)) or 'none'}. Diagnose again with the diagnostics that give them."
            )


def _changes(spectrum: Spectrum, layer: LayerPrescription) -> bool:
    loses = bool((spectrum.used & ~layer.keep).any()) or not bool(layer.heads.all())
    return loses or bool((layer.strength.double() != spectrum.strength.double())[spectrum.used].any())


def _nothing(spectra: list[Spectrum], layers: tuple[LayerPrescription, ...], rule: Rule) -> str:
    strengths = torch.cat([spectrum.strength[spectrum.used].abs().flatten() for spectrum in spectra])
    span = (
        f"|strength| lies in {strengths.min():.3g}..{strengths.max():.3g}"
        if len(strengths)
        else "there are no directions"
    )
    first = next((layer.reasons[0] for layer in layers if layer.reasons), "there are no heads")
    heads = sum(len(layer.reasons) for layer in layers)
    return (
        f"{rule} would change nothing: all {heads} heads of {len(layers)} layers keep everything ({span}; "
        f"the first head {first}). Turn its knob further or use another rule."
    )
