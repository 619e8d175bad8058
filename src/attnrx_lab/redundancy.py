"""Redundancy: heads of a layer with the same spectrum, and heads with the same output; `remove_heads` reads both.

Similar spectra alone do not make two heads equal, since their projections differ; the similarity of their outputs
must accompany them (SVDA, Section 3.7).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.decide.diagnostics import Diagnostic
from attnrx.decide.diagnostics.diagnostic import Accumulator
from attnrx.decide.diagnostics.moments import OutputMoments
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.spectrum import Spectrum


class _Similarities(OutputMoments):
    def readings(self) -> list[dict[str, Tensor]]:
        per_layer = super().readings()
        for layer, (readings, moment) in enumerate(zip(per_layer, self.outputs, strict=True)):
            similarity = output_similarity(moment.value, self.readouts[layer].double())
            readings["output_similarity"] = similarity.cpu()
        return per_layer


@dataclass(frozen=True)
class Redundancy(Diagnostic):
    """Returns spectral_redundancy (SVDA, Eq. 43) and output_similarity: [heads, heads], symmetric, ones on the
    diagonal.

    A head without energy, or one that adds the same to every token of every image, is similar to none, including
    itself: its row is zero.
    """

    accumulator: ClassVar[type[Accumulator]] = _Similarities

    def of_spectrum(self, spectrum: Spectrum) -> dict[str, Tensor]:
        return {"spectral_redundancy": spectral_redundancy(spectrum.strength, spectrum.used)}


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
