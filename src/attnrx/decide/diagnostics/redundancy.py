"""Redundancy: heads of a layer with the same spectrum, and heads with the same output.

Similar spectra alone do not make two heads equal, since their projections differ; the similarity of their outputs
must accompany them (SVDA, Section 3.7).
"""

from dataclasses import dataclass

import torch

from attnrx.decide.diagnostics.diagnostic import Accumulator, Diagnostic
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.observation import Observation
from attnrx.vit.spectrum import Spectrum


@dataclass(frozen=True)
class Redundancy(Diagnostic):
    """Returns spectral_redundancy (SVDA, Eq. 43) and output_similarity: [heads, heads], symmetric, ones on the
    diagonal.

    A head without energy, or one that adds the same to every token of every image, is similar to none, including
    itself: its row is zero.
    """

    def start(self, spectra: tuple[Spectrum, ...]) -> Accumulator:
        return _Similarities(spectra)


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


class _Similarities(OutputMoments):
    def readings(self) -> list[dict[str, Tensor]]:
        return [
            {
                "spectral_redundancy": spectral_redundancy(spectrum.strength, spectrum.used),
                "output_similarity": output_similarity(moment.value, self.readouts[layer].double()).cpu(),
            }
            for layer, (spectrum, moment) in enumerate(zip(self.spectra, self.outputs, strict=True))
        ]


class CentredMoment:
    """The sum over rows of (x - mean) (x - mean)^T, of rows that arrive in batches.

    Every batch is centred on its own mean before it is multiplied, in its own precision; batches are merged in float64.
    The sum of x x^T minus the mean's share would lose small variations of large rows to rounding.
    """

    def __init__(self):
        self.rows = 0
        # Numbers without axes, which broadcast: the first rows set device and width.
        self.mean = torch.zeros(())
        self.value = torch.zeros(())

    def covariance(self) -> Float[Tensor, "features features"]:
        """Returns the moment per row, symmetric, in float64 on the CPU; zero without rows."""
        covariance = self.value.cpu().double() / max(self.rows, 1)
        return (covariance + covariance.mT) / 2  # rounding leaves it slightly asymmetric

    def add(self, rows: Float[Tensor, "rows features"]) -> None:
        count = rows.shape[0]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        mean = rows.mean(0)
        centred = rows - mean
        step = mean.double() - self.mean.to(mean.device)
        # The pairwise update of a centred second moment: the spread between the means of both parts.
        between = self.rows * count / (self.rows + count) * torch.outer(step, step)
        self.value = self.value.to(mean.device) + (centred.T @ centred).double() + between
        self.mean = self.mean.to(mean.device) + step * (count / (self.rows + count))
        self.rows += count


def spectral_redundancy(
    strength: Float[Tensor, "heads directions"], used: Bool[Tensor, "heads directions"] | None = None
) -> Float[Tensor, "heads heads"]:
    """Returns the cosine between the |strength| of every two heads (SVDA, Eq. 43), in [0, 1]."""
    magnitude = strength.abs() if used is None else strength.abs() * used
    return _cosines(magnitude @ magnitude.T)


def output_similarity(
    moment: Float[Tensor, "features features"], readout: Float[Tensor, "heads head_dim width"]
) -> Float[Tensor, "heads heads"]:
    """Returns the cosine between the contributions of every two heads to the residual stream, in [-1, 1].

    Head h adds output_h @ readout_h to each token. Its mean over all tokens of all images is excluded: it is a bias.
    `moment` is the centred second moment of the concatenated outputs, so nothing of the width of the residual stream is
    formed: <a_g, a_h> = trace(readout_g^T moment_gh readout_h).
    """
    heads, head_dim, _ = readout.shape
    # Both [heads, heads, dims, dims]: trace(A^T M B) is the sum of the elements of M * (A B^T).
    blocks = moment.view(heads, head_dim, heads, head_dim).transpose(1, 2)
    readouts = torch.einsum("gdw,hew->ghde", readout, readout)
    return _cosines((blocks * readouts).sum((-2, -1)))


def _cosines(products: Float[Tensor, "heads heads"]) -> Float[Tensor, "heads heads"]:
    # A square can be negative by rounding. A head without energy has the inverse 0, so its row is 0, itself included.
    norms = products.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))
    return (products * inverse[:, None] * inverse).clamp(-1, 1)  # only rounding can exceed the interval
