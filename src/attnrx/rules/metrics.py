"""Metrics: the error norms in which truncated directions of a head are optimal."""

from collections.abc import Callable, Mapping

from attnrx.decompositions import Balanced, balance, svd_directions
from attnrx.diagnosis import LayerDiagnosis
from attnrx.errors import NotSupported, UnknownName
from attnrx.shapes import Tensor

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
