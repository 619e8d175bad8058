"""Texts and tables about a result: a summary, a before-and-after table, findings, costs, and a folder's files."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.checks.costs import KERNELS
from attnrx.show.reports.numbers import MISSING, TIMES, fixed, interval, known, number, quantity, typeset, with_unit
from attnrx.support.errors import CheckpointError
from attnrx.support.storage import read_json
from attnrx.vit.costs import factors_text, speed_text
from attnrx.vit.outputs import KINDS

Record = Mapping[str, Any]
TOP_1 = "top-1 accuracy"  # the measure of findings on accuracy that do not name their measure
SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
NAMES = {
    "query_key": "query and key",
    "value_output": "value and output",
    "read_out": f"attention {TIMES} values",
    "mlp": "MLP",
}
UNITS = ("params", "macs")
NOTHING_REMOVED = "NOTHING WAS REMOVED"


class SummaryPart(NamedTuple):
    """One part of the summary sentence: an amount with its conditions, interval and factors. Missing texts are ""."""

    amount: str
    conditions: str = ""
    interval: str = ""
    factors: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, self))


class MeasuredSpeed:
    """The speed relative to a baseline (above 1 is faster), with its interval and the conditions of its measurement.

    `record` is the record of a `LatencyComparison`. `by_runtime` and `by_compression` are the two factors of the speed,
    or None if the unchanged model was not timed in the same `runtime`. `reference_seconds` is the baseline's median
    time, or None if it was not recorded. `where` is a phrase for the summary sentence with the number of CPU threads or
    the name of the GPU.
    """

    def __init__(self, record: Record):
        faster, settings, torch = record["faster"], record.get("conditions") or {}, record.get("torch_version")
        self.record, self.batch = record, record["batch"]
        self.value, self.low, self.high = faster["value"], known(faster.get("low")), known(faster.get("high"))
        self.baseline, self.runtime = record.get("baseline", "the original"), record.get("runtime", KERNELS)
        self.gained_by, self.change = record.get("gained_by", self.runtime), record.get("change", "compression")
        self.reference_seconds = (record.get("reference") or {}).get("median")
        self.by_runtime, self.by_compression = (
            (record.get(name) or {}).get("value") for name in ("by_runtime", "by_compression")
        )
        threads, graphs = record.get("threads"), "CUDA graphs" if settings.get("graphs") else None
        used = None if threads is None else f"{threads} thread{'s' * (threads != 1)}"
        on_cuda = str(settings.get("device", "cpu")).startswith("cuda")
        self.where = " as ".join(filter(None, (record.get("hardware"), graphs))) if on_cuda else used or ""
        parts = [
            f"batch {record['batch']}",
            None if on_cuda else used,
            settings.get("precision"),
            record.get("runtime") or (torch and f"PyTorch {torch}"),
            "compiled" if settings.get("compiled") else None,
            graphs,
            record.get("hardware"),
        ]
        self.conditions = ", ".join(part for part in parts if part)

    @property
    def text(self) -> str:
        return speed_text(self.value)

    @property
    def interval(self) -> str:
        return "" if self.low is None or self.high is None else f"[{self.low:.2f}, {self.high:.2f}]"

    @property
    def factors(self) -> str:
        """The speed's factors, e.g. "= 2.08x by attnrx's kernels x 1.06x by compression", or "" without factors."""
        if self.by_runtime is None or self.by_compression is None:
            return ""
        return f"= {factors_text(self.by_runtime, self.by_compression, self.gained_by, self.change)}"


def summary_of(evidence: Evidence) -> str:
    """Returns one sentence with the speed and its factors, the accuracy change, costs, divergence and image count.

    Warnings come before this sentence, e.g. that nothing was removed.
    """
    sentence = ", ".join(str(part) for part in summary_parts(evidence))
    return " ".join((*(f"{each}." for each in statements(evidence)), sentence))


def compared_to(speed: float, baseline: str) -> str:
    """Returns how a speed's text goes on, e.g. "than the original in timm" after "1.62x faster"."""
    return f"{'than' if speed >= 1 else 'of'} {baseline}"


def nothing_removed(evidence: Evidence) -> bool:
    """Whether the candidate is the unchanged model, as a module or as a file."""
    return evidence.about.get("nothing_removed") is True


