"""The result of a command: a record for JSON, and tables and lines for the console."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import attnrx as rx


@dataclass(frozen=True)
class Table:
    """A table of texts; all columns but the first are right-aligned."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a command: the record for --json, the text and tables to print, and the exit code."""

    record: Mapping[str, Any]
    shown: tuple[Table | str, ...]
    code: int = 0


def show(part: Table | str) -> None:
    """Prints a text or a table to stdout; tables are drawn with rich on a terminal only."""
    if isinstance(part, str):
        print(part)
    elif sys.stdout.isatty():
        _draw(part)
    else:
        print(plain_text(part))


def plain_text(table: Table) -> str:
    """Sets a table in columns of spaces, which scripts can read and files can hold."""
    lines = [table.columns, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.columns))]
    texts = [
        "  ".join(
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([table.title, *texts] if table.title else texts)


def _draw(table: Table) -> None:
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    drawn = rich.table.Table(title=table.title or None, box=rich.box.SIMPLE_HEAD, title_justify="left")
    for column, name in enumerate(table.columns):
        drawn.add_column(name, justify="right" if column else "left")
    for row in table.rows:
        # As Text, because rich reads square brackets in plain strings as markup.
        drawn.add_row(*(rich.text.Text(text) for text in row))
    rich.console.Console().print(drawn)  # rich respects NO_COLOR


def as_percent(share: float | None, digits: int = 2) -> str:
    """Formats a share as a percentage."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def findings_table(evidence: "rx.Evidence") -> Table:
    """Returns the findings, claims first; reported findings on corrupted images are in `robustness_tables`."""
    shown = [finding for finding in evidence.findings if finding.check != "robustness" or finding.is_claim]
    ordered = sorted(shown, key=lambda finding: not finding.is_claim)
    rows = tuple(
        (
            finding.claim,
            significant(finding.value, finding.unit),
            _interval(finding),
            _limit(finding),
            finding.outcome_text if finding.is_claim else "",
        )
        for finding in ordered
    )
    return Table(("finding", "value", "95 % interval", "limit", ""), rows)


def robustness_tables(evidence: "rx.Evidence") -> tuple[Table, ...]:
    """Returns one table per severity: both accuracies for each corruption, and their means."""
    found = [finding for finding in evidence.of("robustness") if "reference_accuracy" in finding.details]
    single = [finding for finding in found if "severity" in finding.details]
    severities = sorted({finding.details["severity"] for finding in single})
    tables = []
    for severity in severities:
        at_severity = [finding for finding in single if finding.details["severity"] == severity]
        means = [finding for finding in found if finding.details.get("severities") == [severity]]
        lines = [_corrupted(finding.details["corruption"], finding) for finding in at_severity]
        lines += [_corrupted(f"mean of {len(finding.details['corruptions'])}", finding) for finding in means]
        tables.append(Table(CORRUPTED, tuple(lines), f"accuracy on images corrupted at severity {severity}, in %"))
    if len(severities) > 1:
        means = [finding for finding in found if finding.details.get("severities") == severities]
        lines = [_corrupted(f"mean of {len(finding.details['corruptions'])}", finding) for finding in means]
        tables.append(Table(CORRUPTED, tuple(lines), "over all severities"))
    return tuple(tables)


CORRUPTED = ("corruption", "reference", "candidate", "change", "95 % interval")


def _corrupted(name: str, finding: "rx.Finding") -> tuple[str, ...]:
    lines = [f"{finding.details[role]:.1f}" for role in ("reference_accuracy", "candidate_accuracy")]
    low, high = finding.low or 0.0, finding.high or 0.0
    return (name, *lines, f"{finding.value:+.1f}", f"[{low:+.1f}, {high:+.1f}]")


def significant(value: float, unit: str = "") -> str:
    """Formats a number with four significant digits and its unit."""
    return f"{value:.4g} {unit}".rstrip()


def _interval(finding: "rx.Finding") -> str:
    if finding.low is None or finding.high is None:
        return ""
    return f"[{finding.low:.4g}, {finding.high:.4g}]"


def _limit(finding: "rx.Finding") -> str:
    return "" if finding.limit is None else significant(finding.limit, finding.unit)


def cost_changes(
    before: "rx.costs.ModelCosts", after: "rx.costs.ModelCosts", convention: "rx.costs.Convention | None" = None
) -> dict[str, Any]:
    """Returns the costs of both models as JSON-ready values, with savings in percent of the first."""
    original, smaller = _both(before, after, convention)
    saving = original.saving(smaller)
    return {
        "original": cost_record(original),
        "compressed": cost_record(smaller),
        "params_down_percent": 100 * saving.params_share,
        "macs_down_percent": 100 * saving.macs_share,
    }


def cost_record(price: "rx.costs.Price") -> dict[str, Any]:
    """Returns the totals of one model as JSON-ready values."""
    return {"params": price.params, "macs": price.macs, "mhsa_macs_per_layer": price.mhsa_macs_per_layer}


def convention_table(
    before: "rx.costs.ModelCosts", after: "rx.costs.ModelCosts", convention: "rx.costs.Convention | None" = None
) -> Table:
    """Returns the table of the costs of both models, with savings in percent."""
    original, smaller = _both(before, after, convention)
    saving = original.saving(smaller)
    return Table(
        ("", "original", "realized", "saved"),
        (
            ("parameters", f"{original.params:,}", f"{smaller.params:,}", f"{100 * saving.params_share:.3f} %"),
            ("MACs", f"{original.macs:,}", f"{smaller.macs:,}", f"{100 * saving.macs_share:.3f} %"),
        ),
    )


def percent_table(original: "rx.costs.Price", smaller: "rx.costs.Price") -> Table:
    """Returns the table of the costs of both models, with the second in percent of the first."""
    shares = smaller.percent_of(original)
    attention = [sum(price.attention_macs) for price in (original, smaller)]
    return Table(
        ("", "original", "compressed", "of the original"),
        (
            ("parameters", f"{original.params:,}", f"{smaller.params:,}", f"{shares['params_percent']:.3f} %"),
            ("MACs", f"{original.macs:,}", f"{smaller.macs:,}", f"{shares['macs_percent']:.3f} %"),
            ("MACs of attention", f"{attention[0]:,}", f"{attention[1]:,}", f"{shares['mhsa_percent']:.3f} %"),
        ),
    )


def parts_table(price: "rx.costs.Price") -> Table:
    """Returns the table of the parts with nonzero costs, and their sum."""
    parts = [(name, part) for name, part in price.parts.items() if part.params or part.macs]
    rows = [(name.replace("_", " "), f"{part.params:,}", f"{part.macs:,}") for name, part in parts]
    return Table(("part", "parameters", "MACs"), (*rows, ("all", f"{price.params:,}", f"{price.macs:,}")))


def _both(
    before: "rx.costs.ModelCosts", after: "rx.costs.ModelCosts", convention: "rx.costs.Convention | None"
) -> "tuple[rx.costs.Price, rx.costs.Price]":
    counts = convention or rx.costs.SVDA
    return counts.price(before), counts.price(after)
