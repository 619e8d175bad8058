"""The verdict: headline numbers and the outcomes of all claims."""

from collections.abc import Mapping

from attnrx.evidence import REPORTED, Evidence, Finding
from attnrx.reports.content import ComparisonRecord, Measured, ReportContent
from attnrx.reports.numbers import GAP, TIMES, fixed, interval, number, percent, quantity
from attnrx.reports.sections.costs import change, cost_records, latency_records, total
from attnrx.reports.sections.section import Section

Tile = tuple[str, str, str]  # one headline number: its value, its label and a note


def verdict(content: ReportContent) -> Section:
    evidence = content.evidence
    if evidence is None and content.comparison is not None:
        words = _compared(content.comparison)
    else:
        words = sentence(evidence)
    data = {
        "state": REPORTED if evidence is None else evidence.outcome,
        "sentence": words,
        "tiles": _tiles(content),
        "notes": _notes(content),
        "failures": evidence.failures if evidence else (),
        "undecided": evidence.undecided if evidence else (),
    }
    return Section("verdict", "Verdict", data)


def sentence(evidence: Evidence | None) -> str:
    """Summarizes the outcomes of all claims in one sentence."""
    if evidence is None:
        return "Nothing was verified: this report holds no evidence."
    limited = len(evidence.claims)
    failing, undecided, reported = len(evidence.failures), len(evidence.undecided), len(evidence.findings) - limited
    claims = "claim" if limited == 1 else "claims"
    if failing:
        found = f"{failing} of {limited} {claims} {'does' if failing == 1 else 'do'} not hold."
    elif undecided:
        are = "is" if undecided == 1 else "are"
        found = f"None of {limited} {claims} fails; {undecided} {are} undecided on so few images."
    elif not limited:
        found = "No claim has a limit to hold."
    else:
        found = "The one claim holds." if limited == 1 else f"All {limited} claims hold."
    if not reported:
        return found
    return f"{found} {reported} more {'quantity is' if reported == 1 else 'quantities are'} reported without a limit."


def _compared(found: ComparisonRecord) -> str:
    names, images = len(found.methods), found.about.get("images")
    methods = "method was" if names == 1 else "methods were"
    where = f" on {number(images)} images" if isinstance(images, int) else ""
    tried = "one trial" if len(found.trials) == 1 else f"{len(found.trials)} trials"
    return f"{names} {methods} compared with the original in {tried}{where}; there are no claims with a limit."


def _notes(content: ReportContent) -> list[str]:
    """Returns the notes on the images recorded by the parts of the content, without duplicates."""
    comparison = {} if content.comparison is None else content.comparison.about
    parts = [part.about for part in (content.diagnosis, content.prescription, content.evidence) if part is not None]
    parts += [each for each in (comparison, comparison.get("diagnosis")) if isinstance(each, Mapping)]
    return list(dict.fromkeys(str(note) for about in parts for note in about.get("notes") or ()))


def _tiles(content: ReportContent) -> list[Tile]:
    tiles: list[Tile] = []
    prescription, evidence = content.prescription, content.evidence
    if content.comparison is not None:
        tiles.append(_measured_tile(content.comparison.accuracy, "%", "top-1 of the original"))
    if prescription is not None:
        directions = sum(layer.qk.directions for layer in prescription.layers)
        note = f"{number(sum(layer.qk.kept for layer in prescription.layers))} of {number(directions)} kept"
        tiles.append((percent(prescription.removed_share), "of the score directions removed", note))
    if (records := cost_records(content)) is not None:
        for unit, label in (("params", "parameters"), ("macs", "MACs of an image")):
            old, new = (total(record, unit) for record in records)
            tiles.append((change(old, new), label, f"{number(old)} → {number(new)}"))
    # The accuracy check has one finding in points, the change; the accuracies themselves are in percent.
    changes = [finding for finding in (evidence.of("accuracy") if evidence else ()) if finding.unit == "points"]
    tiles += [_measured_tile(finding, "points", "of accuracy", signed=True) for finding in changes[:1]]
    for record in latency_records(content)[:1]:
        ratio = record["ratio"]
        note = f"{interval(ratio['low'], ratio['high'])}, batch of {record['batch']}"
        tiles.append((fixed(ratio["value"], 2) + TIMES, "the time of a forward pass", note))
    return tiles


def _measured_tile(found: Finding | Measured, unit: str, label: str, signed: bool = False) -> Tile:
    within = interval(found.low, found.high)
    value = quantity(found.value, unit, found.low, found.high, signed=signed)
    return value, label, f"95{GAP}% interval {within}" if within else ""