def statements(evidence: Evidence) -> list[str]:
    """Returns warnings that a reader must see before the numbers, e.g. that nothing was removed."""
    warnings = list(evidence.warnings)
    if not nothing_removed(evidence) or any(NOTHING_REMOVED in each for each in warnings):
        return warnings
    measured = speeds(evidence)
    if not measured or evidence.of("files"):  # findings on files show the gain from the runtime themselves
        return [*warnings, f"{NOTHING_REMOVED}: this is the unchanged model"]
    runtime = measured[0].runtime
    alone = f"{NOTHING_REMOVED}: this is the unchanged model, and its speed is that of {runtime} alone"
    return [*warnings, f"{alone}; an exported file such as model.onnx gains nothing" if runtime == KERNELS else alone]


def summary_parts(evidence: Evidence) -> list[SummaryPart]:
    """Returns the parts of the summary sentence, one for every quantity that was measured."""
    parts = []
    for speed in speeds(evidence)[:1]:  # the sentence leaves out speeds at other batch sizes, to stay short
        where = f" on {speed.where}" if speed.where else ""
        setting = f"{compared_to(speed.value, speed.baseline)} at batch {speed.batch}{where}"
        parts.append(SummaryPart(speed.text, setting, speed.interval, speed.factors))
    change = finding_of(evidence, "accuracy change")
    if change is not None and known(change.value) is not None:
        measure = str(change.details.get("measure", TOP_1))
        amount = f"{_signed(change.value)} points of {'accuracy' if measure == TOP_1 else measure}"
        interval = ""
        if change.low is not None and change.high is not None:
            interval = f"[{_signed(change.low)}, {_signed(change.high)}]"
        parts.append(SummaryPart(amount, interval=interval))
    metric, after = finding_of(evidence, "metric change"), finding_of(evidence, "metric", "candidate")
    if metric is not None and after is not None and metric.low is not None and metric.high is not None:
        name, interval = metric.details["measure"], f"[{metric.low:+.3f}, {metric.high:+.3f}]"
        parts.append(SummaryPart(f"{name} {after.value:.3f}, a change of {metric.value:+.3f}", interval=interval))
    for unit, name in (("macs", "MACs"), ("params", "parameters")):
        before, after = cost_totals(evidence, unit) or (0, 0)
        saved = 100 * (before - after) / before if before else 0.0
        if abs(saved) >= 0.5:  # a smaller number would be rounded to 0 %
            parts.append(SummaryPart(f"{abs(saved):.0f} % {'fewer' if saved > 0 else 'more'} {name}"))
    agreement, divergence = finding_of(evidence, "agreement"), finding_of(evidence, "divergence")
    in_nats = divergence is not None and divergence.unit == "nats"
    kind = KINDS.get(str(evidence.about.get("outputs", "logits" if in_nats else "embedding")), KINDS["logits"])
    if agreement is not None and agreement.n and known(agreement.value) is not None:
        unchanged = round(agreement.n * agreement.value / 100)
        parts.append(SummaryPart(f"{unchanged:,} of {agreement.n:,} {kind.answers} unchanged"))
    if divergence is not None and known(divergence.value) is not None:
        name = evidence.about.get("divergence") or kind.columns[1]
        decimals = ".3g" if "divergence" in evidence.about else ".3f"  # a user's divergence has no known scale
        parts.append(SummaryPart(f"{name} {divergence.value:{decimals}}"))
    recalls = [each for each in evidence.of("index") if each.details.get("quantity") == "index recall"]
    for recall in recalls[-1:]:  # the recall of the most neighbours
        neighbours = "neighbour is" if recall.details["k"] == 1 else f"{recall.details['k']} neighbours are"
        found = (
            f"{recall.value:.1f} % of the nearest {neighbours} found in the old index of {recall.details['index']:,}"
        )
        interval = "" if recall.low is None or recall.high is None else f"[{recall.low:.1f}, {recall.high:.1f}]"
        parts.append(SummaryPart(found, interval=interval))
    images = evidence.about.get("images")
    if isinstance(images, int) and parts:
        parts.append(SummaryPart(f"{images:,} images"))
    return parts


def _signed(value: float) -> str:
    # A value that rounds to zero has no sign.
    return f"{value:+.1f}" if round(value, 1) else "0.0"


def finding_of(evidence: Evidence, quantity: str, model: str | None = None) -> Finding | None:
    """Returns the first finding on a quantity (of this `model`, if you pass one), or None if there is none."""
    for finding in evidence.findings:
        details = finding.details
        # Findings on corrupted images have the same quantities. They are skipped, because the images were changed.
        single = not {"corruption", "severity"} <= details.keys()
        if single and details.get("quantity") == quantity and model in (None, details.get("model")):
            return finding
    return None


