"""Stores the results of a comparison: the costs and the quality of several methods for one model."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnrx.show.figures import DRAWN, Drawing, Figure, Panel, Series
from attnrx.support import arguments as kinds
from attnrx.support.estimate import Estimate
from attnrx.support.storage import read_record, write_json
from attnrx.support.tables import markdown_table
from attnrx.vit.outputs import KINDS, OutputKind

KIND, SCHEMA = "attnrx comparison", 2
WIDE = 20  # if the largest divergence in a figure is more than WIDE times the smallest, the axis is logarithmic

NUMBER = kinds.finite()
SHARE = kinds.optional(kinds.finite(0.0, 1.0))
ESTIMATE = kinds.record({"value": NUMBER, "low": NUMBER, "high": NUMBER})
COUNT = kinds.whole(0, kinds.LARGEST)
TRIAL = kinds.record(
    {
        "method": kinds.ANY_TEXT,
        "share": SHARE,
        "params": COUNT,
        "macs": COUNT,
        "params_share": kinds.finite(0.0),
        "macs_share": kinds.finite(0.0),
        **dict.fromkeys(("accuracy", "change", "agreement", "divergence"), ESTIMATE),
        "n": COUNT,
        "seconds": kinds.finite(0.0),
        "target": SHARE,
    }
)
DIFFERENCE = kinds.record(
    {
        "first": kinds.ANY_TEXT,
        "second": kinds.ANY_TEXT,
        "share": SHARE,
        "target": SHARE,
        **dict.fromkeys(("divergence", "accuracy"), ESTIMATE),
        **dict.fromkeys(("divergence_p", "accuracy_p"), kinds.finite(0.0, 1.0)),
        "n": COUNT,
    }
)
UNREACHED = kinds.record({"method": kinds.ANY_TEXT, "target": NUMBER, "least": NUMBER})
RECORD = kinds.record(
    {
        "trials": kinds.each(TRIAL),
        "accuracy": ESTIMATE,
        "about": kinds.record({"outputs": kinds.one_of(*KINDS)}, open=True),
        "unreached": kinds.each(UNREACHED),
        "differences": kinds.each(DIFFERENCE),
    }
)


@dataclass(frozen=True)
class MethodTrial:
    """The costs and the quality of the model that one method makes at one share, compared with the original model.

    `share` is None if the method has no adjustable share. `target` is the share of the MACs that was requested, or None
    if none was requested. `n` is the number of test images, and `seconds` is the time that the compression took.
    """

    method: str
    share: float | None
    params: int
    macs: int
    params_share: float
    macs_share: float
    accuracy: Estimate
    change: Estimate
    agreement: Estimate
    divergence: Estimate
    n: int
    seconds: float
    target: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        return (
            self.method,
            kept_text(self.share),
            f"{self.accuracy.value:.1f} %",
            self.change.text(1),
            f"{self.agreement.text(1)} %",
            self.divergence.text(3),
            f"{100 * self.macs_share:.1f} %",
            f"{100 * self.params_share:.1f} %",
        )


@dataclass(frozen=True)
class Unreached:
    """A method that cannot reach the requested share of the MACs, with the smallest share that it can reach."""

    method: str
    target: float
    least: float

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        reason = f"cannot cost {100 * self.target:g} % of the MACs"
        return (self.method, "-", reason, "-", "-", "-", f"at least {100 * self.least:.1f} %", "-")


@dataclass(frozen=True)
class Difference:
    """The paired differences in divergence and accuracy (in points) of two methods at one budget, second minus first.

    If `divergence` is positive, the second method is worse. Intervals are 95 % bootstrap intervals over the images,
    without a correction for multiple comparisons. `divergence_p` comes from a paired sign-flip test of the mean, and
    `accuracy_p` from McNemar's exact test. Holm's method corrects the p-values of each measure for the number of
    differences in the comparison.
    """

    first: str
    second: str
    share: float | None
    target: float | None
    divergence: Estimate
    divergence_p: float
    accuracy: Estimate
    accuracy_p: float
    n: int

    @property
    def cells(self) -> tuple[str, ...]:
        """This difference's row in the table of differences."""
        budget = "fixed rules" if self.share is None else f"{100 * self.share:g} % kept"
        return (
            f"{self.second} minus {self.first}",
            budget if self.target is None else f"{100 * self.target:g} % of the MACs",
            self.divergence.text(3),
            f"{self.divergence_p:.3g}",
            self.accuracy.text(1),
            f"{self.accuracy_p:.3g}",
        )


