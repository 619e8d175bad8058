"""Total rank: distributes a total number of directions over the heads of a layer or model."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.decompositions import allocate_by_loss, water_fill
from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidRule
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only, largest
from attnrx.rules.metrics import OWN
from attnrx.rules.preconditions import read_learned_spectrum, require_count, require_rank
from attnrx.rules.rule import Rule
from attnrx.spectrum import Spectrum

SCOPES, BY = ("layer", "model"), ("energy", "divergence")


@dataclass(frozen=True)
class TotalRank(Rule):
    """Keeps the strongest directions of all heads together: `rank` per layer, or that share of all directions.

    This is water-filling: of all selections of that size it removes the least energy, so heads get irregular ranks
    (IrrAtt). With `by="divergence"` it minimizes the measured divergence of the attention instead (see
    `measure_divergence`), by a dynamic programme. With `scope="model"` the total is distributed over all layers. Every
    rank is a multiple of `multiple` and at least `minimum`, even for a smaller requested share. Strengths are those of
    the `metric` (see METRICS), or with "own" the model's. The default metric is "mix" for scores without norms, "own"
    for scores with norms (SVDA), and "centered" for values and MLP (see OUTPUT_METRICS).
    """

    default_metric: ClassVar[str | None] = "mix"

    rank: int | float
    scope: str = "layer"
    multiple: int = 1
    minimum: int = 1
    by: str = "energy"

    def __post_init__(self):
        require_rank(self, "rank", self.rank)
        if self.scope not in SCOPES:
            raise InvalidRule(f"total_rank was given scope={self.scope!r}: choose from {', '.join(SCOPES)}.")
        if self.by not in BY:
            raise InvalidRule(f"total_rank was given by={self.by!r}: choose from {', '.join(BY)}.")
        require_count(self, "multiple", self.multiple, least=1)
        require_count(self, "minimum", self.minimum)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        indices = range(len(diagnosis.layers)) if self.scope == "model" else (layer,)
        spectra = [read_learned_spectrum(self, diagnosis, index) for index in indices]
        total = self._total(spectra)
        present = [each.used.any(-1) for each in spectra]  # removed heads take no part of the total
        if self.by == "energy":
            strengths = [(each.strength * each.used)[own] for each, own in zip(spectra, present, strict=True)]
            shared = water_fill(strengths, total, multiple=self.multiple, minimum=self.minimum)
        else:
            metric = diagnosis.about.get("metric", OWN)
            losses = [
                diagnosis.layers[index].reading(f"divergence_{metric}")[own]
                for index, own in zip(indices, present, strict=True)
            ]
            flat = allocate_by_loss(torch.cat(losses), total, multiple=self.multiple, minimum=self.minimum)
            shared = tuple(part.tolist() for part in torch.tensor(flat).split([int(own.sum()) for own in present]))
        own = layer if self.scope == "model" else 0
        num_kept = torch.zeros(len(present[own]), dtype=torch.long)
        num_kept[present[own]] = torch.tensor(shared[own], dtype=torch.long)
        among = f" for the layer's {len(shared[own])} heads" if len(num_kept) > 1 else ""
        notes = [f"{sum(shared[own])}{among}, the strongest of the {self.scope}"] * len(num_kept)
        return keep_only(spectrum, largest(spectrum.strength.abs(), spectrum.used, num_kept), notes)

    def _total(self, spectra: list[Spectrum]) -> int:
        available = sum(int(spectrum.used.sum()) for spectrum in spectra)
        target = self.rank * (len(spectra) if isinstance(self.rank, int) else available)
        total = round(target / self.multiple) * self.multiple
        if isinstance(self.rank, int):
            return total
        units = sum(int(spectrum.used.any(-1).sum()) for spectrum in spectra)
        return max(total, units * -(-self.minimum // self.multiple) * self.multiple)
