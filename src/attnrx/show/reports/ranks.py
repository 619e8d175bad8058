"""The ranks of a compressed model by pathway (query-key, value-output, MLP), layer and head."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import LayerPrescription, Prescription
from attnrx.vit.maps import HIDDEN, LINEAR_MAPS

SCORES, VALUES, MLP, UNITS = "Query and key", "Value and output", "MLP", "Hidden units"


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
    if diagnosis is None:
        heads = [tuple(range(len(layer.heads))) for layer in layers]
        full = [[layer.qk.keep.shape[1]] * len(layer.heads) for layer in layers]
    else:
        heads = [layer.spectrum.heads for layer in diagnosis.layers]
        full = [[int(rank) for rank in layer.spectrum.rank] for layer in diagnosis.layers]
    scores = [
        [HeadRank(layer.qk.kept, layer.qk.directions)]
        if layer.qk.is_shared
        else _kept_ranks(layer, layer.qk.ranks, ranks)
        for layer, ranks in zip(layers, full, strict=True)
    ]
    pathways = [_pathway(SCORES, scores, heads)]
    values = [layer.outputs.get("vo") for layer in layers]
    # A layer without a decision keeps all value dimensions, as many as the other layers have.
    full_rank = max((decision.strength.shape[1] for decision in values if decision is not None), default=0)
    if full_rank:
        dims = [[full_rank] * len(layer.heads) for layer in layers]
        rows = [
            _kept_ranks(layer, ranks if decided is None else decided.ranks, ranks)
            for layer, decided, ranks in zip(layers, values, dims, strict=True)
        ]
        pathways.append(_pathway(VALUES, rows, heads))
    if any(name in layer.outputs for layer in layers for name in LINEAR_MAPS):
        pathways.append(PathwayRanks(MLP, LINEAR_MAPS, tuple(_mlp(layers))))
    return tuple(pathways)


def prescribed_units(prescription: Prescription) -> tuple[PathwayRanks, ...]:
    """Returns the hidden units that stay in every layer; none where all do."""
    decisions = [layer.hidden for layer in prescription.layers]
    full = max((len(decision.keep) for decision in decisions if decision is not None), default=0)
    rows = tuple(
        (HeadRank(full, full) if decision is None else HeadRank(int(decision.keep.sum()), len(decision.keep)),)
        for decision in decisions
    )
    return (PathwayRanks(UNITS, (HIDDEN,), rows),) if full else ()


def _pathway(name: str, rows: Sequence[Sequence[HeadRank]], heads: Sequence[tuple[int, ...]]) -> PathwayRanks:
    """Arranges the parts by the original index of their head; missing heads are marked as pruned."""
    columns = 1 + max((head for indices in heads for head in indices), default=0)
    full_rank = max((part.full for row in rows for part in row), default=0)
    layers = []
    for row, indices in zip(rows, heads, strict=True):
        # A single entry of a layer with a single head is that of the head.
        if len(row) == 1 and len(indices) != 1:  # shared by all heads
            layers.append(tuple(row))
        else:
            by_head = dict(zip(indices, row, strict=True))
            layers.append(tuple(by_head.get(head, HeadRank(None, full_rank)) for head in range(columns)))
    return PathwayRanks(name, tuple(f"head {head}" for head in range(columns)), tuple(layers))


def _kept_ranks(layer: LayerPrescription, ranks: Sequence[int], full: Sequence[int]) -> list[HeadRank]:
    decided = zip(ranks, layer.heads.tolist(), full, strict=True)
    return [HeadRank(rank if stays else None, full_rank) for rank, stays, full_rank in decided]


def _mlp(layers: Sequence[LayerPrescription]) -> Iterator[tuple[HeadRank, ...]]:
    sides = {name: [layer.outputs[name] for layer in layers if name in layer.outputs] for name in LINEAR_MAPS}
    full = {name: max((decision.strength.shape[1] for decision in side), default=0) for name, side in sides.items()}
    for layer in layers:
        row = []
        for name in LINEAR_MAPS:
            output = layer.outputs.get(name)
            if output is None:
                # A map that no layer reduces has the full rank of the other one.
                full_rank = full[name] or max(full.values())
                row.append(HeadRank(full_rank, full_rank, whole=True))
            else:
                row.append(HeadRank(output.ranks[0], output.strength.shape[1]))
        yield tuple(row)
