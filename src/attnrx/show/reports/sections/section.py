"""The base of report sections, and the provenance: the recorded origin of every part of the report."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnrx.show.reports.content import ReportContent
from attnrx.show.reports.figures import Chart
from attnrx.show.reports.numbers import plain


@dataclass(frozen=True)
class Section:
    """One part of the page; `name` is its anchor and the file name of its template.

    A section with a `summary` is folded: the page shows this line until the reader opens the section.
    """

    name: str
    title: str
    data: Mapping[str, Any]
    summary: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture with heading and caption; `note` follows the heading, `legend` pairs pictures with names."""

    picture: str
    title: str
    note: str = ""
    caption: str = ""
    legend: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, chart: Chart, *, with_legend: bool = False) -> "Figure":
        return cls(chart.draw(), chart.title, legend=chart.legend if with_legend else ())


def provenance_section(content: ReportContent) -> Section | None:
    """Returns the records of the parts, one table each."""
    parts: dict[str, Mapping[str, Any]] = {"this report": content.about}
    diagnosed: dict[str, Any] = {}
    if content.diagnosis is not None:
        diagnosed = {"fingerprint": content.diagnosis.fingerprint, **content.diagnosis.about}
        parts["the diagnosis"] = diagnosed
    if content.prescription is not None:
        record = {"fingerprint": content.prescription.fingerprint, **content.prescription.about}
        # The fields that the prescription shares with the diagnosis are listed once.
        new = {name: value for name, value in record.items() if name not in diagnosed or diagnosed[name] != value}
        parts["the prescription"] = new
    for name, part in (("the evidence", content.evidence), ("the comparison", content.comparison)):
        parts[name] = {} if part is None else part.about
    records = [(name, described(record)) for name, record in parts.items() if record]
    names = ", ".join(name for name, _ in records)
    return Section("provenance", "Provenance", {"records": records}, f"Records of {names}") if records else None


def described(record: Mapping[str, Any], inside: str = "") -> list[tuple[str, str]]:
    """Flattens a free record to pairs of texts; nested fields are named by their path."""
    pairs: list[tuple[str, str]] = []
    for key, value in record.items():
        name = inside + str(key).replace("_", " ")
        if isinstance(value, Mapping):
            pairs += described(value, f"{name} · ")
        # A list of records, such as diagnostics with their options, would be unreadable on one line.
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
