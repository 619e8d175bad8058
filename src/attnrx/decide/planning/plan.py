"""A plan: target, prescription, explanations, predicted costs and accuracy, and alternative plans."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from attnrx.nouns.predictions import PredictedQuantity
from attnrx.nouns.prescription import Prescription
from attnrx.nouns.prescription_schema import KIND as PRESCRIPTION
from attnrx.support.atomic_writes import parts_by, replacing_folder
from attnrx.support.display import Displayed
from attnrx.support.storage import file_kind, write_json

KIND, SCHEMA = "attnrx plan", 2


@dataclass(frozen=True)
class Point:
    """One plan of the Pareto front: its cost as a share of the original's, predicted and measured divergence (nats).

    `agreement` and `change` of top-1 accuracy are shares of the images of the plan, `macs` and `params` shares of the
    original's. `faster` is the measured speed relative to the original, None for a plan that was not timed.
    `description` summarizes the choices.
    """

    cost: float
    sensitivity: float
    divergence: float
    agreement: float | None = None
    change: float | None = None
    macs: float | None = None
    params: float | None = None
    faster: float | None = None
    description: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Displayed):
    """A prescription for a target, with its predictions.

    `cost` is the predicted share of the original's cost, `measured` the latency measured while planning (for latency).
    `expected` holds the divergence in nats, and the agreement and the change of top-1 accuracy as shares. `explained`
    has one line per choice; `front` contains plans between the original and this one, cheapest last.
    """

    prescription: Prescription
    target: str
    spend: str
    cost: float
    expected: Mapping[str, PredictedQuantity]
    explained: tuple[str, ...]
    front: tuple[Point, ...]
    measured: Mapping[str, Any] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def promises(self) -> dict[str, Any]:
        """The predictions that the check `promises` verifies, as JSON-ready values; the prescription records them."""
        return {
            "target": self.target,
            "spend": self.spend,
            "price": self.cost,  # the name in the file format, schema 2
            "expected": {name: quantity.to_record() for name, quantity in self.expected.items()},
            "measured": None if self.measured is None else dict(self.measured),
        }

    @property
    def promising(self) -> Prescription:
        """The prescription with the predictions in `about["plan"]`."""
        return replace(self.prescription, about={**self.prescription.about, "plan": self.promises})

    def to_record(self) -> dict[str, Any]:
        """Returns the content of plan.json."""
        return {
            "kind": KIND,
            "schema": SCHEMA,
            **self.promises,
            "explained": list(self.explained),
            "front": [asdict(point) for point in self.front],
            "about": dict(self.about),
        }

    def save(self, folder: Path | str) -> Path:
        """Writes plan.json and prescription.json; an earlier plan in the folder is replaced atomically."""
        # plan.json is moved last: a folder that has it is complete.
        with replacing_folder(folder, parts_by(_is_part), last="plan.json") as new:
            self.promising.save(new / "prescription.json")
            write_json(new / "plan.json", self.to_record())
        return Path(folder) / "plan.json"


def _is_part(path: Path) -> bool:
    # By name and content: a user's file of the same name is not replaced.
    kind = KIND if path.name == "plan.json" else PRESCRIPTION
    kind += " tensors" if path.name.startswith("prescription.json.tensors-") else ""
    return path.name.startswith(("plan.json", "prescription.json")) and file_kind(path) == kind
