"""The page itself: sections set by their templates into one file that needs nothing else."""

from pathlib import Path

from attnrx.reports.content import ReportContent
from attnrx.reports.sections import SECTIONS, verdict
from attnrx.storage import write_text

TEMPLATES = Path(__file__).parent / "templates"


def write_report(path: Path | str, content: ReportContent) -> Path:
    """Writes the report as one HTML file: no scripts, no network; readable offline, printable, light and dark."""
    return write_text(path, render(content))


def render(content: ReportContent) -> str:
    """Gives the page; every word of the content is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [section for section in (build(content) for build in SECTIONS) if section is not None]
    return environment.get_template("report.html.j2").render(
        title=content.title,
        style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        verdict=verdict(content),
        sections=sections,
    )
