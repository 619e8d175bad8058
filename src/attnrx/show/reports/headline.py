"""The result in a few measured numbers of evidence: one sentence for consoles and pages, and what is behind it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.checks.costs import KERNELS
from attnrx.show.reports.numbers import known
from attnrx.vit.costs import factors_text, speed_text
from attnrx.vit.outputs import KINDS

Record = Mapping[str, Any]
TOP_1 = "top-1 accuracy"  # of findings that do not name their measure


@dataclass(frozen=True)
class SummaryPart:
    """One measured amount with its conditions, its 95 % interval and its factors as text, empty where there is none."""

    amount: str
    conditions: str = ""
    interval: str = ""
    factors: str = ""

    def __str__(self) -> str:
        return " ".join(text for text in (self.amount, self.conditions, self.interval, self.factors) if text)


class MeasuredSpeed:
    """The speed relative to a baseline (above 1: faster), with its interval and the conditions of its measurement.

    `record` is that of a `LatencyComparison`. `by_runtime` and `by_compression` are the factors of the speed, if the
    unchanged model was timed in the same `runtime`. `reference_seconds` is the median time of the baseline, if it is
    recorded; `where` are the threads of a CPU, or another device, for the sentence.
    """

    def __init__(self, record: Record):
        faster, settings, torch = record["faster"], record.get("conditions") or {}, record.get("torch_version")
        self.record, self.batch = record, record["batch"]
        self.value, self.low, self.high = faster["value"], known(faster.get("low")), known(faster.get("high"))
        self.baseline, self.runtime = record.get("baseline", "the original"), record.get("runtime", KERNELS)
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
    def setting(self) -> str:
        """The baseline, the batch size and the threads or the device, for the sentence."""
        where = f" on {self.where}" if self.where else ""
        return f"{'than' if self.value >= 1 else 'of'} {self.baseline} at batch {self.batch}{where}"

    @property
    def factors(self) -> str:
        """The factors of the speed, "= 2.08x by attnrx's kernels x 1.06x by compression"; empty without them."""
        if self.by_runtime is None or self.by_compression is None:
            return ""
        return f"= {factors_text(self.by_runtime, self.by_compression, self.runtime)}"


def summary_of(evidence: Evidence) -> str:
    """Returns one sentence: speed with its factors, change of accuracy, costs, divergence and the number of images; it
    begins with what has to be known first, e.g. that nothing was removed.
    """
    sentence = ", ".join(str(part) for part in summary_parts(evidence))
    return " ".join((*(f"{each}." for each in statements(evidence)), sentence))


def nothing_removed(evidence: Evidence) -> bool:
    """Whether the candidate is the unchanged model, in attnrx or as a file."""
    return evidence.about.get("nothing_removed") is True


def statements(evidence: Evidence) -> list[str]:
    """Returns what has to be known before the numbers are read."""
    warnings = list(evidence.warnings)
    if not nothing_removed(evidence):
        return warnings
    measured = speeds(evidence)
    if not measured:
        return [*warnings, "NOTHING WAS REMOVED: this is the unchanged model"]
    runtime = measured[0].runtime
    alone = f"NOTHING WAS REMOVED: this is the unchanged model, and its speed is that of {runtime} alone"
    return [*warnings, f"{alone}; an exported file such as model.onnx gains nothing" if runtime == KERNELS else alone]


def summary_parts(evidence: Evidence) -> list[SummaryPart]:
    """Returns the parts of the sentence, each if it was measured."""
    # Only the first speed: one sentence has no room for those at other batch sizes.
    parts = [SummaryPart(speed.text, speed.setting, speed.interval, speed.factors) for speed in speeds(evidence)[:1]]
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
        if abs(saved) >= 0.5:  # less would read 0 %
            parts.append(SummaryPart(f"{abs(saved):.0f} % {'fewer' if saved > 0 else 'more'} {name}"))
    divergence = finding_of(evidence, "divergence")
    if divergence is not None and known(divergence.value) is not None:
        outputs = str(evidence.about.get("outputs", "logits" if divergence.unit == "nats" else "embedding"))
        name = evidence.about.get("divergence") or KINDS.get(outputs, KINDS["logits"]).columns[1]
        decimals = ".3g" if "divergence" in evidence.about else ".3f"  # of a user's divergence no scale is known
        parts.append(SummaryPart(f"{name} {divergence.value:{decimals}}"))
    images = evidence.about.get("images")
    if isinstance(images, int) and parts:
        parts.append(SummaryPart(f"{images:,} images"))
    return parts


def _signed(value: float) -> str:
    # A value that rounds to zero has no sign.
    return f"{value:+.1f}" if round(value, 1) else "0.0"


def finding_of(evidence: Evidence, quantity: str, model: str | None = None) -> Finding | None:
    """Returns the first finding of a quantity, of one model if it is given."""
    for finding in evidence.findings:
        details = finding.details
        # Findings about single corruptions are of the same quantities, but not about the data themselves.
        single = not {"corruption", "severity"} <= details.keys()
        if single and details.get("quantity") == quantity and model in (None, details.get("model")):
            return finding
    return None


def speeds(evidence: Evidence) -> list[MeasuredSpeed]:
    """Returns the measured speeds; the one that a plan promised is the first."""
    promised = finding_of(evidence, "promised speed")
    # The promise is about the hardware, batch and threads of the plan, so its measurement is the headline.
    first = [] if promised is None or "measured" not in promised.details else [promised.details["measured"]]
    others = [each.details for each in evidence.of("latency") if each.details.get("quantity") == "speed"]
    return [MeasuredSpeed(record) for record in first + [record for record in others if "faster" in record]]


def cost_records(evidence: Evidence) -> tuple[Record, Record] | None:
    """Returns the costs of the original and of the candidate by part, or None."""
    found = [finding_of(evidence, "counted costs", model) for model in ("reference", "candidate")]
    before, after = (None if each is None else each.details.get("parts") for each in found)
    return (before, after) if isinstance(before, Mapping) and isinstance(after, Mapping) else None


def cost_totals(evidence: Evidence, unit: str) -> tuple[int, int] | None:
    """Returns the "params" or the "macs" of the original and of the smaller model."""
    records = cost_records(evidence)
    if records is not None:
        before, after = (sum(part[unit] for part in record.values()) for record in records)
        return before, after
    finding = finding_of(evidence, {"params": "parameters", "macs": "MACs"}[unit])
    return None if finding is None else (finding.details["reference"], finding.details["candidate"])
