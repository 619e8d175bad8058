"""The files of exports: models without a classifier, other precisions, and what is replaced, removed or kept."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn

import attnrx as rx
from attnrx.data.model_data import images_for, preprocessing_of
from attnrx.exporting import Onnx, parse_format, present_exports, present_script, remove_export, subject_of, writing
from attnrx.exporting.exported import sealed_script
from attnrx.support.errors import InvalidInput
from attnrx.vit.models import family_of
from support import odd_pictures, pretrained

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def small(**changes: Any) -> nn.Module:
    return rx.load(pretrained.of_timm(pretrained.VIT, **changes)).float()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an export, its facts and its script; tests write into copies."""
    return rx.export(small(), tmp_path_factory.mktemp("made") / "a.onnx").path.parent


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["vit, no classifier", pytest.param("hf vit, backbone", marks=pytest.mark.slow)])
def test_a_model_of_embeddings_is_exported_without_classes(name: str, tmp_path: Path) -> None:
    model = rx.load(pretrained.CASES[name][1]()).float()
    assert rx.exporting.fitting_names(model, ("cat", "dog")) == ()
    with pytest.raises(InvalidInput, match="2 class_names for a model with 0 classes"):
        rx.export(model, tmp_path / "a.onnx", class_names=("cat", "dog"))
    exported = rx.export(model, tmp_path / "a.onnx")
    assert exported.facts["class_names"] == [] and exported.facts["output"] == "embedding"
    claims = [finding["claim"] for finding in exported.facts["parity"]]
    assert len(claims) == 1 and "feature of the embedding" in claims[0]
    stored = onnx.load(tmp_path / "a.onnx")
    metadata = {one.key: json.loads(one.value) for one in stored.metadata_props}
    assert [output.name for output in stored.graph.output] == ["embedding"]
    assert metadata["class_names"] == [] and files(tmp_path) == {"a.onnx", "a.onnx.json"}


def test_large_models_are_calibrated_on_fewer_images_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, form = small(), Onnx()
    images = images_for(model, torch.randn(12, *family_of(model).input_shape(model)), "images")
    assert [len(each) for each in subject_of(model, form, images).batches(12)] == [8, 4]
    monkeypatch.setattr(writing, "MACS_AT_ONCE", 3.5 * family_of(model).costs(model).macs)
    assert [len(each) for each in subject_of(model, form, images).batches(12)] == [3] * 4


def test_the_script_of_one_logit_prints_the_class_on_its_side(tmp_path: Path) -> None:
    model = small(num_classes=1)
    names = rx.exporting.fitting_names(model, ("negative", "positive"))
    exported = rx.export(model, tmp_path / "one.onnx", class_names=names)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    image.save(tmp_path / "image.png")
    assert exported.facts["preprocessing"] == preprocessing_of(model).to_dict()
    pixels = preprocessing_of(model)(image)[None].float()
    positive = float(model(pixels).detach().sigmoid())
    words = [sys.executable, str(tmp_path / "run_one.py"), str(tmp_path / "image.png")]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert printed[0] == ("positive" if positive > 0.5 else "negative")
    assert float(printed[1]) == pytest.approx(max(positive, 1 - positive), abs=2e-3)


def test_a_script_that_was_edited_or_is_not_ours_is_kept(made: Path, tmp_path: Path) -> None:
    script, own = tmp_path / "run_a.py", "print('mine')\n"
    script.write_text(own)
    with pytest.raises(InvalidInput, match=r"run_a\.py, which exists and was edited or not written"):
        rx.export(small(), tmp_path / "a.onnx")
    assert files(tmp_path) == {"run_a.py"} and script.read_text() == own
    rx.export(small(), tmp_path / "a.onnx", features=True)  # has no script
    assert script.read_text() == own
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    assert present_script(tmp_path / "a.onnx") == script
    rx.export(small(), tmp_path / "a.onnx")
    script.write_text(script.read_text() + own)
    with pytest.raises(InvalidInput, match="edited"):
        rx.export(small(), tmp_path / "a.onnx")


