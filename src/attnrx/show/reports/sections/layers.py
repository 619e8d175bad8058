"""Layers and heads: what changed, the prescription with its reasons, and the readings and spectra of every head."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.nouns.prescription import LayerPrescription, ScoreDecision
from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.figures import LEVELS, Figure, HeatMap
from attnrx.show.reports.numbers import MISSING, fixed, number, percent, plain, short
from attnrx.show.reports.ranks import (
    MLP,
    SCORES,
    UNITS,
    VALUES,
    HeadRank,
    PathwayRanks,
    prescribed_ranks,
    prescribed_units,
)
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.maps import HIDDEN, LINEAR_MAPS

DENSE = 9  # from this many columns on the cells of heat maps are small and show fewer digits

# The maps of a pathway in the keys of spectra; "fc" stands for both maps of the MLP.
KEYS = {SCORES: "qk", VALUES: "vo", MLP: "fc", UNITS: HIDDEN}
PATHWAYS = {
    SCORES: "Directions in which a head scores pairs of tokens.",
    VALUES: "Value dimensions of a head.",
    MLP: "Ranks of the two maps; a map that is not factorized is marked “all”.",
    UNITS: "Hidden units of the MLP; the second map is refitted to those that stay.",
}
SHARED = "A cell across a layer is the number of directions shared by all its heads."

# Captions of the readings, in the order of the page; other readings follow.
MEANING = {
    "effective_rank": "The effective number of directions by the entropy of the energy (Eq. 24).",
    "effective_rank_mix": "The effective number of directions on the diagnosed images, by the metric of plans (mix).",
    "effective_rank_weights": "The effective number of directions of the product of query and key weights (plain SVD).",
    "selectivity": "0 where attention is uniform, 1 where every query attends to one token.",
    "entropy": "Spectral entropy in nats (Eq. 23).",
    "sparsity": "Share of directions below a tenth of the head's largest strength (Eq. 29: an absolute threshold).",
    "alignment": "Mean cosine between queries and keys, before the strengths.",
    "sensitivity": "Largest strength times the scale: the bound on the change of a score (Proposition 4).",
    "perturbation_response": "Change of the attention map under a small change of the image (Eq. 33).",
}
# The open figures: the first of these that differ between heads. A plain dense head has no strengths of its own, and
# its effective rank is the number of its directions in every head.
MAIN, OPEN_FIGURES = ("effective_rank", "effective_rank_mix", "effective_rank_weights", "selectivity"), 3

Rows = Sequence[Sequence[float | None]]


def treatment(content: ReportContent) -> Section | None:
    """Returns the prescription: the rules, and one reason per head."""
    prescription = content.prescription
    if prescription is None:
        return None
    if content.diagnosis is None:
        heads = [tuple(range(len(layer.heads))) for layer in prescription.layers]
    else:
        heads = [layer.spectrum.heads for layer in content.diagnosis.layers]
    layers = [_reasons(layer, names) for layer, names in zip(prescription.layers, heads, strict=True)]
    tokens = () if prescription.tokens is None else prescription.tokens.reasons
    removed = prescription.removed_share
    data = {
        "prescription": prescription,
        "layers": layers,
        "tokens": tokens,
        "removed": percent(removed) if removed else "",
    }
    return Section("prescription", "Prescription", data, "The rules, and the reason for every head and stage")


def _reasons(layer: LayerPrescription, names: Sequence[int]) -> dict[str, Any]:
    scores = layer.qk
    keeps = f"heads keep {plain(list(scores.ranks), 16)} of {scores.keep.shape[1]}"
    if scores.is_shared:
        keeps = f"the heads share {number(scores.kept)} of {number(scores.directions)}"
    removed = 1 - scores.kept / scores.directions if scores.directions else 0.0
    summary = f"{percent(removed)} of the score directions removed; {keeps}" if removed else "all score directions kept"
    return {
        "heads": list(zip(names, scores.ranks, layer.heads.tolist(), scores.reasons, strict=True)),
        "summary": summary,
        "others": [
            (name, why) for name, decision in layer.decisions.items() if name != "qk" for why in decision.reasons
        ],
    }


def changes(content: ReportContent) -> Section | None:
    """Returns what was removed, in words, and one heat map per pathway that lost ranks."""
    prescription = content.prescription
    if prescription is None:
        return None
    pathways = (*prescribed_ranks(prescription, content.diagnosis), *prescribed_units(prescription))
    # A pathway that lost nothing would be a map of a single colour.
    pathways = tuple(pathway for pathway in pathways if pathway.kept < pathway.full)
    tokens = prescription.tokens
    if not pathways and tokens is None:
        return None
    words = [[[_words(part) for part in layer] for layer in pathway.layers] for pathway in pathways]
    spectra = explored_spectra(content)
    facts = [fact for pathway in pathways for fact in _facts(pathway)]
    if tokens is not None:
        stages = len(tokens.policy.layers)
        facts.append(("Tokens", f"{tokens.policy.reducer} before {number(stages)} layer{'s' * (stages != 1)}"))
    data = {
        "facts": facts,
        "figures": [_rank_figure(pathway, texts, spectra) for pathway, texts in zip(pathways, words, strict=True)],
        "steps": range(LEVELS),
        "dense": any(len(pathway.columns) >= DENSE for pathway in pathways),
        "inspects": any(key.startswith(KEYS[pathway.name]) for key in spectra for pathway in pathways),
    }
    return Section("changes", "What changed", data)


def _facts(pathway: PathwayRanks) -> Iterator[tuple[str, str]]:
    share, what = (
        percent(1 - pathway.kept / max(pathway.full, 1)),
        "units" if pathway.name == UNITS else "ranks",
    )
    yield pathway.name, f"{share} of the {what} removed, {number(pathway.kept)} of {number(pathway.full)} kept"
    heads = sum(part.rank is None for layer in pathway.layers for part in layer)
    if heads and pathway.name == SCORES:
        total = sum(len(layer) for layer in pathway.layers)
        yield "Heads", f"{number(heads)} of {number(total)} removed"


def _words(part: HeadRank) -> str:
    if part.rank is None:
        return "removed"
    return f"all {number(part.full)}, one matrix" if part.whole else f"{number(part.rank)} of {number(part.full)}"


def _rank_figure(pathway: PathwayRanks, words: list[list[str]], spectra: Collection[str]) -> Figure:
    """Draws one pathway; `words` describe the parts of every layer, and `spectra` are the keys of known spectra."""
    several, caption = len(pathway.columns) > 1, PATHWAYS.get(pathway.name, "")
    shared = [several and len(layer) == 1 for layer in pathway.layers]
    cells = [["all" if part.whole else number(part.rank) for part in layer] for layer in pathway.layers]
    tips = []
    for is_shared, row in zip(shared, words, strict=True):
        names = ("all heads together",) if is_shared else pathway.columns
        tips.append([f"{name}: {text}" for name, text in zip(names, row, strict=True)])
    picture = HeatMap(
        f"{pathway.name}: rank of every part, from zero to full",
        [[None if part.rank is None else part.share for part in layer] for layer in pathway.layers],
        0.0,
        1.0,
        dense=len(pathway.columns) >= DENSE,
        columns=pathway.columns,
        texts=cells,
        tips=tips,
        heads=_cell_keys(KEYS.get(pathway.name, ""), [len(layer) for layer in pathway.layers], spectra),
    )
    share = percent(pathway.kept / max(pathway.full, 1))
    note = f"{number(pathway.kept)} of {number(pathway.full)} kept, {share}"
    return Figure(picture.draw(), pathway.name, note, f"{caption} {SHARED}".strip() if any(shared) else caption)


def maps(content: ReportContent) -> Section | None:
    """Returns effective ranks and selectivity as open figures, and the other readings as folded ones."""
    if content.diagnosis is None:
        return None
    figures = _reading_figures(content.diagnosis, explored_spectra(content))
    if not figures:
        return None
    names = [name for name in MAIN if name in figures]
    telling = []
    for name in names:
        values = torch.cat([layer.readings[name].double() for layer in content.diagnosis.layers])
        if bool((values.amax() - values.amin()) > 1e-6 * values.abs().amax()):
            telling.append(name)
    main = [figures.pop(name) for name in (telling or names)[:OPEN_FIGURES]]
    dense = any(max(layer.spectrum.heads, default=0) >= DENSE - 1 for layer in content.diagnosis.layers)
    data = {"main": main, "rest": list(figures.values()), "steps": range(LEVELS), "dense": dense}
    titles = ", ".join(figure.title for figure in (*main, *figures.values()))
    return Section("maps", "Layers and heads", data, titles)


def _reading_figures(diagnosis: Diagnosis, spectra: Collection[str]) -> dict[str, Figure]:
    """Draws the readings with one number per head that all layers have, those of MEANING first."""
    layers = diagnosis.layers
    shared = [
        {name for name, reading in layer.readings.items() if tuple(reading.shape) == (len(layer.spectrum.heads),)}
        for layer in layers
    ]
    # Only readings of all layers, because a map needs a row for every layer.
    names = set.intersection(*shared) if shared else set()
    full_rank = max((layer.spectrum.strength.shape[1] for layer in layers), default=1)
    columns = 1 + max((head for layer in layers for head in layer.spectrum.heads), default=0)
    figures = {}
    for name in [name for name in MEANING if name in names] + sorted(names - MEANING.keys()):
        # Heads are at their index in the original model; columns without a head stay empty.
        grid: list[list[float | None]] = [[None] * columns for _ in layers]
        for row, layer in zip(grid, layers, strict=True):
            for head, value in zip(layer.spectrum.heads, layer.readings[name].tolist(), strict=True):
                row[head] = value
        figures[name] = _reading_figure(name, grid, full_rank, spectra)
    return figures


def _reading_figure(name: str, grid: Rows, full_rank: int, spectra: Collection[str]) -> Figure:
    values = [value for row in grid for value in row if value is not None and math.isfinite(value)] or [0.0]
    dense = len(grid[0]) >= DENSE
    limits = {"effective_rank": (0.0, float(full_rank)), "selectivity": (0.0, 1.0), "sparsity": (0.0, 1.0)}
    low, high = limits.get(name, (min(values), max(values)))
    largest = max(abs(low), abs(high))
    # Cells have space for three digits: very small or large values are shown in units of a power of ten.
    power = 0 if largest == 0 or 0.01 <= largest < 1000 else math.floor(math.log10(largest))
    decimals = max(0, (2 if dense else 3) - (1 if largest / 10**power < 2 else 2))
    decimals = 1 if name.startswith("effective_rank") else max(decimals, 2 if largest <= 1 else 0)

    def write(value: float) -> str:
        return fixed(value / 10**power, decimals) if math.isfinite(value) else MISSING

    title = name.replace("rank_", "rank, ").replace("_", " ").capitalize()
    heads = _cell_keys("qk", [len(row) for row in grid], spectra)
    picture = HeatMap(f"{title} of every head", grid, low, high, write, dense, heads=heads).draw()
    unit = f", cells in units of {number(10.0**power, 1)}" if power else ""
    return Figure(picture, title, f"{short(low, 3)} to {short(high, 3)}{unit}", MEANING.get(name, ""))


def explored_spectra(content: ReportContent) -> dict[str, dict[str, Any]]:
    """Returns the spectra that the page shows for the heads and maps as JSON-ready records by key, "qk-LAYER-HEAD"; the
    maps of the MLP have one unit, 0.
    """
    diagnosis, prescription = content.diagnosis, content.prescription
    by_key: dict[str, dict[str, Any]] = {}
    # First the diagnosed directions, all of them kept. A prescription then replaces those that it decides on.
    for index, layer in enumerate(() if diagnosis is None else diagnosis.layers):
        spectrum, energies = layer.spectrum, _shown_energies(layer)
        for head, energy, used in zip(spectrum.heads, energies, spectrum.used, strict=True):
            by_key[f"qk-{index}-{head}"] = _spectrum(f"Layer {index}, head {head}", energy, used, used)
    for index, layer in enumerate(() if prescription is None else prescription.layers):
        diagnosed = None if diagnosis is None else diagnosis.layers[index].spectrum
        heads = range(len(layer.heads)) if diagnosed is None else diagnosed.heads
        for name, strength, keep in _decided(layer):
            # Padding has the strength 0; a kept direction may have it too.
            energies, used = strength.square(), (strength > 0) | keep
            if diagnosis is not None and name == "qk":
                energies, used = _score_energies(diagnosis.layers[index], layer.qk)
            is_linear = name in (*LINEAR_MAPS, HIDDEN)
            for unit, *tensors in zip((0,) if is_linear else heads, energies, keep, used, strict=True):
                title = f"Layer {index}, {name}" if is_linear else f"Layer {index}, head {unit}"
                by_key[f"{name}-{index}-{unit}"] = _spectrum(title, *tensors)
    return {key: spectrum for key, spectrum in by_key.items() if spectrum["energy"]}


def _spectrum(
    title: str, energy: Float[Tensor, "directions"], keep: Bool[Tensor, "directions"], used: Bool[Tensor, "directions"]
) -> dict[str, Any]:
    """Returns the used directions of one unit by decreasing energy, and which are kept."""
    # The same order for energies and mask; stable, so that equal energies stay in the order of the file.
    energy, keep = energy[used], keep[used]
    order = energy.argsort(descending=True, stable=True)
    # A head without energy has shares of 0 and not NaN.
    energy, keep = energy[order] / energy.sum().clamp_min(1e-300), keep[order]
    relative = energy / energy[:1].clamp_min(1e-300)  # to the strongest direction
    return {
        "title": title,
        "note": f"{int(keep.sum())} of {len(keep)} · {percent(float(energy[keep].sum()))}",
        "energy": [float(f"{each:.3g}") for each in relative.tolist()],  # three digits are a tenth of a pixel
        "keep": "".join("1" if each else "0" for each in keep.tolist()),
    }


def _cell_keys(map_key: str, widths: Sequence[int], spectra: Collection[str]) -> list[list[str]]:
    """Returns the key of every cell of rows of these widths, empty without a spectrum; a map of the MLP is a column."""

    def key(layer: int, column: int) -> str:
        name = f"{LINEAR_MAPS[column]}-{layer}-0" if map_key == "fc" else f"{map_key}-{layer}-{column}"
        return name if name in spectra else ""

    return [[key(layer, column) for column in range(width)] for layer, width in enumerate(widths)]


def _shown_energies(layer: LayerDiagnosis) -> Float[Tensor, "heads directions"]:
    """Returns the energies of a layer's directions; those in the metric "mix" where its own strengths are all equal, as
    those of a plain dense head are.
    """
    energy, mix = layer.spectrum.energy, layer.readings.get("strength_mix")
    if mix is None or mix.shape != energy.shape or not layer.spectrum.used.all():
        return energy
    is_flat = bool((energy - energy.mean(-1, keepdim=True)).abs().max() <= 1e-6 * energy.abs().max())
    return mix.double().square() if is_flat else energy


def _score_energies(diagnosis: LayerDiagnosis, decision: ScoreDecision) -> tuple[Tensor, Tensor]:
    """Returns the energies of all score directions of a decision, and which directions there are.

    A decision without a basis selects among the diagnosed directions, and may rescale those it keeps. One with a basis
    has the strengths of the kept directions only; all are a reading of the diagnosis in the metric of the rule.
    """
    if decision.basis is None:
        return diagnosis.spectrum.energy, diagnosis.spectrum.used
    keep, strength = decision.keep, decision.strength
    for name, reading in diagnosis.readings.items():
        if name.startswith("strength_") and reading.shape == strength.shape:
            # The metric of the rule is recognized by its strengths, because the decision does not name it.
            if torch.allclose(reading.double()[keep], strength[keep], rtol=1e-4):
                return reading.double().square(), reading > 0
    return strength.square(), torch.ones_like(keep)


def _decided(layer: LayerPrescription) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the maps with the strengths and the kept directions of their units; shared directions are one unit."""
    yield "qk", layer.qk.strength, layer.qk.keep & layer.heads[:, None]
    for name, decision in layer.outputs.items():
        # The kept directions are the strongest ones.
        order = decision.strength.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        yield name, decision.strength, order < torch.tensor(decision.ranks)[:, None]
    if layer.hidden is not None:
        yield HIDDEN, layer.hidden.strength[None], layer.hidden.keep[None]
