"""The content of a report: plain records. Every part is optional; a section is rendered if its data is given."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.prescription import Prescription
from attnrx.show.reports.numbers import percent
from attnrx.show.reports.ranks import PathwayRanks
from attnrx.support.display import Displayed
from attnrx.support.errors import CheckpointError, FingerprintMismatch, InvalidInput
from attnrx.support.shapes import Bool, Float, Int, Tensor
from attnrx.support.storage import check_schema, read_json
from attnrx.support.tables import Cell, Tabular
from attnrx.support.validation import JSON_OBJECT, Items, Number, Optional, Record, Text, validated
from attnrx.vit.costs import LatencyComparison, ModelCosts
from attnrx.vit.outputs import KINDS, OutputKind
from attnrx.vit.tokens import TokenPolicy

Interval = tuple[float, float]
KIND, SCHEMA = "attnrx comparison", 2  # of the file of `attnrx compare`
PLAN, PLAN_SCHEMA = "attnrx plan", 2  # of the file of `attnrx plan`


# More points than a page can show are no result of attnrx; their charts would take hours.
MOST_POINTS, MOST_PAIRS = 5000, 50_000
_NUMBER = Optional(Number())
FRONT = Record(
    {
        "spend": Text(),
        "front": Items(
            Record(
                {"cost": Number(1e-9)},
                dict.fromkeys(("divergence", "agreement", "change", "macs", "params", "faster"), _NUMBER),
                open=True,
            ),
            1,
            MOST_POINTS,
        ),
    },
    {"about": JSON_OBJECT, "measured": Optional(JSON_OBJECT)},
    open=True,
)
COMPARISON = Record(
    {"trials": Items(Record({"method": Text()}, open=True), 0, MOST_POINTS), "about": JSON_OBJECT},
    {
        "unreached": Items(Record({"method": Text()}, open=True), 0, MOST_POINTS),
        "differences": Items(Record({"first": Text(), "second": Text()}, open=True), 0, MOST_PAIRS),
    },
    open=True,
)


@dataclass(frozen=True)
class TradeOffPoint:
    """The results of one realization at one retention ratio rho.

    `kind` is the realization ("mask", "renormalized", "exact", "refit"), `discrepancy` the relative logit discrepancy
    from the original (Eq. 46), and `accuracy_change` is in percentage points. Intervals are at 95 %.
    """

    rho: float
    kind: str
    removed_share: float
    discrepancy: float
    accuracy_change: float
    accuracy_interval: Interval | None = None
    discrepancy_interval: Interval | None = None


@dataclass(frozen=True)
class AttentionSamples:
    """Sample images in the unit range and, per model, the attention received by each patch.

    Received attention is the mean over the queries and sums to 1 over the patches; prefix tokens are excluded. `maps`
    is ordered, the original first, e.g. "original", "masked", "compressed", each [images, layers, heads, tokens]. The
    tokens are the patches of a square grid, row by row; a pruned head is NaN. `labels` are the classes of the images.
    """

    images: Float[Tensor, "images channels height width"]
    maps: Mapping[str, Tensor]
    labels: tuple[str, ...] = ()

    def __post_init__(self):
        count = self.images.shape[0]
        shapes = {name: tuple(maps.shape) for name, maps in self.maps.items()}
        if not shapes or count == 0:
            raise InvalidInput("attention samples without images or maps: omit the part from the report instead.")
        if len(set(shapes.values())) != 1 or next(iter(shapes.values()))[0] != count:
            raise InvalidInput(
                f"maps of shapes {shapes} for {count} images: "
                f"every model needs [{count}, layers, heads, tokens], all of the same shape."
            )
        if math.isqrt(self.tokens) ** 2 != self.tokens:
            raise InvalidInput(f"{self.tokens} tokens are not a square grid of patches; remove class tokens.")
        if self.labels and len(self.labels) != count:
            raise InvalidInput(f"{len(self.labels)} labels for {count} images: give one each, or none.")

    @property
    def tokens(self) -> int:
        return next(iter(self.maps.values())).shape[-1]

    @property
    def side(self) -> int:
        return math.isqrt(self.tokens)


@dataclass(frozen=True)
class TokenSamples:
    """Sample images in the unit range, and the patches kept by a token policy.

    `left` marks the patches kept after each stage of the `policy`; `tokens` is the number of tokens per layer, prefix
    tokens included. The patches form `grid` (rows, columns), row by row. `given` is the relevance assigned by the token
    reducer to the remaining patches, NaN for all others; `by_layer` is the relevance of all patches by each layer of
    the model without token reduction. For a token reducer that merges, `groups` holds the index of the patch whose
    token represents each patch after each stage. `labels` are the classes of the images.
    """

    images: Float[Tensor, "images channels height width"]
    left: Bool[Tensor, "images stages patches"]
    policy: TokenPolicy
    tokens: tuple[int, ...]
    grid: tuple[int, int]
    given: Float[Tensor, "images stages patches"] | None = None
    by_layer: Mapping[str, Float[Tensor, "images layers patches"]] | None = None
    labels: tuple[str, ...] = ()
    groups: Int[Tensor, "images stages patches"] | None = None

    def __post_init__(self):
        count, stages, patches = self.left.shape
        rows, columns = self.grid
        if not count or len(self.images) != count or (self.labels and len(self.labels) != count):
            raise InvalidInput(
                f"{len(self.images)} images, patches of {count} and {len(self.labels)} labels: give one each."
            )
        if stages != len(self.policy.layers) or rows * columns != patches:
            raise InvalidInput(
                f"{stages} stages and {patches} patches for a policy of {len(self.policy.layers)} stages and a grid "
                f"of {rows} x {columns}: they must agree."
            )


@dataclass(frozen=True)
class Measured:
    """A value with its 95 % interval; None for fields that are not in the file."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ComparedTrial:
    """One method at one share: costs as shares of the original's, `change` in points, `divergence` as of `kind`.

    `reached` is False for a method that cannot be compressed to its target; `note` is the reason. `speedup` is the
    latency of the original over that of the method. Values that were not measured are None.
    """

    method: str
    share: float | None
    params_share: float | None
    macs_share: float | None
    accuracy: Measured
    change: Measured
    agreement: Measured
    divergence: Measured
    reached: bool = True
    note: str = ""
    speedup: Measured = Measured()


