"""The numbers of a sweep: from the records of its jobs, averaged over the seeds."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from attnrx.show.checks.statistics import t_interval
from attnrx.show.reports.numbers import MISSING, interval, quantity
from attnrx_lab.sweeps.jobs import Label

SEED = "seed"


@dataclass(frozen=True)
class Result:
    """One number of a job, with its 95 % interval and count where they are known."""

    metric: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    unit: str = ""
    labels: Mapping[str, Label] = field(default_factory=dict)


@dataclass(frozen=True)
class Mean:
    """One number over `runs` seeds: mean, standard deviation and 95 % t interval.

    For a single seed, and if all seeds agree, the interval is that of the measurement.
    """

    metric: str
    unit: str
    labels: Mapping[str, Label]
    value: float | None
    low: float | None
    high: float | None
    runs: int
    deviation: float | None = None

    def __str__(self) -> str:
        return f"{quantity(self.value, self.unit, self.low, self.high)} {interval(self.low, self.high)}".strip()


def means_table(means: Sequence[Mean]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Returns the names of all columns, and one line of texts for every combination of labels."""
    axes = tuple(dict.fromkeys(name for mean in means for name in mean.labels))
    metrics = tuple(dict.fromkeys(mean.metric for mean in means))
    lines: dict[tuple[Label, ...], dict[str, Mean]] = defaultdict(dict)
    for mean in means:
        lines[tuple(mean.labels.get(name) for name in axes)][mean.metric] = mean
    rows = (
        (
            *(MISSING if label is None else str(label) for label in labels),
            str(max(mean.runs for mean in means_of_metrics.values())),
            *(str(means_of_metrics.get(metric, MISSING)) for metric in metrics),
        )
        for labels, means_of_metrics in lines.items()
    )
    return (*axes, "seeds", *metrics), tuple(rows)


def over_seeds(results: Sequence[Result]) -> tuple[Mean, ...]:
    """Groups numbers that differ in their seed alone."""
    groups: dict[tuple[str, tuple[tuple[str, Label], ...]], list[Result]] = defaultdict(list)
    for result in results:
        labels = tuple(sorted((name, value) for name, value in result.labels.items() if name != SEED))
        groups[result.metric, labels].append(result)
    return tuple(_mean(group) for group in groups.values())


def _mean(results: Sequence[Result]) -> Mean:
    first = results[0]
    labels = {name: value for name, value in first.labels.items() if name != SEED}
    measured = [result for result in results if result.value is not None]
    values = _by_seed(measured, "value")
    if len(set(values)) > 1:  # equal values have no spread: a t interval of zero width would hide the measurement's
        over = t_interval(values)
        return Mean(first.metric, first.unit, labels, fmean(values), over.low, over.high, len(values), stdev(values))
    value, low, high = (next(iter(_by_seed(measured, name)), None) for name in ("value", "low", "high"))
    return Mean(first.metric, first.unit, labels, value, low, high, len(values))


def _by_seed(results: Sequence[Result], name: str) -> list[float]:
    """Returns one value per seed: several jobs of one seed may measure the same model, such as the original."""
    values_of_seed: dict[Label, list[float]] = defaultdict(list)
    for result in results:
        if (value := getattr(result, name)) is not None:
            values_of_seed[result.labels.get(SEED)].append(value)
    return [fmean(values) for values in values_of_seed.values()]


# By kind of record: the list of its entries, the labels of an entry, and the metrics of an entry with their units. An
# entry without metrics is a number itself, and is named by its claim or its column.
RECORDS: Mapping[str, tuple[str, tuple[str, ...], Mapping[str, str]]] = {
    "attnrx comparison": (
        "trials",
        ("method", "share", "target"),
        {"accuracy": "%", "change": "points", "agreement": "%", "divergence": "nats", "macs_share": "", "seconds": "s"},
    ),
    "attnrx speeds": ("speeds", ("method", "share", "batch", "threads"), {"speedup": "x", "macs_share": ""}),
    "attnrx evidence": ("findings", ("check",), {}),
    "attnrx reproduced table": ("cells", ("row",), {}),
}


def rows_of(record: Mapping[str, Any]) -> tuple[Result, ...]:
    """Returns the numbers of a command's record."""
    if record.get("kind") not in RECORDS:
        return tuple(_flat(record))
    entries, names, metrics = RECORDS[record["kind"]]
    rows = []
    for entry in record[entries]:
        # Batch, threads and rounds of a speed are those of its latency.
        facts = {**entry.get("latency", {}), **entry}
        labels = {name: facts[name] for name in names if facts.get(name) is not None}
        n = facts.get("n", facts.get("rounds"))
        if not metrics:
            rows.append(_result(facts.get("claim") or facts["column"], facts, n, facts.get("unit", ""), labels))
        rows += [_result(metric, facts[metric], n, unit, labels) for metric, unit in metrics.items()]
    return tuple(rows)


def of_job(result: Result, labels: Mapping[str, Label]) -> Result:
    """Returns a number with the labels of its job, too.

    An axis may have the name of a label of the record, such as method or check. Both are kept, or jobs that differ in
    that axis alone would be averaged like seeds.
    """
    own = {
        f"{name} in the record" if name in labels else name: value
        for name, value in result.labels.items()
        if name not in labels or labels[name] != value
    }
    return replace(result, labels={**labels, **own})


def _result(metric: str, number: Any, n: int | None, unit: str, labels: Mapping[str, Label]) -> Result:
    """Returns a number, an estimate, or a list of the value and the ends of its interval."""
    if isinstance(number, Mapping):
        number = [number[name] for name in ("value", "low", "high")]
    value, low, high = number if isinstance(number, list | tuple) else (number, None, None)
    return Result(metric, value, low, high, n, unit, labels)


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[Result]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float):
            yield Result(f"{prefix}{name}", float(value))