def speeds(evidence: Evidence) -> list[MeasuredSpeed]:
    """Returns the measured speeds. If a plan promised a speed, the speed that was measured to check it comes first."""
    promised = finding_of(evidence, "promised speed")
    # The promised speed was measured on the plan's hardware, with its batch and threads, so it is the headline.
    first = [] if promised is None or "measured" not in promised.details else [promised.details["measured"]]
    others = [each.details for each in evidence.of("latency") if each.details.get("quantity") == "speed"]
    return [MeasuredSpeed(record) for record in first + [record for record in others if "faster" in record]]


def cost_records(evidence: Evidence) -> tuple[Record, Record] | None:
    """Returns the costs of each part of the original and of the smaller model, or None if they were not measured."""
    found = [finding_of(evidence, "counted costs", model) for model in ("reference", "candidate")]
    before, after = (None if each is None else each.details.get("parts") for each in found)
    return (before, after) if isinstance(before, Mapping) and isinstance(after, Mapping) else None


def cost_totals(evidence: Evidence, unit: str) -> tuple[int, int] | None:
    """Returns the total "params" or "macs" of the original and of the smaller model, or None if not measured."""
    records = cost_records(evidence)
    if records is not None:
        before, after = (sum(part[unit] for part in record.values()) for record in records)
        return before, after
    finding = finding_of(evidence, {"params": "parameters", "macs": "MACs"}[unit])
    return None if finding is None else (finding.details["reference"], finding.details["candidate"])


def verdict(found: Evidence | None, records: Mapping[str, Record]) -> dict[str, Any]:
    """Returns the data of the report's first section: the summary, claim outcomes, and a before-and-after table.

    The section also shows the notes in `records`, which are the records of all parts of the report.
    """
    evidence = found or Evidence((), {})
    notes = [str(note) for record in records.values() for note in record.get("notes") or ()]
    return {
        "state": evidence.outcome,
        "statements": statements(evidence),
        "answer": [tuple(map(typeset, part)) for part in summary_parts(evidence)],
        "sentence": sentence(found),
        "after": "unchanged" if nothing_removed(evidence) else "smaller",
        "rows": list(_rows(evidence)),
        "times": _times(evidence),
        "files": measured_files(evidence),
        "file_columns": FILE_COLUMNS,
        "deployed": deployed(evidence),
        "conditions": next((speed.conditions for speed in speeds(evidence)), ""),
        "notes": list(dict.fromkeys(notes)),
        "failures": list(evidence.failures),
        "undecided": list(evidence.undecided),
    }


def deployed(evidence: Evidence) -> tuple[str, str]:
    """Returns the file to deploy, and a sentence about it. Both are "" if the evidence is not from `shrink`."""
    name = evidence.about.get("file")
    if isinstance(name, str):
        return name, "the speed, the accuracy and the outputs on this page are this file's."
    if "target" not in evidence.about:
        return "", ""
    opened_by = "its own library" if evidence.about.get("portable") else "attnrx.load"
    return "model.safetensors", f"open its folder with {opened_by}. The numbers on this page are of PyTorch."


def sentence(evidence: Evidence | None) -> str:
    """Returns the outcomes of all claims in one sentence."""
    if evidence is None:
        return "Nothing was verified: this report holds no evidence."
    return f"{evidence.counted[0].upper()}{evidence.counted[1:]}."


def _times(evidence: Evidence) -> list[tuple[str, float, str]]:
    """Returns the times of the baseline, the unchanged model in the smaller model's runtime, and the smaller model.

    Each entry has a name, the time as a share of the baseline's time, and the time in milliseconds as text. If the
    unchanged model was not timed, the list is empty.
    """
    speed = next(iter(speeds(evidence)), None)
    if speed is None or speed.reference_seconds is None or speed.by_runtime is None or nothing_removed(evidence):
        return []
    unchanged = f"unchanged, by {speed.gained_by}"
    shares = {speed.baseline: 1.0, unchanged: 1 / speed.by_runtime, "smaller": 1 / speed.value}
    return [(name, share, f"{number(1000 * share * speed.reference_seconds)} ms") for name, share in shares.items()]


