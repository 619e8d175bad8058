"""Diagnostics: readings of the spectra and intermediate results of attention layers."""

from attnrx.decide.diagnostics.diagnostic import Diagnostic
from attnrx.decide.diagnostics.geometry import Geometry
from attnrx.decide.diagnostics.moments import Moments
from attnrx.decide.diagnostics.panel import Panel
from attnrx.decide.diagnostics.redundancy import Redundancy
from attnrx.decide.diagnostics.spectral_shape import SpectralShape
from attnrx.decide.diagnostics.watches import MapWatch, hidden_diagnosis, singular_directions
from attnrx.support.plugins import moved
from attnrx.vit.spectrum import Spectrum

DIAGNOSTICS: dict[str, type[Diagnostic]] = {
    "spectral_shape": SpectralShape,
    "geometry": Geometry,
    "redundancy": Redundancy,
    "moments": Moments,
}

__all__ = [
    "DIAGNOSTICS",
    "Diagnostic",
    "Geometry",
    "MapWatch",
    "Moments",
    "Panel",
    "Redundancy",
    "SpectralShape",
    "hidden_diagnosis",
    "singular_directions",
    "suited_diagnostics",
]


def suited_diagnostics(spectra: tuple[Spectrum, ...], *, moments: bool = False) -> tuple[Diagnostic, ...]:
    """Returns the diagnostics of the SVDA paper, and `Moments` for layers that need them, with their default options.

    Forms without norms can be rewritten in the metrics that `Moments` measures. With `moments` it is included for forms
    with norms (SVDA), too, whose values and MLP have no other metric of the data.
    """
    if spectra and not any(spectrum.heads for spectrum in spectra):  # attention that is not read, or has been removed
        return (Moments(),)
    free = moments or any(spectrum.norms == "none" for spectrum in spectra)
    standard = (SpectralShape(), Geometry(), Redundancy())
    return (*standard, Moments()) if free else standard


__getattr__ = moved({"PerturbationResponse": "attnrx_lab.perturbation.measure_perturbation"})
