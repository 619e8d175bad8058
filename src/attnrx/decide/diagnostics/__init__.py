"""Diagnostics: readings of the spectra and intermediate results of attention layers."""

from attnrx.decide.diagnostics.diagnostic import Diagnostic, Geometry, Moments, Panel
from attnrx.decide.diagnostics.spectral_shape import SpectralShape
from attnrx.support.text_parsing import Registry
from attnrx.vit.spectrum import Spectrum

DIAGNOSTICS = Registry[Diagnostic]("diagnostic", SpectralShape, Geometry, Moments)
_OTHERS = Registry[Diagnostic]("diagnostic")
register_diagnostic = _OTHERS.register  # with default options, to the standard ones

__all__ = [
    "DIAGNOSTICS",
    "Diagnostic",
    "Geometry",
    "Moments",
    "Panel",
    "SpectralShape",
    "register_diagnostic",
    "suited_diagnostics",
]


def suited_diagnostics(spectra: tuple[Spectrum, ...], *, moments: bool = False) -> tuple[Diagnostic, ...]:
    """Returns the standard diagnostics, and `Moments` for layers that need them, with their default options.

    Forms without norms can be rewritten in the metrics that `Moments` measures. With `moments` it is included for forms
    with norms (SVDA), too, whose values and MLP have no other metric of the data.
    """
    if spectra and not any(spectrum.heads for spectrum in spectra):  # attention that is not read, or has been removed
        return (Moments(),)
    standard = (SpectralShape(), Geometry(), *(kind() for kind in _OTHERS.known().values()))
    return (*standard, Moments()) if moments or any(spectrum.norms == "none" for spectrum in spectra) else standard
