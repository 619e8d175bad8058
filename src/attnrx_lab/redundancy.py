"""SVDA's indicators of redundancy: similarities between heads, and numbers that describe single heads.

The rule `remove_heads` compares heads by their spectra and by their outputs. Two heads with similar spectra need not be
redundant, because their projections may differ, so the rule also requires similar outputs (SVDA, Section 3.7). The
other indicators (sparsity, active directions, sensitivity, alignment) are only reported, and no rule uses them.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from attnrx.decide.diagnostics import CentredMoment, Diagnostic, largest_of, magnitude_of, widened
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.attention import Observation
from attnrx.vit.spec import Spectrum

# A direction below a tenth of the largest strength has less than a hundredth of the largest energy.
INACTIVE_BELOW = 0.1


@dataclass(frozen=True)
class Redundancy(Diagnostic):
    """Returns the readings spectral_redundancy (SVDA, Eq. 43) and output_similarity.

    The two similarities are symmetric matrices [heads, heads] with ones on the diagonal. If all strengths of a head are
    zero, its row of spectral_redundancy is zero, including the diagonal. If a head adds the same vector to every token
    of every image, its row of output_similarity is zero.
    """

    reads_outputs: ClassVar[bool] = True

    def of_spectrum(self, spectrum: Spectrum) -> dict[str, Tensor]:
        return {"spectral_redundancy": spectral_redundancy(spectrum.strength, spectrum.used)}

    def of_outputs(self, moment: CentredMoment, readout: Float[Tensor, "heads v_head_dim width"]) -> dict[str, Tensor]:
        return {"output_similarity": output_similarity(moment.value, readout.double()).cpu()}


def spectral_redundancy(
    strength: Float[Tensor, "heads directions"], used: Bool[Tensor, "heads directions"] | None = None
) -> Float[Tensor, "heads heads"]:
    """Returns the cosine similarity in [0, 1] of the |strength| vectors of each pair of heads (SVDA, Eq. 43)."""
    magnitude = strength.abs() if used is None else strength.abs() * used
    return _cosines(magnitude @ magnitude.T)


def output_similarity(
    moment: Float[Tensor, "features features"], readout: Float[Tensor, "heads head_dim width"]
) -> Float[Tensor, "heads heads"]:
    """Returns the cosine similarity in [-1, 1] of the contributions of each pair of heads to the residual stream.

    Head h adds output_h @ readout_h to each token, where readout_h is the head's part of the output projection. The
    mean contribution over all tokens of all images is subtracted, because it acts as a bias. `moment` is the centred
    second moment of the concatenated outputs. The function does not compute the contributions a_g, because their inner
    products are <a_g, a_h> = trace(readout_g^T moment_gh readout_h).
    """
    heads, head_dim, _ = readout.shape
    # `blocks` and `readouts` are [heads, heads, dims, dims]. trace(A^T M B) is the sum of the elements of M * (A B^T).
    blocks = moment.view(heads, head_dim, heads, head_dim).transpose(1, 2)
    readouts = torch.einsum("gdw,hew->ghde", readout, readout)
    return _cosines((blocks * readouts).sum((-2, -1)))


def _cosines(products: Float[Tensor, "heads heads"]) -> Float[Tensor, "heads heads"]:
    # Rounding can make a square negative. A head without energy has the inverse 0, so its whole row is 0.
    norms = products.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))
    return (products * inverse[:, None] * inverse).clamp(-1, 1)  # only rounding can leave this interval


@dataclass(frozen=True)
class Indicators(Diagnostic):
    """Returns the readings sparsity, active_directions, sensitivity and alignment, each of shape [heads].

    A head whose strengths are all zero has sparsity 1, no active directions and sensitivity 0.
    """

    def of_spectrum(self, spectrum: Spectrum) -> dict[str, Tensor]:
        strength, used = spectrum.strength, spectrum.used
        return {
            "sparsity": sparsity(strength, used),
            "active_directions": active_directions(strength, used),
            "sensitivity": sensitivity(strength, spectrum.scale, used),
        }

    def measure(self, observation: Observation) -> dict[str, Tensor]:
        return {"alignment": alignment(observation.query, observation.key)}


def sparsity(
    strength: Float[Tensor, "*heads directions"], used: Bool[Tensor, "*heads directions"] | None = None
) -> Float[Tensor, "*heads"]:
    """Returns the share of a head's directions whose |strength| is below a threshold (P_epsilon, SVDA, Eq. 29).

    The threshold epsilon of Eq. 29 is absolute. This function uses a tenth of the head's largest |strength| instead, so
    the result does not depend on the scale of the strengths.
    """
    there = torch.ones_like(strength, dtype=torch.bool) if used is None else used
    directions = there.sum(-1)
    share = (directions - active_directions(strength, used)) / directions.clamp(min=1)
    return torch.where(directions > 0, share, torch.ones_like(share))


def active_directions(
    strength: Float[Tensor, "*heads directions"], used: Bool[Tensor, "*heads directions"] | None = None
) -> Float[Tensor, "*heads"]:
    """Returns how many of a head's directions reach the threshold that `sparsity` uses (C_epsilon, SVDA, Eq. 30)."""
    magnitude = magnitude_of(strength, used)
    # Zero is inactive even if the head's largest strength is zero, which makes the threshold zero.
    active = (magnitude >= INACTIVE_BELOW * largest_of(magnitude)[..., None]) & (magnitude > 0)
    return active.sum(-1).to(strength.dtype)


def sensitivity(
    strength: Float[Tensor, "*heads directions"], scale: float, used: Bool[Tensor, "*heads directions"] | None = None
) -> Float[Tensor, "*heads"]:
    """Returns max|strength| * scale, a Lipschitz constant of the scores in queries and keys (SVDA, Prop. 4)."""
    return scale * largest_of(magnitude_of(strength, used))


def alignment(
    query: Float[Tensor, "batch queries heads directions"], key: Float[Tensor, "batch keys heads directions"]
) -> Float[Tensor, "heads"]:
    """Returns the cosine of query rows and key rows, averaged over all pairs of a query and a key, and all images.

    The mean lies in [-1, 1]. The function ignores the strengths and divides every row by its norm, so you can compare
    dense and compressed heads. The cosine between a zero row and any other row is defined as zero.
    """
    # The mean over all pairs of a dot product is the dot product of the two means.
    cosine = (_mean_unit(query) * _mean_unit(key)).sum(-1)
    return cosine.mean(0).clamp(-1, 1)  # only rounding can leave this interval


def _mean_unit(rows: Float[Tensor, "batch tokens heads directions"]) -> Float[Tensor, "batch heads directions"]:
    rows = widened(rows)
    return F.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny).mean(1)
