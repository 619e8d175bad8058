"""One run of the fusion experiment: the fusion matrices of a model, and their statistics."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from attnrx.attention import Attention
from attnrx.decompositions import CorrectionSchedule, cpd_epc, water_filled_blocks
from attnrx.diagnosis import LayerDiagnosis
from attnrx.errors import InvalidInput
from attnrx.models import family_of, model_fingerprint
from attnrx.progress import Log, no_log
from attnrx.rules.metrics import JointForm
from attnrx.serialization.config import to_dict
from attnrx.serialization.storage import file_sha256, write_json, write_tensors
from attnrx.shapes import Tensor
from attnrx_lab.papers.fusion_experiment import FusionExperiment, FusionRun, Mix, fusion_of, rule_of
from attnrx_lab.papers.measures import Measure, plain_measure

CORRECTIONS = 100  # sweeps of the correction, at most
DRAWN = 10_000  # random columns, for a standard error of the chance level below half a point


def run_fusion(experiment: FusionExperiment, folder: Path | str, *, log: Log = no_log) -> FusionRun:
    """Decomposes every layer at every share; result.json has the statistics, fusions.safetensors the matrices."""
    folder = Path(folder)
    experiment.require(folder)
    if (folder / "result.json").exists():
        return FusionRun.load(folder)
    model = experiment.original()
    experiment.claim(folder)
    layers = family_of(model).attention(model)
    rules: dict[str, Any] = {}
    mixes: dict[str, Tensor] = {}
    for share in experiment.shares:
        log(f"{experiment.name}: {len(layers)} layers in {share:.3g} of their directions")
        found = [_fusion(experiment, attention, share, layer) for layer, attention in enumerate(layers)]
        for layer, each in enumerate(found):
            name = rule_of(share, f"layer-{layer}")
            mixes[name] = each.mix
            rules[name] = {"fusion": _plain({**blocks(each.mix, experiment.seed), **each.error})}
        pairs = zip(_places([each.ranks for each in found]), _places([each.best for each in found]), strict=True)
        for place, (own, best) in enumerate(pairs):
            kinds = {"fusion": _plain(spread_of(own)), "best": _plain(spread_of(best))}
            rules[rule_of(share, f"head-{place + 1}")] = kinds
    write_tensors(folder / "fusions.safetensors", mixes)
    record = {
        "kind": FusionRun.kind,
        "schema": FusionRun.schema,
        "settings": to_dict(experiment),
        "data": {"name": "none", "notes": list(_notes(layers))},
        "model": {"fingerprint": model_fingerprint(model)},
        "layers": len(layers),
        "rules": rules,
        "fusions_sha256": file_sha256(folder / "fusions.safetensors"),
    }
    write_json(folder / "result.json", record)
    log(f"{experiment.name}: done, {folder / 'result.json'}")
    return FusionRun.load(folder)


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
    if _shared(attention):
        mix, error = spectrum.strength.double(), {}
    else:
        rank, sweeps = max(1, round(share * int(spectrum.used.sum()))), experiment.sweeps
        schedule = CorrectionSchedule(sweeps, correction_sweeps=min(sweeps, CORRECTIONS))
        terms = cpd_epc(tensor, rank, start="random", schedule=schedule, seed=experiment.seed + layer)
        mix, error = terms.mix, {"error": tensor.relative_error(*terms.factors)}
    best = water_filled_blocks(tensor, mix.shape[1]).ranks
    return _Fusion(mix, error, fusion_of(mix).ranks, best)


def _shared(attention: Attention) -> bool:
    return attention.spec.shares_directions


def _notes(layers: Sequence[Attention]) -> Iterator[str]:
    if all(_shared(attention) for attention in layers):
        yield "the fusion matrices are those of the model as it was given"
    else:
        yield "the fusion matrices are those of the decomposition (CPD-EPC), before any fine-tuning"


def blocks(mix: Mix, seed: int = 0) -> dict[str, float]:
    """Returns how close a fusion matrix is to block-diagonal once its columns are sorted by owner.

    `as_fitted` is the share of its energy, in %, inside the blocks with unscaled columns, and `rescaled` the mean over
    columns, which does not depend on their scale (Figure 3 b). `by_chance` is the latter for columns of as many heads
    drawn
    from a normal distribution, which have no blocks. `least` and `most` are the smallest and the largest block.
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
        "least": float(min(found.ranks)),
        "most": float(max(found.ranks)),
    }


def spread_of(ranks: Sequence[int]) -> dict[str, float]:
    """Returns the mean, the median and the extremes of the ranks of one position over the layers."""
    return {"mean": fmean(ranks), "median": median(ranks), "least": float(min(ranks)), "most": float(max(ranks))}


def _places(ranks: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Sorts the ranks of every layer and returns those of each position: the smallest of every layer first."""
    return list(zip(*(sorted(layer) for layer in ranks), strict=True))


def _plain(numbers: dict[str, float]) -> dict[str, Measure]:
    return {name: plain_measure(value) for name, value in numbers.items()}
