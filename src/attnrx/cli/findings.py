"""Evidence as tables for the terminal."""

import attnrx as rx
from attnrx.cli.outcome import Table


def findings_table(evidence: "rx.Evidence") -> Table:
    """Returns the findings, claims first; reported findings on corrupted images are in `robustness_tables`."""
    shown = [finding for finding in evidence.findings if finding.check != "robustness" or finding.is_claim]
    ordered = sorted(shown, key=lambda finding: not finding.is_claim)
    rows = tuple(
        (
            finding.claim,
            significant(finding.value, finding.unit),
            _interval(finding),
            _limit(finding),
            finding.outcome_text if finding.is_claim else "",
        )
        for finding in ordered
    )
    return Table(("finding", "value", "95 % interval", "limit", ""), rows)


def robustness_tables(evidence: "rx.Evidence") -> tuple[Table, ...]:
    """Returns one table per severity: both accuracies for each corruption, and their means."""
    found = [finding for finding in evidence.of("robustness") if "reference_accuracy" in finding.details]
    single = [finding for finding in found if "severity" in finding.details]
    severities = sorted({finding.details["severity"] for finding in single})
    tables = []
    for severity in severities:
        at_severity = [finding for finding in single if finding.details["severity"] == severity]
        means = [finding for finding in found if finding.details.get("severities") == [severity]]
        lines = [_corrupted(finding.details["corruption"], finding) for finding in at_severity]
        lines += [_corrupted(f"mean of {len(finding.details['corruptions'])}", finding) for finding in means]
        tables.append(Table(CORRUPTED, tuple(lines), f"accuracy on images corrupted at severity {severity}, in %"))
    if len(severities) > 1:
        means = [finding for finding in found if finding.details.get("severities") == severities]
        lines = [_corrupted(f"mean of {len(finding.details['corruptions'])}", finding) for finding in means]
        tables.append(Table(CORRUPTED, tuple(lines), "over all severities"))
    return tuple(tables)


CORRUPTED = ("corruption", "reference", "candidate", "change", "95 % interval")


def _corrupted(name: str, finding: "rx.Finding") -> tuple[str, ...]:
    lines = [f"{finding.details[role]:.1f}" for role in ("reference_accuracy", "candidate_accuracy")]
    low, high = finding.low or 0.0, finding.high or 0.0
    return (name, *lines, f"{finding.value:+.1f}", f"[{low:+.1f}, {high:+.1f}]")


def significant(value: float, unit: str = "") -> str:
    """Formats a number with four significant digits and its unit."""
    return f"{value:.4g} {unit}".rstrip()


def _interval(finding: "rx.Finding") -> str:
    if finding.low is None or finding.high is None:
        return ""
    return f"[{finding.low:.4g}, {finding.high:.4g}]"


def _limit(finding: "rx.Finding") -> str:
    return "" if finding.limit is None else significant(finding.limit, finding.unit)