def test_an_outdated_script_goes_with_its_export(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    rx.export(small(), tmp_path / "a.onnx", features=True)
    assert files(tmp_path) == {"a.onnx", "a.onnx.json"}
    # The script of another file with this stem is not that of this one.
    (tmp_path / "run_a.py").write_text(sealed_script(Onnx().example(tmp_path / "a.onnx") or ""))
    assert present_script(tmp_path / "a.xml") is None and present_script(tmp_path / "a.onnx") is not None


def test_an_export_is_removed_with_its_files_unless_they_were_changed(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "b.onnx").write_bytes(b"mine")
    (tmp_path / "b.onnx.json").write_text("{}")
    assert list(present_exports(tmp_path)) == [tmp_path / "a.onnx"]
    remove_export(tmp_path / "b.onnx")
    remove_export(tmp_path / "a.onnx")
    assert files(tmp_path) == {"b.onnx", "b.onnx.json"}
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "a.onnx").write_bytes(b"mine")
    remove_export(tmp_path / "a.onnx")
    assert "a.onnx" in files(tmp_path)


@pytest.mark.slow
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


@pytest.mark.parametrize("form", ["onnx", pytest.param("openvino", marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", [3, pytest.param("dynamic", marks=pytest.mark.slow)])
def test_the_script_classifies_as_the_transform_of_timm_and_the_model_do(
    form: str, batch: int | str, tmp_path: Path
) -> None:
    timm = pytest.importorskip("timm")
    pytest.importorskip({"onnx": "onnxruntime", "openvino": "openvino"}[form])
    source = timm.create_model(
        "vit_tiny_patch16_224", img_size=(32, 48), patch_size=16, depth=1, embed_dim=12, num_heads=3, num_classes=3
    )
    torch.nn.init.normal_(source.head.weight, std=0.3)
    source.pretrained_cfg.update(crop_pct=0.7, interpolation="bilinear")
    source = source.float().eval()
    config = timm.data.resolve_model_data_config(source, {"input_size": (3, 32, 48)})
    transform, path = timm.data.create_transform(**config), tmp_path / f"a{parse_format(form).suffix}"
    exported = rx.export(rx.load(source), path, to=form, batch=batch, class_names=("ant", "bee", "cow"))
    assert exported.facts["preprocessing"]["resize_to"] == [45, 68]
    for name in ("orientation 6 png", "landscape alpha"):
        file = tmp_path / "picture"
        file.write_bytes(odd_pictures.ODD[name])
        picture = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
        shares = source(transform(picture)[None].float())[0].softmax(0)
        words = [sys.executable, str(tmp_path / "run_a.py"), str(file)]
        printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        assert printed[0] == ("ant", "bee", "cow")[int(shares.argmax())]
        assert float(printed[1]) == pytest.approx(float(shares.max()), abs=1e-3)


@pytest.mark.slow
def test_models_of_openvino_leave_the_memory_for_signals_as_it_was(tmp_path: Path) -> None:
    """The second of two models would leave that of the first, which is gone, and the next signal end the process."""
    pytest.importorskip("openvino")
    if sys.platform != "linux":
        pytest.skip("the stack for signals is that of Linux")
    program = """
import ctypes, faulthandler, sys, torch
from pathlib import Path
import attnrx as rx
faulthandler.enable()
def stack():
    found = (ctypes.c_int64 * 3)()
    ctypes.CDLL(None).sigaltstack(None, found)
    return list(found)
before = stack()
files = [rx.load(path) for path in sys.argv[1:]]
for file in files:
    file(torch.randn(1, *file.images.shape))
    assert stack() == before, "after a run"
for index in (0, 0):
    del files[index], file
    assert stack() == before, "after the end of a model"
    file = None
"""
    paths = [str(rx.export(small(), tmp_path / f"{name}.xml", to="openvino").path) for name in ("a", "b")]
    done = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
