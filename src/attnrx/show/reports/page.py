"""The HTML page: sections rendered by their templates into one self-contained file."""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.prescription import Prescription
from attnrx.show.reports.layers import changes, maps, treatment
from attnrx.show.reports.numbers import fixed, interval, number, percent, quantity, short, typeset, with_unit
from attnrx.show.reports.results import costs, findings, verdict
from attnrx.show.reports.samples import MapSamples, TokenSamples, outputs, tokens
from attnrx.support.arguments import checked
from attnrx.support.display import Displayed
from attnrx.support.errors import FingerprintMismatch, InvalidInput
from attnrx.support.storage import write_text

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, repr=False)
class ReportContent(Displayed):
    """The parts of one report about one candidate.

    `about` is a free record: the model, the data, the versions, the seed, the command. Costs and latency are those of
    the evidence.
    """

    title: str
    about: Mapping[str, Any] = field(default_factory=dict)
    prescription: Prescription | None = None
    diagnosis: Diagnosis | None = None
    evidence: Evidence | None = None
    tokens: TokenSamples | None = None
    outputs: MapSamples | None = None

    @property
    def records(self) -> dict[str, Mapping[str, Any]]:
        """What the parts record, by part."""
        records: dict[str, Mapping[str, Any]] = {"this report": self.about}
        for name, part in (("the diagnosis", self.diagnosis), ("the prescription", self.prescription)):
            if part is not None:
                records[name] = {"fingerprint": part.fingerprint, **part.about}
        records["the evidence"] = {} if self.evidence is None else self.evidence.about
        return {name: record for name, record in records.items() if record}

    def __post_init__(self):
        # By the fields themselves, so that a new part needs no change here.
        if all(part is None for name, part in vars(self).items() if name not in ("title", "about")):
            raise InvalidInput(
                f"the report {self.title!r} has nothing to show: "
                "give it evidence, a prescription, a diagnosis or another part."
            )
        if self.diagnosis is None or self.prescription is None:
            return
        if self.diagnosis.fingerprint != self.prescription.fingerprint:
            raise FingerprintMismatch(
                f"the diagnosis is of the model {self.diagnosis.fingerprint}, the prescription is for the model "
                f"{self.prescription.fingerprint}; report them with the diagnosis that the prescription was made from."
            )


@checked()
def write_report(
    path: Path | str,
    content: ReportContent | None = None,
    *,
    evidence: Evidence | None = None,
    prescription: Prescription | None = None,
    diagnosis: Diagnosis | None = None,
) -> Path:
    """Writes the report as one HTML file that uses no network: readable without scripts, printable, light and dark.

    Give evidence, prescription and diagnosis, or instead a `content` with these and other parts and a title. The page
    as text, e.g. for an iframe of a notebook, is `render(ReportContent(title, evidence=evidence))`.

    Args:
        path: The file to write.
        content: All parts of the report.
        evidence: What `verify` measured.
        prescription: The prescription of the candidate.
        diagnosis: The diagnosis that the prescription was made from.

    Returns:
        The path of the file.

    Raises:
        InvalidInput: There is nothing to show, or both a content and single parts were given.
        FingerprintMismatch: Diagnosis and prescription belong to different models.

    Examples:
        >>> model = rx.load("svda:digits")
        >>> diagnosis = rx.diagnose(model, torch.randn(64, 1, 16, 16))
        >>> prescription = rx.prescribe(diagnosis, "total_rank:0.5")
        >>> page = rx.write_report("report.html", diagnosis=diagnosis, prescription=prescription)
    """
    parts = {"evidence": evidence, "prescription": prescription, "diagnosis": diagnosis}
    part_names = [name for name, part in parts.items() if part is not None]
    if content is not None and part_names:
        raise InvalidInput(f"write_report got content and {', '.join(part_names)}: put all parts into ReportContent.")
    if content is None:
        about = {} if evidence is None else evidence.about
        content = ReportContent(f"attnrx: {Path(path).stem}", about, prescription, diagnosis, evidence)
    return write_text(path, render(content))


def render(content: ReportContent) -> str:
    """Returns the page as HTML, e.g. for an iframe of a notebook; all text of the content is escaped.

    Args:
        content: All parts of the report.

    Returns:
        One HTML document with its style, script and pictures.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        # By default Jinja escapes nothing, and an unknown name is an empty text; here it raises an error.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (fixed, interval, number, percent, quantity, short, typeset, with_unit):
        environment.globals[function.__name__] = function
    # A record may have any values, e.g. paths.
    environment.globals["json_text"] = partial(json.dumps, indent=1, default=str, ensure_ascii=False)
    decided, records = (content.prescription, content.diagnosis), content.records
    provenance = {"records": records, "summary": f"Records of {', '.join(records)}"} if records else None
    # The name, which is the anchor and the file name of the template, the title, and the data, None for a section that
    # the content has nothing for. A section with a "summary" is folded: the page shows this line until it is opened.
    every_section = (
        ("verdict", "Result", verdict(content.evidence, records)),
        ("changes", "What changed", changes(*decided)),
        ("outputs", "Outputs", outputs(content.outputs)),
        ("tokens", "Tokens", tokens(content.tokens)),
        ("prescription", "Prescription", treatment(*decided)),
        ("maps", "Layers and heads", maps(content.diagnosis)),
        ("evidence", "Evidence", findings(content.evidence)),
        ("costs", "Costs", costs(content.evidence or Evidence((), {}))),
        ("provenance", "Provenance", provenance),
    )
    sections = [(*names, data) for *names, data in every_section if data is not None]
    script = (TEMPLATES / "script.js").read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(
        title=content.title,
        style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        script=script,
        # The content security policy of the page allows the script of this hash and no other.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        sections=sections,
        # Without another open section than the result the folded ones are the content of the page.
        unfold=all("summary" in data for _, _, data in sections[1:]),
    )
