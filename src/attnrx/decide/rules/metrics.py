"""Metrics in which the directions of a head are optimal, and spectra rewritten in them."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from attnrx.change.decompositions import Balanced, balance, svd_directions
from attnrx.decide.rules.rotary import COHERENCE, RotaryDirections
from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.nouns.prescription import Basis
from attnrx.support.errors import NotSupported, UnknownName
from attnrx.support.shapes import Tensor

# The name for the model's own directions, whose strengths SVDA learns.
OWN = "own"

# The share of "softmax" in the recommended metric "mix". "softmax" alone gives too few directions to heads that attend
# to a single token, where the quadratic approximation of the softmax fails.
MIX = 0.7


# The moments of the keys, and their shares, in the metrics of the data; the other moment is that of the queries.
KEY_MOMENTS: Mapping[str, Mapping[str, float]] = {
    "activation": {"key_gram": 1.0},
    "centered": {"key_covariance": 1.0},
    "softmax": {"key_softmax": 1.0},
    "mix": {"key_softmax": MIX, "key_covariance": 1 - MIX},
}

# weights: the matrices W_Q W_K^T (TruncAtt). augmented: with the query bias as one more row, because it changes the
# softmax; the key bias does not. activation: the mean square of the scores on the data. centered: that of the scores
# minus their mean over the keys, which the softmax cancels. softmax: weighted by the curvature of the softmax.
METRICS = ("weights", "augmented", *KEY_MOMENTS)


def directions_in(metric: str, layer: LayerDiagnosis) -> Balanced | RotaryDirections:
    """Returns, for every head of a layer, the score directions that are optimal at every rank in a metric; of rotary
    attention the forms that are best at every rank.

    Raises:
        UnknownName: The metric is none of METRICS.
        NotSupported: The layer is SVDA, whose rows are divided by their norms and must not be combined, its heads share
            their directions, or it has a norm over all features of query and key.
        InvalidInput: The diagnosis lacks the moments of the metric.
    """
    spectrum = layer.spectrum
    if metric not in METRICS:
        raise UnknownName("metric", metric, (OWN, *METRICS))
    if "qk" in spectrum.fixed:
        raise NotSupported(
            f"metric={metric!r} would combine directions of a layer with a norm over all features of query and key."
        )
    if spectrum.has_norms:
        raise NotSupported(
            f"metric={metric!r} would combine the directions of a layer whose rows are divided by their norms (SVDA), "
            "which changes the norms; its own strengths rank its directions: omit the metric."
        )
    if spectrum.shared:
        raise NotSupported(
            f"metric={metric!r} would give every head directions of its own in a layer whose heads share them (CP "
            "SlimAtt, IrrAtt); the strengths rank the shared directions: omit the metric, or prescribe the original "
            "model."
        )
    if metric in KEY_MOMENTS:
        keys = torch.stack([share * layer.reading(name) for name, share in KEY_MOMENTS[metric].items()]).sum(0)
        grams = layer.reading("query_gram"), keys
        return balance(*grams) if spectrum.pairs is None else RotaryDirections(*grams, layer)
    # Rows [heads, directions, features] of query and key, whose Grams have lost digits; the last feature is the bias.
    query, key = spectrum.query if metric == "augmented" else spectrum.query[..., :-1], spectrum.key[..., :-1]
    if spectrum.pairs is None:
        return svd_directions(query, key)
    query, key = query.double(), key.double()
    return RotaryDirections(query @ query.mT, key @ key.mT, layer)


def rewritten(diagnosis: Diagnosis, metric: str) -> tuple[Diagnosis, tuple[Basis, ...]]:
    """Returns the diagnosis with every layer's score directions rewritten in a metric, and the changes of basis.

    The rewritten strengths are the singular values of the bilinear map in that metric; their square is the error of
    removing a direction. All rules then apply as to learned strengths. Of the readings, the moments of queries and keys
    are recomputed, and those that do not depend on the directions are kept; the others are removed.
    """
    # Kept with the diagnosis: a plan prescribes from one for every candidate.
    known: dict[str, tuple[Diagnosis, tuple[Basis, ...]]] = vars(diagnosis).setdefault("_rewritten", {})
    if metric not in known:
        pairs = [_layer(layer, metric) for layer in diagnosis.layers]
        about = {**diagnosis.about, "metric": metric}
        layers = tuple(layer for layer, _ in pairs)
        known[metric] = replace(diagnosis, layers=layers, about=about), tuple(basis for _, basis in pairs)
    return known[metric]


def _layer(layer: LayerDiagnosis, metric: str) -> tuple[LayerDiagnosis, Basis]:
    spectrum, balanced = layer.spectrum, directions_in(metric, layer)
    if isinstance(balanced, RotaryDirections):
        return _rotary_layer(layer, balanced)
    # Balanced directions are sorted by strength, so those of a head with fewer rows are its first ones.
    used = torch.arange(spectrum.used.shape[1]) < spectrum.used.sum(-1, keepdim=True)
    changed = replace(
        spectrum,
        query=balanced.left @ spectrum.query,
        key=balanced.right @ spectrum.key,
        strength=torch.where(used, balanced.strength, 0.0),
        used=used,
    )
    readings: dict[str, Tensor] = {
        name: value for name, value in layer.readings.items() if name == "selectivity" or name.startswith("divergence_")
    }
    for side, name, table in (("query", "query_gram", balanced.left), ("key", "key_covariance", balanced.right)):
        if name in layer.readings:
            # Moments are quadratic in the rows: E (T q)(T q)^T = T E[q q^T] T^T.
            gram = table @ layer.reading(name).double() @ table.mT
            readings |= {name: gram, f"{side}_moment": gram.diagonal(dim1=-2, dim2=-1)}
    return LayerDiagnosis(changed, readings), Basis(balanced.left, balanced.right, shared=spectrum.shared)


def _rotary_layer(layer: LayerDiagnosis, found: RotaryDirections) -> tuple[LayerDiagnosis, Basis]:
    """Returns the layer with strengths that order its directions, and the basis in which all of them are kept.

    The forms of two ranks have no directions in common, so those of a decision are computed for its ranks.
    """
    roots = torch.where(layer.spectrum.used, found.strength, 1.0).rsqrt()
    # Both sides are divided by the roots of the strengths, so that all directions together give the original scores.
    diagonal = torch.diag_embed(torch.where(layer.spectrum.used, roots, 0.0))
    readings = {name: value for name, value in layer.readings.items() if name in ("selectivity", COHERENCE)}
    basis = Basis(diagonal, diagonal, shared=False, pairs=layer.spectrum.pairs)
    return LayerDiagnosis(replace(layer.spectrum, strength=found.strength), readings), basis
