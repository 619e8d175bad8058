"""The difference of two diagnoses, head by head."""

from dataclasses import dataclass

from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.support.errors import InvalidInput


@dataclass(frozen=True)
class Change:
    """One reading of one head in two diagnoses; None if a diagnosis lacks the head or the reading."""

    layer: int
    head: int
    reading: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float | None:
        """The second reading minus the first."""
        return None if self.before is None or self.after is None else self.after - self.before


def compare_diagnoses(before: Diagnosis, after: Diagnosis) -> tuple[Change, ...]:
    """Returns every per-head reading of both diagnoses side by side, by layer, original head and name, the rank first.

    Heads are matched by their index in the original model, so a model can be compared with its compressed form, whose
    heads may be stored in another order, or be removed.

    Raises:
        InvalidInput: The diagnoses have different numbers of layers.
    """
    if len(before.layers) != len(after.layers):
        raise InvalidInput(
            f"the first diagnosis has {len(before.layers)} layers, the second {len(after.layers)}: "
            "only diagnoses of models with equally many layers can be compared."
        )
    changes: list[Change] = []
    for layer, (first, second) in enumerate(zip(before.layers, after.layers, strict=True)):
        old, new = _per_head(first), _per_head(second)
        for head in sorted(old.keys() | new.keys()):
            was, now = old.get(head, {}), new.get(head, {})
            # False sorts before True, so the rank is the first.
            names = sorted(was.keys() | now.keys(), key=lambda name: (name != "rank", name))
            changes += [Change(layer, head, name, was.get(name), now.get(name)) for name in names]
    return tuple(changes)


def _per_head(layer: LayerDiagnosis) -> dict[int, dict[str, float]]:
    # Readings of one axis have one number per head; those with more axes are tables of directions or pairs of heads.
    columns = {name: reading.tolist() for name, reading in layer.readings.items() if reading.ndim == 1}
    columns["rank"] = layer.spectrum.rank.tolist()
    return {
        head: {name: column[row] for name, column in columns.items()} for row, head in enumerate(layer.spectrum.heads)
    }
