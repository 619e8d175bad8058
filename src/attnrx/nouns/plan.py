"""A plan: its target, prescription and explanations, and the predicted costs and accuracy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from attnrx.nouns.prescription import KIND as PRESCRIPTION
from attnrx.nouns.prescription import PREDICTIONS, Prescription
from attnrx.support import arguments as kinds
from attnrx.support.arguments import checked
from attnrx.support.atomic_writes import parts_by, replacing_folder
from attnrx.support.display import Displayed
from attnrx.support.storage import file_kind, read_record, write_json
from attnrx.vit.outputs import KINDS, Embeddings, OutputKind

KIND, SCHEMA = "attnrx plan", 2
RECORD = kinds.record(
    {
        **PREDICTIONS,
        "target": kinds.ANY_TEXT,
        "spend": kinds.ANY_TEXT,
        "price": kinds.finite(),
        "explained": kinds.each(kinds.ANY_TEXT),
        "about": kinds.record(
            more={"outputs": kinds.one_of(*KINDS), "images": kinds.whole(0, kinds.LARGEST)}, open=True
        ),
    }
)


@dataclass(frozen=True)
class PredictedQuantity:
    """A prediction of one quantity: its mean and standard deviation over images, and the number of these images.

    These images were not used to choose the plan. `limits` holds the smallest and the largest possible value of the
    quantity (see `limits_of`).
    """

    value: float
    spread: float
    images: int
    limits: tuple[float, float] = (-inf, inf)

    def interval(self, images: int) -> tuple[float, float]:
        """Returns the 95 % prediction interval of the mean over `images` other images, clipped to `limits`."""
        # The variance of the difference between two means: over the images of the prediction, and over the others.
        half = 1.96 * self.spread * (1 / self.images + 1 / images) ** 0.5
        # The normal distribution extends beyond the range of the quantity, e.g. beyond an agreement of 100 %.
        low, high = self.limits
        return max(self.value - half, low), min(self.value + half, high)

    def to_record(self) -> dict[str, float]:
        """Returns the prediction as JSON-ready values. The limits are omitted, because the quantity determines them."""
        return {"value": self.value, "spread": self.spread, "images": self.images}


def limits_of(quantity: str, outputs: OutputKind) -> tuple[float, float]:
    """Returns the smallest and largest possible value of a quantity, e.g. 0 and 1 for "agreement"."""
    if quantity == "divergence":
        return 0.0, 2.0 if isinstance(outputs, Embeddings) else inf  # the cosine distance is at most 2
    return (0.0, 1.0) if quantity == "agreement" else (-1.0, 1.0)


@dataclass(frozen=True)
class TargetMet:
    """The planner's result if the unchanged model already meets the target. `reason` explains why."""

    reason: str

    @classmethod
    def by_speed(cls, faster: float, speed: float, where: str, baseline: str) -> "TargetMet":
        """Returns the result for the target `faster`, if the unchanged model is `speed` times as fast as `baseline`."""
        return cls(
            f"faster={faster:.3g} is met by the unchanged model {where}: it is {speed:.2f}x as fast as {baseline}, so "
            f"nothing has to be removed. Save it with rx.save, or request more than faster={speed:.2f}."
        )


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Displayed):
    """A prescription for a target, with its predictions.

    `minimized` names the cost that the plan reduces ("latency", "macs" or "params"). `cost` is the predicted cost as a
    share of the original model's cost. `measured` records the timing of the plan, or is None if the cost is not
    latency. `expected` holds the predictions of the divergence (in nats, for class outputs), of the agreement, and of
    the change of top-1 accuracy (as shares). `explained` contains one line for each choice of the planner. `about`
    records the settings, the kind of the model's outputs ("outputs") and the number of images that were used to choose
    the plan ("images").
    """

    prescription: Prescription
    target: str
    minimized: str
    cost: float
    expected: Mapping[str, PredictedQuantity]
    explained: tuple[str, ...]
    measured: Mapping[str, Any] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outputs(self) -> OutputKind:
        """The kind of the model's outputs. If the plan does not record a kind, it is "logits"."""
        return KINDS[self.about.get("outputs", "logits")]

    @property
    def predictions(self) -> dict[str, Any]:
        """The predictions, which the check `promises` compares with measurements, as JSON-ready values."""
        return {
            "target": self.target,
            "spend": self.minimized,  # the name in the file format, schema 2
            "price": self.cost,
            "expected": {name: quantity.to_record() for name, quantity in self.expected.items()},
            "measured": None if self.measured is None else dict(self.measured),
        }

    @property
    def with_predictions(self) -> Prescription:
        """The prescription with the predictions in `about["plan"]`."""
        return replace(self.prescription, about={**self.prescription.about, "plan": self.predictions})

    def to_record(self) -> dict[str, Any]:
        """Returns the content of plan.json."""
        return {
            "kind": KIND,
            "schema": SCHEMA,
            **self.predictions,
            "explained": list(self.explained),
            "about": dict(self.about),
        }

    @checked()
    def save(self, folder: Path | str) -> Path:
        """Writes plan.json and prescription.json. An earlier plan in the folder is replaced atomically.

        Returns the path of plan.json.

        Raises:
            InvalidInput: `about` of the prescription contains something that `load` would refuse.
        """

        # plan.json is moved last, so a folder that contains it is complete.
        def is_part(path: Path) -> bool:
            # The name and the content of a file are compared, so a user's file of the same name is not replaced.
            kind = KIND if path.name == "plan.json" else PRESCRIPTION
            kind += " tensors" if path.name.startswith("prescription.json.tensors-") else ""
            return path.name.startswith(("plan.json", "prescription.json")) and file_kind(path) == kind

        with replacing_folder(folder, parts_by(is_part), last="plan.json") as new:
            self.with_predictions.save(new / "prescription.json")
            write_json(new / "plan.json", self.to_record())
        return Path(folder) / "plan.json"

    @classmethod
    @checked()
    def load(cls, path: Path | str) -> "Plan":
        """Reads plan.json, and prescription.json in the same folder.

        Raises:
            CheckpointError: One of the files is missing or damaged, or is not a plan or a prescription.
        """
        path = Path(path)
        record = read_record(path, KIND, SCHEMA, RECORD)
        outputs = KINDS[record["about"].get("outputs", "logits")]
        return cls(
            Prescription.load(path.with_name("prescription.json")),
            record["target"],
            record["spend"],
            record["price"],
            {
                name: PredictedQuantity(**quantity, limits=limits_of(name, outputs))
                for name, quantity in record["expected"].items()
            },
            tuple(record["explained"]),
            record["measured"],
            record["about"],
        )
