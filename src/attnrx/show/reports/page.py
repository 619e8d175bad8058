"""The documents about a result: a self-contained HTML page, rendered from templates, and a model card."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import FAILS, HOLDS, REPORTED, UNDECIDED, Evidence
from attnrx.nouns.prescription import Prescription
from attnrx.show.checks.costs import KERNELS
from attnrx.show.reports.layers import changes, maps, treatment
from attnrx.show.reports.numbers import fixed, interval, number, percent, plain, quantity, short, typeset, with_unit
from attnrx.show.reports.results import (
    FILE_COLUMNS,
    by_severity,
    costs,
    deployed,
    finding_of,
    findings,
    measured_files,
    sentence,
    statements,
    summary_parts,
    verdict,
)
from attnrx.show.reports.samples import MapSamples, TokenSamples, outputs, tokens
from attnrx.support.arguments import ANY_TEXT, checked, require_fields
from attnrx.support.display import Displayed
from attnrx.support.errors import InvalidInput
from attnrx.support.storage import write_text
from attnrx.support.tables import Marked, markdown, markdown_code, markdown_table

TEMPLATES = Path(__file__).parent / "templates"

# The model card.
COUNTED = 100_000  # integers of this size or more are parameters or MACs, and get thousands separators
UNNAMED = "Vision Transformer"
# What the conditions of the evidence are called in the model card, if their own names could be misunderstood.
ABOUT = {"batch": "timed batch", "batch_size": "predictions in batches of", "threads": "threads for predictions"}
MARKS = {HOLDS: "✓ {}", FAILS: "✗ **{}**", UNDECIDED: "? {}", REPORTED: "{}"}

# The variable name for a model's outputs in the card's example code, if they are not logits.
RETURNED = {
    "embedding": "embeddings",
    "regression": "numbers",
    "map": "maps",
    "several": "outputs",
    "label_probabilities": "probabilities",
}

USE = """\
```python
import attnrx as rx

model = rx.load("path/to/this/folder")
{call}  # images normalized as in config.json{accelerated}
```"""
# A portable model can be loaded without attnrx. Its card shows this text before USE.
PORTABLE = "Its own library loads it, without attnrx:\n\n```python\n{code}\n```\n\nSo does attnrx:"
# This line is added to USE if the speed was measured in attnrx's kernels, which `load` does not enable.
ACCELERATED = "\nfast = rx.accelerate(model)  # the same model at the speed above: inference on a CPU"

# This line is added to USE for a transformers model.
PIPELINE = '\nanswers = transformers.pipeline("{task}", model=model, image_processor=processor)'
# The hub's task names: the first for embeddings and all other outputs, the second for classifiers.
TASKS = "image-feature-extraction", "image-classification"

# The last line of a card is a hash of the card, which shows if the card was edited. As a comment, it is not displayed.
SEAL = "<!-- attnrx card {} -->\n"


@dataclass(frozen=True, repr=False)
class ReportContent(Displayed):
    """The parts of one report about one compressed model.

    `about` may contain anything that identifies the run, e.g. the model, the data, the versions, the seed and the
    command. The report's tables of costs and latency come from `evidence`.
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
        """The `about` records of the report and its parts, keyed by their titles on the page."""
        records: dict[str, Mapping[str, Any]] = {"this report": self.about}
        for name, part in (("the diagnosis", self.diagnosis), ("the prescription", self.prescription)):
            if part is not None:
                records[name] = {"fingerprint": part.fingerprint, **part.about}
        records["the evidence"] = {} if self.evidence is None else self.evidence.about
        return {name: record for name, record in records.items() if record}

    def __post_init__(self):
        require_fields(self, title=ANY_TEXT)
        # The loop covers all fields, so that a new part needs no change here.
        if all(part is None for name, part in vars(self).items() if name not in ("title", "about")):
            raise InvalidInput(
                f"the report {self.title!r} has nothing to show: "
                "give it evidence, a prescription, a diagnosis or another part."
            )
        if self.diagnosis is not None and self.prescription is not None:
            self.diagnosis.require(self.prescription.fingerprint, "the model of the prescription")


