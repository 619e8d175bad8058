"""Moments: the second moments of keys and head outputs that data-aware metrics need."""

from dataclasses import dataclass

import torch

from attnrx.decide.diagnostics.diagnostic import Accumulator, Averages, CentredMoment, Diagnostic
from attnrx.decide.diagnostics.geometry import query_grams
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.observation import Observation
from attnrx.vit.spectrum import Spectrum


@dataclass(frozen=True)
class Moments(Diagnostic):
    """Returns, besides the query_gram and key_covariance of `Geometry`, the moments of the other metrics.

    key_gram [heads, directions, directions] is the second moment of the keys, and key_softmax their covariance under
    the attention: the mean over queries of sum_j p_j k_j k_j^T - (sum_j p_j k_j)(...)^T, which is the curvature of the
    softmax in the directions of the keys. query_joint_gram and key_joint_covariance [heads, directions, heads *
    directions] are the query_gram and key_covariance of all heads together, for directions that heads are to share.
    output_mean [heads, v_head_dim] and output_covariance [heads, v_head_dim, heads * v_head_dim] describe the outputs
    of all heads together, over all tokens of all images, and readout_gram [heads, v_head_dim, v_head_dim] the output
    projection.
    """

    def start(self, spectra: tuple[Spectrum, ...]) -> Accumulator:
        return _Moments(spectra)


class OutputMoments(Accumulator):
    """Collects the second moment of the concatenated head outputs of each layer, and its output projection."""

    def __init__(self, spectra: tuple[Spectrum, ...]):
        self.spectra = spectra
        self.outputs = [CentredMoment() for _ in spectra]
        self.readouts: dict[int, Tensor] = {}

    def observe(self, layer: int, observation: Observation) -> None:
        # [batch, heads, tokens, dims] to one row per token with all heads side by side.
        self.outputs[layer].add(observation.output.transpose(1, 2).flatten(2).flatten(0, 1))
        self.readouts[layer] = observation.readout


class _Moments(OutputMoments):
    def __init__(self, spectra: tuple[Spectrum, ...]):
        super().__init__(spectra)
        self.keys = Averages(len(spectra), measure_keys)

    def observe(self, layer: int, observation: Observation) -> None:
        super().observe(layer, observation)
        self.keys.observe(layer, observation)

    def readings(self) -> list[dict[str, Tensor]]:
        per_layer = self.keys.readings()
        for layer, (readings, outputs) in enumerate(zip(per_layer, self.outputs, strict=True)):
            readout = self.readouts[layer].double().cpu()
            heads, v_head_dim = readout.shape[:2]
            readings["output_mean"] = outputs.mean.cpu().double().reshape(heads, v_head_dim)
            readings["output_covariance"] = outputs.covariance().reshape(heads, v_head_dim, heads * v_head_dim)
            readings["readout_gram"] = readout @ readout.mT
        return per_layer


def measure_keys(observation: Observation) -> dict[str, Tensor]:
    """Returns both moments of the keys of one batch, each the mean over its images."""
    return {
        "key_gram": query_grams(observation.key).mean(0),
        "key_softmax": softmax_covariance(observation.key, observation.attention),
        "query_joint_gram": joint_grams(observation.query).mean(0),
        "key_joint_covariance": joint_grams(observation.key - observation.key.mean(1, keepdim=True)).mean(0),
    }


def joint_grams(
    rows: Float[Tensor, "batch tokens heads directions"],
) -> Float[Tensor, "batch heads directions features"]:
    """Returns the second moment of every image's rows, all heads side by side, mean over tokens."""
    # All heads are one head of `heads * directions` features; the rows of its moment are then split by head again.
    heads = rows.shape[2:]
    return query_grams(rows.flatten(2).unsqueeze(2)).squeeze(1).unflatten(1, heads)


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
