"""Edited prescriptions, diagnoses and evidence are refused, with the file and the field in the message."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attnrx.change.predictions import Predictions
from attnrx.decide.rules import parse_rule, prescribe_maps
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.nouns.prescription import Prescription
from attnrx.show.checks import Accuracy
from attnrx.show.checks.check import Comparison
from attnrx.support.errors import CheckpointError
from attnrx.support.seals import SEAL, sealed
from attnrx.support.storage import read_json, read_tensors, write_json
from attnrx.vit.outputs import Logits
from support.command_line import call
from support.diagnoses import diagnosis
from support.edits import ABSENT, write_edited

NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diagnosis, a prescription of 16 directions per head of which 6 stay, and evidence."""
    folder = tmp_path_factory.mktemp("files")
    made = diagnosis(heads=4, directions=16, layers=3)
    made.save(folder / "diagnosis.json")
    prescribe_maps(made, parse_rule("top_rank:6")).save(folder / "prescription.json")
    findings = (Finding("accuracy", "change", -0.5, "points", limit=-1.0, outcome="holds", low=-0.9, high=0.1, n=100),)
    Evidence(findings, {"rules": {"qk": "top_rank:3"}}).save(folder / "evidence.json")
    return folder


HEAD = "layers[1].qk.heads[2]"
TOKENS = {"reasons": ["why"], "seed": 0, "trained": False}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (f"{HEAD}.keep[0]", -1, "is -1; it must be a whole number of 0 or more, at most 15"),
        (f"{HEAD}.keep[0]", 0.0, "is 0.0; it must be a whole number"),
        (f"{HEAD}.keep", [0, 1, 2, 3, 4, 4], "keep[5] is 4, as layers[1].qk.heads[2].keep[4] is"),
        (f"{HEAD}.keep", [0, 1, 2], "rank is 6, and keep has 3 directions"),
        (f"{HEAD}.strength[3]", NAN, "is nan; it must be a finite number"),
        (f"{HEAD}.strength[3]", 1e39, r"is 1e+39; it must be a finite number"),
        (f"{HEAD}.why", ABSENT, "is missing"),
        ("layers[1].qk.directions", 10**12, "it must be a whole number of 0 or more, at most 65536"),
        ("layers[1].qk", ABSENT, "layers[1].qk is missing"),
        ("layers[0].qk.basis", {"shared": False}, "needs the tensor"),
        ("removed_share", 0.0, "its layers give 0.625"),
        ("rules.tokens", "evit:0.5@2", "tokens is missing, and rules.tokens is given"),
        ("tokens", TOKENS, "rules.tokens is missing, and tokens is given"),
        ("rules.score", {}, "rules.score is unknown"),
        ("rules.tokens", "evit:7@4", "rules.tokens is 'evit:7@4'"),
        ("tokens", TOKENS | {"seed": -1}, "tokens.seed is -1"),
        ("tokens", TOKENS | {"reasons": []}, "tokens.reasons has 0 values"),
    ],
)  # fmt: skip
def test_an_edited_prescription_is_refused_by_field(
    files: Path, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    path = write_edited(tmp_path / "prescription.json", files / "prescription.json", field, value)
    with pytest.raises(CheckpointError, match=re.escape(message)) as refused:
        Prescription.load(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layers[2]", ABSENT, "its tensors include 'layers.2."),
        ("layers[1].heads", [0, 1, 1, 3], r"layers[1].heads[2] is 1, as layers[1].heads[1] is"),
        ("layers[1].scale", NAN, r"layers[1].scale is nan; it must be a finite number"),
        ("layers[1].norms", "some", r"layers[1].norms is 'some'; it must be one of"),
        ("tensors_sha256", "0" * 64, "which is not in its folder"),
    ],
)  # fmt: skip
def test_an_edited_diagnosis_is_refused_by_field(
    files: Path, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    path = write_edited(tmp_path / "diagnosis.json", files / "diagnosis.json", field, value)
    (tensors,) = files.glob("diagnosis.json.tensors-*")
    (tmp_path / tensors.name).write_bytes(tensors.read_bytes())
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Diagnosis.load(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("findings[0].value", "much", r"findings[0].value is 'much'; it must be a finite number"),
        ("findings[0].n", -3, r"findings[0].n is -3; it must be a whole number"),
        ("findings[0].outcome", "yes", r"findings[0].outcome is 'yes'; it must be one of"),
        ("findings[0].limit", None, "has the limit None and the outcome 'holds'"),
        ("findings[0].low", 0.5, "low is above high"),
        ("findings[0].claim", ABSENT, r"findings[0].claim is missing"),
        ("outcome", "fails", "outcome is 'fails', and the findings give 'holds'"),
    ],
)  # fmt: skip
def test_edited_evidence_is_refused_by_field(files: Path, tmp_path: Path, field: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Evidence.load(write_edited(tmp_path / "evidence.json", files / "evidence.json", field, value))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evidence of two models of which 36 and 34 of 359 images are right."""
    before, after = torch.zeros(359, dtype=torch.bool), torch.zeros(359, dtype=torch.bool)
    before[:36], after[2:36] = True, True
    outputs = {role: torch.nn.functional.one_hot((~right).long(), 2).double() for role, right in
               (("reference", before), ("candidate", after))}  # fmt: skip
    predictions = Predictions(outputs, torch.zeros(359, dtype=torch.long), Logits())
    compared = SimpleNamespace(predictions=predictions, seed=0)
    about = {"images": 359, "candidate": "00ff", "reference": "11ee"}
    evidence = Evidence(Accuracy()(cast(Comparison, compared)), about)
    return evidence.save(tmp_path_factory.mktemp("measured") / "evidence.json")


NUMBERS = [
    ("findings[0].value", 99.9, "findings[0].value is 99.9, outside of its interval [7.33"),
    ("findings[1].value", 12.0, "findings[1].value is 12, and 34 of 359 images are 9.47"),
    ("findings[0].details.correct", 360, "findings[0].details.correct is 360 of 359 images"),
    ("findings[0].n", 360, "findings[0].n is 360, and about.images is 359"),
    ("findings[0].n", 200, "36 of 200 images are 18 %"),
    ("findings[0].low", None, "findings[0].low is missing"),
    ("findings[2].value", -0.2, "findings[2].value is -0.2, and 0 gained and 2 lost of 359 images"),
    ("findings[2].details.gained", 2, "2 gained and 2 lost of 359 images are 0"),
    ("findings[2].outcome", "fails", "findings[2].outcome is 'fails', and the limit -1"),
    ("findings[2].limit", -9.0, "give 'holds'"),
    ("about.candidate", "22dd", "was changed after it was written (its own hash differs). Verify again."),
    ("findings[0].claim", "top-5 accuracy", "its own hash differs"),
]


@pytest.mark.parametrize(("field", "value", "message"), NUMBERS)
def test_numbers_that_contradict_each_other_are_refused_by_field(
    field: str, value: Any, message: str, measured: Path, tmp_path: Path
) -> None:
    assert Evidence.load(measured).of("accuracy")[0].details["correct"] == 36
    with pytest.raises(CheckpointError, match=rf"evidence\.json.*{re.escape(message)}"):
        Evidence.load(write_edited(tmp_path / "evidence.json", measured, field, value))


@pytest.mark.parametrize(("field", "value", "message"), NUMBERS)
def test_files_of_schema_2_without_a_hash_are_read_if_their_numbers_fit(
    field: str, value: Any, message: str, measured: Path, tmp_path: Path
) -> None:
    """As earlier versions wrote them."""
    record = {name: part for name, part in read_json(measured).items() if name != SEAL}
    earlier = write_json(tmp_path / "earlier.json", record | {"schema": 2})
    assert Evidence.load(earlier) == Evidence.load(measured)
    changed = write_edited(tmp_path / "evidence.json", earlier, field, value)
    if "hash" in message:
        assert Evidence.load(changed)
        return
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Evidence.load(changed)


def test_evidence_of_which_the_hash_was_removed_is_refused(measured: Path, tmp_path: Path) -> None:
    record = {name: part for name, part in read_json(measured).items() if name != SEAL}
    with pytest.raises(CheckpointError, match=f"{SEAL} is missing"):
        Evidence.load(write_json(tmp_path / "evidence.json", record))


def test_a_difference_that_is_not_candidate_minus_reference_is_refused(measured: Path, tmp_path: Path) -> None:
    record = read_json(measured)
    record["findings"][2]["details"] |= {"lost": None, "gained": None}
    record["findings"][2] |= {"value": -0.9}
    with pytest.raises(CheckpointError, match=r"\[2\]\.value is -0\.9, and candidate minus reference is -0\.557"):
        Evidence.load(write_json(tmp_path / "evidence.json", sealed(record)))


def test_a_report_refuses_edited_evidence(measured: Path, tmp_path: Path) -> None:
    path = write_edited(tmp_path / "evidence.json", measured, "findings[0].value", 99.9)
    done = call("report", "--evidence", path, "--out", tmp_path / "report.html")
    assert done.code == 2 and "findings[0].value is 99.9" in done.err and not (tmp_path / "report.html").exists()


DEEP = ("[" * 100_000, "[" * 5000 + "]" * 5000, '{"a":' * 300 + "1" + "}" * 300)


@pytest.mark.parametrize("content", [*DEEP, "1" * 5000], ids=("open", "lists", "objects", "digits"))
def test_json_that_exhausts_the_reader_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"a.json"):
        read_json(tmp_path / "a.json")


def test_a_pipe_a_device_and_a_folder_are_refused_before_they_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for read in (read_json, read_tensors):
        with pytest.raises(CheckpointError, match=r"pipe.json is a pipe, a socket or a device; give a regular file"):
            read(tmp_path / "pipe.json")
        with pytest.raises(CheckpointError, match="or a device"):
            read(Path("/dev/zero"))
        with pytest.raises(CheckpointError, match="is a folder"):
            read(tmp_path)
        with pytest.raises(CheckpointError, match="does not exist"):
            read(write_json(tmp_path / "a.json", {}) / "below")
