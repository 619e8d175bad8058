"""The page itself: sections set by their templates into one file that needs nothing else."""

from pathlib import Path

from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput
from attnrx.evidence import Evidence
from attnrx.prescription import Prescription
from attnrx.reports.content import ReportContent
from attnrx.reports.sections import SECTIONS, verdict
from attnrx.storage import write_text

TEMPLATES = Path(__file__).parent / "templates"


def write_report(
    path: Path | str,
    content: ReportContent | None = None,
    *,
    evidence: Evidence | None = None,
    prescription: Prescription | None = None,
    diagnosis: Diagnosis | None = None,
) -> Path:
    """Writes the report as one HTML file: no scripts, no network; readable offline, printable, light and dark.

    It shows the evidence, the prescription and the diagnosis, as `attnrx report` does; `content` holds these and other
    parts under a title of your own, and is given instead of them.
    """
    parts = {"evidence": evidence, "prescription": prescription, "diagnosis": diagnosis}
    given = [name for name, part in parts.items() if part is not None]
    if (content is None) != bool(given):
        raise InvalidInput(
            f"write_report got content and {', '.join(given)}: put all parts into ReportContent."
            if content is not None
            else "write_report got nothing to show: give evidence, prescription, diagnosis, or a ReportContent."
        )
    if content is None:
        about = {} if evidence is None else evidence.about
        content = ReportContent(
            f"attnrx: {Path(path).stem}", about, evidence=evidence, prescription=prescription, diagnosis=diagnosis
        )
    return write_text(path, render(content))


def render(content: ReportContent) -> str:
    """Returns the page; every word of the content is escaped."""
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
