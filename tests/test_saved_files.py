"""Folders, files and texts written by an earlier version (0.1.0, October 2026) are still read, and mean the same.

`tests/saved/0.1.0` has small models of timm and transformers, shrunk along every map, with prescriptions, evidence,
diagnoses, a plan, an elastic folder and an ONNX file; `logits.safetensors` has their outputs for `images()`.
`tests/saved/6558ac6e` has those of a later commit, before models stayed those of their library: other libraries, users'
own modules, and a result of `shrink`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import attnrx as rx
from attnrx.nouns.plan import Plan
from attnrx.support.earlier_versions import converted
from attnrx.support.errors import CheckpointError
from attnrx.support.modules import tensors_of
from attnrx.vit.models import answer
from support.users_models import CASES

SAVED = Path(__file__).parent / "saved" / "0.1.0"
LOGITS = load_file(SAVED / "logits.safetensors")
TEXTS = json.loads((SAVED / "texts.json").read_text())
FOLDERS = sorted(path.parent.name for path in SAVED.glob("*/config.json"))

pytestmark = pytest.mark.usefixtures("single_precision")


def images() -> torch.Tensor:
    return torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1


def difference(model: torch.nn.Module, name: str) -> float:
    with torch.no_grad():
        return float((answer(model, images()) - LOGITS[name]).abs().max())


@pytest.mark.parametrize("name", FOLDERS)
def test_models_answer_as_they_did(name: str) -> None:
    assert difference(rx.load(SAVED / name), name) < 1e-5


def test_folders_are_all_listed() -> None:
    assert len(FOLDERS) == 5


@pytest.mark.parametrize("name", FOLDERS)
def test_prescriptions_and_evidence_are_read(name: str) -> None:
    prescription = rx.Prescription.load(SAVED / name / "prescription.json")
    evidence = rx.Evidence.load(SAVED / name / "evidence.json")
    assert len(prescription.layers) == 3 and evidence.findings
    assert evidence.outcome == json.loads((SAVED / name / "evidence.json").read_text())["outcome"]


@pytest.mark.parametrize("name", ["timm", "transformers"])
def test_diagnoses_give_the_prescriptions_of_their_texts(name: str) -> None:
    diagnosis = rx.Diagnosis.load(SAVED / f"{name}.diagnosis.json")
    before = rx.Prescription.load(SAVED / f"{name}-0" / "prescription.json")
    again = rx.prescribe(diagnosis, " ".join(f"{key}={text}" for key, text in before.rules.items()))
    for old, new in zip(before.layers, again.layers, strict=True):
        assert old.qk.ranks == new.qk.ranks and str(old.decisions) == str(new.decisions)


def test_plans_are_read() -> None:
    plan = Plan.load(SAVED / "timm.plan.json" / "plan.json")
    assert plan.explained and plan.expected["divergence"].value > 0 and plan.prescription.layers


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_elastic_folders_give_the_size_of_a_budget(share: float) -> None:
    assert difference(rx.load(SAVED / "elastic", macs=share), f"elastic@{share}") < 1e-5


def test_an_index_without_fingerprints_has_those_of_the_evidence(tmp_path: Path) -> None:
    folder = tmp_path / "elastic"
    shutil.copytree(SAVED / "elastic", folder)
    for one, other in (("macs-0.9", "kept"), ("macs-0.75", "macs-0.9"), ("kept", "macs-0.75")):
        (folder / one).rename(folder / other)
    with pytest.raises(CheckpointError, match="it was replaced or renamed"):
        rx.load(folder, macs=0.75)
    (folder / "macs-0.9" / "evidence.json").unlink()
    with pytest.raises(CheckpointError, match=r"size macs-0\.9 has no evidence .* make the sizes again"):
        rx.load(folder, macs=0.75)


def test_onnx_files_answer_as_they_did() -> None:
    pytest.importorskip("onnxruntime")
    answers = rx.exporting.load_exported(SAVED / "timm.onnx")(images())
    assert float((answers - LOGITS["timm-2"]).abs().max()) < 1e-4


@pytest.mark.parametrize("text", TEXTS["rules"])
def test_rules_keep_their_texts(text: str) -> None:
    assert str(rx.rules.parse_rule(text)) == text


@pytest.mark.parametrize("text", TEXTS["policies"])
def test_token_policies_keep_their_texts(text: str) -> None:
    assert str(rx.tokens.parse_policy(text)) == text


@pytest.mark.parametrize("text", [*TEXTS["formats"], *TEXTS["targets"], *TEXTS["checks"]])
def test_other_texts_are_read(text: str) -> None:
    if text in TEXTS["formats"]:
        assert rx.exporting.parse_format(text)
    elif text in TEXTS["targets"]:
        assert rx.planning.Target.parse(text)
    else:
        assert rx.checks.parse_checks(text)


COMMIT = SAVED.parent / "6558ac6e"
# The modules of users, which a function creates again.
MADE_BY = {
    "vit-pytorch": "vit-pytorch",
    "torch-encoder": "layers of torch",
    "dinov2-repository": "DINOv2's repository",
    "depth": "depth",
    "two-heads": "two heads",
    "clip": "CLIP",
}
OUTPUTS = load_file(COMMIT / "logits.safetensors")


@pytest.mark.parametrize("name", sorted({key.partition("|")[0] for key in OUTPUTS}))
def test_models_of_a_wrapped_library_answer_as_they_did(name: str) -> None:
    given: dict[str, Any] = {"factory": CASES[MADE_BY[name]].make} if name in MADE_BY else {}
    model = rx.load(COMMIT / name, **given)
    with torch.no_grad():
        answers = tensors_of(answer(model, images()))
    assert answers.keys() == {key.partition("|")[2] for key in OUTPUTS if key.partition("|")[0] == name}
    for place, found in answers.items():
        torch.testing.assert_close(found, OUTPUTS[f"{name}|{place}"], rtol=1e-4, atol=1e-5)


def test_documents_of_that_commit_are_read() -> None:
    evidence, prescription = (
        rx.Evidence.load(COMMIT / "shrunk" / "evidence.json"),
        rx.Prescription.load(COMMIT / "shrunk" / "prescription.json"),
    )
    assert evidence.findings and prescription.about["realized"]["by"] == "compress"
    assert Plan.load(COMMIT / "plan" / "plan.json").prescription.ranks == prescription.ranks
    assert len(rx.Diagnosis.load(COMMIT / "shrunk.diagnosis.json").layers) == 3
    assert rx.load(COMMIT / "elastic", macs=0.75) is not None


def test_what_no_longer_exists_is_named() -> None:
    policy = {"type": "TokenPolicy", "thresholds": {"tuple": [0.5]}}
    with pytest.raises(CheckpointError, match=r"made this TokenPolicy with thresholds = .*make it again"):
        converted({"kind": "attnrx model", "tokens": {"policy": policy}}, "config.json")
    how = {"by": "compress", "norms": "refit", "refine": 0}
    record = converted({"kind": "attnrx prescription", "about": {"realized": how}}, "prescription.json")
    assert record["about"]["realized"] == {"by": "refit"}
    with pytest.raises(CheckpointError, match="refine = 100"):
        converted({"kind": "attnrx prescription", "about": {"realized": {**how, "refine": 100}}}, "prescription.json")
