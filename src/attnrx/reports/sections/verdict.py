"""The verdict: headline numbers and the outcomes of all claims."""

from collections.abc import Mapping
from dataclasses import dataclass

from attnrx.evidence import REPORTED, Evidence, Finding
from attnrx.reports.comparison import ComparisonRecord
from attnrx.reports.content import ReportContent
from attnrx.reports.numbers import GAP, TIMES, fixed, interval, number, percent, quantity, short, with_unit
from attnrx.reports.sections.costs import change, cost_records, latency_records, total
from attnrx.reports.sections.section import Section


@dataclass(frozen=True)
class Tile:
    """One headline number."""

    value: str
    label: str
    note: str = ""


def verdict(content: ReportContent) -> Section:
    """Returns the top section of the page."""
    evidence = content.evidence
    data = {
        "state": _state(evidence),
        "sentence": _sentence(content),
        "tiles": tiles(content),
        "notes": _notes(content),
        "failures": [_claim(finding) for finding in evidence.failures] if evidence else [],
        "undecided": [_claim(finding) for finding in evidence.undecided] if evidence else [],
    }
    return Section("verdict", "Verdict", data)


def sentence(evidence: Evidence | None) -> str:
    """Summarizes the outcomes of all claims in one sentence."""
    if evidence is None:
        return "Nothing was verified: this report holds no evidence."
    limited = len(evidence.claims)
    failing, undecided, reported = len(evidence.failures), len(evidence.undecided), len(evidence.findings) - limited
    more = ""
    if reported:
        more = f" {reported} more {'quantity is' if reported == 1 else 'quantities are'} reported without a limit."
    if failing:
        claims, do = "claim" if limited == 1 else "claims", "does" if failing == 1 else "do"
        return f"{failing} of {limited} {claims} {do} not hold.{more}"
    if undecided:
        claims, are = "claim" if limited == 1 else "claims", "is" if undecided == 1 else "are"
        return f"None of {limited} {claims} fails; {undecided} {are} undecided on so few images.{more}"
    if not limited:
        return f"No claim has a limit to hold.{more}"
    return ("The one claim holds." if limited == 1 else f"All {limited} claims hold.") + more


def _sentence(content: ReportContent) -> str:
    if content.evidence is None and content.comparison is not None:
        return _compared(content.comparison)
    return sentence(content.evidence)


def tiles(content: ReportContent) -> list[Tile]:
    """Returns the available headline numbers."""
    found = [
        *_original(content.comparison),
        _removed(content),
        *_savings(content),
        _accuracy(content.evidence),
        _speed(content),
    ]
    return [tile for tile in found if tile is not None]


def _notes(content: ReportContent) -> list[str]:
    """Returns the notes on the images recorded by the parts of the content, without duplicates."""
    comparison = {} if content.comparison is None else content.comparison.about
    parts = [part.about for part in (content.diagnosis, content.prescription, content.evidence) if part is not None]
    parts += [each for each in (comparison, comparison.get("diagnosis")) if isinstance(each, Mapping)]
    return list(dict.fromkeys(str(note) for about in parts for note in about.get("notes") or ()))


def _compared(found: ComparisonRecord) -> str:
    names, images = len(found.methods), found.about.get("images")
    methods = "method was" if names == 1 else "methods were"
    where = f" on {number(images)} images" if isinstance(images, int) else ""
    tried = "one trial" if len(found.trials) == 1 else f"{len(found.trials)} trials"
    return f"{names} {methods} compared with the original in {tried}{where}; there are no claims with a limit."


def _original(found: ComparisonRecord | None) -> list[Tile]:
    if found is None:
        return []
    accuracy = found.accuracy
    value = quantity(accuracy.value, "%", accuracy.low, accuracy.high)
    within = interval(accuracy.low, accuracy.high)
    return [Tile(value, "top-1 of the original", f"95{GAP}% interval {within}")]


def _removed(content: ReportContent) -> Tile | None:
    if content.prescription is None:
        return None
    total = sum(layer.qk.directions for layer in content.prescription.layers)
    num_kept = sum(layer.qk.kept for layer in content.prescription.layers)
    note = f"{number(num_kept)} of {number(total)} kept"
    return Tile(percent(content.prescription.removed_share), "of the score directions removed", note)


def _savings(content: ReportContent) -> list[Tile]:
    records = cost_records(content)
    if records is None:
        return []
    units = (("params", "parameters"), ("macs", "MACs of an image"))
    amounts = [(name, total(records[0], unit), total(records[1], unit)) for unit, name in units]
    return [Tile(change(old, new), name, f"{number(old)} → {number(new)}") for name, old, new in amounts]


def _accuracy(evidence: Evidence | None) -> Tile | None:
    """Returns the change of accuracy in points from the accuracy check."""
    changes = [finding for finding in (evidence.of("accuracy") if evidence else ()) if finding.unit == "points"]
    if not changes:
        return None
    first = changes[0]
    within = interval(first.low, first.high)
    value = quantity(first.value, first.unit, first.low, first.high, signed=True)
    return Tile(value, "of accuracy", f"95{GAP}% interval {within}" if within else "")


def _speed(content: ReportContent) -> Tile | None:
    records = latency_records(content)
    if not records:
        return None
    ratio = records[0]["ratio"]
    note = f"{interval(ratio['low'], ratio['high'])}, batch of {records[0]['batch']}"
    return Tile(fixed(ratio["value"], 2) + TIMES, "the time of a forward pass", note)


def _claim(finding: Finding) -> dict[str, str]:
    return {
        "claim": finding.claim,
        "value": quantity(finding.value, finding.unit, finding.low, finding.high),
        "interval": interval(finding.low, finding.high),
        "limit": "" if finding.limit is None else with_unit(short(finding.limit), finding.unit),
        "deciding": "" if finding.deciding_n is None else number(finding.deciding_n),
    }


def _state(evidence: Evidence | None) -> str:
    return REPORTED if evidence is None else evidence.outcome
