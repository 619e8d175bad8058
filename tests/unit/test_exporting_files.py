"""The files of exports: models without a classifier, other precisions, and what is replaced, removed or kept."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import attnrx as rx
import pretrained
from attnrx.errors import InvalidInput
from attnrx.exporting import Onnx, own_exports, own_script, precision_for, remove_export
from attnrx.exporting.own_files import sealed_script

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def small(**changes: Any) -> nn.Module:
    return rx.load(pretrained.of_timm(pretrained.VIT, **changes)).float()


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["vit, no classifier", "hf vit, backbone"])
def test_a_model_of_embeddings_is_exported_without_classes(name: str, tmp_path: Path) -> None:
    model = rx.load(pretrained.CASES[name][1]()).float()
    assert rx.exporting.fitting_names(model, ("cat", "dog")) == ()
    with pytest.raises(InvalidInput, match="2 class_names for a model without a classifier"):
        rx.export(model, tmp_path / "a.onnx", class_names=("cat", "dog"))
    exported = rx.export(model, tmp_path / "a.onnx")
    assert exported.facts["class_names"] == [] and exported.facts["output"] == "embedding"
    claims = [finding["claim"] for finding in exported.facts["parity"]]
    assert len(claims) == 1 and "feature of the embedding" in claims[0]
    stored = onnx.load(tmp_path / "a.onnx")
    metadata = {one.key: json.loads(one.value) for one in stored.metadata_props}
    assert [output.name for output in stored.graph.output] == ["embedding"]
    assert metadata["class_names"] == [] and files(tmp_path) == {"a.onnx", "a.onnx.json"}


def test_the_script_of_one_logit_prints_the_class_on_its_side(tmp_path: Path) -> None:
    model = small(num_classes=1)
    names = rx.exporting.fitting_names(model, ("negative", "positive"))
    exported = rx.export(model, tmp_path / "one.onnx", class_names=names)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    image.save(tmp_path / "image.png")
    mean, std = (np.array(exported.facts["normalization"][name], np.float32) for name in ("mean", "std"))
    pixels = torch.from_numpy(((np.asarray(image, np.float32) / 255 - mean) / std).transpose(2, 0, 1)[None].copy())
    positive = float(model(pixels).detach().sigmoid())
    words = [sys.executable, str(tmp_path / "run_one.py"), str(tmp_path / "image.png")]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert printed[0] == ("positive" if positive > 0.5 else "negative")
    assert float(printed[1]) == pytest.approx(max(positive, 1 - positive), abs=2e-3)


def test_a_script_that_was_edited_or_is_not_ours_is_kept(tmp_path: Path) -> None:
    script, own = tmp_path / "run_a.py", "print('mine')\n"
    script.write_text(own)
    with pytest.raises(InvalidInput, match=r"run_a\.py, which exists and was edited or not written"):
        rx.export(small(), tmp_path / "a.onnx")
    assert files(tmp_path) == {"run_a.py"} and script.read_text() == own
    rx.export(small(), tmp_path / "a.onnx", features=True)  # has no script
    assert script.read_text() == own
    script.unlink()
    rx.export(small(), tmp_path / "a.onnx")
    assert own_script(tmp_path / "a.onnx") == script
    rx.export(small(), tmp_path / "a.onnx")
    script.write_text(script.read_text() + own)
    with pytest.raises(InvalidInput, match="edited"):
        rx.export(small(), tmp_path / "a.onnx")


def test_an_outdated_script_goes_with_its_export(tmp_path: Path) -> None:
    rx.export(small(), tmp_path / "a.onnx")
    rx.export(small(), tmp_path / "a.onnx", features=True)
    assert files(tmp_path) == {"a.onnx", "a.onnx.json"}
    # The script of another file with this stem is not that of this one.
    (tmp_path / "run_a.py").write_text(sealed_script(Onnx().example(tmp_path / "a.onnx") or ""))
    assert own_script(tmp_path / "a.xml") is None and own_script(tmp_path / "a.onnx") is not None


def test_an_export_is_removed_with_its_files_unless_they_were_changed(tmp_path: Path) -> None:
    rx.export(small(), tmp_path / "a.onnx")
    (tmp_path / "b.onnx").write_bytes(b"mine")
    (tmp_path / "b.onnx.json").write_text("{}")
    assert list(own_exports(tmp_path)) == [tmp_path / "a.onnx"]
    remove_export(tmp_path / "b.onnx")
    remove_export(tmp_path / "a.onnx")
    assert files(tmp_path) == {"b.onnx", "b.onnx.json"}
    rx.export(small(), tmp_path / "a.onnx")
    (tmp_path / "a.onnx").write_bytes(b"mine")
    remove_export(tmp_path / "a.onnx")
    assert "a.onnx" in files(tmp_path)


def test_an_export_of_two_files_replaces_its_own_only(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    path, model = tmp_path / "a.xml", small()
    first = rx.export(model, path, to="openvino").facts["files"]
    second = rx.export(small(num_classes=4), path, to="openvino").facts["files"]
    assert first.keys() == second.keys() == {"a.xml", "a.bin"} and first["a.bin"] != second["a.bin"]
    assert rx.load(path)(torch.zeros(1, 3, 16, 16, dtype=torch.float32)).shape == (1, 4)
    (tmp_path / "a.bin").write_bytes(b"mine")
    before = files(tmp_path)
    with pytest.raises(InvalidInput, match=re.escape(str(tmp_path / "a."))):
        rx.export(model, path, to="openvino")
    assert files(tmp_path) == before and (tmp_path / "a.bin").read_bytes() == b"mine"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_precision_of_a_format_is_its_own(dtype: torch.dtype, tmp_path: Path) -> None:
    model = small().to(dtype)
    assert precision_for(model, Onnx()) == "float32" and precision_for(small(), Onnx()) is None
    assert precision_for(model, rx.exporting.Program()) == ("float32" if dtype == torch.float64 else None)
    exported = rx.export(model, tmp_path / "a.onnx", precision=precision_for(model, Onnx()))
    assert exported.images.precision == "float32"