@dataclass(frozen=True)
class ComparedPair:
    """The second method minus the first at one budget: divergence, accuracy in points, corrected p-values (Holm)."""

    first: str
    second: str
    share: float | None
    target: float | None
    divergence: Measured
    divergence_p: float | None
    accuracy: Measured
    accuracy_p: float | None


@dataclass(frozen=True)
class ComparisonRecord(Tabular):
    """All trials, the accuracy of the original, the measurement settings, and the differences between methods."""

    trials: tuple[ComparedTrial, ...]
    accuracy: Measured
    about: Mapping[str, Any]
    differences: tuple[ComparedPair, ...] = ()

    @property
    def kind(self) -> OutputKind:
        """What the models return; logits in a file that does not state it."""
        return KINDS.get(str(self.about.get("outputs")), KINDS["logits"])

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods in the order of the file."""
        return tuple(dict.fromkeys(trial.method for trial in self.trials))

    def to_rows(self) -> list[dict[str, Cell]]:
        """Returns one record per trial; `low` and `high` are the ends of 95 % intervals."""
        costs, measured = ("share", "params_share", "macs_share"), ("accuracy", "change", "agreement", "divergence")
        rows: list[dict[str, Cell]] = []
        for trial in self.trials:
            row: dict[str, Cell] = {"method": trial.method, **{name: getattr(trial, name) for name in costs}}
            for name in (*measured, "speedup"):
                value: Measured = getattr(trial, name)
                row |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
            rows.append({**row, "reached": trial.reached, "note": trial.note})
        return rows

    @classmethod
    def load(cls, path: Path | str) -> "ComparisonRecord":
        """Reads the file; unknown fields are ignored.

        Raises:
            CheckpointError: The file is not a comparison, is damaged, or contains no trial.
        """
        record = read_json(path)
        check_schema(record, KIND, SCHEMA, path)
        validated(record, COMPARISON, path)
        try:
            # Read without a schema: what is missing, or of another type, raises one of the errors below.
            trials = tuple(_trial(trial) for trial in record["trials"])
            trials += tuple(_unreached(each) for each in record.get("unreached", ()))
            differences = tuple(_pair(pair) for pair in record.get("differences", ()))
            comparison = cls(trials, _measured(record["accuracy"]), dict(record["about"]), differences)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is not a whole comparison ({error!r}); it was edited or truncated."
            ) from error
        if not comparison.trials:
            raise CheckpointError(f"{path} holds no trial yet; let `attnrx compare` finish its first one.")
        return comparison


def _trial(record: Mapping[str, Any]) -> ComparedTrial:
    measured = "accuracy", "change", "agreement", "divergence", "speedup"
    values = _numbers(record, "share", "params_share", "macs_share")
    values |= {name: _measured(record.get(name)) for name in measured}
    reached, note = record.get("reached") is not False, str(record.get("note") or "")
    return ComparedTrial(str(record["method"]), **values, reached=reached, note=note)


def _unreached(record: Mapping[str, Any]) -> ComparedTrial:
    """Returns a method that was not measured, because it cannot cost so little."""
    target, least = (percent(share) for share in _numbers(record, "target", "least").values())
    unmeasured = dict.fromkeys(("accuracy", "change", "agreement", "divergence"), Measured())
    note = f"{target} of the MACs; it costs at least {least}"
    return ComparedTrial(str(record["method"]), None, None, None, **unmeasured, reached=False, note=note)


def _pair(record: Mapping[str, Any]) -> ComparedPair:
    values = _numbers(record, "share", "target", "divergence_p", "accuracy_p")
    values |= {name: _measured(record.get(name)) for name in ("divergence", "accuracy")}
    return ComparedPair(str(record["first"]), str(record["second"]), **values)


def _measured(record: Mapping[str, Any] | None) -> Measured:
    return Measured() if record is None else Measured(**_numbers(record, "value", "low", "high"))


def _numbers(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    values = {name: record.get(name) for name in names}
    return {name: None if value is None else float(value) for name, value in values.items()}


@dataclass(frozen=True)
class FrontPoint:
    """One measured plan: its predicted `cost` as a share of the original's, and what was measured on the plan's images.

    `divergence` is in nats, `agreement` and `change` of top-1 accuracy are shares of the images; `macs` and `params`
    are shares of the original's. `faster` is the speed relative to the original, None for a plan that was not timed.
    """

    cost: float
    divergence: float
    agreement: float | None = None
    change: float | None = None
    macs: float | None = None
    params: float | None = None
    faster: float | None = None
    description: str = ""

    @property
    def speedup(self) -> float:
        """The speed relative to the original: measured if the plan was timed, else predicted; for plans of latency."""
        # The cost of a plan of latency is its share of the original's latency.
        return 1 / self.cost if self.faster is None else self.faster


@dataclass(frozen=True)
class PlanFront:
    """The front of a plan: plans between the original and the chosen one, which is the last.

    `spend` is the cost that the plan limits ("latency", "macs" or "params"), `images` the number of images behind the
    measured values, `conditions` those of the measured latency, and `outputs` what the model returns ("logits" or
    "embedding").
    """

    spend: str
    points: tuple[FrontPoint, ...]
    images: int | None = None
    conditions: Mapping[str, Any] = field(default_factory=dict)
    outputs: str = "logits"

    def __post_init__(self):
        if not self.points or any(point.cost <= 0 for point in self.points):
            raise InvalidInput(f"a front of {len(self.points)} plans: give at least one, with positive costs.")

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "PlanFront":
        """Returns the front of `Plan.to_record()`; unknown fields are ignored."""
        names = tuple(point_field.name for point_field in fields(FrontPoint) if point_field.name != "description")
        points = (
            FrontPoint(**_numbers(point, *names), description=str(point.get("description", "")))
            for point in record["front"]
        )
        about = record.get("about", {})
        outputs = "embedding" if about.get("outputs") == "embedding" else "logits"
        # `measured` is null for a plan that was not timed.
        return cls(str(record["spend"]), tuple(points), about.get("images"), record.get("measured") or {}, outputs)

    @classmethod
    def load(cls, path: Path | str) -> "PlanFront":
        """Reads the front from the plan.json of `attnrx plan`.

        Raises:
            CheckpointError: The file is not a plan, or is damaged.
        """
        record = read_json(path)
        check_schema(record, PLAN, PLAN_SCHEMA, path)
        validated(record, FRONT, path)
        try:
            return cls.of_record(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is not a whole plan ({error!r}); it was edited or truncated.") from error


@dataclass(frozen=True, repr=False)
class ReportContent(Displayed):
    """The parts of one report about one candidate.

    `about` is a free record: the model, the data, the versions, the seed, the command. `history` holds the records of a
    training run, one per epoch. `costs` are those of the original and of the candidate. Missing `costs` and `latency`
    are taken from the evidence, missing `ranks` from the prescription. `comparison` is about several candidates, and
    `front` has the plans that were measured on the way to this candidate.
    """

    title: str
    about: Mapping[str, Any] = field(default_factory=dict)
    prescription: Prescription | None = None
    diagnosis: Diagnosis | None = None
    evidence: Evidence | None = None
    trade_off: tuple[TradeOffPoint, ...] = ()
    attention: AttentionSamples | None = None
    tokens: TokenSamples | None = None
    history: tuple[Mapping[str, Any], ...] = ()
    costs: tuple[ModelCosts, ModelCosts] | None = None
    latency: tuple[LatencyComparison, ...] = ()
    ranks: tuple[PathwayRanks, ...] = ()
    comparison: ComparisonRecord | None = None
    front: PlanFront | None = None

    def __post_init__(self):
        # By the fields themselves, so that a new part needs no change here.
        parts = [value for name, value in vars(self).items() if name not in ("title", "about")]
        if all(part is None or part == () for part in parts):
            raise InvalidInput(
                f"the report {self.title!r} has nothing to show: "
                "give it evidence, a prescription, a diagnosis or another part."
            )
        if self.diagnosis is None or self.prescription is None:
            return
        if self.diagnosis.fingerprint != self.prescription.fingerprint:
            raise FingerprintMismatch(
                f"the diagnosis is of the model {self.diagnosis.fingerprint}, the prescription is for the model "
                f"{self.prescription.fingerprint}; report them with the diagnosis that the prescription was made from."
            )