def _rows(evidence: Evidence) -> Iterator[tuple[str, ...]]:
    """Yields a row (name, before, after, change) for latency, accuracy, parameters and MACs, if they were measured."""
    for speed in speeds(evidence)[:1]:
        # The time "after" is the baseline's median time, divided by the speed in the summary sentence. That speed is
        # the median of the ratios in each round. The ratio of the two median times would differ from it if the
        # machine's load changed between rounds.
        before, times = speed.reference_seconds, [MISSING] * 2
        if before is not None:
            times = [f"{number(1000 * each)} ms" for each in (before, before / speed.value)]
        yield f"Latency at batch {speed.batch}", *times, f"{speed.text} {speed.interval}".strip()
    both = [finding_of(evidence, "accuracy", model) for model in ("reference", "candidate")]
    found = [each for each in both if each is not None and known(each.value) is not None]
    if len(found) == len(both):
        measure, change = str(found[1].details.get("measure", TOP_1)), finding_of(evidence, "accuracy change")
        texts = [quantity(each.value, "%", each.low, each.high) for each in found]
        points = "" if change is None else quantity(change.value, change.unit, change.low, change.high, signed=True)
        yield measure[0].upper() + measure[1:], *texts, points
    for unit, title in (("params", "Parameters"), ("macs", "MACs of one image")):
        if (totals := cost_totals(evidence, unit)) is not None:
            old, new = totals
            # Both numbers get the same prefix, so that a reader can compare them.
            scale, prefix = next(((scale, prefix) for scale, prefix in SCALES if max(totals) >= scale), (1, ""))
            change = (
                "unchanged" if old == new else with_unit(fixed(100 * (new - old) / max(old, 1), 1, signed=True), "%")
            )
            yield title, number(old / scale) + prefix, number(new / scale) + prefix, change


FILE_COLUMNS = ("file", "speed", "unchanged answers", "divergence", "size")


def measured_files(evidence: Evidence) -> tuple[str, list[tuple[str, ...]]]:
    """Returns the title and the rows of the table that compares exported files.

    The rows are files of the unchanged model, written by the vendor's tool and by attnrx, and the file of the smaller
    model. All files were timed in one run. If there was no such run, the table has no rows.
    """
    rows, title = [], ""
    for finding in evidence.of("files"):
        details = finding.details
        divergence, agreement = details["divergence"], details["agreement"]
        rows.append(
            (
                details["title"],
                f"{finding.value:.2f}x {interval(finding.low, finding.high)}".strip(),
                MISSING
                if agreement is None
                else quantity(agreement["value"], "%", agreement["low"], agreement["high"]),
                quantity(divergence["value"], divergence["unit"], divergence["low"], divergence["high"]),
                f"{details['bytes'] / 1e6:.1f} MB",
            )
        )
        threads = f"{details['threads']} thread{'s' * (details['threads'] != 1)}"
        images = f", outputs of {details['images']:,} images" if "images" in details else ""  # added later
        title = f"Files in one run, batch {details['batch']}, {threads}, {details['hardware']}{images}"
    return title, rows


def findings(evidence: Evidence) -> dict[str, Any]:
    """Returns the data of the evidence table, with findings grouped by check."""
    shown, elsewhere = by_severity(evidence)
    groups: dict[str, list[Finding]] = {}
    for finding in shown:
        groups.setdefault(finding.check.replace("_", " "), []).append(finding)
    summary = f"{len(shown)} findings; {evidence.summary}"
    return {"groups": groups, "elsewhere": len(elsewhere), "summary": summary}


def by_severity(evidence: Evidence) -> tuple[list[Finding], list[Finding]]:
    """Returns two lists: the findings for the main table, and the findings on single corruptions and severities."""
    separated: tuple[list[Finding], list[Finding]] = [], []
    for finding in evidence.findings:
        # False and True are the indices of the two lists.
        separated[{"corruption", "severity"} <= finding.details.keys()].append(finding)
    return separated


def costs(evidence: Evidence) -> dict[str, Any] | None:
    """Returns the data of the tables of costs and latency, or None if neither was measured."""
    records, latency = cost_records(evidence), speeds(evidence)
    if records is None and not latency:
        return None
    parts = [] if records is None else _parts(*records)
    kinds = ["Parameters and MACs by part"] * bool(parts) + ["Latency in milliseconds"] * bool(latency)
    return {"parts": parts, "latency": latency, "summary": "; ".join(kinds)}


