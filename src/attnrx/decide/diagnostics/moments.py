"""The selectivity of a head, and the second moments of queries, keys and head outputs that metrics need.

Those of queries and keys are of the rows as they enter the scores: divided by their norms if the form has norms, before
the strength. Keys are centred over the tokens of their own image: a component common to all keys of an image adds a
constant to a row of scores, which softmax ignores.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.decide.diagnostics.diagnostic import CentredMoment, Diagnostic
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention import Observation


@dataclass(frozen=True)
class Geometry(Diagnostic):
    """Returns selectivity [heads], query_moment and key_moment [heads, directions], and two matrices.

    The matrices, [heads, directions, directions], are query_gram and key_covariance, whose diagonals are the moments.
    """

    def measure(self, observation: Observation) -> dict[str, Tensor]:
        # Queries are not centred: softmax ignores a component that all keys share, but not one that all queries share.
        query, key = query_grams(observation.query).mean(0), key_covariances(observation.key).mean(0)
        return {
            "selectivity": selectivity(observation.attention),
            "query_moment": query.diagonal(dim1=-2, dim2=-1),
            "key_moment": key.diagonal(dim1=-2, dim2=-1),
            "query_gram": query,
            "key_covariance": key,
        }


def selectivity(attention: Float[Tensor, "batch heads queries keys"]) -> Float[Tensor, "heads"]:
    """Returns one minus the mean entropy of the attention rows over log(keys): 0 for uniform, 1 for one-hot attention.

    With a single key the selectivity is 0.
    """
    attention, keys = widened(attention), attention.shape[-1]
    if keys == 1:
        return attention.new_zeros(attention.shape[1])
    logs = attention.clamp(min=torch.finfo(attention.dtype).tiny).log_()  # 0 log 0 = 0; three times as fast as xlogy
    entropy = -(attention * logs).sum(-1).mean((0, 2))
    return (1 - entropy / math.log(keys)).clamp(0, 1)  # only rounding can exceed the interval


def query_grams(
    query: Float[Tensor, "batch queries heads directions"],
) -> Float[Tensor, "batch heads directions directions"]:
    """Returns the second moment of every image's query rows, mean over tokens of q q^T."""
    rows = widened(query).transpose(1, 2).contiguous()  # the copy costs less than multiplying strided rows
    return (rows.mT @ rows).div_(rows.shape[-2])


def key_covariances(
    key: Float[Tensor, "batch keys heads directions"],
) -> Float[Tensor, "batch heads directions directions"]:
    """Returns the covariance of every image's key rows over its tokens."""
    key = widened(key)
    return query_grams(key - key.mean(1, keepdim=True))


def widened(rows: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the rows in float32, or in their own type if that is wider."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


@dataclass(frozen=True)
class Moments(Diagnostic):
    """Returns, besides the query_gram and key_covariance of `Geometry`, the moments of the other metrics.

    key_gram [heads, directions, directions] is the second moment of the keys, and key_softmax their covariance under
    the attention: the mean over queries of sum_j p_j k_j k_j^T - (sum_j p_j k_j)(...)^T, which is the curvature of the
    softmax in the directions of the keys. output_mean [heads, v_head_dim] and output_covariance [heads, v_head_dim,
    heads * v_head_dim] describe the outputs of all heads together, over all tokens of all images, and readout_gram
    [heads, v_head_dim, v_head_dim] the output projection.
    """

    reads_outputs: ClassVar[bool] = True

    def measure(self, observation: Observation) -> dict[str, Tensor]:
        return {
            "key_gram": query_grams(observation.key).mean(0),
            "key_softmax": softmax_covariance(observation.key, observation.attention),
        }

    def of_outputs(self, moment: CentredMoment, readout: Float[Tensor, "heads v_head_dim width"]) -> dict[str, Tensor]:
        readout = readout.double().cpu()
        heads, v_head_dim = readout.shape[:2]
        return {
            "output_mean": moment.mean.cpu().double().reshape(heads, v_head_dim),
            "output_covariance": moment.covariance().reshape(heads, v_head_dim, heads * v_head_dim),
            "readout_gram": readout @ readout.mT,
        }


def softmax_covariance(
    key: Float[Tensor, "batch keys heads directions"], attention: Float[Tensor, "batch heads queries keys"]
) -> Float[Tensor, "heads directions directions"]:
    """Returns the covariance of the keys under each query's own attention, mean over queries and images.

    A change d of the scores of one query changes its attention by a divergence of about d^T (diag p - p p^T) d / 2.
    """
    wide = torch.promote_types(key.dtype, torch.float32)
    keys, weights = key.to(wide).transpose(1, 2), attention.to(wide)
    # A covariance is that of the differences from any point; of equal large keys all digits would be lost.
    keys = keys - keys.mean(-2, keepdim=True)
    # [batch, heads, queries, directions]: the mean of the keys under the attention of every query.
    means = weights @ keys
    queries = weights.shape[-2]
    # The sum over the queries is inside the products, so no matrix [directions, directions] per query is formed.
    spread = keys.mT @ (keys * weights.sum(-2)[..., None]) - means.mT @ means
    return (spread / queries).mean(0)