@checked()
def write_report(
    path: Path | str,
    content: ReportContent | None = None,
    *,
    evidence: Evidence | None = None,
    prescription: Prescription | None = None,
    diagnosis: Diagnosis | None = None,
) -> Path:
    """Writes the report as one printable HTML file, which has a dark mode and needs neither network nor scripts.

    Pass any of `evidence`, `prescription` and `diagnosis`. To set a title or add other parts, pass `content` instead.
    To get the page as text, e.g. for an iframe in a notebook, call `render(ReportContent(title, evidence=evidence))`.

    Args:
        path: The file to write.
        content: The title and all parts of the report, in place of the following arguments.
        evidence: The evidence that `verify` returned.
        prescription: The prescription that the compressed model was made with.
        diagnosis: The diagnosis that the prescription was made from.

    Returns:
        The path of the file.

    Raises:
        InvalidInput: There is nothing to show, or you passed both `content` and single parts.
        FingerprintMismatch: Diagnosis and prescription belong to different models.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> model = rx.load(vit)
        >>> diagnosis = rx.diagnose(model, torch.randn(64, 3, 32, 32))
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


@checked()
def render(content: ReportContent) -> str:
    """Returns the page as HTML, e.g. for an iframe in a notebook. All text in the content is escaped.

    Args:
        content: All parts of the report.

    Returns:
        One HTML document with its style, script and pictures.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        # By default, Jinja escapes nothing and replaces unknown names by empty texts. Here it escapes all text, and an
        # unknown name raises an error.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (fixed, interval, number, percent, quantity, short, typeset, with_unit):
        environment.globals[function.__name__] = function
    # A record may contain values of any class, e.g. paths.
    environment.globals["json_text"] = partial(json.dumps, indent=1, default=str, ensure_ascii=False)
    diagnosis, records = content.diagnosis, content.records
    provenance = {"records": records, "summary": f"Records of {', '.join(records)}"} if records else None
    # A section has a name, a title, a part of the content, and a function. The name is the section's anchor and the
    # file name of its template. The function returns the data of the part, or None if there is nothing to show. If the
    # data have a "summary", the section is folded: the page shows only the summary until the reader opens the section.
    every_section: list[tuple[str, str, Any, Callable[[Any], dict[str, Any] | None]]] = [
        ("verdict", "Result", records, partial(verdict, content.evidence)),
        ("changes", "What changed", content.prescription, partial(changes, diagnosis=diagnosis)),
        ("outputs", "Outputs", content.outputs, outputs),
        ("tokens", "Tokens", content.tokens, tokens),
        ("prescription", "Prescription", content.prescription, partial(treatment, diagnosis=diagnosis)),
        ("maps", "Layers and heads", diagnosis, maps),
        ("evidence", "Evidence", content.evidence, findings),
        ("costs", "Costs", content.evidence, costs),
        ("provenance", "Provenance", provenance, dict),
    ]
    sections = [
        (name, title, data)
        for name, title, part, data_of in every_section
        if part is not None and (data := data_of(part)) is not None
    ]
    script = (TEMPLATES / "script.js").read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(
        title=content.title,
        style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        script=script,
        # The page's content security policy only allows the script with this hash.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        sections=sections,
        # If all sections after the first are folded, the page would look empty, so all of them are opened.
        unfold=all("summary" in data for _, _, data in sections[1:]),
    )


@checked(library_code=ANY_TEXT)
def model_card(
    facts: Mapping[str, Any],
    evidence: Evidence | None = None,
    prescription: Prescription | None = None,
    library_code: str = "",
) -> str:
    """Returns the model card as Markdown with a YAML header for the hub. It is saved as README.md.

    The card only contains measured and recorded facts. Every saved model gets a card, so this function works with the
    base install. `huggingface_hub.ModelCard` would be a fifth dependency, only for a header of fifteen lines.

    Args:
        facts: The facts for the card's table. "name" is the heading. "outputs" is the name of an `OutputKind`, which
            sets the task on the hub: a model that returns embeddings is not a classifier.
        evidence: The evidence that `verify` returned.
        prescription: The prescription that the model was made with.
        library_code: For a portable model, the code that loads it with its own library.

    Returns:
        The card. Its last line is a hash of the other lines, from which `is_unedited` detects edits.
    """
    rows, returned = [], RETURNED.get(str(facts.get("outputs")), "logits")
    # A transformers model returns an object with several outputs, so the example code calls it `output`.
    is_transformers = facts.get("family") == "huggingface"
    call = "output = model(images)" if is_transformers else f"{returned} = model(images)"
    pipeline = PIPELINE.format(task=TASKS[returned == "logits"]) if is_transformers else ""
    for name, value in facts.items():
        is_count = isinstance(value, int) and value >= COUNTED
        if name != "name":
            rows.append((str(name).replace("_", " "), number(value) if is_count else plain(value)))
    measured = evidence or Evidence((), {})
    in_kernels = any(KERNELS in finding.claim for finding in measured.findings)
    blocks = [
        _head(facts, measured, TASKS[returned == "logits"]),
        f"# {markdown(facts.get('name', UNNAMED))}",
        *(f"**{markdown(each)}.**" for each in statements(measured)),
        markdown(", ".join(map(str, summary_parts(measured)))),
        markdown(sentence(evidence)),
        f"Deploy {markdown_code(deployed(measured)[0])}: {deployed(measured)[1]}" if "file" in measured.about else "",
        markdown_table(("", ""), rows) if rows else "",
        *_files(measured),
        "## How to use it",
        *([PORTABLE.format(code=library_code)] if library_code else []),
        USE.format(call=call, accelerated=(ACCELERATED if in_kernels else "") + pipeline),
        *([] if prescription is None else _prescribed(prescription)),
        *([] if evidence is None else _evidence(evidence)),
    ]
    text = "\n\n".join(block for block in blocks if block) + "\n\n"
    return text + _seal(text)


