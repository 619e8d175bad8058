"""Rewrites a diagnosis in the directions that a metric ranks; the scores do not change."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from attnrx.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.diagnostics import SpectralShape
from attnrx.diagnostics.redundancy import spectral_redundancy
from attnrx.prescription import Basis
from attnrx.rules.metrics import directions_in
from attnrx.shapes import Tensor
from attnrx.spectrum import Spectrum


def rewritten(diagnosis: Diagnosis, metric: str) -> tuple[Diagnosis, tuple[Basis, ...]]:
    """Returns the diagnosis with every layer's score directions rewritten in a metric, and the changes of basis.

    The rewritten strengths are the singular values of the bilinear map in that metric; their square is the error of
    removing a direction. All rules then apply as to learned strengths. Readings of the old directions are recomputed or
    removed.
    """
    pairs = [_layer(layer, metric) for layer in diagnosis.layers]
    about = {**diagnosis.about, "metric": metric}
    return replace(diagnosis, layers=tuple(layer for layer, _ in pairs), about=about), tuple(b for _, b in pairs)


def _layer(layer: LayerDiagnosis, metric: str) -> tuple[LayerDiagnosis, Basis]:
    spectrum, found = layer.spectrum, directions_in(metric, layer)
    ranks = spectrum.used.sum(-1, keepdim=True)
    used = torch.arange(spectrum.used.shape[1]) < ranks
    changed = replace(
        spectrum,
        query=found.left @ spectrum.query,
        key=found.right @ spectrum.key,
        strength=torch.where(used, found.strength, 0.0),
        used=used,
    )
    basis = Basis(found.left, found.right, shared=spectrum.shared)
    readings = _readings(layer.readings, changed, basis)
    readings["metric_rank"] = torch.tensor(found.rank)  # directions with nonzero strength in the metric
    return LayerDiagnosis(changed, readings), basis


def _readings(old: Mapping[str, Tensor], spectrum: Spectrum, basis: Basis) -> dict[str, Tensor]:
    """Returns the readings that do not depend on the directions, and recomputes the others where possible."""
    moments = {"query_moment", "key_moment", "query_gram", "key_covariance", "score_gram", "key_gram", "key_softmax"}
    kept = {name: value for name, value in old.items() if name not in moments}
    readings = SpectralShape().measure(spectrum)
    readings["spectral_redundancy"] = spectral_redundancy(spectrum.strength, spectrum.used)
    for name, table in (("query_gram", basis.left), ("key_covariance", basis.right)):
        if name in old:
            gram = table @ old[name].double() @ table.mT
            readings[name] = gram
            readings[name.split("_")[0] + "_moment"] = gram.diagonal(dim1=-2, dim2=-1)
    return kept | readings
