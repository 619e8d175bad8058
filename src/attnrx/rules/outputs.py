"""Deciding about the other maps of a layer by the same rules: what its heads read out, and its MLP."""

from collections.abc import Callable
from dataclasses import replace

import torch

from attnrx.decompositions import Balanced, balance
from attnrx.decompositions.low_rank import pays
from attnrx.decompositions.readout import Circuit, read_out
from attnrx.diagnosis import Diagnosis, LayerDiagnosis, MapDiagnosis
from attnrx.diagnostics import SpectralShape
from attnrx.errors import InvalidRule
from attnrx.prescription import OutputPrescription
from attnrx.rules.rule import Rule
from attnrx.shapes import Float, Tensor
from attnrx.spectrum import Spectrum

NEEDS = ("output_covariance", "output_mean", "readout_gram")


def decide_values(diagnosis: Diagnosis, rule: Rule) -> list[OutputPrescription | None]:
    """Lets a rule choose what every head reads out, and refits the output projection to it, all heads together.

    A head's directions are balanced between the covariance of what it reads out and its part of the output projection,
    so a strength squared is what leaving the direction out costs the head alone; the refit then makes use of what the
    heads have in common. None where everything stays.
    """
    missing = sorted({name for layer in diagnosis.layers for name in NEEDS if name not in layer.readings})
    if missing:
        raise InvalidRule(
            f"{rule} for the values needs {', '.join(missing)}, which the diagnosis does not have; diagnose again with "
            "the diagnostic `moments`."
        )
    found = [_value_directions(layer) for layer in diagnosis.layers]
    spectra = [
        _spectrum(each.left, each.right, each.strength, layer.spectrum.heads, "values")
        for each, layer in zip(found, diagnosis.layers, strict=True)
    ]
    view = _view(diagnosis, spectra)
    decisions: list[OutputPrescription | None] = []
    for index, (layer, directions) in enumerate(zip(diagnosis.layers, found, strict=True)):
        chosen = rule.decide(view, index)
        if bool(chosen.keep.all()) or not chosen.heads.numel():
            decisions.append(None)
            continue
        mean = layer.reading("output_mean").double().flatten()
        covariance = layer.reading("output_covariance").double().reshape(len(mean), len(mean))
        circuit = Circuit(torch.eye(len(mean), dtype=mean.dtype), None, covariance, mean, len(chosen.ranks))
        reduced = read_out(circuit, directions, chosen.keep)
        decisions.append(
            OutputPrescription(
                chosen.ranks,
                torch.cat(reduced.projection),
                reduced.weight,
                mean,
                directions.strength,
                chosen.reasons,
            )
        )
    return decisions


def decide_mlp(diagnosis: Diagnosis, rule: Rule) -> list[tuple[OutputPrescription | None, OutputPrescription | None]]:
    """Lets a rule choose the rank of both maps of every MLP; a map stays whole where two factors would not pay."""
    if any(len(layer.mlp) != 2 for layer in diagnosis.layers):
        raise InvalidRule(
            f"{rule} for the MLP needs both maps of every layer's MLP, which the diagnosis does not have; diagnose "
            "again with the diagnostic `moments`, a model whose MLP is two linear maps."
        )
    sides = [_decide_maps(diagnosis, rule, which) for which in range(2)]
    return list(zip(*sides, strict=True))


def _decide_maps(diagnosis: Diagnosis, rule: Rule, which: int) -> list[OutputPrescription | None]:
    maps = [layer.mlp[which] for layer in diagnosis.layers]
    present = [found for found in maps if found is not None]
    spectra = [
        _spectrum(found.directions[None], found.directions[None], found.strength[None], (0,), "mlp")
        for found in present
    ]
    view = _view(replace(diagnosis, layers=diagnosis.layers[: len(present)]), spectra)
    decided = iter([_decide_map(rule, view, index, found) for index, found in enumerate(present)])
    return [None if found is None else next(decided) for found in maps]


def _decide_map(rule: Rule, view: Diagnosis, index: int, found: MapDiagnosis) -> OutputPrescription | None:
    chosen = rule.decide(view, index)
    (rank,) = chosen.ranks
    if not 0 < rank or not pays(rank, found.directions.shape[1], found.inputs):
        return None
    kept = found.directions[chosen.keep[0]].double()
    return OutputPrescription((rank,), kept, kept.mT, found.mean, found.strength[None], chosen.reasons)


def _value_directions(layer: LayerDiagnosis) -> Balanced:
    heads, size = layer.reading("output_mean").shape
    covariance = layer.reading("output_covariance").double().reshape(heads, size, heads, size)
    own = covariance.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return balance(own, layer.reading("readout_gram"))


def _spectrum(
    left: Tensor, right: Tensor, strength: Float[Tensor, "units directions"], units: tuple[int, ...], of: str
) -> Spectrum:
    used = torch.ones_like(strength, dtype=torch.bool)
    return Spectrum(left, right, strength.double(), used, 1.0, "none", units, of)


def _view(diagnosis: Diagnosis, spectra: list[Spectrum]) -> Diagnosis:
    """The diagnosis as a rule sees it that decides about other maps: their spectra, and readings of those."""
    shape: Callable[[Spectrum], dict[str, Tensor]] = SpectralShape().measure
    return replace(diagnosis, layers=tuple(LayerDiagnosis(spectrum, shape(spectrum)) for spectrum in spectra))
