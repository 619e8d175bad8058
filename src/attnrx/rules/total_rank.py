"""Total rank: so many directions for a whole layer or model, dealt out to where they count."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.decompositions import allocate_by_loss, water_fill
from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidRule
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only
from attnrx.rules.knobs import require_count, require_rank
from attnrx.rules.metrics import OWN
from attnrx.rules.preconditions import read_learned_spectrum
from attnrx.rules.rule import Rule
from attnrx.rules.selection import largest
from attnrx.spectrum import Spectrum

SCOPES, BY = ("layer", "model"), ("energy", "divergence")


@dataclass(frozen=True)
class TotalRank(Rule):
    """Keeps the strongest directions of all heads together: `rank` of them a layer, or that share of what there is.

    This is water-filling: of all choices of so many directions it leaves the least energy out, so heads get irregular
    ranks (IrrAtt). With `by="divergence"` what is left out is the measured divergence of the attention instead (see
    `measure_divergence`), which a dynamic programme makes as small as can be. With `scope="model"` the layers share out
    their sum. Every rank is a multiple of `multiple` and at least `minimum`, however small a share was requested for.
    Strengths are those of the `metric` (see METRICS), or with "own" the model's. Unless stated it is "mix" for scores
    without norms, "own" for scores with norms (SVDA), and "centered" for values and MLP (see OUTPUT_METRICS).
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
        """Fills the heads up, whichever direction is the strongest next."""
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        indices = range(len(diagnosis.layers)) if self.scope == "model" else (layer,)
        spectra = [read_learned_spectrum(self, diagnosis, index) for index in indices]
        total = self._total(spectra)
        if self.by == "energy":
            strengths = [each.strength * each.used for each in spectra]
            shared = water_fill(strengths, total, multiple=self.multiple, minimum=self.minimum)
        else:
            metric = diagnosis.about.get("metric", OWN)
            prices = [diagnosis.layers[index].reading(f"divergence_{metric}") for index in indices]
            flat = allocate_by_loss(torch.cat(prices), total, multiple=self.multiple, minimum=self.minimum)
            heads = [len(each.heads) for each in spectra]
            shared = tuple(tuple(part.tolist()) for part in torch.tensor(flat).split(heads))
        ranks = shared[layer if self.scope == "model" else 0]
        kept = torch.tensor(ranks, dtype=torch.long)
        notes = [f"{sum(ranks)} for the layer's {len(ranks)} heads, the strongest of the {self.scope}"] * len(ranks)
        return keep_only(spectrum, largest(spectrum.strength.abs(), spectrum.used, kept), notes)

    def _total(self, spectra: list[Spectrum]) -> int:
        there = sum(int(spectrum.used.sum()) for spectrum in spectra)
        wanted = self.rank * (len(spectra) if isinstance(self.rank, int) else there)
        total = round(wanted / self.multiple) * self.multiple
        if isinstance(self.rank, int):
            return total
        units = sum(len(spectrum.heads) for spectrum in spectra)
        return max(total, units * -(-self.minimum // self.multiple) * self.multiple)
