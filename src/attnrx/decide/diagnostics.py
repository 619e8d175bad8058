"""Diagnostics, which are computed from each layer's spectrum, intermediate results and head outputs.

A `Panel` collects the readings of several diagnostics for all layers of a model. `Geometry` measures the selectivity of
heads. `Geometry` and `Moments` measure the second moments that metrics of pruning rules need.

Moments of queries and keys are computed from the query and key rows whose dot products are the attention scores, before
the strengths multiply these rows. If the form of attention has norms, the rows are already divided by them. The mean
key of each image is subtracted from its keys, because a component that all keys share only adds a constant to a row of
scores, and softmax ignores constants.

In a spectrum, `used` is True for directions that exist. It is False for padding, which is ignored. A head without
energy (all strengths are zero, or no direction exists) has entropy 0 and effective rank 0.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.change.decompositions import gram
from attnrx.support.arguments import require_fields
from attnrx.support.errors import InvalidInput
from attnrx.support.registry import Registry
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.attention import Observation
from attnrx.vit.spec import Spectrum


class CentredMoment:
    """Accumulates the sum over rows of (x - mean) (x - mean)^T, for rows that arrive in batches.

    For every batch, the mean of its rows is subtracted first, and the moment is computed in the batch's precision. Then
    the moments of all batches are merged in float64. It would be simpler to sum x x^T and subtract the outer product of
    the mean at the end. But if rows are large and vary little, the difference would be lost to rounding.
    """

    def __init__(self):
        self.rows = 0
        # Scalars broadcast, so the first rows set the device and the width.
        self.mean = torch.zeros(())
        self.value = torch.zeros(())

    def covariance(self) -> Float[Tensor, "features features"]:
        """Returns the moment divided by the number of rows, in float64 on the CPU. It is 0 if there are no rows."""
        covariance = self.value.cpu().double() / max(self.rows, 1)
        return (covariance + covariance.mT) / 2  # rounding leaves it slightly asymmetric

    def add(self, rows: Float[Tensor, "rows features"]) -> None:
        count = rows.shape[0]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        mean = rows.mean(0)
        centred = rows - mean
        step = mean.double() - self.mean.to(mean.device)
        # The pairwise update of a centred second moment. `between` is the spread between the means of the two parts.
        between = self.rows * count / (self.rows + count) * torch.outer(step, step)
        self.value = self.value.to(mean.device) + gram(centred).double() + between
        self.mean = self.mean.to(mean.device) + step * (count / (self.rows + count))
        self.rows += count


class Diagnostic:
    """The base class of diagnostics, which compute readings. Subclasses are frozen dataclasses with options as fields.

    Diagnostics receive spectra and observations, never a model. The first axis of every reading is the head. All
    diagnostics obey two laws. First, if heads are permuted, the readings are permuted in the same way. Second, readings
    do not depend on how images are divided into batches.
    """

    reads_outputs: ClassVar[bool] = False
    """Whether this diagnostic has readings `of_outputs`."""

    def __post_init__(self):
        require_fields(self)

    def of_spectrum(self, spectrum: Spectrum) -> dict[str, Tensor]:
        """Returns the readings that need only the spectrum, and no images. The base class returns none."""
        return {}

    def measure(self, observation: Observation) -> dict[str, Tensor]:
        """Returns one layer's readings for one batch, averaged over its images. The base class returns none."""
        return {}

    def of_outputs(self, moment: CentredMoment, readout: Float[Tensor, "heads v_head_dim width"]) -> dict[str, Tensor]:
        """Returns the readings of one layer's head outputs over all images. The base class returns none.

        `moment` is the centred moment of the concatenated outputs of all heads. `readout` is the output projection.
        """
        return {}


