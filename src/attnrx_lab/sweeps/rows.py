"""Named numbers from the record of a command, which a storage keeps with the record itself.

record                    numbers                                             labels besides those of the job
attnrx comparison         accuracy, change, agreement, divergence,            method, share (and target)
                          macs_share, params_share, seconds
attnrx speeds             speedup, time_ratio, macs_share                     method, share, batch, threads
attnrx evidence           every finding                                       check
attnrx reproduced table   every cell                                          row
anything else             every number in it, e.g. accuracy.test              -
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attnrx_lab.sweeps.jobs import Label, Result

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
