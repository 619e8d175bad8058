"""Metrics in which the directions of a head are optimal, and spectra rewritten in them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from attnrx.decompositions import Balanced, FactoredTensor, balance, svd_directions
from attnrx.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.diagnostics import SpectralShape
from attnrx.diagnostics.redundancy import spectral_redundancy
from attnrx.errors import InvalidRule, NotSupported, UnknownName
from attnrx.prescription import Basis
from attnrx.shapes import Float, Tensor
from attnrx.spectrum import Spectrum

# The name for the model's own directions, whose strengths SVDA learns.
OWN = "own"

# The share of "softmax" in the recommended metric "mix". "softmax" alone gives too few directions to heads that attend
# to a single token, where the quadratic approximation of the softmax fails.
MIX = 0.7


def _weights(layer: LayerDiagnosis) -> Balanced:
    return svd_directions(layer.spectrum.query[..., :-1], layer.spectrum.key[..., :-1])


def _augmented(layer: LayerDiagnosis) -> Balanced:
    return svd_directions(layer.spectrum.query, layer.spectrum.key[..., :-1])


def _by_key(name: str) -> Callable[[LayerDiagnosis], Balanced]:
    return lambda layer: balance(layer.reading("query_gram"), layer.reading(name))


def _mix(layer: LayerDiagnosis) -> Balanced:
    keys: Tensor = MIX * layer.reading("key_softmax") + (1 - MIX) * layer.reading("key_covariance")
    return balance(layer.reading("query_gram"), keys)


# weights: the matrices W_Q W_K^T (TruncAtt). augmented: with the query bias as one more row, because it changes the
# softmax; the key bias does not. activation: the mean square of the scores on the data. centered: that of the scores
# minus their mean over the keys, which the softmax cancels. softmax: weighted by the curvature of the softmax.
METRICS: Mapping[str, Callable[[LayerDiagnosis], Balanced]] = {
    "weights": _weights,
    "augmented": _augmented,
    "activation": _by_key("key_gram"),
    "centered": _by_key("key_covariance"),
    "softmax": _by_key("key_softmax"),
    "mix": _mix,
}


def directions_in(metric: str, layer: LayerDiagnosis) -> Balanced:
    """Returns, for every head of a layer, the score directions that are optimal at every rank in a metric.

    Raises:
        UnknownName: The metric is none of METRICS.
        NotSupported: The layer is SVDA, whose rows are divided by their norms and must not be combined.
        InvalidInput: The diagnosis lacks the moments of the metric.
    """
    if metric not in METRICS:
        raise UnknownName("metric", metric, (OWN, *METRICS))
    if layer.spectrum.has_norms:
        raise NotSupported(
            f"metric={metric!r} would combine the directions of a layer whose rows are divided by their norms (SVDA), "
            "which changes the norms; its own strengths rank its directions: omit the metric."
        )
    return METRICS[metric](layer)


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


# Singular values below this share of the largest one are rounding errors.
NOISE = 1e-12

JOINT_METRICS = ("weights", "augmented", "centered")


class JointForm:
    """Y[:, :, h] = query_h^T key_h in a metric, as a tensor of three modes; `basis` expresses factors in rows of the
    heads.

    In the metrics "weights" and "augmented" the first two modes are the features of a token (the query with a trailing
    1 for its bias). In "centered" they are the roots of the second moments of all heads' queries and centred keys
    together, so that the squared norm of the tensor is the mean square of the centred scores for independent queries
    and keys.
    """

    def __init__(self, layer: LayerDiagnosis, metric: str):
        if metric not in JOINT_METRICS:
            raise InvalidRule(
                f"metric={metric!r}: for directions that heads share choose one of {', '.join(JOINT_METRICS)}; the "
                "softmax weights the keys of every head differently, so it gives no metric common to all heads."
            )
        if layer.spectrum.has_norms:
            raise InvalidRule("heads whose rows are divided by their norms (SVDA) cannot share directions.")
        self.query, self.key = _sides(layer, metric)
        self.tensor = FactoredTensor(self.query, self.key)

    def basis(
        self, left: Float[Tensor, "rows rank"], right: Float[Tensor, "columns rank"]
    ) -> tuple[Float[Tensor, "1 rank stacked"], Float[Tensor, "1 rank stacked"]]:
        """Returns the combinations of all heads' rows, concatenated by head, that give these factors."""
        return _combination(self.query, left), _combination(self.key, right)


def _sides(layer: LayerDiagnosis, metric: str) -> tuple[Tensor, Tensor]:
    spectrum = layer.spectrum
    if metric == "centered":
        return _rooted(layer.reading("query_joint_gram")), _rooted(layer.reading("key_joint_covariance"))
    query = spectrum.query if metric == "augmented" else spectrum.query[..., :-1]
    return spectrum.strength[..., None] * query.double(), spectrum.key[..., :-1].double()


def _rooted(gram: Float[Tensor, "heads directions features"]) -> Float[Tensor, "heads directions features"]:
    """Returns the symmetric root of a joint moment, rows by head: products of its rows are the moment."""
    heads, directions, features = gram.shape
    square = gram.double().reshape(features, features)
    values, vectors = torch.linalg.eigh((square + square.mT) / 2)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
    return root.reshape(heads, directions, features)


def _combination(rows: Float[Tensor, "heads directions features"], factor: Tensor) -> Float[Tensor, "1 rank stacked"]:
    stacked = rows.flatten(0, 1)
    return (torch.linalg.pinv(stacked.mT, rtol=NOISE) @ factor).mT[None].contiguous()
