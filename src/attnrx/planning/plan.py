"""A plan: what was sought, what was chosen and why, what it will cost, and what else could have been had."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from attnrx.atomic_writes import replacing_folder
from attnrx.checks.promises import Expected
from attnrx.prescription import KIND as PRESCRIPTION
from attnrx.prescription import Prescription
from attnrx.storage import file_kind, write_json

KIND, SCHEMA = "attnrx plan", 1


@dataclass(frozen=True)
class Point:
    """One plan of the front: its price as a share of the original's, and the divergence predicted and measured."""

    cost: float
    sensitivity: float
    divergence: float


@dataclass(frozen=True, eq=False)
class Plan:
    """A prescription for a target, with its promises.

    `cost` is the share of the original's cost that the tables predict, `measured` the measured latency when the plan
    was made (for latency). `expected` holds the divergence in nats, the agreement and the change of the top-1
    accuracy, the last two as shares. `explained` has one line for every choice, `front` other plans, cheapest last.
    """

    prescription: Prescription
    target: str
    spend: str
    cost: float
    expected: Mapping[str, Expected]
    explained: tuple[str, ...]
    front: tuple[Point, ...]
    measured: Mapping[str, Any] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def promises(self) -> dict[str, Any]:
        """What `verify` holds to account, as JSON-ready values; the prescription carries them."""
        return {
            "target": self.target,
            "spend": self.spend,
            "price": self.cost,
            "expected": {name: asdict(own) for name, own in self.expected.items()},
            "measured": None if self.measured is None else dict(self.measured),
        }

    @property
    def promising(self) -> Prescription:
        """The prescription with the promises in its record."""
        return replace(self.prescription, about={**self.prescription.about, "plan": self.promises})

    def save(self, folder: Path | str) -> Path:
        """Writes plan.json and the prescription beside it; an earlier plan in the folder is replaced at once."""
        record = {
            "kind": KIND,
            "schema": SCHEMA,
            **self.promises,
            "explained": list(self.explained),
            "front": [asdict(point) for point in self.front],
            "about": dict(self.about),
        }
        with replacing_folder(folder, _is_part, last="plan.json") as new:
            self.promising.save(new / "prescription.json")
            write_json(new / "plan.json", record)
        return Path(folder) / "plan.json"


def _is_part(path: Path) -> bool:
    kind = KIND if path.name == "plan.json" else PRESCRIPTION
    kind += " tensors" if path.name.startswith("prescription.json.tensors-") else ""
    return path.name.startswith(("plan.json", "prescription.json")) and file_kind(path) == kind
