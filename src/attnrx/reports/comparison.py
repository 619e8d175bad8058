"""The record of a comparison of methods, read from the file of `attnrx compare`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnrx.errors import CheckpointError
from attnrx.serialization.storage import check_schema, read_json

KIND, SCHEMA = "attnrx comparison", 2


@dataclass(frozen=True)
class Measured:
    """A value with its 95 % interval; None for fields that are not in the file."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ComparedTrial:
    """One method at one share: costs as shares of the original's, `change` in points, `divergence` in nats.

    `reached` is False for a method that cannot be compressed to its target; `note` is the reason. Values that were not
    measured are None.
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


@dataclass(frozen=True)
class ComparedPair:
    """The second method minus the first at one budget: KL in nats and top-1 in points, p-values corrected (Holm)."""

    first: str
    second: str
    share: float | None
    target: float | None
    divergence: Measured
    divergence_p: float | None
    accuracy: Measured
    accuracy_p: float | None


@dataclass(frozen=True)
class ComparisonRecord:
    """All trials, the accuracy of the original, the measurement settings, and the differences between methods."""

    trials: tuple[ComparedTrial, ...]
    accuracy: Measured
    about: Mapping[str, Any]
    differences: tuple[ComparedPair, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods in the order of the file."""
        return tuple(dict.fromkeys(trial.method for trial in self.trials))

    @classmethod
    def load(cls, path: Path | str) -> "ComparisonRecord":
        """Reads the file; unknown fields are ignored.

        Raises:
            CheckpointError: The file is not a comparison, is damaged, or contains no trial.
        """
        record = read_json(path)
        check_schema(record, KIND, SCHEMA, path)
        try:
            trials = tuple(_trial(trial) for trial in record["trials"])
            differences = tuple(_pair(pair) for pair in record.get("differences", ()))
            found = cls(trials, _measured(record["accuracy"]), dict(record["about"]), differences)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is not a whole comparison ({error!r}); it was edited or truncated."
            ) from error
        if not found.trials:
            raise CheckpointError(f"{path} holds no trial yet; let `attnrx compare` finish its first one.")
        return found


def _trial(record: Mapping[str, Any]) -> ComparedTrial:
    return ComparedTrial(
        str(record["method"]),
        share=_number(record.get("share")),
        params_share=_number(record.get("params_share")),
        macs_share=_number(record.get("macs_share")),
        accuracy=_measured(record.get("accuracy")),
        change=_measured(record.get("change")),
        agreement=_measured(record.get("agreement")),
        divergence=_measured(record.get("divergence")),
        reached=record.get("reached") is not False,
        note=str(record.get("note") or ""),
    )


def _pair(record: Mapping[str, Any]) -> ComparedPair:
    return ComparedPair(
        str(record["first"]),
        str(record["second"]),
        share=_number(record.get("share")),
        target=_number(record.get("target")),
        divergence=_measured(record.get("divergence")),
        divergence_p=_number(record.get("divergence_p")),
        accuracy=_measured(record.get("accuracy")),
        accuracy_p=_number(record.get("accuracy_p")),
    )


def _measured(record: Any) -> Measured:
    if record is None:
        return Measured()
    return Measured(*(_number(record.get(name)) for name in ("value", "low", "high")))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
