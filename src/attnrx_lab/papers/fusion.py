"""The fusion experiment (IrrAtt, Figures 2 and 3), which shows how a layer's heads use shared directions."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.nouns.diagnosis import LayerDiagnosis
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention import Attention
from attnrx.vit.models import family_of, model_fingerprint
from attnrx.workflows.load import load
from attnrx_lab.decompositions import Canonical, Fusion, cpd_epc, fusion_ranks, water_filled
from attnrx_lab.papers import sources
from attnrx_lab.papers.experiment import MODEL_KNOBS, Experiment, plain_measures
from attnrx_lab.papers.irratt import METRIC
from attnrx_lab.rules.shared import JointForm

DRAWN = 10_000  # random columns, so that the chance level has a standard error below half a point

Mix = Float[Tensor, "heads rank"]


@dataclass(frozen=True)
class FusionExperiment(Experiment):
    """Decomposes a pre-trained model's scores, layer by layer, into directions that all heads share (CPD-EPC).

    Every layer is decomposed once for each share in `shares`, which is the share of its directions to keep. The
    decomposition uses only the weights, and starts from random terms drawn with `seed`. Starting from the heads' own
    directions would assign one owner to each direction in advance. If the heads already share directions, the model is
    not decomposed.
    """

    kind: ClassVar[str] = "irratt-fusion"
    knobs: ClassVar[tuple[str, ...]] = MODEL_KNOBS

    subject: str
    model: str
    shares: tuple[float, ...]
    seed: int = 0
    weights: str | None = None
    sweeps: int = 200
    tiny: bool = False

    def as_tiny(self) -> "FusionExperiment":
        """Returns the same run with fewer sweeps on a tiny model with the same number of heads and layers."""
        return replace(self, tiny=True, sweeps=3)

    def original(self) -> nn.Module:
        if not self.tiny:
            return load(self.model, weights=self.weights).eval()
        outline = sources.outline_of(self.model)
        return sources.tiny_twin(outline, self.seed, len(family_of(outline).attention(outline)))

    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Decomposes every layer at every share."""
        model = self.original()
        self.claim(folder)
        layers = family_of(model).attention(model)
        rules: dict[str, Any] = {}
        for share in self.shares:
            log(f"{self.name}: {len(layers)} layers in {share:.3g} of their directions")
            ranks, best = [], []
            for layer, attention in enumerate(layers):
                mix, water_filled, error = self._fusion(attention, share, layer)
                ranks.append(sorted(_owners(mix).ranks))
                best.append(sorted(water_filled))
                rules[f"{share:g}/layer-{layer}"] = {"fusion": plain_measures({**blocks(mix, self.seed), **error})}
            # IrrAtt, Section 4.5 and Figure 2: sort the ranks of every layer, then group them by position.
            for head in range(len(ranks[0])):
                by_kind = {"fusion": [each[head] for each in ranks], "best": [each[head] for each in best]}
                rules[f"{share:g}/head-{head + 1}"] = {
                    kind: plain_measures(
                        {"mean": fmean(over), "median": median(over), "least": min(over), "most": max(over)}
                    )
                    for kind, over in by_kind.items()
                }
        is_fused = all(attention.spec.traits.shares_directions for attention in layers)
        source = "the model as it was given" if is_fused else "the decomposition (CPD-EPC), before any fine-tuning"
        return {
            "data": {"name": "none", "notes": [f"the fusion matrices are those of {source}"]},
            "model": {"fingerprint": model_fingerprint(model)},
            "rules": rules,
        }

    def _fusion(self, attention: Attention, share: float, layer: int) -> tuple[Mix, tuple[int, ...], dict[str, float]]:
        """Returns a layer's fusion matrix, the block ranks that would fit the weights best, and the relative error.

        If the heads already share directions, the function returns their fusion matrix and no error.
        """
        spectrum = attention.spectrum()
        heads = len(spectrum.strength)
        rows = {name: getattr(spectrum, name).expand(heads, -1, -1) for name in ("query", "key")}
        spectrum = replace(spectrum, **rows, shared=False)  # shared rows are repeated for every head
        tensor = JointForm(LayerDiagnosis(spectrum, {}), METRIC).tensor
        if attention.spec.traits.shares_directions:
            mix, error = spectrum.strength.double(), {}  # nothing was decomposed
        else:
            rank = max(1, round(share * int(spectrum.used.sum())))
            # Every layer starts from different random terms.
            terms = cpd_epc(tensor, rank, start="random", sweeps=self.sweeps, seed=self.seed + layer)
            mix, error = terms.mix, {"error": tensor.relative_error(*terms.factors)}
        return mix, fusion_ranks(water_filled(tensor, mix.shape[1])).ranks, error


def _owners(mix: Mix) -> Fusion:
    # Owners depend only on the fusion matrix. The other two factors only need the same rank.
    empty = torch.zeros(1, mix.shape[1], dtype=torch.float64)
    return fusion_ranks(Canonical(empty, empty, mix))


def blocks(mix: Mix, seed: int = 0) -> dict[str, float | int]:
    """Measures how close a fusion matrix is to being block-diagonal after its columns are sorted by owner.

    `as_fitted` is the share of the matrix's energy inside the blocks, in %. `rescaled` is the mean over the columns of
    each column's share, which does not depend on the columns' scale (IrrAtt, Figure 3 b). `by_chance` is the value of
    `rescaled` for random columns without block structure. `least` and `most` are the sizes of the smallest and the
    largest block.

    Raises:
        InvalidInput: The fusion matrix is zero.
    """
    fusion = _owners(mix)
    # The owner has the largest of several entries, so its share exceeds 1 / heads even in columns without structure.
    chance_mix = torch.randn(len(mix), DRAWN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    energy = mix.double().square()
    if not bool(energy.sum() > 0):
        raise InvalidInput("a fusion matrix of zeros has no blocks.")
    return {
        "as_fitted": 100 * float(energy.amax(0).sum() / energy.sum()),
        "rescaled": 100 * float(1 - fusion.off_block.mean()),
        "by_chance": 100 * float(1 - _owners(chance_mix).off_block.mean()),
        "least": min(fusion.ranks),
        "most": max(fusion.ranks),
    }
