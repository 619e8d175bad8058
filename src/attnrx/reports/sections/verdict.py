"""The verdict: what was compressed, by how much, what it cost, and whether every claim holds."""

from dataclasses import dataclass

from attnrx.evidence import Evidence, Finding
from attnrx.reports.content import ReportContent
from attnrx.reports.numbers import TIMES, fixed, interval, number, percent, quantity
from attnrx.reports.sections.section import Section


@dataclass(frozen=True)
class Tile:
    """One number that a reader came for."""

    value: str
    label: str
    note: str = ""


def verdict(content: ReportContent) -> Section:
    """Gives the top of the page; without evidence it says that nothing was verified."""
    evidence = content.evidence
    data = {
        "state": _state(evidence),
        "sentence": sentence(evidence),
        "tiles": tiles(content),
        "failures": [_failure(finding) for finding in evidence.failures] if evidence else [],
    }
    return Section("verdict", "Verdict", data)


def sentence(evidence: Evidence | None) -> str:
    """Says in one sentence whether the claims hold."""
    if evidence is None:
        return "Nothing was verified: this report holds no evidence."
    limited = [finding for finding in evidence.findings if finding.holds is not None]
    reported = len(evidence.findings) - len(limited)
    more = f" {_counted(reported, 'more quantity is', 'more quantities are')} reported without a limit." if reported else ""
    if not limited:
        return f"No claim has a limit to hold.{more}"
    failing = len(evidence.failures)
    if failing:
        return f"{failing} of {_counted(len(limited), 'claim does', 'claims do')} not hold.{more}"
    verb = "The one claim holds." if len(limited) == 1 else f"All {len(limited)} claims hold."
    return verb + more


def tiles(content: ReportContent) -> list[Tile]:
    """Gives the headline numbers that the content knows."""
    found = [_removed(content), *_savings(content), _accuracy(content.evidence)]
    found.extend(_speed(content))
    return [tile for tile in found if tile is not None]


def _removed(content: ReportContent) -> Tile | None:
    if content.prescription is None:
        return None
    total = sum(layer.keep.numel() for layer in content.prescription.layers)
    stays = sum(sum(ranks) for ranks in content.prescription.ranks)
    note = f"{number(stays)} of {number(total)} stay"
    return Tile(percent(content.prescription.removed_share), "of the score directions removed", note)


def _savings(content: ReportContent) -> list[Tile]:
    if content.costs is None:
        return []
    before, after = content.costs
    saved = before.saving(after)
    pairs = (("parameters", before.params, after.params, saved.params_share), ("MACs", before.macs, after.macs, saved.macs_share))
    return [
        Tile(f"{fixed(-100 * share, 2, signed=True)} %", name, f"{number(old)} → {number(new)}")
        for name, old, new, share in pairs
    ]


def _accuracy(evidence: Evidence | None) -> Tile | None:
    """Takes the first finding of the accuracy check that is a change, in points."""
    findings = evidence.of("accuracy") if evidence else ()
    changes = [finding for finding in findings if finding.unit == "points"]
    if not changes:
        return None
    first = changes[0]
    within = interval(first.low, first.high)
    return Tile(quantity(first.value, first.unit, first.low, first.high), "accuracy", f"95 % interval {within}" if within else "")


def _speed(content: ReportContent) -> list[Tile]:
    if not content.latency:
        return []
    first = content.latency[0]
    note = f"{interval(first.ratio.low, first.ratio.high)}, batch {first.batch}"
    return [Tile(fixed(first.ratio.value, 2) + TIMES, "time of a forward pass", note)]


def _failure(finding: Finding) -> dict[str, str]:
    return {
        "claim": finding.claim,
        "value": quantity(finding.value, finding.unit, finding.low, finding.high),
        "limit": quantity(finding.limit, finding.unit),
    }


def _state(evidence: Evidence | None) -> str:
    if evidence is None or all(finding.holds is None for finding in evidence.findings):
        return "open"
    return "holds" if evidence.holds else "fails"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
