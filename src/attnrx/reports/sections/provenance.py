"""Provenance: the recorded origin of every part of the report."""

from collections.abc import Mapping
from typing import Any

from attnrx.reports.content import ReportContent
from attnrx.reports.sections.section import Section, described


def provenance_section(content: ReportContent) -> Section | None:
    """Returns the records of the parts, one table each."""
    parts: dict[str, Mapping[str, Any]] = {"this report": content.about}
    if content.diagnosis is not None:
        parts["the diagnosis"] = {"fingerprint": content.diagnosis.fingerprint, **content.diagnosis.about}
    if content.prescription is not None:
        parts["the prescription"] = _new(
            {"fingerprint": content.prescription.fingerprint, **content.prescription.about}, parts
        )
    if content.evidence is not None:
        parts["the evidence"] = content.evidence.about
    if content.comparison is not None:
        parts["the comparison"] = content.comparison.about
    records = [(name, described(record)) for name, record in parts.items() if record]
    return Section("provenance", "Provenance", {"records": records}) if records else None


def _new(record: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Removes the fields that the prescription shares with the diagnosis."""
    known = parts.get("the diagnosis", {})
    return {name: value for name, value in record.items() if name not in known or known[name] != value}
