"""The folder of `Shrunk.save`: the names of its files, which are replaced, and the files of others, which are not."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from attnrx.change.exporting import Format, parse_format
from attnrx.change.exporting.exported import KIND as EXPORTED
from attnrx.change.exporting.exported import facts_path
from attnrx.change.exporting.own_files import own_exports, own_script, require_export_path, require_own_files
from attnrx.change.realization.elastic import INDEX as ELASTIC_INDEX
from attnrx.change.realization.elastic import KIND as ELASTIC
from attnrx.change.realization.elastic import is_elastic
from attnrx.data.model_data import num_classes
from attnrx.nouns.evidence import KIND as EVIDENCE
from attnrx.nouns.evidence import Evidence
from attnrx.support.atomic_writes import Parts, require_absent
from attnrx.support.errors import InvalidInput
from attnrx.support.storage import REPORT, file_kind
from attnrx.vit.models import is_model_file, require_model_folder

RESULT = re.compile(r"model(?:-(\w+))?")  # the stems of exported files in a folder of results


def exported_paths(folder: Path, form: Format) -> tuple[Path, Path]:
    """Returns the paths of the file of a format in a folder of results, and of its evidence."""
    return folder / f"model-{form.name}{form.suffix}", folder / f"evidence-{form.name}.json"


def require_elastic_folder(folder: Path) -> None:
    """Raises InvalidInput if an elastic model would overwrite a file of the user, or hide a saved model."""
    require_absent([folder / ELASTIC_INDEX], _is_elastic_index)
    if (folder / "config.json").exists():
        raise InvalidInput(f"{folder} has a model, which `load` would not find beside sizes; choose another folder.")


def require_no_sizes(folder: Path) -> None:
    """Raises InvalidInput for the folder of an elastic model, beside whose sizes `load` finds no model."""
    if is_elastic(folder):
        raise InvalidInput(f"{folder} is the folder of an elastic model; choose another folder.")


def require_result_folder(folder: Path, model: nn.Module, onnx: bool, other: Format | None = None) -> None:
    """Raises InvalidInput if results would overwrite files that attnrx did not write.

    `onnx` states whether model.onnx is written; `other` is the format of another file, which has evidence of its own.
    """
    require_no_sizes(folder)
    require_model_folder(folder)
    require_absent([folder / "report.html"], _is_report)
    if onnx:
        require_own_export(folder / "model.onnx", None, parse_format("onnx"), model)
    if other is not None:
        require_own_export(*exported_paths(folder, other), other, model)


def require_own_export(path: Path, evidence: Path | None, form: Format, model: nn.Module) -> None:
    require_own_files(path, form.files(path))
    require_export_path(path, form, with_script=form.example(path) is not None and num_classes(model) > 0)
    if evidence is not None:
        require_absent([evidence], _is_evidence)


def _is_elastic_index(path: Path) -> bool:
    return file_kind(path) == ELASTIC


def _is_report(path: Path) -> bool:
    return file_kind(path) == REPORT


def _is_evidence(path: Path) -> bool:
    return file_kind(path) == EVIDENCE


def require_model_of(folder: Path, fingerprint: str) -> None:
    """Raises InvalidInput if a folder has the evidence of another model than this one."""
    path = folder / "evidence.json"
    stored = Evidence.load(path).about.get("candidate") if _is_evidence(path) else None
    if stored not in (None, fingerprint):
        raise InvalidInput(f"{folder} holds another model (its evidence is of {stored}): save this one there first.")


def result_parts(fingerprint: str) -> Parts:
    """Returns the files that `Shrunk.save` replaces for the model with this fingerprint.

    These are the model, its report, and exports of other models with their evidence; exports of this model stay, unless
    they are written again.
    """

    def parts(folder: Path, written: Collection[str]) -> set[str]:
        names = {each.name for each in folder.iterdir() if is_model_file(each)}
        names |= {"report.html"} if _is_report(folder / "report.html") else set()
        for path, facts in own_exports(folder).items():
            if RESULT.fullmatch(path.stem) and fingerprint != _fingerprint_of(facts):
                names |= _export_names(path, facts)
        return names | export_parts(folder, written)

    return parts


def export_parts(folder: Path, written: Collection[str]) -> set[str]:
    """Returns the files of earlier exports, with their evidence, in whose place files of these names are written."""
    names = set()
    for path, facts in own_exports(folder).items():
        if path.name in written:
            names |= _export_names(path, facts)
    # Facts and scripts without a file are those of an export that was interrupted.
    paths = [folder / name for name in written]
    names |= {path.name for path in paths if path.suffix == ".json" and file_kind(path) in (EXPORTED, EVIDENCE)}
    return names | {script.name for path in paths if (script := own_script(path)) is not None}


def _export_names(path: Path, facts: Mapping[str, Any]) -> set[str]:
    """Returns the names of the files of an export: its facts, its files, its script and its evidence."""
    name, script = RESULT.fullmatch(path.stem), own_script(path)
    evidence = path.with_name(f"evidence-{name[1]}.json") if name else None
    names = {facts_path(path).name, *facts["files"]}
    names |= {script.name} if script is not None else set()
    return names | ({evidence.name} if evidence is not None and _is_evidence(evidence) else set())


def _fingerprint_of(facts: Mapping[str, Any]) -> Any:
    model = facts.get("model")
    return model.get("fingerprint") if isinstance(model, Mapping) else None