class Panel:
    """Collects the readings of all diagnostics for all layers. More images do not need more memory."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...], spectra: tuple[Spectrum, ...]):
        kinds = [type(diagnostic) for diagnostic in diagnostics]
        twice = sorted({kind.__name__ for kind in kinds if kinds.count(kind) > 1})
        if not diagnostics or twice:
            problem = f"{', '.join(twice)} given twice" if twice else "no diagnostic given"
            raise InvalidInput(f"a diagnosis with {problem}: choose at least one, and each kind once.")
        self.diagnostics, self.spectra = diagnostics, spectra
        self._images = [0] * len(spectra)
        self._sums: list[dict[str, Tensor]] = [{} for _ in spectra]  # float64, on the device of the layers
        self._reads_outputs = any(each.reads_outputs for each in diagnostics)
        self._outputs = [CentredMoment() for _ in spectra]
        self._readouts: dict[int, Tensor] = {}
        for layer, spectrum in enumerate(spectra):
            if not spectrum.heads:  # it computes nothing to observe, and its readings are empty
                # An empty layer gets an artificial observation of one image with one token.
                rows, maps = torch.zeros(1, 1, 0, spectrum.strength.shape[1]), torch.zeros(1, 0, 1, 1)
                factors = rows, rows, rows[0, 0], spectrum.scale
                self.observe(layer, Observation(*factors, maps, maps, maps, maps, maps[0]))

    def observe(self, layer: int, observation: Observation, **others: Tensor) -> None:
        """Adds one layer's results for one batch. `others` holds extra readings, averaged over the batch's images.

        Raises:
            InvalidInput: The layer computed NaN or infinity.
        """
        # If any output is not finite, the sum is not finite either. The sum takes a tenth of the time of isfinite.
        total = observation.output.sum(dtype=torch.promote_types(observation.output.dtype, torch.float32))
        if not bool(torch.isfinite(total)):
            raise InvalidInput(
                f"layer {layer + 1} computed NaN or infinity, though the weights are finite: the images hold NaN, or "
                "the numbers left the range of their precision. Check the data, or diagnose the model in float32."
            )
        images, sums = observation.query.shape[0], self._sums[layer]
        self._images[layer] += images
        for means in (*(each.measure(observation) for each in self.diagnostics), others):
            for name, mean in means.items():
                # Batches differ in size, so sums are collected. A mean of batch means would be wrong.
                total = mean.to(torch.float64) * images
                sums[name] = sums[name] + total if name in sums else total
        if self._reads_outputs:
            # [batch, heads, tokens, dims] becomes one row per token, with all heads side by side.
            self._outputs[layer].add(observation.output.transpose(1, 2).flatten(2).flatten(0, 1))
            self._readouts[layer] = observation.readout

    def readings(self) -> list[dict[str, Tensor]]:
        """Returns the readings of every layer by name, averaged in float64 and on the CPU.

        Raises:
            InvalidInput: A reading overflowed.
        """
        readings: list[dict[str, Tensor]] = [{} for _ in self.spectra]
        for layer, (spectrum, found) in enumerate(zip(self.spectra, readings, strict=True)):
            for each in self.diagnostics:
                found |= each.of_spectrum(spectrum)
                if each.reads_outputs:
                    found |= each.of_outputs(self._outputs[layer], self._readouts[layer])
            # The sums stay on the device until now, because a copy to the CPU in every batch would wait for the GPU.
            found |= {name: (total / self._images[layer]).cpu() for name, total in self._sums[layer].items()}
            for name, value in found.items():
                if not bool(torch.isfinite(value).all()):
                    raise InvalidInput(
                        f"the reading {name} of layer {layer + 1} overflowed, though the layer's outputs are finite: "
                        "its squares left the range of the model's precision. Diagnose the model in float64, "
                        "model.double()."
                    )
        return readings


@dataclass(frozen=True)
class Geometry(Diagnostic):
    """Measures the selectivity of heads, and the second moments of their queries and keys.

    The readings are selectivity [heads], query_moment and key_moment [heads, directions], and the matrices query_gram
    and key_covariance [heads, directions, directions]. The moments are the diagonals of these matrices.
    """

    def measure(self, observation: Observation) -> dict[str, Tensor]:
        # Queries are not centred. Softmax ignores a component that all keys share, but not one that all queries share.
        query, key = query_grams(observation.query).mean(0), key_covariances(observation.key).mean(0)
        return {
            "selectivity": selectivity(observation.attention),
            "query_moment": query.diagonal(dim1=-2, dim2=-1),
            "key_moment": key.diagonal(dim1=-2, dim2=-1),
            "query_gram": query,
            "key_covariance": key,
        }


def selectivity(attention: Float[Tensor, "batch heads queries keys"]) -> Float[Tensor, "heads"]:
    """Returns each head's selectivity: 1 - H / log(keys), where H is the mean entropy of the head's attention rows.

    Uniform attention has selectivity 0, and so has attention to a single key. One-hot attention has selectivity 1.
    """
    attention, keys = widened(attention), attention.shape[-1]
    if keys == 1:
        return attention.new_zeros(attention.shape[1])
    logs = attention.clamp(min=torch.finfo(attention.dtype).tiny).log_()  # 0 log 0 = 0, three times as fast as xlogy
    entropy = -(attention * logs).sum(-1).mean((0, 2))
    return (1 - entropy / math.log(keys)).clamp(0, 1)  # only rounding can exceed the interval


def query_grams(
    query: Float[Tensor, "batch queries heads directions"],
) -> Float[Tensor, "batch heads directions directions"]:
    """Returns the second moment of every image's query rows: the mean of q q^T over the tokens."""
    rows = widened(query).transpose(1, 2).contiguous()  # the copy costs less than multiplying strided rows
    return (rows.mT @ rows).div_(rows.shape[-2])


