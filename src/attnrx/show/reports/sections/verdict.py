"""The result: one sentence, the outcomes of the claims, and every measured quantity before and after."""

from collections.abc import Iterator
from dataclasses import dataclass

from attnrx.nouns.evidence import Evidence
from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.headline import (
    TOP_1,
    MeasuredSpeed,
    accuracies,
    cost_totals,
    nothing_removed,
    speeds,
    statements,
    summary_parts,
)
from attnrx.show.reports.numbers import fixed, number, typeset, with_unit

SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Bar:
    """The bar of one model: its amount as text, and its length and interval as shares of the track."""

    amount: str
    share: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class BarPair:
    """One quantity of the original and of the candidate, and for the latency of the unchanged model in its runtime.

    `after` is named `name`, "smaller" unless nothing was removed.
    """

    title: str
    note: str
    before: Bar
    after: Bar
    name: str = "smaller"
    between: tuple[str, Bar] | None = None

    @property
    def bars(self) -> list[tuple[str, str, Bar]]:
        """The bars from top to bottom: name, kind in the style sheet, and bar."""
        between = [] if self.between is None else [(self.between[0], "before", self.between[1])]
        return [("original", "before", self.before), *between, (self.name, "after", self.after)]


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
        "bars": list(_bars(content)),
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


def _bars(content: ReportContent) -> Iterator[BarPair]:
    """Yields latency, accuracy, parameters and MACs, each if it was measured."""
    name = "unchanged" if nothing_removed(content.measured) else "smaller"
    if measured := speeds(content.measured):
        yield _latency_bars(measured[0], name)
    if (both_accuracies := accuracies(content.measured)) is not None:
        measure = str(both_accuracies[1].details.get("measure", TOP_1))
        before, after = (
            Bar(fixed(each.value, 1), each.value / 100, _share(each.low), _share(each.high)) for each in both_accuracies
        )
        yield BarPair(measure[0].upper() + measure[1:], "%", before, after, name)
    for unit, title in (("params", "Parameters"), ("macs", "MACs of one image")):
        if (totals := cost_totals(content.measured, unit)) is not None:
            old, new = totals
            # One unit for both models, so that the numbers can be compared without converting.
            scale, prefix = next(((scale, prefix) for scale, prefix in SCALES if max(totals) >= scale), (1, ""))
            saved = 100 * (new - old) / old if old else 0.0
            note = "unchanged" if old == new else with_unit(fixed(saved, 1, signed=True), "%")
            longest = max(old, new, 1)
            before, after = (Bar(number(total / scale) + prefix, total / longest) for total in totals)
            yield BarPair(title, note, before, after, name)


def _latency_bars(speed: MeasuredSpeed, name: str) -> BarPair:
    """Returns the latencies as shares of the baseline's, all from the speeds of the sentence: the ratio of the two
    median times differs from the median of their ratios where the load of the machine changes between rounds.
    """
    unchanged = speed.by_runtime if name != "unchanged" else None
    # The longest bar fills the track: the baseline's, or that of a model that is slower.
    longest = max(1.0, 1 / speed.value, 0.0 if unchanged is None else 1 / unchanged)
    # A latency is 1 / speed, so the higher end of the speed is the lower end of the bar.
    ends = [None if end is None else 1 / end / longest for end in (speed.high, speed.low)]
    note = f"% of {speed.baseline}"
    if speed.reference_seconds is not None:
        note += f", {number(1000 * speed.reference_seconds)} ms at batch {speed.batch}"
    between = None
    if unchanged is not None:
        between = "kernels alone", Bar(number(100 / unchanged), 1 / unchanged / longest)
    after = Bar(number(100 / speed.value), 1 / speed.value / longest, *ends)
    return BarPair("Latency", note, Bar("100", 1 / longest), after, name, between)


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
