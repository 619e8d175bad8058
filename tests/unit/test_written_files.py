"""The table of the files of a folder: size, speed as in the headline, and accuracy."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.reports import files_table, written_files
from attnrx.show.reports.results import deployed
from attnrx.support.estimate import Estimate
from attnrx.support.storage import write_json
from support import report_content

HEADLINE = report_content.latency().faster.value


def folder_with(folder: Path, about: dict, timing_changes: dict) -> Path:
    timing = replace(report_content.latency(), **timing_changes)
    record = asdict(timing) | {"image_shape": list(timing.image_shape)}
    speed = Finding("latency", "speed", 1.06, "x", details={"quantity": "speed", **record})
    # Without the claim that is shown to fail although its interval leaves it undecided, which no file may state.
    consistent = [finding for finding in report_content.evidence().findings if finding.outcome != "fails"]
    evidence = Evidence((*consistent, speed), about)
    evidence.save(folder / "evidence.json")
    (folder / "model.safetensors").write_bytes(b"0" * 2_500_000)
    (folder / "model.onnx").write_bytes(b"0" * 3_000_000)
    own = replace(timing, faster=Estimate(1.25, 1.2, 1.3), by_runtime=None, by_compression=None)
    speeds = [asdict(own) | {"baseline": "the original as onnx"}]
    write_json(folder / "model.onnx.json", {"files": {"model.onnx": "hash"}, "speeds": speeds})
    (folder / "model-openvino.xml").write_bytes(b"0" * 100_000)
    (folder / "model-openvino.bin").write_bytes(b"0" * 1_400_000)
    write_json(folder / "model-openvino.xml.json", {"files": {"model-openvino.bin": "", "model-openvino.xml": ""}})
    evidence.save(folder / "evidence-openvino.json")
    return folder


def test_every_file_has_its_size_speed_and_accuracy(tmp_path: Path) -> None:
    rows = written_files(folder_with(tmp_path, {}, {}))
    assert [(row["file"], row["bytes"], row["faster"]) for row in rows] == [
        ("model.safetensors", 2_500_000, HEADLINE),
        ("model-openvino.xml", 1_500_000, HEADLINE),
        ("model.onnx", 3_000_000, 1.25),
    ]
    _, texts, _ = files_table(tmp_path)
    assert texts[0] == ("model.safetensors", "2.5 MB", "1.06x faster than the original", "95.8 %")
    assert texts[2] == ("model.onnx", "3.0 MB", "1.25x faster than the original as onnx", "as the model")


def test_evidence_about_a_file_gives_its_numbers_to_this_file_only(tmp_path: Path) -> None:
    folder_with(tmp_path, {"file": "model-openvino.xml", "format": "openvino"}, {})
    (tmp_path / "evidence-openvino.json").unlink()
    assert {row["file"]: row["faster"] for row in written_files(tmp_path)} == {
        "model.safetensors": None, "model-openvino.xml": HEADLINE, "model.onnx": 1.25
    }  # fmt: skip
    _, texts, _ = files_table(tmp_path)
    assert [row[3] for row in texts] == ["not measured", "95.8 %", "as the model"]


@pytest.mark.parametrize(
    ("about", "name", "words"),
    [
        ({"target": "faster=1.3", "file": "model-int8.onnx"}, "model-int8.onnx", "this file's"),
        ({"target": "macs=0.7"}, "model.safetensors", "attnrx.load"),
        ({"target": "macs=0.7", "portable": True}, "model.safetensors", "its own library"),
        ({}, "", ""),
    ],
)
def test_a_result_says_which_file_to_deploy(about: dict, name: str, words: str) -> None:
    found, text = deployed(Evidence((), about))
    assert found == name and words in text


def test_a_file_without_a_measured_speed_says_so(tmp_path: Path) -> None:
    folder_with(tmp_path, {}, {})
    findings = (each for each in report_content.evidence().findings if each.outcome != "fails")
    unmeasured = [each for each in findings if each.details.get("quantity") != "speed"]
    Evidence(tuple(unmeasured), {}).save(tmp_path / "evidence.json")
    assert written_files(tmp_path)[0]["faster"] is None and files_table(tmp_path)[1][0][2] == "not measured"


def test_a_slower_file_says_of_what(tmp_path: Path) -> None:
    _, texts, _ = files_table(folder_with(tmp_path, {}, {"faster": Estimate(0.9, 0.8, 0.95)}))
    assert texts[0][2] == "0.90x the speed of the original"


def test_damaged_evidence_is_named_and_other_files_keep_their_numbers(tmp_path: Path) -> None:
    folder_with(tmp_path, {}, {})
    (tmp_path / "evidence.json").write_text('{"kind": "attnrx evidence"')
    damaged, other, _ = written_files(tmp_path)
    assert "evidence.json is not readable" in damaged["problem"] and damaged["accuracy"] is None
    assert other["problem"] is None and other["faster"] == HEADLINE
    _, texts, _ = files_table(tmp_path)
    assert texts[0][2:] == ("unknown: its evidence is damaged", "unknown") and texts[1][2].startswith("1.06x faster")
