"""The ranks of a compressed model by pathway (query-key, value-output, MLP), layer and head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from attnrx.diagnosis import Diagnosis
from attnrx.maps import LINEAR_MAPS
from attnrx.models import family_of, rank_of
from attnrx.prescription import LayerPrescription, OutputDecision, Prescription, ScoreDecision

SCORES, VALUES, MLP = "Query and key", "Value and output", "MLP"


@dataclass(frozen=True)
class HeadRank:
    """The kept rank of `full` directions of one part; None for a pruned head.

    `whole` marks a map that is one matrix and not factorized.
    """

    rank: int | None
    full: int
    whole: bool = False

    @property
    def share(self) -> float:
        """The kept rank as a share of `full`."""
        return 0.0 if self.rank is None else self.rank / max(self.full, 1)


@dataclass(frozen=True)
class PathwayRanks:
    """The ranks of one pathway: a row per layer, with one entry per column or a single entry shared by all columns."""

    name: str
    columns: tuple[str, ...]
    layers: tuple[tuple[HeadRank, ...], ...]

    @property
    def kept(self) -> int:
        """The total number of kept directions; shared ones count once."""
        return sum(part.rank or 0 for layer in self.layers for part in layer)

    @property
    def full(self) -> int:
        """The total number of directions before pruning."""
        return sum(part.full for layer in self.layers for part in layer)


def prescribed_ranks(prescription: Prescription, diagnosis: Diagnosis | None = None) -> tuple[PathwayRanks, ...]:
    """Returns the ranks of a prescription: of query and key, and of values and MLP if it prunes them.

    The diagnosis provides the original indices of the heads and their numbers of directions.
    """
    layers = prescription.layers
    heads = [tuple(range(len(layer.qk.heads))) for layer in layers]
    used: list[list[int] | None] = [None] * len(layers)
    if diagnosis is not None:
        heads = [layer.spectrum.heads for layer in diagnosis.layers]
        used = [[int(rank) for rank in layer.spectrum.rank] for layer in diagnosis.layers]
    found = [_pathway(SCORES, [_scores(layer.qk, own) for layer, own in zip(layers, used, strict=True)], heads)]
    values = [layer.outputs["vo"] for layer in layers if "vo" in layer.outputs]
    if values:
        full = max(own.strength.shape[1] for own in values)
        found.append(_pathway(VALUES, [_values(layer, full) for layer in layers], heads))
    if any(name in layer.outputs for layer in layers for name in LINEAR_MAPS):
        found.append(PathwayRanks(MLP, LINEAR_MAPS, tuple(_mlp(layers))))
    return tuple(found)


def model_ranks(model: nn.Module) -> tuple[PathwayRanks, ...]:
    """Returns the ranks of all pathways of a model."""
    family = family_of(model)
    specs = [attention.spec for attention in family.attention(model)]
    heads = [spec.heads for spec in specs]
    scores: list[Sequence[HeadRank]] = [
        [HeadRank(spec.ranks[0], spec.original_rank)]
        if spec.shares_directions and spec.ranks
        else [HeadRank(rank, spec.original_rank) for rank in spec.ranks]
        for spec in specs
    ]
    values = [[HeadRank(rank, spec.head_dim) for rank in spec.reads] for spec in specs]
    found = [_pathway(SCORES, scores, heads), _pathway(VALUES, values, heads)]
    pairs = family.mlp(model)
    if pairs:
        layers = tuple(tuple(_linear(linear) for linear in pair) for pair in pairs)
        found.append(PathwayRanks(MLP, LINEAR_MAPS, layers))
    return tuple(found)


def _pathway(name: str, rows: Sequence[Sequence[HeadRank]], heads: Sequence[tuple[int, ...]]) -> PathwayRanks:
    """Arranges the parts by the original index of their head; missing heads are marked as pruned."""
    columns = 1 + max((head for own in heads for head in own), default=0)
    most = max((part.full for row in rows for part in row), default=0)
    layers = []
    for row, own in zip(rows, heads, strict=True):
        if len(row) == 1 and len(own) != 1:
            layers.append(tuple(row))
            continue
        line = [HeadRank(None, most)] * columns
        for head, part in zip(own, row, strict=True):
            line[head] = part
        layers.append(tuple(line))
    return PathwayRanks(name, tuple(f"head {head}" for head in range(columns)), tuple(layers))


def _scores(layer: ScoreDecision, used: Sequence[int] | None) -> list[HeadRank]:
    if layer.is_shared:
        return [HeadRank(layer.kept, layer.directions)]
    full = [layer.keep.shape[1]] * len(layer.heads) if used is None else used
    return [
        HeadRank(rank if stays else None, most)
        for rank, stays, most in zip(layer.ranks, layer.heads.tolist(), full, strict=True)
    ]


def _values(layer: LayerPrescription, full: int) -> list[HeadRank]:
    stays, values = layer.qk.heads.tolist(), layer.outputs.get("vo")
    ranks = (full,) * len(stays) if values is None else values.ranks
    return [HeadRank(rank if stay else None, full) for rank, stay in zip(ranks, stays, strict=True)]


def _mlp(layers: Sequence[LayerPrescription]) -> list[tuple[HeadRank, ...]]:
    pairs = [tuple(layer.outputs.get(name) for name in LINEAR_MAPS) for layer in layers]
    sides = zip(*pairs, strict=True)
    full = [max((own.strength.shape[1] for own in side if own is not None), default=0) for side in sides]
    full = [most or max(full) for most in full]  # a map that no layer reduces has the full rank of the other one
    return [tuple(_output(own, most) for own, most in zip(pair, full, strict=True)) for pair in pairs]


def _output(output: OutputDecision | None, full: int) -> HeadRank:
    return HeadRank(full, full, whole=True) if output is None else HeadRank(output.ranks[0], output.strength.shape[1])


def _linear(linear: Any) -> HeadRank:
    full = min(linear.in_features, linear.out_features)
    rank = rank_of(linear)
    return HeadRank(full, full, whole=True) if rank is None else HeadRank(rank, full)
