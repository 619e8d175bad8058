"""Geometry: the selectivity of a head, and the second moments of queries and keys.

The moments are those of the rows as they enter the scores: divided by their norms if the form has norms, before the
strength. Keys are centred over the tokens of their own image: a component common to all keys of an image adds a
constant to a row of scores, which softmax ignores.
"""

import math
from dataclasses import dataclass

import torch

from attnrx.decide.diagnostics.diagnostic import Diagnostic
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.observation import Observation


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
