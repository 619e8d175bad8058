"""Exporting on the command line: files that are timed, verified and refused like models."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.exporting import Baseline, Onnx
from attnrx.support.errors import InvalidInput
from attnrx.support.records import to_dict
from attnrx.vit.models import build_model, save_model
from support import pretrained
from support.command_line import call, record
from support.pictures import write_folder

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("export")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # this fixture may be made before that of the tests, or after it
    data = write_folder(root / "images", {"train": 8, "validation": 2, "test": 4})
    model = build_model("dense:digits", channels=3, classes=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    run = save_model(root / "run", model.float().eval())
    torch.set_default_dtype(before)
    onnx = record("export", run, "--out", root / "run.onnx", "--to", "onnx(opset=18)")
    return SimpleNamespace(root=root, data=data, run=run, file=root / "run.onnx", onnx=onnx)


@pytest.mark.slow
def test_an_export_tells_what_was_compared(made: SimpleNamespace) -> None:
    result = made.onnx
    assert result["exported"] == str(made.file) and result["format"] == {"type": "Onnx", "opset": 18}
    assert [each["outcome"] for each in result["parity"]] == ["holds", "reported"]
    assert result == {"exported": str(made.file), **json.loads((made.root / "run.onnx.json").read_text())}
    assert not list(made.root.glob(".*"))


@pytest.mark.slow
def test_a_file_is_verified_like_a_folder(made: SimpleNamespace) -> None:
    words = ("--reference", made.run, "--data", made.data, "--checks", "accuracy(most_drop=100),fidelity")
    found = record("verify", made.file, *words, "--out", made.root / "evidence.json")["findings"]
    agreements = [each["value"] for each in found if each["details"].get("quantity") == "agreement"]
    assert agreements == [100]
    assert "printed only; --out FILE writes it" in call("verify", made.file, *words).out


@pytest.mark.slow
def test_a_file_is_timed_beside_the_originals(made: SimpleNamespace) -> None:
    import onnx

    out, original = made.root / "beside.onnx", rx.load(made.run)
    exported = rx.export(original, out, batch=2, class_names=("cat", "dog", "eel"))
    (speed,) = rx.exporting.compare_with_original(exported, original, threads=1)
    assert (speed.batch, speed.threads) == (2, 1) and 0.3 < speed.faster.value < 3
    (found,) = json.loads((made.root / "beside.onnx.json").read_text())["speeds"]
    assert found["faster"]["value"] == speed.faster.value
    (names,) = [one.value for one in onnx.load(out).metadata_props if one.key == "class_names"]
    assert json.loads(names) == ["cat", "dog", "eel"]
    with pytest.raises(InvalidInput, match="2 class_names for a model with 3 classes"):
        rx.export(original, made.root / "named.onnx", class_names=("a", "b"))


@pytest.mark.slow
def test_int8_takes_its_images_from_data(made: SimpleNamespace) -> None:
    out = made.root / "int8.onnx"
    requested = ("export", made.run, "--to", "int8(images=8)", "--data", made.data, "--batch", 4, "--out", out)
    assert record(*requested)["images"]["batch"] == 4
    assert out.stat().st_size < 0.7 * made.file.stat().st_size


def test_a_model_of_embeddings_is_exported_on_data_with_classes(made: SimpleNamespace) -> None:
    pytest.importorskip("transformers")
    # It is found by its outputs and not by the absence of class names: a backbone of transformers has none.
    run = rx.save(rx.load(pretrained.CASES["hf vit, backbone"][1]()).float(), made.root / "backbone")
    found = record("export", run, "--data", made.data, "--out", made.root / "backbone.onnx")
    assert (found["output"], found["class_names"], len(found["parity"])) == ("embedding", [], 1)
    assert not (made.root / "run_backbone.py").exists()


@pytest.mark.slow
def test_all_models_are_timed_in_onnx_runtime(made: SimpleNamespace) -> None:
    out = made.root / "speeds"
    halves = "half=qk=uniform_rank:0.5 vo=uniform_rank:0.5 fc1=uniform_rank:0.25 fc2=uniform_rank:0.25"
    how = ("--batches", "1,3", "--threads", 1, "--rounds", 3, "--clock", "cpu", "--device", "cpu")
    done = call("bench", "dense:digits", "--methods", halves, "--runtime", "onnx", *how, "--out", out)
    assert done.code == 0, done.err
    (row,) = json.loads((out / "bench.json").read_text())["rows"]
    assert row["conditions"]["rates"]["runtime"] == to_dict(Onnx()) and len(row["speeds"]) == 2, row["note"]
    assert all(each["threads"] == 1 and each["faster"]["value"] > 0 for each in row["speeds"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("export {run} --to onyx --out {root}/x.onnx", "did you mean 'onnx'"),
        ("export {run} --out {root}/x.bin", "ends in .onnx"),
        ("export {run} --batch many --out {root}/x.onnx", "dynamic"),
        ("export {run} --to int8 --out {root}/x.onnx", "calibration images"),
        ("export {file} --out {root}/x.onnx", "Exported"),
        (
            "bench dense:digits --methods a=uniform_rank:0.5 --runtime int8(images=0) --out {root}/x.json",
            "Int8(images=0)",
        ),
    ],
)
@pytest.mark.slow
def test_bad_input_is_told_and_leaves_nothing(made: SimpleNamespace, words: str, said: str) -> None:
    before = sorted(made.root.iterdir())
    done = call(*(word.format(**vars(made)) for word in words.split()))
    assert done.code == 2 and said in done.err, done.err
    assert sorted(made.root.iterdir()) == before


@pytest.mark.slow
def test_a_shrunk_model_is_quantized_and_that_file_verified(made: SimpleNamespace) -> None:
    out = made.root / "shrunk"
    given = ("--data", made.data, "--macs", 0.8, "--batch", 2, "--threads", 1, "--out", out)
    done = call("shrink", made.run, *given, "--to", "int8")
    assert f"deploy: {out / 'model-int8.onnx'}\n" in done.out, done.err
    assert [path.name for path in out.glob("*.onnx")] == ["model-int8.onnx"]
    (row,) = re.findall(r"^model-int8\.onnx +[\d.]+ MB +(.*)$", done.out, re.MULTILINE)
    assert re.match(r"\d+\.\d\dx (faster than|the speed of) ONNX Runtime's own conversion to int8", row), row
    evidence = rx.Evidence.load(out / "evidence.json")
    assert evidence.about["file"] == "model-int8.onnx" and not (out / "evidence-int8.json").exists()
    assert {"divergence", "agreement", "speed"} <= {one.details["quantity"] for one in evidence.findings}
    assert "model-int8.onnx</code>: the speed, the accuracy" in (out / "report.html").read_text()
    assert "did you mean 'int8'" in call("shrink", made.run, *given, "--to", "int9").err


@pytest.mark.slow
def test_a_speed_that_the_unchanged_file_has_changes_nothing(
    made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = Baseline("the vendor's file", nn.Identity())
    monkeypatch.setattr("attnrx.workflows.shrink.measure_baseline", lambda *_: (baseline, 1.5))
    out = made.root / "fast"
    given = ("--data", made.data, "--batch", 2, "--threads", 1, "--out", out)
    done = call("shrink", made.run, *given, "--faster", 1.0001, "--to", "onnx")
    assert "met by the unchanged model as onnx: it is 1.50x as fast as the vendor's file" in done.err
    assert f"deploy: {out / 'model.onnx'}\n" in done.out and [*out.glob("*.onnx")] == [out / "model.onnx"]
    assert done.out.count("NOTHING WAS REMOVED") == 1
    # The table of files has the speed of the headline.
    (row,) = re.findall(r"^model\.onnx +[\d.]+ MB +(\d+\.\d\dx) ", done.out, re.MULTILINE)
    assert f"{row} " in done.out.splitlines()[-1]
    model, original = rx.load(out), rx.load(made.run)
    assert rx.models.model_fingerprint(model) == rx.models.model_fingerprint(original)
    (speed,) = rx.Evidence.load(out / "evidence.json").of("latency")[:1]
    assert not any("memory" in one.claim for one in rx.Evidence.load(out / "evidence.json").findings)  # of torch
    assert speed.limit == pytest.approx(1.0001) and not (out / "prescription.json").exists()
