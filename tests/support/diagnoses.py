"""Diagnoses made by hand, for tests that need no model: random strengths and every reading that rules use."""

from dataclasses import replace

import torch

from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.spec import Spectrum

WIDTH = 5


def spectrum(
    strength: Float[Tensor, "heads directions"],
    used: Bool[Tensor, "heads directions"] | None = None,
    norms: str = "kept",
) -> Spectrum:
    """A spectrum with these strengths and random tables."""
    heads, directions = strength.shape
    generator = torch.Generator().manual_seed(heads * 1000 + directions)
    query, key = torch.randn(2, heads, directions, WIDTH + 1, generator=generator, dtype=torch.float64)
    used = torch.ones_like(strength, dtype=torch.bool) if used is None else used
    return Spectrum(query, key, strength * used, used, directions**-0.5, norms, tuple(range(heads)))


def layer(given: Spectrum, seed: int = 0) -> LayerDiagnosis:
    """A layer with random readings; heads 0 and 1 repeat each other, and the last head attends almost uniformly."""
    heads, directions = given.strength.shape
    generator = torch.Generator().manual_seed(seed)
    similar = torch.rand(heads, heads, generator=generator, dtype=torch.float64).mul(0.5)
    similar = (similar + similar.T) / 2
    similar.fill_diagonal_(1.0)
    if heads > 1:
        similar[0, 1] = similar[1, 0] = 0.999
    selectivity = torch.linspace(0.4, 1e-4, heads, dtype=torch.float64)
    moments = torch.rand(2, heads, directions, generator=generator, dtype=torch.float64)
    readings = {
        "spectral_redundancy": similar.sqrt(),
        "output_similarity": similar,
        "selectivity": selectivity,
        "query_moment": moments[0],
        "key_moment": moments[1],
    }
    return LayerDiagnosis(given, readings)


def diagnosis(heads: int = 4, directions: int = 8, layers: int = 2, seed: int = 0, ragged: bool = False) -> Diagnosis:
    """A diagnosis of random layers; with `ragged` the heads have different numbers of directions, the first none."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(layers):
        strength = torch.randn(heads, directions, generator=generator, dtype=torch.float64)
        ranks = torch.arange(heads) * directions // max(heads - 1, 1)
        used = torch.arange(directions) < ranks[:, None] if ragged else None
        made.append(layer(spectrum(strength, used), seed + index))
    return Diagnosis(tuple(made), "0123456789abcdef", {"model": "by hand", "data": {"name": "noise", "images": 3}})


def of_strengths(*rows: list[float], norms: str = "kept") -> Diagnosis:
    """A diagnosis of one layer whose heads have these strengths."""
    made = layer(spectrum(torch.tensor(rows, dtype=torch.float64), norms=norms))
    return Diagnosis((made,), "0123456789abcdef", {})


def permuted(given: Diagnosis, order: list[int]) -> Diagnosis:
    """The same diagnosis with the heads of every layer in another order."""
    layers = []
    for old in given.layers:
        s = old.spectrum
        moved = Spectrum(
            s.query[order],
            s.key[order],
            s.strength[order],
            s.used[order],
            s.scale,
            s.norms,
            tuple(s.heads[head] for head in order),
        )
        pairs = ("spectral_redundancy", "output_similarity")
        readings = {
            name: reading[order][:, order] if name in pairs else reading[order]
            for name, reading in old.readings.items()
        }
        layers.append(LayerDiagnosis(moved, readings))
    return replace(given, layers=tuple(layers))
