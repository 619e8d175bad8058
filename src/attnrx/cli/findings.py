"""Evidence as a table for people."""

import attnrx as rx
from attnrx.cli.outcome import Table

HOLDS = {True: "holds", False: "FAILS", None: ""}


def findings_table(evidence: "rx.Evidence") -> Table:
    """Gives the findings, those with a limit first; single corruptions and severities are left to the file."""
    shown = [finding for finding in evidence.findings if "severity" not in finding.details]
    ordered = sorted(shown, key=lambda finding: finding.holds is None)
    rows = tuple(
        (
            finding.claim,
            measured(finding.value, finding.unit),
            _interval(finding),
            _limit(finding),
            HOLDS[finding.holds],
        )
        for finding in ordered
    )
    return Table(("finding", "value", "95 % interval", "limit", ""), rows)


def measured(value: float, unit: str = "") -> str:
    """Writes a number with four digits that tell something, and its unit."""
    return f"{value:.4g} {unit}".rstrip()


def _interval(finding: "rx.Finding") -> str:
    if finding.low is None or finding.high is None:
        return ""
    return f"[{finding.low:.4g}, {finding.high:.4g}]"


def _limit(finding: "rx.Finding") -> str:
    return "" if finding.limit is None else measured(finding.limit, finding.unit)
