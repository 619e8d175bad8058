"""Diagnostics: what can be read off the spectra of attention layers and off what they compute. They see no model."""

from attnrx.diagnostics.diagnostic import Accumulator, Diagnostic
from attnrx.diagnostics.difference import Change, compare
from attnrx.diagnostics.geometry import Geometry
from attnrx.diagnostics.panel import Panel
from attnrx.diagnostics.perturbation import PerturbationResponse
from attnrx.diagnostics.redundancy import Redundancy
from attnrx.diagnostics.spectral_shape import SpectralShape

DIAGNOSTICS: dict[str, type[Diagnostic]] = {
    "spectral_shape": SpectralShape,
    "geometry": Geometry,
    "perturbation_response": PerturbationResponse,
    "redundancy": Redundancy,
}

__all__ = [
    "DIAGNOSTICS",
    "Accumulator",
    "Change",
    "Diagnostic",
    "Geometry",
    "Panel",
    "PerturbationResponse",
    "Redundancy",
    "SpectralShape",
    "compare",
    "standard",
]


def standard() -> tuple[Diagnostic, ...]:
    """Gives every diagnostic with its default knobs."""
    return tuple(kind() for kind in DIAGNOSTICS.values())
