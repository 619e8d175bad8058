"""The files of a folder of results: size, speed beside the unchanged model's file, and accuracy of each."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnrx.nouns.evidence import Evidence
from attnrx.show.reports.headline import MeasuredSpeed, finding_of, nothing_removed, speeds
from attnrx.support.errors import CheckpointError
from attnrx.support.storage import read_json
from attnrx.vit.costs import speed_text

COLUMNS = ("file", "size", "speed against the unchanged model's file", "accuracy")
UNCHANGED = "is the unchanged model's"
MEGABYTE = 1e6


def written_files(folder: Path | str) -> list[dict[str, Any]]:
    """Returns a record for every model file of a folder that `Shrunk.save` wrote.

    `bytes` include the files that belong to it. `faster` is its speed relative to the file of the unchanged model in
    the same runtime and precision, `accuracy` that of its evidence in %; None where they were not measured, as the
    accuracy of model.onnx, whose logits are those of the model. `unchanged` states that nothing was removed.
    """
    folder = Path(folder)
    rows = [_record(folder, "model.safetensors", ("model.safetensors",), folder / "evidence.json", {})]
    for facts_path in sorted(folder.glob("model*.json")):
        path = facts_path.with_suffix("")
        if path.suffix and path.is_file():
            facts = read_json(facts_path)
            names = tuple(facts.get("files") or (path.name,))
            evidence = folder / f"evidence-{path.stem.removeprefix('model-')}.json"
            rows.append(_record(folder, path.name, names, evidence, facts))
    return [{**row, "unchanged": rows[0]["unchanged"]} for row in rows if row["bytes"]]


def files_table(folder: Path | str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]:
    """Returns columns, rows and title of the table of the files of a folder, as texts."""
    rows = tuple(
        (
            row["file"],
            f"{row['bytes'] / MEGABYTE:.1f} MB",
            UNCHANGED if row["unchanged"] else "not measured" if row["faster"] is None else speed_text(row["faster"]),
            "as the model" if row["accuracy"] is None else f"{row['accuracy']:.1f} %",
        )
        for row in written_files(folder)
    )
    return COLUMNS, rows, "files"


def _record(
    folder: Path, name: str, names: tuple[str, ...], evidence_path: Path, facts: Mapping[str, Any]
) -> dict[str, Any]:
    size = sum((folder / each).stat().st_size for each in names if (folder / each).is_file())
    evidence = Evidence((), {})
    if evidence_path.is_file():
        with suppress(CheckpointError):  # a damaged file has no numbers
            evidence = Evidence.load(evidence_path)
    faster = batch = None
    accuracy = finding_of(evidence, "accuracy", "candidate")
    for speed in speeds(evidence)[:1]:
        batch, faster = speed.batch, speed.by_compression
        if faster is None and "unchanged" in speed.baseline:
            faster = speed.value
    if not evidence.findings and facts.get("speeds"):
        speed = MeasuredSpeed(facts["speeds"][-1])
        faster, batch = speed.value, speed.batch
    return {
        "file": name,
        "bytes": size,
        "faster": faster,
        "batch": batch,
        "accuracy": None if accuracy is None else accuracy.value,
        "unchanged": nothing_removed(evidence),
    }
