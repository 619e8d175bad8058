"""The sections of a report: each function maps the report content to a section, or None without data."""

from collections.abc import Callable

from attnrx.reports.content import ReportContent
from attnrx.reports.sections.comparison import comparison, trade_off
from attnrx.reports.sections.costs import costs
from attnrx.reports.sections.evidence import controls, findings, robustness
from attnrx.reports.sections.layers import maps, ranks, spectra, treatment
from attnrx.reports.sections.samples import attention, tokens
from attnrx.reports.sections.section import Section, provenance_section
from attnrx.reports.sections.training import training
from attnrx.reports.sections.verdict import verdict

# In the order of the page, after the verdict.
SECTIONS: tuple[Callable[[ReportContent], Section | None], ...] = (
    comparison,
    treatment,
    ranks,
    maps,
    spectra,
    findings,
    controls,
    robustness,
    trade_off,
    costs,
    tokens,
    attention,
    training,
    provenance_section,
)

__all__ = ["SECTIONS", "Section", "verdict"]
