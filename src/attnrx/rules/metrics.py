"""Metrics: in what sense the directions of a head are the best ones to keep."""

from collections.abc import Callable, Mapping

from attnrx.decompositions import Balanced, balance, svd_directions
from attnrx.diagnosis import LayerDiagnosis
from attnrx.errors import NotSupported, UnknownName
from attnrx.shapes import Tensor

# The name for deciding about the model's own directions, in whose strengths SVDA is trained.
OWN = "own"

# The share of the attention's own view of the keys in the recommended metric; alone, it starves heads that attend to
# a single token, where the quadratic model of the softmax fails.
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


# weights: the matrices W_Q W_K^T (TruncAtt). augmented: with the query bias as one more row, on which scores depend;
# the key bias is invisible to the softmax. activation: the mean square of the scores on the data. centered: that of
# the scores less their mean over the keys, which the softmax cannot see. softmax: weighted by its curvature.
METRICS: Mapping[str, Callable[[LayerDiagnosis], Balanced]] = {
    "weights": _weights,
    "augmented": _augmented,
    "activation": _by_key("key_gram"),
    "centered": _by_key("key_covariance"),
    "softmax": _by_key("key_softmax"),
    "mix": _mix,
}


def directions_in(metric: str, layer: LayerDiagnosis) -> Balanced:
    """Returns the score directions of every head of a layer that are the best of every rank in a metric.

    Raises:
        UnknownName: for a metric that is none of METRICS.
        NotSupported: for SVDA, whose rows are divided by their norms, so that they may not be combined.
        InvalidInput: where the diagnosis lacks the moments that the metric is made of.
    """
    if metric not in METRICS:
        raise UnknownName("metric", metric, (OWN, *METRICS))
    if layer.spectrum.norms != "none":
        raise NotSupported(
            f"metric={metric!r} would combine the directions of a layer whose rows are divided by their norms (SVDA), "
            "which changes the norms; its own strengths rank its directions: leave the metric out."
        )
    return METRICS[metric](layer)
