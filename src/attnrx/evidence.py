"""What was measured of a candidate against its reference: claims, values, limits, and whether they hold."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attnrx.errors import CheckpointError, InvalidInput
from attnrx.storage import check_schema, read_json, write_json
from attnrx.validation import (
    JSON_OBJECT,
    Choice,
    Flag,
    Integer,
    Invalid,
    Items,
    Number,
    Optional,
    Record,
    Text,
    below,
    shown,
    validated,
)

KIND, SCHEMA = "attnrx evidence", 1


def _require_verdict(finding: Mapping[str, Any], where: str) -> None:
    """A limit and whether it holds go together, and the ends of an interval are in order."""
    low, high = finding["low"], finding["high"]
    if (finding["limit"] is None) != (finding["holds"] is None):
        raise Invalid(below(where, "holds"), f"is {shown(finding['holds'])} with the limit {shown(finding['limit'])}")
    if low is not None and high is not None and low > high:
        raise Invalid(below(where, "low"), f"is {low}, above high, which is {high}")


FINDING = Record(
    {
        "check": Text(),
        "claim": Text(),
        "value": Optional(Number()),  # JSON has no NaN: null is a value that could not be measured
        "unit": Text(),
        "limit": Optional(Number()),
        "holds": Optional(Flag()),
        "low": Optional(Number()),
        "high": Optional(Number()),
        "n": Optional(Integer()),
        "seed": Optional(Integer()),
        "details": JSON_OBJECT,
    },
    then=_require_verdict,
)
RECORD = Record(
    {
        "kind": Choice((KIND,)),
        "schema": Choice((SCHEMA,)),
        "holds": Flag(),
        "about": JSON_OBJECT,
        "findings": Items(FINDING),
    }
)


@dataclass(frozen=True)
class Finding:
    """One measured claim.

    `limit` and `holds` are None where a quantity is only reported. `low` and `high` bound the value at 95 % where it
    is noisy, `n` counts what it was measured on. `details` holds what a reader may want beside it (draws, kernels,
    per-layer slack).
    """

    check: str
    claim: str
    value: float
    unit: str = ""
    limit: float | None = None
    holds: bool | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    seed: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if (self.limit is None) != (self.holds is None):
            raise InvalidInput(f"finding {self.claim!r}: a limit and whether it holds go together.")


@dataclass(frozen=True)
class Evidence:
    """All findings about one candidate; `about` says what was compared, on which data, with which versions."""

    findings: tuple[Finding, ...]
    about: Mapping[str, Any]

    @property
    def holds(self) -> bool:
        """Whether every claim that has a limit holds."""
        return all(finding.holds is not False for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The claims that do not hold."""
        return tuple(finding for finding in self.findings if finding.holds is False)

    def of(self, check: str) -> tuple[Finding, ...]:
        """The findings of one check."""
        return tuple(finding for finding in self.findings if finding.check == check)

    def save(self, path: Path | str) -> Path:
        """Writes one JSON file."""
        findings = [asdict(finding) for finding in self.findings]
        return write_json(
            path,
            {
                "kind": KIND,
                "schema": SCHEMA,
                "holds": self.holds,
                "about": dict(self.about),
                "findings": findings,
            },
        )

    @classmethod
    def load(cls, path: Path | str) -> "Evidence":
        """Reads what `save` wrote."""
        record = read_json(path)
        check_schema(record, KIND, SCHEMA, path)
        validated(record, RECORD, path)
        found = cls(tuple(_finding(finding) for finding in record["findings"]), record["about"])
        if found.holds != record["holds"]:
            raise CheckpointError(
                f"{path}: holds is {record['holds']}, and the findings give {found.holds}; verify again."
            )
        return found


def _finding(record: Mapping[str, Any]) -> Finding:
    """JSON has no NaN: a value that could not be measured is stored as null."""
    return Finding(**{**record, "value": math.nan if record["value"] is None else record["value"]})
