"""Preconditions of rules: valid options, and spectra with the readings that a rule needs."""

import math

from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput, InvalidRule, NotSupported
from attnrx.prescription import ScoreDecision
from attnrx.rules.rule import Rule, rule_name
from attnrx.serialization.storage import require_finite_tensors
from attnrx.shapes import Tensor
from attnrx.spectrum import Spectrum


def read_spectrum(rule: Rule, diagnosis: Diagnosis, layer: int) -> Spectrum:
    """Returns one layer's spectrum; raises InvalidInput for a layer out of range or strengths that are not finite."""
    if not 0 <= layer < len(diagnosis.layers):
        raise InvalidInput(
            f"{rule} was applied to layer {layer}; the diagnosis has layers 0..{len(diagnosis.layers) - 1}."
        )
    spectrum = diagnosis.layers[layer].spectrum
    require_finite_tensors({"strength": spectrum.strength}, f"the spectrum of layer {layer}")
    return spectrum


def read_learned_spectrum(rule: Rule, diagnosis: Diagnosis, layer: int) -> Spectrum:
    """Returns one layer's spectrum; raises NotSupported for dense attention, whose strengths are 1 and rank nothing.

    Other equal strengths are accepted: learned ones, and those of a dead layer, which are all zero or (in a metric) all
    at the noise floor.
    """
    spectrum = read_spectrum(rule, diagnosis, layer)
    strength = spectrum.strength[spectrum.used]
    if not spectrum.has_norms and strength.numel() > 1 and bool((strength == 1).all()):
        raise NotSupported(
            f"{rule} ranks by strength, but layer {layer} is dense attention, where every direction has strength 1. "
            "Use contribution_energy, which uses measured queries and keys, or train an SVDA model."
        )
    return spectrum


def require_own_directions(rule: Rule, spectrum: Spectrum, matched: ScoreDecision) -> None:
    """Raises NotSupported for directions that all heads share: the use by each head does not determine their number."""
    if spectrum.shared or matched.is_shared:
        raise NotSupported(f"{rule} ranks the directions of every head, and these are shared; use random_matched.")


def read(rule: Rule, diagnosis: Diagnosis, layer: int, name: str, *, per: str) -> Tensor:
    """Returns one reading in float64; `per` ("head", "direction" or "pair" of directions) is its shape.

    Raises:
        InvalidRule: The reading is missing.
        InvalidInput: The reading has another shape or holds NaN.
    """
    spectrum = read_spectrum(rule, diagnosis, layer)
    try:
        reading = diagnosis.layers[layer].reading(name)
    except InvalidInput as error:
        raise InvalidRule(f"{rule} cannot decide about layer {layer}: {error}") from error
    heads, directions = spectrum.strength.shape
    shapes: dict[str, tuple[int, ...]] = {
        "head": (heads,),
        "direction": (heads, directions),
        "pair": (directions, directions),
    }
    if tuple(reading.shape) != shapes[per]:
        raise InvalidInput(
            f"{rule} needs {name} of shape {shapes[per]} in layer {layer}, found {tuple(reading.shape)}; "
            "diagnose the model again."
        )
    require_finite_tensors({name: reading}, f"the diagnosis of layer {layer}")
    return reading.double()


MOST = 2**31 - 1


def require_share(rule: Rule, knob: str, value: float) -> None:
    """Raises InvalidRule unless the value is a share: a number in (0, 1]."""
    if not (_is_number(value) and 0 < value <= 1):
        raise InvalidRule(f"{_requested(rule, knob, value)}: {knob} is a share and must lie in (0, 1], e.g. 0.9.")


def require_positive(rule: Rule, knob: str, value: float) -> None:
    """Raises InvalidRule unless the value is a positive, finite number."""
    if not (_is_number(value) and 0 < value < math.inf):
        raise InvalidRule(
            f"{_requested(rule, knob, value)}: {knob} is compared with |strength| and must be a positive number."
        )


def require_count(rule: Rule, knob: str, value: int, least: int = 0) -> None:
    """Raises InvalidRule unless the value is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise InvalidRule(f"{_requested(rule, knob, value)}: {knob} must be a whole number in {least}..{MOST}.")


def require_rank(rule: Rule, knob: str, value: int | float) -> None:
    """Raises InvalidRule unless the value is an integer number of directions or a share of them, a float in (0, 1]."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST
    if not is_count and not (isinstance(value, float) and 0 < value <= 1):
        raise InvalidRule(
            f"{_requested(rule, knob, value)}: give a whole number of directions, or a share in (0, 1], e.g. 0.5."
        )


def rank_among(value: int | float, total: int) -> int:
    """Returns the rank that a knob specifies: an integer itself, or a share of the `total` directions, at least one."""
    return value if isinstance(value, int) else max(1, round(value * total))


def require_rule(rule: Rule, value: object) -> None:
    """Raises InvalidRule unless the value is a rule that a control can match."""
    if not isinstance(value, Rule):
        name = rule_name(type(rule))
        raise InvalidRule(
            f"{name} was given {value!r}: give the rule that it matches, e.g. {name}(energy_retention:0.9)."
        )


def _requested(rule: Rule, knob: str, value: object) -> str:
    return f"{rule_name(type(rule))} was given {knob}={value!r}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