@dataclass(frozen=True)
class MethodComparison:
    """All trials for one model, with the original model's accuracy in % and the measurement settings.

    `differences` compares every pair of methods at the same budget. Methods without an adjustable share have no budget.
    They are compared with each other, and with methods that cost nearly the same MACs. `unreached` lists the methods
    that cannot reach a MACs target.
    """

    trials: tuple[MethodTrial, ...]
    accuracy: Estimate
    about: Mapping[str, Any]
    unreached: tuple[Unreached, ...] = ()
    differences: tuple[Difference, ...] = ()

    @property
    def outputs(self) -> OutputKind:
        """The kind of output that the models return."""
        return KINDS[self.about["outputs"]]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of `rows`."""
        accuracy, divergence = self.outputs.columns
        return ("method", "kept", accuracy, "change (points)", "agreement", divergence, "MACs", "parameters")

    @property
    def difference_columns(self) -> tuple[str, ...]:
        """The names of the columns of the table of differences."""
        accuracy, divergence = self.outputs.columns
        return ("difference", "budget", divergence, "p (Holm)", f"{accuracy} (points)", "p (Holm)")

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The table's rows: the original, then one row per trial and per unreached target, grouped by method."""
        # Trials and unreached targets are both stored in the order of the methods.
        order = [method["name"] for method in self.about["methods"]]
        original = ("the original", "-", f"{self.accuracy.value:.1f} %", "-", "-", "-", "100 %", "100 %")
        rows = sorted((*self.trials, *self.unreached), key=lambda each: order.index(each.method))
        return original, *(each.cells for each in rows)

    def to_markdown(self) -> str:
        """Returns a Markdown table of the trials and, if there are differences, a table of the differences."""
        table = markdown_table(self.columns, self.rows)
        if not self.differences:
            return table
        return f"{table}\n\n{markdown_table(self.difference_columns, [each.cells for each in self.differences])}"

    def save(self, path: Path | str) -> Path:
        """Writes the JSON file, and returns its path."""
        return write_json(path, {"kind": KIND, "schema": SCHEMA, **asdict(self)})

    @classmethod
    def load(cls, path: Path | str) -> "MethodComparison":
        """Reads a JSON file written by `save`.

        Raises:
            CheckpointError: The file is missing, damaged or of another kind.
        """
        record = read_record(path, KIND, SCHEMA, RECORD)
        trials = tuple(MethodTrial(**_with_estimates(each)) for each in record["trials"])
        unreached = tuple(Unreached(**each) for each in record["unreached"])
        differences = tuple(Difference(**_with_estimates(each)) for each in record["differences"])
        return cls(trials, Estimate(**record["accuracy"]), record["about"], unreached, differences)


def _with_estimates(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Estimate(**value) if isinstance(value, dict) else value for name, value in record.items()}


def _figures(comparison: MethodComparison) -> Iterator[Figure]:
    """Yields two figures, which plot the divergence and the accuracy of each method against its share of the MACs."""
    quality, divergence = comparison.outputs.columns
    unit, images = comparison.outputs.unit, comparison.about.get("images")
    about = "bars: 95 % intervals" if images is None else f"{images:,} images, bars: 95 % intervals"
    quality, divergence = f"{quality}, % ({about})", f"{divergence}{f', {unit}' if unit else ''} ({about})"
    methods = list(dict.fromkeys(trial.method for trial in comparison.trials))
    for name, label, field in (("trade-off", divergence, "divergence"), ("quality", quality, "accuracy")):
        lines = list[Series]()
        for method in methods:
            trials = sorted((each for each in comparison.trials if each.method == method), key=lambda each: each.macs)
            points = [getattr(each, field) for each in trials]
            ends = tuple(each.low for each in points), tuple(each.high for each in points)
            shares, values = tuple(each.macs_share for each in trials), tuple(each.value for each in points)
            lines.append(Series(method, shares, values, *ends))
        # Small divergences would not be visible beside large ones.
        drawn = [value for line in lines for value in (*line.y, *line.low)]
        is_wide = field == "divergence" and 0 < min(drawn, default=0.0) < max(drawn, default=0.0) / WIDE
        panel = (Panel(tuple(lines)),)
        yield Figure(
            name, "MACs, share of the original", label, panel, marks="points", log_floor=0.0 if is_wide else None
        )


DRAWN.register(Drawing(KIND, MethodComparison, MethodComparison.load, _figures))


def kept_text(share: float | None) -> str:
    """Formats a method's kept share for a table."""
    return "-" if share is None else f"{100 * share:.4g} %"
