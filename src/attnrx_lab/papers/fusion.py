"""The fusion experiment: which head uses which of the directions that all heads of a layer share (Figures 2 and 3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.decompositions import Canonical, CorrectionSchedule, Fusion, cpd_epc, fusion_ranks, water_filled_blocks
from attnrx.diagnosis import LayerDiagnosis
from attnrx.errors import InvalidInput
from attnrx.models import family_of, model_fingerprint
from attnrx.progress import Log
from attnrx.rules.shared import JointForm
from attnrx.serialization.storage import file_sha256, read_tensors, write_tensors
from attnrx.shapes import Float, Tensor
from attnrx.training import Reporter
from attnrx_lab.papers import sources
from attnrx_lab.papers.experiment import Experiment, Run, plain_measures

CORRECTIONS = 100  # sweeps of the correction, at most
DRAWN = 10_000  # random columns, for a standard error of the chance level below half a point
FILE = "fusions.safetensors"

Mix = Float[Tensor, "heads rank"]


def fusion_of(mix: Mix) -> Fusion:
    """Returns the owner of each direction of a fusion matrix, with its columns sorted and rescaled."""
    nothing = torch.zeros(1, mix.shape[1], dtype=torch.float64)
    return fusion_ranks(Canonical(nothing, nothing, mix))


def rule_of(share: float, what: str) -> str:
    """Returns the name of the results at a share of the directions."""
    return f"{share:g}/{what}"


def fusions_at(run: Run, share: float) -> list[Tensor]:
    """Returns the fusion matrix of every layer at a share, heads by directions, as fitted."""
    tensors = read_tensors(run.folder / FILE, run.record["fusions_sha256"])
    return [tensors[rule_of(share, f"layer-{layer}")] for layer in range(run.record["layers"])]


@dataclass(frozen=True)
class FusionExperiment(Experiment):
    """The scores of every layer of a pre-trained model in `shares` of its directions, shared by all heads (CPD-EPC).

    Only the weights are used. The seed draws the start: a start from the heads' own directions would give each
    direction one owner beforehand. A model whose heads share directions already is read unchanged.
    """

    kind: ClassVar[str] = "irratt-fusion"
    format: ClassVar[str] = "attnrx fusion run"
    tiny_note: ClassVar[str] = "a tiny model with random weights; these numbers show that the recipe runs"
    knobs: ClassVar[Mapping[str, str]] = sources.MODEL_KNOBS

    subject: str
    model: str
    shares: tuple[float, ...]
    dataset: str = "none"
    seed: int = 0
    weights: str | None = None
    metric: str = "augmented"
    sweeps: int = 200
    tiny: bool = False

    def __post_init__(self):
        if not self.shares or any(not 0 < share <= 1 for share in self.shares):
            raise InvalidInput(f"FusionExperiment(shares={self.shares}): give at least one share in (0, 1].")

    def as_tiny(self) -> "FusionExperiment":
        """The same on a tiny model with as many heads and layers, with few sweeps."""
        return replace(self, tiny=True, sweeps=3)

    def original(self) -> nn.Module:
        if not self.tiny:
            return sources.loaded(self.model, self.weights)
        outline = sources.outline_of(self.model)
        return sources.tiny_twin(outline, self.seed, len(family_of(outline).attention(outline)))

    def measured(self, folder: Path, reporter: Reporter | None, log: Log) -> dict[str, Any]:
        """Decomposes every layer at every share; fusions.safetensors holds the matrices."""
        model = self.original()
        self.claim(folder)
        layers = family_of(model).attention(model)
        rules: dict[str, Any] = {}
        mixes: dict[str, Tensor] = {}
        for share in self.shares:
            log(f"{self.name}: {len(layers)} layers in {share:.3g} of their directions")
            found = [_fusion(self, attention, share, layer) for layer, attention in enumerate(layers)]
            for layer, each in enumerate(found):
                name = rule_of(share, f"layer-{layer}")
                mixes[name] = each.mix
                rules[name] = {"fusion": plain_measures({**blocks(each.mix, self.seed), **each.error})}
            # The ranks of each position over the layers: the smallest of every layer first.
            places = zip(*(zip(sorted(each.ranks), sorted(each.best), strict=True) for each in found), strict=True)
            for number, pairs in enumerate(places, 1):
                kinds = zip(("fusion", "best"), zip(*pairs, strict=True), strict=True)
                rules[rule_of(share, f"head-{number}")] = {kind: plain_measures(_spread(own)) for kind, own in kinds}
        write_tensors(folder / FILE, mixes)
        given = all(attention.spec.shares_directions for attention in layers)
        source = "the model as it was given" if given else "the decomposition (CPD-EPC), before any fine-tuning"
        return {
            "data": {"name": "none", "notes": [f"the fusion matrices are those of {source}"]},
            "model": {"fingerprint": model_fingerprint(model)},
            "layers": len(layers),
            "rules": rules,
            "fusions_sha256": file_sha256(folder / FILE),
        }


@dataclass(frozen=True)
class _Fusion:
    """One layer: its fusion matrix, the error of the scores if they were decomposed, its ranks, and the best ones."""

    mix: Mix
    error: dict[str, float]
    ranks: tuple[int, ...]
    best: tuple[int, ...]


def _fusion(experiment: FusionExperiment, attention: Attention, share: float, layer: int) -> _Fusion:
    """Decomposes a layer, or reads one whose heads share directions already."""
    spectrum = attention.spectrum()
    heads = len(spectrum.strength)
    rows = {name: getattr(spectrum, name).expand(heads, -1, -1) for name in ("query", "key")}
    spectrum = replace(spectrum, **rows, shared=False)  # shared rows are repeated for every head
    tensor = JointForm(LayerDiagnosis(spectrum, {}), experiment.metric).tensor
    if attention.spec.shares_directions:
        mix, error = spectrum.strength.double(), {}  # nothing was decomposed
    else:
        rank, sweeps = max(1, round(share * int(spectrum.used.sum()))), experiment.sweeps
        schedule = CorrectionSchedule(sweeps, correction_sweeps=min(sweeps, CORRECTIONS))
        # Every layer starts from draws of its own.
        terms = cpd_epc(tensor, rank, start="random", schedule=schedule, seed=experiment.seed + layer)
        mix, error = terms.mix, {"error": tensor.relative_error(*terms.factors)}
    best = water_filled_blocks(tensor, mix.shape[1]).ranks
    return _Fusion(mix, error, fusion_of(mix).ranks, best)


def blocks(mix: Mix, seed: int = 0) -> dict[str, float | int]:
    """Returns how close a fusion matrix is to block-diagonal once its columns are sorted by owner.

    `as_fitted` is the share of its energy, in %, inside the blocks with unscaled columns, and `rescaled` the mean over
    columns, which does not depend on their scale (Figure 3 b). `by_chance` is the latter for columns of as many heads
    drawn from a normal distribution, which have no blocks. `least` and `most` are the smallest and the largest block.
    """
    found = fusion_of(mix)
    drawn = torch.randn(len(mix), DRAWN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    energy = mix.double().square()
    if not bool(energy.sum() > 0):
        raise InvalidInput("a fusion matrix of zeros has no blocks.")
    return {
        "as_fitted": 100 * float(energy.amax(0).sum() / energy.sum()),
        "rescaled": 100 * float(1 - found.off_block.mean()),
        "by_chance": 100 * float(1 - fusion_of(drawn).off_block.mean()),
        "least": min(found.ranks),
        "most": max(found.ranks),
    }


def _spread(ranks: Sequence[int]) -> dict[str, float | int]:
    return {"mean": fmean(ranks), "median": median(ranks), "least": min(ranks), "most": max(ranks)}