def key_covariances(
    key: Float[Tensor, "batch keys heads directions"],
) -> Float[Tensor, "batch heads directions directions"]:
    """Returns the covariance of every image's key rows over its tokens."""
    key = widened(key)
    return query_grams(key - key.mean(1, keepdim=True))


def widened(rows: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the rows in float32, or unchanged if their dtype is wider."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


@dataclass(frozen=True)
class Moments(Diagnostic):
    """Measures the moments that some metrics need and `Geometry` does not measure.

    - key_gram [heads, directions, directions]: the second moment of the keys.
    - key_softmax [heads, directions, directions]: the covariance of the keys, weighted by the attention probabilities.
      This is the curvature of the softmax in the key directions: the mean over queries of
      sum_j p_j k_j k_j^T - (sum_j p_j k_j)(...)^T.
    - output_mean [heads, v_head_dim] and output_covariance [heads, v_head_dim, heads * v_head_dim]: the mean and
      covariance of all heads' outputs together, over all tokens of all images.
    - readout_gram [heads, v_head_dim, v_head_dim]: the Gram matrix of each head's part of the output projection.
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
    """Returns the covariance of the keys, weighted by each query's attention, and averaged over queries and images.

    Let a query's scores change by a small d. The KL divergence between its old attention p and its new attention is
    then about d^T (diag p - p p^T) d / 2.
    """
    wide = torch.promote_types(key.dtype, torch.float32)
    keys, weights = key.to(wide).transpose(1, 2), attention.to(wide)
    # A covariance does not depend on the origin. Without this shift, large and nearly equal keys would lose all digits.
    keys = keys - keys.mean(-2, keepdim=True)
    # [batch, heads, queries, directions]: the mean key under every query's attention.
    means = weights @ keys
    queries = weights.shape[-2]
    # Each product sums over the queries, so no matrix [directions, directions] per query is formed.
    spread = keys.mT @ (keys * weights.sum(-2)[..., None]) - means.mT @ means
    return (spread / queries).mean(0)


@dataclass(frozen=True)
class SpectralShape(Diagnostic):
    """Measures how a head's energy is spread: energy [heads, directions], entropy and effective_rank [heads]."""

    def of_spectrum(self, spectrum: Spectrum) -> dict[str, Tensor]:
        strength, used = spectrum.strength, spectrum.used
        return {
            "energy": energy(strength, used),
            "entropy": entropy(strength, used),
            "effective_rank": effective_rank(strength, used),
        }


def energy(
    strength: Float[Tensor, "*heads directions"], used: Bool[Tensor, "*heads directions"] | None = None
) -> Float[Tensor, "*heads directions"]:
    """Returns each direction's share of its head's squared strengths (SVDA, Eq. 22), or zeros if all are zero."""
    magnitude = magnitude_of(strength, used)
    largest = largest_of(magnitude)[..., None]
    # Magnitudes are first divided by the largest one, because their squares might overflow or vanish.
    square = (magnitude / torch.where(largest > 0, largest, torch.ones_like(largest)).detach()).square()
    total = square.sum(-1, keepdim=True)
    return square / torch.where(total > 0, total, torch.ones_like(total))


def entropy(
    strength: Float[Tensor, "*heads directions"], used: Bool[Tensor, "*heads directions"] | None = None
) -> Float[Tensor, "*heads"]:
    """Returns the spectral entropy H in nats (SVDA, Eq. 23): 0 for one direction, log(directions) for equal strengths.

    The entropy is differentiable everywhere. A direction of strength zero receives no gradient.
    """
    share = energy(strength, used)
    # Where a share is zero, log(1) replaces log(0). So 0 log 0 = 0, and autograd multiplies no infinite slope by 0.
    return 0 - (share * torch.where(share > 0, share, torch.ones_like(share)).log()).sum(-1)  # 0 -, or zero reads -0.0


def effective_rank(
    strength: Float[Tensor, "*heads directions"], used: Bool[Tensor, "*heads directions"] | None = None
) -> Float[Tensor, "*heads"]:
    """Returns the effective rank exp(H) (SVDA, Eqs. 24 and 25), which is 0 if all strengths are zero.

    The effective rank never exceeds the number of nonzero strengths, even after rounding.
    """
    active = (magnitude_of(strength, used) != 0).sum(-1)
    # By rounding, exp(log(n)) may exceed n. The smallest integer above it would then be n + 1.
    return torch.minimum(entropy(strength, used).exp(), active.to(strength.dtype))


def magnitude_of(
    strength: Float[Tensor, "*heads directions"], used: Bool[Tensor, "*heads directions"] | None
) -> Float[Tensor, "*heads directions"]:
    """Returns the absolute strengths, with zeros for padding."""
    return (strength if used is None else torch.where(used, strength, torch.zeros_like(strength))).abs()


def largest_of(magnitude: Float[Tensor, "*heads directions"]) -> Float[Tensor, "*heads"]:
    """Returns the largest entry of every head, or zero for a head without directions."""
    # amax raises for an axis of length 0.
    return magnitude.amax(-1) if magnitude.shape[-1] else magnitude.sum(-1)


# All diagnostics in this registry except `Moments` are standard, which means that `diagnose` measures them by default.
DIAGNOSTICS = Registry[type[Diagnostic]]("diagnostic", SpectralShape, Geometry, Moments)


def suited_diagnostics(spectra: tuple[Spectrum, ...], *, moments: bool = False) -> tuple[Diagnostic, ...]:
    """Returns the diagnostics that `diagnose` measures by default, with their default options.

    The default is all standard diagnostics, plus `Moments` if the layers need it. Attention without norms needs
    `Moments`, because pruning may choose a new basis for its directions, by a metric that uses these moments. With
    `moments=True`, `Moments` is also added for attention with norms, because without it, rules for values and MLPs have
    no metric that uses data.
    """
    if spectra and not any(spectrum.heads for spectrum in spectra):  # no attention is read, or all is removed
        return (Moments(),)
    standard = tuple(kind() for kind in DIAGNOSTICS.values() if kind is not Moments)
    return (*standard, Moments()) if moments or any(spectrum.norms == "none" for spectrum in spectra) else standard