def is_unedited(card: str) -> bool:
    """Whether a card has not changed since `model_card` returned it."""
    text = card[: card.rfind(SEAL.partition("{")[0])]
    return card == text + _seal(text)


def _seal(text: str) -> str:
    return SEAL.format(hashlib.sha256(text.encode()).hexdigest()[:16])


def _head(facts: Mapping[str, Any], evidence: Evidence, task: str) -> str:
    """Returns the YAML header for the hub. Texts are quoted as JSON, which is a subset of YAML."""
    lines = ["library_name: attnrx", f"pipeline_tag: {task}"]
    # The hub uses tags for its search, and shows the results in model-index.
    lines += ["tags:", "- vision-transformer", "- attention", "- compression"]
    # The hub compares results of classifiers. A nearest-neighbour accuracy is not comparable with them. Neither is an
    # accuracy over several labels per image, or with labels that are not the model's.
    is_comparable = (
        task == "image-classification"
        and facts.get("outputs") not in ("multilabel", "label_probabilities")
        and not evidence.warnings
    )
    accuracy = finding_of(evidence, "accuracy", "candidate")
    if accuracy is not None and is_comparable:
        data = str(evidence.about.get("data", "unnamed"))
        lines += ["metrics:", "- accuracy", "model-index:"]
        lines += [f"- name: {json.dumps(str(facts.get('name', UNNAMED)))}", "  results:", "  - task:"]
        lines += [f"      type: {task}", "    dataset:", f"      name: {json.dumps(data)}"]
        lines += [f"      type: {json.dumps(data.partition(':')[0])}", "    metrics:", "    - type: accuracy"]
        lines += [f"      value: {accuracy.value / 100:.6g}", "      name: top-1 accuracy"]
    return "\n".join(["---", *lines, "---"])


def _prescribed(prescription: Prescription) -> list[str]:
    rows = [(str(index), plain(list(ranks), 32)) for index, ranks in enumerate(prescription.ranks, 1)]
    # The column's title has the number of directions of the widest layer. Heads with fewer directions are padded.
    num_directions = max((layer.qk.keep.shape[1] for layer in prescription.layers), default=0)
    rules = f"Rules: {markdown_code(prescription)}. " if prescription.rules else ""
    origin = f"{rules}For the model with the fingerprint {markdown_code(prescription.fingerprint)}."
    columns = ("layer", f"directions that each head keeps, of {num_directions}")
    return ["## Prescription", origin, markdown_table(columns, rows) if rows else ""]


def _files(evidence: Evidence) -> list[str]:
    """Returns the model card's table that compares exported files with the vendor's file, if they were measured."""
    title, rows = measured_files(evidence)
    return [f"{markdown(title)}:", markdown_table(FILE_COLUMNS, rows)] if rows else []


def _evidence(evidence: Evidence) -> list[str]:
    columns = ("result", "check", "claim", "value", "limit", "95 % interval", "n")
    # Only single values are listed, because nested records do not fit into a sentence.
    about = {name: value for name, value in evidence.about.items() if isinstance(value, str | int | float)}
    measured = "; ".join(f"{ABOUT.get(name, name.replace('_', ' '))} {plain(value)}" for name, value in about.items())
    shown, elsewhere = by_severity(evidence)
    rows = [
        (
            Marked(MARKS[finding.outcome].format(markdown(finding.outcome_text))),
            finding.check,
            finding.claim,
            quantity(finding.value, finding.unit, finding.low, finding.high),
            "" if finding.limit is None else short(finding.limit),
            interval(finding.low, finding.high),
            "" if finding.n is None else number(finding.n),
        )
        for finding in shown
    ]
    return [
        "## Evidence",
        f"Measured with: {markdown(measured)}." if measured else "",
        markdown_table(columns, rows) if rows else "",
        f"`evidence.json` holds all of it, with {len(elsewhere)} findings for single corruptions and severities."
        if elsewhere
        else "",
    ]