def _parts(before: Record, after: Record) -> list[dict[str, Any]]:
    """Returns a row for every part that has costs before or after, and a row for the whole model."""
    zero = dict.fromkeys(UNITS, 0)
    # The rows include parts of either model, because compression may add parts, e.g. token predictors.
    pairs = {name: (before.get(name, zero), after.get(name, zero)) for name in (*before, *after)}
    shown = [(name, *pair) for name, pair in pairs.items() if any(part[unit] for part in pair for unit in UNITS)]
    total_before, total_after = (
        {unit: sum(part[unit] for part in record.values()) for unit in UNITS} for record in (before, after)
    )
    rows = []
    for name, old, new in (*shown, ("whole model", total_before, total_after)):
        cells = []
        for was, now in ((old[unit], new[unit]) for unit in UNITS):
            changed = was and now != was
            change = with_unit(fixed(100 * (now - was) / was, 2, signed=True), "%") if changed else MISSING
            cells += [number(was), number(now), change]
        # The share of the original's MACs sets the length of the row's bar. Four digits keep the page small.
        share = round(old["macs"] / max(total_before["macs"], 1), 4)
        title = NAMES.get(name, name.replace("_", " "))
        rows.append({"name": title, "cells": cells, "share": share, "total": old is total_before})
    return rows


def written_files(folder: Path | str) -> list[dict[str, Any]]:
    """Returns a record for every model file in a folder that `Shrunk.save` wrote.

    A record has these entries:

    - `bytes` is the size of the file together with the files that belong to it, e.g. external weights.
    - `faster` is the file's speed relative to the `baseline`, the name of another model or file, at the `batch` size.
      All three are None if the speed was not measured.
    - `accuracy` is the file's accuracy in %, or None if it was not measured. The accuracy of model.onnx is never
      measured, because this file returns the same logits as the model.
    - `problem` says why the evidence of the file cannot be read. The record then has no numbers.
    """
    folder = Path(folder)
    main, judged = folder / "evidence.json", None  # the folder's evidence, and the file that was verified in it
    with suppress(CheckpointError, OSError):
        judged = Evidence.load(main).about.get("file")
    rows = [_record(folder, "model.safetensors", ("model.safetensors",), main, {})]
    if judged is not None:
        rows[0] |= {"faster": None, "baseline": None, "batch": None, "accuracy": None}
    for facts_path in sorted(folder.glob("model*.json")):
        path = facts_path.with_suffix("")
        if path.suffix and path.is_file():
            facts = read_json(facts_path)
            names = tuple(facts.get("files") or (path.name,))
            evidence = main if path.name == judged else folder / f"{evidence_stem(path.stem)}.json"
            rows.append(_record(folder, path.name, names, evidence, facts))
    return [row for row in rows if row["bytes"]]


def evidence_stem(stem: str) -> str:
    """Returns the name, without suffix, of an exported file's evidence, e.g. "evidence-onnx" if `stem` is "model"."""
    return f"evidence{stem.removeprefix('model') or '-onnx'}"


def files_table(folder: Path | str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]:
    """Returns the columns, the rows and the title of a table of the model files in a folder, as texts."""
    rows = []
    for row in written_files(folder):
        value, baseline = row["faster"], row["baseline"]
        speed = "not measured" if value is None else f"{speed_text(value)} {compared_to(value, baseline)}"
        unknown = "not measured" if row["file"] == "model.safetensors" else "as the model"
        accuracy = unknown if row["accuracy"] is None else f"{row['accuracy']:.1f} %"
        if row["problem"] is not None:
            speed, accuracy = "unknown: its evidence is damaged", "unknown"
        rows.append((row["file"], f"{row['bytes'] / 1e6:.1f} MB", speed, accuracy))
    return ("file", "size", "speed", "accuracy"), tuple(rows), "files"


def _record(
    folder: Path, name: str, names: tuple[str, ...], evidence_path: Path, facts: Mapping[str, Any]
) -> dict[str, Any]:
    size = sum((folder / each).stat().st_size for each in names if (folder / each).is_file())
    evidence = Evidence((), {})
    problem = None
    if evidence_path.is_file():
        try:
            evidence = Evidence.load(evidence_path)
        except CheckpointError as error:  # this file is listed without numbers, so that other files are still listed
            problem = str(error)
    accuracy, measured = finding_of(evidence, "accuracy", "candidate"), speeds(evidence)[:1]
    if not evidence.findings and facts.get("speeds"):
        measured = [MeasuredSpeed(facts["speeds"][-1])]
    speed = measured[0] if measured else None
    return {
        "file": name,
        "bytes": size,
        "faster": None if speed is None else speed.value,
        "baseline": None if speed is None else speed.baseline,
        "batch": None if speed is None else speed.batch,
        "accuracy": None if accuracy is None else accuracy.value,
        "problem": problem,
    }
