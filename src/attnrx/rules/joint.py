"""The query-key tensor of a layer over all heads, in factored form, and the basis of its factors."""

import torch

from attnrx.decompositions import FactoredTensor
from attnrx.diagnosis import LayerDiagnosis
from attnrx.errors import InvalidRule
from attnrx.shapes import Float, Tensor

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
