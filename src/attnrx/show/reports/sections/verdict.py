"""The result: one sentence, the outcomes of the claims, and every measured quantity before and after."""

from collections.abc import Iterator

from attnrx.nouns.evidence import Evidence
from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.headline import (
    TOP_1,
    accuracies,
    cost_totals,
    finding_of,
    nothing_removed,
    speeds,
    statements,
    summary_parts,
)
from attnrx.show.reports.numbers import MISSING, fixed, number, quantity, typeset, with_unit

SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def verdict(content: ReportContent) -> Section:
    evidence = content.measured
    data = {
        "state": evidence.outcome,
        "statements": statements(evidence),
        "answer": [
            tuple(map(typeset, (part.amount, part.conditions, part.interval, part.factors)))
            for part in summary_parts(evidence)
        ],
        "sentence": sentence(content.evidence),
        "after": "unchanged" if nothing_removed(evidence) else "smaller",
        "rows": list(_rows(content)),
        "times": _times(evidence),
        "conditions": next((speed.conditions for speed in speeds(evidence)), ""),
        "notes": _notes(content),
        "failures": list(evidence.failures),
        "undecided": list(evidence.undecided),
    }
    return Section("verdict", "Result", data)


def sentence(evidence: Evidence | None) -> str:
    """Returns the outcomes of all claims in one sentence."""
    if evidence is None:
        return "Nothing was verified: this report holds no evidence."
    return f"{evidence.counted[0].upper()}{evidence.counted[1:]}."


def _notes(content: ReportContent) -> list[str]:
    """Returns the notes on the images recorded by the parts of the content, without duplicates."""
    parts = content, content.diagnosis, content.prescription, content.evidence
    notes = (note for part in parts if part is not None for note in part.about.get("notes") or ())
    return list(dict.fromkeys(map(str, notes)))


def _times(evidence: Evidence) -> list[tuple[str, float, str]]:
    """Returns the times of the original, of the unchanged model in the runtime of this one, and of this model: name,
    share of the original's, and text; empty where the unchanged model was not timed.
    """
    speed = next(iter(speeds(evidence)), None)
    if speed is None or speed.reference_seconds is None or speed.by_runtime is None or nothing_removed(evidence):
        return []
    runtime = speed.runtime.partition(" in ")[0]
    shares = {speed.baseline: 1.0, f"unchanged, by {runtime}": 1 / speed.by_runtime, "smaller": 1 / speed.value}
    return [(name, share, f"{number(1000 * share * speed.reference_seconds)} ms") for name, share in shares.items()]


def _rows(content: ReportContent) -> Iterator[tuple[str, ...]]:
    """Yields latency, accuracy, parameters and MACs, each if it was measured: name, before, after and change."""
    for speed in speeds(content.measured)[:1]:
        # All from the speed of the sentence: the ratio of the two median times differs from the median of their ratios
        # where the load of the machine changes between rounds.
        before = speed.reference_seconds
        times = (
            [MISSING] * 2
            if before is None
            else [f"{number(1000 * each)} ms" for each in (before, before / speed.value)]
        )
        yield f"Latency at batch {speed.batch}", *times, f"{speed.text} {speed.interval}".strip()
    if (both := accuracies(content.measured)) is not None:
        measure, change = str(both[1].details.get("measure", TOP_1)), finding_of(content.measured, "accuracy change")
        texts = [quantity(each.value, "%", each.low, each.high) for each in both]
        points = "" if change is None else quantity(change.value, change.unit, change.low, change.high, signed=True)
        yield measure[0].upper() + measure[1:], *texts, points
    for unit, title in (("params", "Parameters"), ("macs", "MACs of one image")):
        if (totals := cost_totals(content.measured, unit)) is not None:
            old, new = totals
            # One unit for both models, so that the numbers can be compared without converting.
            scale, prefix = next(((scale, prefix) for scale, prefix in SCALES if max(totals) >= scale), (1, ""))
            change = (
                "unchanged" if old == new else with_unit(fixed(100 * (new - old) / max(old, 1), 1, signed=True), "%")
            )
            yield title, number(old / scale) + prefix, number(new / scale) + prefix, change
