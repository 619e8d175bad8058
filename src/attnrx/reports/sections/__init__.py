"""The sections of a report: each function maps the report content to a section, or None without data."""

from collections.abc import Callable

from attnrx.reports.content import ReportContent
from attnrx.reports.sections.attention import attention
from attnrx.reports.sections.comparison import comparison
from attnrx.reports.sections.controls import controls
from attnrx.reports.sections.costs import costs
from attnrx.reports.sections.maps import maps
from attnrx.reports.sections.provenance import provenance_section
from attnrx.reports.sections.ranks import ranks
from attnrx.reports.sections.robustness import robustness
from attnrx.reports.sections.section import Section, findings
from attnrx.reports.sections.spectra import spectra
from attnrx.reports.sections.tokens import tokens
from attnrx.reports.sections.trade_off import trade_off
from attnrx.reports.sections.training import training
from attnrx.reports.sections.treatment import treatment
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
