"""The folder of `Shrunk.save`: the names of its files, which are replaced, and the files of others, which are not."""

import re
from pathlib import Path

from torch import nn

from attnrx.errors import InvalidInput
from attnrx.evidence import KIND as EVIDENCE
from attnrx.exporting import Format, own_exports, parse_format, remove_export, require_export_path, require_own_files
from attnrx.model_data import num_classes
from attnrx.models import require_model_folder
from attnrx.realization.elastic import INDEX as ELASTIC_INDEX
from attnrx.realization.elastic import KIND as ELASTIC
from attnrx.realization.elastic import is_elastic
from attnrx.serialization.atomic_writes import require_absent
from attnrx.serialization.storage import REPORT, file_kind


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


def remove_outdated(folder: Path, fingerprint: str) -> None:
    """Deletes what `Shrunk.save` and `save_exported` wrote to a folder for another model than this one."""
    for path, facts in own_exports(folder).items():
        name = re.fullmatch(r"model(?:-(\w+))?", path.stem)
        if name is None or facts.get("model", {}).get("fingerprint") == fingerprint:
            continue
        remove_export(path)
        evidence = folder / f"evidence-{name[1]}.json"
        if _is_evidence(evidence):
            evidence.unlink()
