"""The model card: README.md of a saved model in Markdown, with measured and recorded facts only.

Every saved model has one, so that it needs nothing beyond the base install: `huggingface_hub.ModelCard` would be a
fifth dependency, for the fifteen lines of the header.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from attnrx.nouns.evidence import FAILS, HOLDS, REPORTED, UNDECIDED, Evidence
from attnrx.nouns.prescription import Prescription
from attnrx.show.reports.numbers import interval, number, percent, plain, quantity, short
from attnrx.show.reports.results import by_severity, sentence, statements, summary_parts
from attnrx.support.tables import Marked, markdown, markdown_code, markdown_table

COUNTED = 100_000  # integers from here on are parameters or MACs, and get thousands separators
UNNAMED = "Vision Transformer"
MARKS = {HOLDS: "✓ {}", FAILS: "✗ **{}**", UNDECIDED: "? {}", REPORTED: "{}"}

# The task of the hub by what a model returns, and the word for it in code.
TASKS = {
    "embedding": ("image-feature-extraction", "embeddings"),
    "regression": ("image-feature-extraction", "numbers"),
    "map": ("image-feature-extraction", "maps"),
    "several": ("image-feature-extraction", "outputs"),
}
CLASSIFICATION = ("image-classification", "logits")

USE = """\
```python
import attnrx as rx

model = rx.load("path/to/this/folder")
{outputs} = model(images)  # images normalized as in config.json
```"""

# The last line, by which an edit is found: a comment, which is not shown.
SEAL = "<!-- attnrx card {} -->\n"


def model_card(
    facts: Mapping[str, Any], evidence: Evidence | None = None, prescription: Prescription | None = None
) -> str:
    """Returns the model card as Markdown, with a YAML header for the hub.

    Args:
        facts: What the table states; "name" is the heading, and "outputs" the name of an `OutputKind`: a model of
            embeddings is no classifier on the hub.
        evidence: What `verify` measured.
        prescription: The prescription that the model was made by.

    Returns:
        The card, whose last line seals it (`is_unedited`).
    """
    rows, task = [], TASKS.get(str(facts.get("outputs")), CLASSIFICATION)
    for name, value in facts.items():
        is_count = isinstance(value, int) and value >= COUNTED
        if name != "name":
            rows.append((name.replace("_", " "), number(value) if is_count else plain(value)))
    measured = evidence or Evidence((), {})
    removed = ""
    if prescription is not None and prescription.removed_share:
        removed = f"{percent(prescription.removed_share)} of the original model's score directions were removed. "
    blocks = [
        _head(facts, evidence, task[0]),
        f"# {markdown(facts.get('name', UNNAMED))}",
        *(f"**{markdown(each)}.**" for each in statements(measured)),
        removed + markdown(sentence(evidence)),
        markdown(", ".join(map(str, summary_parts(measured)))),
        markdown_table(("", ""), rows) if rows else "",
        "## How to use it",
        USE.format(outputs=task[1]),
        *_prescribed(prescription),
        *_evidence(evidence),
    ]
    text = "\n\n".join(block for block in blocks if block) + "\n\n"
    return text + _seal(text)


def is_unedited(card: str) -> bool:
    """Whether a card is as `model_card` returned it."""
    text = card[: card.rfind(SEAL.partition("{")[0])]
    return card == text + _seal(text)


def _seal(text: str) -> str:
    return SEAL.format(hashlib.sha256(text.encode()).hexdigest()[:16])


def _head(facts: Mapping[str, Any], evidence: Evidence | None, task: str) -> str:
    """Returns the YAML header for the hub; texts are quoted as JSON, a subset of YAML."""
    lines = ["library_name: attnrx", f"pipeline_tag: {task}"]
    # The hub reads these fields for its search and, from model-index, for the results that it shows.
    lines += ["tags:", "- vision-transformer", "- attention", "- compression"]
    # That of nearest neighbours is no result of a classifier.
    found = evidence.of("accuracy") if evidence is not None and task == CLASSIFICATION[0] else ()
    accuracy = next((each.value for each in found if each.details.get("model") == "candidate"), None)
    # Nor is one that cannot be compared: of several labels, or against labels that are not those of the model.
    if evidence is not None and (evidence.warnings or facts.get("outputs") == "multilabel"):
        accuracy = None
    if evidence is not None and accuracy is not None:
        data = str(evidence.about.get("data", "unnamed"))
        lines += ["metrics:", "- accuracy", "model-index:"]
        lines += [f"- name: {json.dumps(str(facts.get('name', UNNAMED)))}", "  results:", "  - task:"]
        lines += [f"      type: {task}", "    dataset:", f"      name: {json.dumps(data)}"]
        lines += [f"      type: {json.dumps(data.partition(':')[0])}", "    metrics:", "    - type: accuracy"]
        lines += [f"      value: {accuracy / 100:.6g}", "      name: top-1 accuracy"]
    return "\n".join(["---", *lines, "---"])


def _prescribed(prescription: Prescription | None) -> list[str]:
    if prescription is None:
        return []
    rows = [(str(index), plain(list(ranks), 32)) for index, ranks in enumerate(prescription.ranks)]
    # Directions of heads of different ranks are padded to the largest number.
    num_directions = max((layer.qk.keep.shape[1] for layer in prescription.layers), default=0)
    rules = f"Rules: {markdown_code(prescription)}. " if prescription.rules else ""
    origin = f"{rules}For the model with the fingerprint {markdown_code(prescription.fingerprint)}."
    columns = ("layer", f"directions that each head keeps, of {num_directions}")
    return ["## Prescription", origin, markdown_table(columns, rows) if rows else ""]


def _evidence(evidence: Evidence | None) -> list[str]:
    if evidence is None:
        return []
    columns = ("result", "check", "claim", "value", "limit", "95 % interval", "n")
    # Nested records would not fit into a sentence.
    about = {name: value for name, value in evidence.about.items() if isinstance(value, str | int | float)}
    measured = "; ".join(f"{name.replace('_', ' ')} {plain(value)}" for name, value in about.items())
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
