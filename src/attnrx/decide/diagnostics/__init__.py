"""Diagnostics: readings of the spectra and intermediate results of attention layers."""

from attnrx.decide.diagnostics.diagnostic import Diagnostic, Geometry, Moments, Panel
from attnrx.decide.diagnostics.spectral_shape import SpectralShape
from attnrx.support.optional import import_plugins
from attnrx.vit.spectrum import Spectrum

DIAGNOSTICS: dict[str, type[Diagnostic]] = {
    "spectral_shape": SpectralShape,
    "geometry": Geometry,
    "moments": Moments,
}

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

_REGISTERED: dict[str, type[Diagnostic]] = {}


def register_diagnostic(kind: type[Diagnostic]) -> None:
    """Adds a diagnostic, with its default options, to the standard ones."""
    _REGISTERED[kind.__name__] = kind


def suited_diagnostics(spectra: tuple[Spectrum, ...], *, moments: bool = False) -> tuple[Diagnostic, ...]:
    """Returns the standard diagnostics, and `Moments` for layers that need them, with their default options.

    Forms without norms can be rewritten in the metrics that `Moments` measures. With `moments` it is included for forms
    with norms (SVDA), too, whose values and MLP have no other metric of the data.
    """
    if spectra and not any(spectrum.heads for spectrum in spectra):  # attention that is not read, or has been removed
        return (Moments(),)
    import_plugins()
    standard = (SpectralShape(), Geometry(), *(kind() for kind in _REGISTERED.values()))
    return (*standard, Moments()) if moments or any(spectrum.norms == "none" for spectrum in spectra) else standard
