"""The base of report sections, and tables of findings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnrx.evidence import Finding
from attnrx.reports.content import ReportContent
from attnrx.reports.numbers import interval, number, plain, quantity, short


@dataclass(frozen=True)
class Section:
    """One part of the page; `name` is its anchor and the file name of its template."""

    name: str
    title: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A picture with heading and caption; `note` follows the heading, `legend` pairs pictures with names."""

    picture: str
    title: str
    note: str = ""
    caption: str = ""
    legend: tuple[tuple[str, str], ...] = ()


def findings(content: ReportContent) -> Section | None:
    """Returns the evidence table; the order of the findings within a check is preserved."""
    if content.evidence is None:
        return None
    shown = [finding for finding in content.evidence.findings if not has_severity(finding)]
    elsewhere = len(content.evidence.findings) - len(shown)
    return Section("evidence", "Evidence", {"groups": grouped(shown), "elsewhere": elsewhere})


def has_severity(finding: Finding) -> bool:
    """Whether a finding is about one corruption at one severity; there are too many of them for the main table."""
    return {"corruption", "severity"} <= finding.details.keys()


def grouped(shown: Sequence[Finding]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Returns the rows of the table grouped by check."""
    checks = dict.fromkeys(finding.check for finding in shown)
    return [(check.replace("_", " "), [row(own) for own in shown if own.check == check]) for check in checks]


def row(finding: Finding) -> dict[str, Any]:
    """Returns one finding as the cells of a table."""
    return {
        "result": finding.outcome,
        "deciding": finding.deciding_n,
        "claim": finding.claim,
        "value": quantity(finding.value, finding.unit, finding.low, finding.high),
        "limit": "" if finding.limit is None else short(finding.limit),
        "interval": interval(finding.low, finding.high),
        "n": "" if finding.n is None else number(finding.n),
        "seed": "" if finding.seed is None else str(finding.seed),
        "details": described(finding.details),
    }


def described(record: Mapping[str, Any], inside: str = "") -> list[tuple[str, str]]:
    """Flattens a free record to pairs of texts; nested fields are named by their path."""
    pairs: list[tuple[str, str]] = []
    for key, value in record.items():
        name = inside + str(key).replace("_", " ")
        if isinstance(value, Mapping):
            pairs += described(value, f"{name} · ")
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
            pairs += [_entry(name, index, item) for index, item in enumerate(value)]
        elif value is not None:
            pairs.append((name, plain(value)))
    return pairs


def _entry(name: str, index: int, record: Mapping[str, Any]) -> tuple[str, str]:
    """Returns one record of a list as a pair of texts, named by its type or else its index."""
    kind = next((key for key in ("check", "type") if key in record), None)
    rest = {key.replace("_", " "): value for key, value in record.items() if key != kind and value is not None}
    return f"{name} · {record[kind] if kind else index}", plain(rest) if rest else "no knobs"
