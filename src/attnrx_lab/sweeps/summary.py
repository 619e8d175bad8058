"""The numbers of a sweep: from the records of its jobs, averaged over the seeds."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from attnrx.checks.statistics import t_interval
from attnrx.reports.numbers import MISSING, interval, quantity
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
            str(max(mean.runs for mean in found.values())),
            *(str(found.get(metric, MISSING)) for metric in metrics),
        )
        for labels, found in lines.items()
    )
    return (*axes, "seeds", *metrics), tuple(rows)


def over_seeds(results: Sequence[Result]) -> tuple[Mean, ...]:
    """Groups numbers that differ in their seed alone."""
    groups: dict[tuple[str, tuple[tuple[str, Label], ...]], list[Result]] = defaultdict(list)
    for result in results:
        labels = tuple(sorted((name, value) for name, value in result.labels.items() if name != SEED))
        groups[result.metric, labels].append(result)
    return tuple(_mean(own) for own in groups.values())


def _mean(own: Sequence[Result]) -> Mean:
    first = own[0]
    labels = {name: value for name, value in first.labels.items() if name != SEED}
    measured = [result for result in own if result.value is not None]
    values = _by_seed(measured, "value")
    if len(set(values)) > 1:  # equal values have no spread: a t interval of zero width would hide the measurement's
        over = t_interval(values)
        return Mean(first.metric, first.unit, labels, fmean(values), over.low, over.high, len(values), stdev(values))
    value, low, high = (next(iter(_by_seed(measured, name)), None) for name in ("value", "low", "high"))
    return Mean(first.metric, first.unit, labels, value, low, high, len(values))


def _by_seed(own: Sequence[Result], name: str) -> list[float]:
    """Returns one value per seed: several jobs of one seed may measure the same model, such as the original."""
    found: dict[Label, list[float]] = defaultdict(list)
    for result in own:
        if (value := getattr(result, name)) is not None:
            found[result.labels.get(SEED)].append(value)
    return [fmean(values) for values in found.values()]


TRIAL = {"accuracy": "%", "change": "points", "agreement": "%", "divergence": "nats"}
ORIGINAL = "original"  # the uncompressed model


def rows_of(record: Mapping[str, Any]) -> tuple[Result, ...]:
    """Returns the numbers of a command's record."""
    return tuple(READERS.get(record.get("kind", ""), _anything)(record))


def _comparison(record: Mapping[str, Any]) -> Iterator[Result]:
    yield _estimate("accuracy", record["accuracy"], "%", record["about"].get("images"), {"method": ORIGINAL})
    for trial in record["trials"]:
        labels = _labels(trial, "method", "share", "target")
        for metric, unit in TRIAL.items():
            yield _estimate(metric, trial[metric], unit, trial["n"], labels)
        for metric in ("macs_share", "params_share"):
            yield Result(metric, trial[metric], labels=labels)
        yield Result("seconds", trial["seconds"], unit="s", labels=labels)


def _speeds(record: Mapping[str, Any]) -> Iterator[Result]:
    for speed in record["speeds"]:
        latency = speed["latency"]
        labels = {**_labels(speed, "method", "share"), **_labels(latency, "batch", "threads")}
        value, low, high = speed["speedup"]
        yield Result("speedup", value, low, high, latency["rounds"], "x", labels)
        yield _estimate("time_ratio", latency["ratio"], "x", latency["rounds"], labels)
        yield Result("macs_share", speed["macs_share"], labels=labels)


def _evidence(record: Mapping[str, Any]) -> Iterator[Result]:
    yield Result("fails", float(record["outcome"] == "fails"))
    for finding in record["findings"]:
        yield _estimate(finding["claim"], finding, finding["unit"], finding["n"], {"check": finding["check"]})


def _table(record: Mapping[str, Any]) -> Iterator[Result]:
    for cell in record["cells"]:
        yield _estimate(cell["column"], cell, "", len(cell["seeds"]), {"row": cell["row"]})


def _anything(record: Mapping[str, Any], prefix: str = "") -> Iterator[Result]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _anything(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float):
            yield Result(f"{prefix}{name}", float(value))


def _estimate(metric: str, entry: Mapping[str, Any], unit: str, n: int | None, labels: Mapping[str, Label]) -> Result:
    return Result(metric, entry["value"], entry.get("low"), entry.get("high"), n, unit, labels)


def _labels(entry: Mapping[str, Any], *names: str) -> dict[str, Label]:
    return {name: entry[name] for name in names if entry.get(name) is not None}


READERS: dict[str, Callable[[Mapping[str, Any]], Iterator[Result]]] = {
    "attnrx comparison": _comparison,
    "attnrx speeds": _speeds,
    "attnrx evidence": _evidence,
    "attnrx reproduced table": _table,
}
