"""Rules that keep directions by their strength: a share of the energy, ranks per head, and a rank of all heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.change.decompositions import water_fill
from attnrx.decide.diagnostics import spectral_shape
from attnrx.decide.rules.rule import Rule, fewest_holding, keep_only, largest, learned_spectrum
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import ScoreDecision
from attnrx.support.arguments import Kind, one_of
from attnrx.support.shapes import Tensor
from attnrx.vit.spectrum import Spectrum


@dataclass(frozen=True)
class EnergyRetention(Rule):
    """Keeps the fewest directions of each head whose energy reaches the retention ratio rho (SVDA, Eqs. 44 and 45).

    Ties are resolved by index. At least one direction is kept, and rho = 1 keeps all that are not zero. The removed
    energy is at most 1 - rho of the head's, so no masked score changes by more than sqrt(1 - rho) * norm(strength) *
    scale. Needs learned strengths.
    """

    rho: float

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        shares = spectral_shape.energy(spectrum.strength.double(), spectrum.used)
        return keep_only(spectrum, fewest_holding(self.rho, shares, spectrum.used))


@dataclass(frozen=True)
class UniformRank(Rule):
    """Keeps the `rank` strongest directions of each head, or that share of its directions (IrrAtt's TruncAtt, Section
    2.3).

    With the metric "weights" this is the truncated singular value decomposition of each head's W_Q W_K^T. The rank is
    rounded to a `multiple`: kernels load several values at once, and are slower at a rank in between than at the next
    multiple. The default metric is that of TotalRank, except "weights" for scores without norms.
    """

    default_metric: ClassVar[str | None] = "weights"

    rank: int | float
    multiple: int = 1

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        available = spectrum.used.sum(-1)
        target = available.clamp(max=int(self.rank)) if isinstance(self.rank, int) else self.rank * available
        # The number of directions of a head may be no multiple: a head can always keep all of them.
        ranks = ((target / self.multiple).round().long() * self.multiple).minimum(available)
        return keep_only(spectrum, largest(spectrum.strength.abs(), spectrum.used, ranks))


@dataclass(frozen=True)
class TotalRank(Rule):
    """Keeps the strongest directions of all heads together: `rank` per layer, or that share of all directions.

    This is water-filling: of all selections of that size it removes the least energy, so heads get irregular ranks
    (IrrAtt). With `scope="model"` the total is distributed over all layers. Every rank is a multiple of `multiple` and
    at least `minimum`, even for a smaller requested share. Strengths are those of the `metric` (see METRICS), or with
    "own" the model's. The default metric is "mix" for scores without norms, "own" for scores with norms (SVDA), and
    "centered" for values and MLP (see OUTPUT_METRICS).
    """

    default_metric: ClassVar[str | None] = "mix"
    kinds: ClassVar[Mapping[str, Kind]] = {"scope": one_of("layer", "model")}

    rank: int | float
    scope: str = "layer"
    multiple: int = 1
    minimum: int = 1

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        indices = range(len(diagnosis.layers)) if self.scope == "model" else (layer,)
        spectra = [learned_spectrum(self, diagnosis, index) for index in indices]
        has_rows = [view.used.any(-1) for view in spectra]  # removed heads take no part of the total
        ranks = self.allocated(diagnosis, indices, spectra, has_rows)
        # With scope="model" every layer repeats the whole allocation and takes its part: decisions have no state.
        position = layer if self.scope == "model" else 0
        num_kept = torch.zeros(len(has_rows[position]), dtype=torch.long)
        num_kept[has_rows[position]] = torch.tensor(ranks[position], dtype=torch.long)
        heads_text = f" for the layer's {len(ranks[position])} heads" if len(num_kept) > 1 else ""
        notes = [f"{sum(ranks[position])}{heads_text}, the strongest of the {self.scope}"] * len(num_kept)
        return keep_only(spectrum, largest(spectrum.strength.abs(), spectrum.used, num_kept), notes)

    def allocated(
        self, diagnosis: Diagnosis, layers: Sequence[int], spectra: list[Spectrum], has_rows: list[Tensor]
    ) -> Sequence[Sequence[int]]:
        """Returns the ranks of the heads that have rows, `has_rows` [heads], of these layers."""
        strengths = [(view.strength * view.used)[heads] for view, heads in zip(spectra, has_rows, strict=True)]
        return water_fill(strengths, total=self.total(spectra), multiple=self.multiple, minimum=self.minimum)

    def total(self, spectra: list[Spectrum]) -> int:
        """Returns the number of directions that heads with these spectra keep together."""
        available = sum(int(spectrum.used.sum()) for spectrum in spectra)
        target = self.rank * (len(spectra) if isinstance(self.rank, int) else available)
        total = round(target / self.multiple) * self.multiple
        if isinstance(self.rank, int):
            return total
        # A share below the minimum of all heads is raised to it; a number below it is refused by the allocation.
        units = sum(int(spectrum.used.any(-1).sum()) for spectrum in spectra)
        return max(total, units * -(-self.minimum // self.multiple) * self.multiple)
