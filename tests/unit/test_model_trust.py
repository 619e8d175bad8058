"""Code in the files of a model runs with `--trust` alone, whatever is typed at a question."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attnrx as rx
from attnrx.support.errors import AttnrxError, CheckpointError
from support.pretrained import of_hf, of_timm

transformers = pytest.importorskip("transformers")

# Writes a file when it is imported, and again when one of its classes is made.
CODE = """
from pathlib import Path
from transformers import PreTrainedConfig, ViTConfig, ViTForImageClassification, ViTImageProcessor

Path({marker!r}).touch()


class OwnConfig(ViTConfig):
    model_type = "own_vit"


class OwnModel(ViTForImageClassification):
    config_class = OwnConfig


class OwnProcessor(ViTImageProcessor):
    pass
"""


class Bomb:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **fields}))


def auto_map(*kinds: str) -> dict[str, str]:
    names = {"AutoConfig": "OwnConfig", "AutoImageProcessor": "OwnProcessor", "AutoProcessor": "OwnProcessor"}
    return {kind: f"modeling_own.{names.get(kind, 'OwnModel')}" for kind in kinds}


MODEL = auto_map("AutoConfig", "AutoModelForImageClassification", "AutoModel")
PROCESSOR = auto_map("AutoImageProcessor", "AutoProcessor")


def own_model(folder: Path, marker: Path) -> None:
    changed(folder / "config.json", model_type="own_vit", architectures=["OwnModel"], auto_map=MODEL)


def known_model(folder: Path, marker: Path) -> None:
    changed(
        folder / "config.json",
        auto_map=MODEL,
        custom_pipelines={"image-classification": {"impl": "modeling_own.OwnModel"}},
    )


def own_processor(folder: Path, marker: Path) -> None:
    changed(folder / "preprocessor_config.json", image_processor_type="OwnProcessor", auto_map=PROCESSOR)


def nested_processor(folder: Path, marker: Path) -> None:
    fields = {"image_processor_type": "OwnProcessor", "auto_map": PROCESSOR}
    changed(folder / "processor_config.json", image_processor=fields, processor_class="OwnProcessor", **fields)


def other_files(folder: Path, marker: Path) -> None:
    for name in ("generation_config.json", "tokenizer_config.json", "video_preprocessor_config.json"):
        changed(folder / name, auto_map={**MODEL, **PROCESSOR, "AutoTokenizer": ["modeling_own.OwnModel"] * 2})
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "modeling_own.py", folder / "custom_generate" / "generate.py")


def kernel(folder: Path, marker: Path) -> None:
    changed(folder / "config.json", attn_implementation="somebody/own-kernels")


def torch_pickle(folder: Path, marker: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weights": Bomb(marker)}, folder / "pytorch_model.bin")


def plain_pickle(folder: Path, marker: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weights": Bomb(marker)}))


# What is planted -> the file that the error names; None where the model is read without the code.
PLANTED: dict[Callable[[Path, Path], None], str | None] = {
    own_model: "config.json",
    known_model: None,
    own_processor: "preprocessor_config.json",
    nested_processor: "processor_config.json",
    other_files: None,
    kernel: "config.json",
    torch_pickle: "pytorch_model.bin",
    plain_pickle: "pytorch_model.bin",
}

CHILD = """
import contextlib, io, json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from attnrx.cli import main
found = []
for words in json.loads(Path(sys.argv[1]).read_text()):
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(err):
        code = main(words)
    found.append([code, out.getvalue() + err.getvalue()])
Path(sys.argv[2]).write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    of_hf("ViTForImageClassification").float().save_pretrained(folder)
    changed(
        folder / "preprocessor_config.json", image_processor_type="ViTImageProcessor", size={"height": 16, "width": 16}
    )
    return folder


def planted(plain: Path, place: Path, plant: Callable[[Path, Path], None]) -> tuple[Path, Path]:
    """A folder with the code of a model, and the file that the code writes."""
    folder, marker = place / plant.__name__, place / f"{plant.__name__} ran"
    shutil.copytree(plain, folder)
    (folder / "modeling_own.py").write_text(CODE.format(marker=str(marker)))
    plant(folder, marker)
    return folder, marker


def commands(folder: Path, out: Path) -> list[list[str]]:
    digits = ["--data", "digits"]
    return [
        ["costs", str(folder)],
        ["costs", f"hf:{folder}"],
        ["export", str(folder), "--out", str(out / "model.onnx")],
        ["shrink", f"hf:{folder}", *digits, "--macs", "0.8", "--out", str(out / "shrunk"), "--no-onnx"],
        ["verify", str(folder), "--reference", str(folder), *digits],
    ]


@pytest.mark.slow
def test_no_command_runs_code_of_a_folder(plain: Path, tmp_path: Path) -> None:
    cases = {plant: planted(plain, tmp_path, plant) for plant in PLANTED}
    # Those that are read run on, so that only one command of theirs is tried.
    words = {plant: commands(folder, tmp_path)[: None if PLANTED[plant] else 2] for plant, (folder, _) in cases.items()}
    (tmp_path / "words.json").write_text(json.dumps([each for several in words.values() for each in several]))
    child = [sys.executable, "-c", CHILD, str(tmp_path / "words.json"), str(tmp_path / "found.json")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(child, input="y\n" * 100, capture_output=True, text=True, env=environment, check=True)
    assert "[y/N]" not in done.stdout + done.stderr
    found = iter(json.loads((tmp_path / "found.json").read_text()))
    for plant, (folder, marker) in cases.items():
        assert not marker.exists(), plant.__name__
        name = PLANTED[plant]
        for each in words[plant]:
            code, text = next(found)
            # Costs of a name are computed of the configuration alone.
            expected = None if each[:2] == ["costs", f"hf:{folder}"] and name != "config.json" else name
            assert code == (0 if expected is None else 2), (each, text)
            assert expected is None or (expected in text and "--trust" in text and "Traceback" not in text), text


@pytest.mark.parametrize("plant", [own_model, own_processor], ids=lambda plant: plant.__name__)
def test_code_runs_with_trust(plant: Callable[[Path, Path], None], plain: Path, tmp_path: Path) -> None:
    folder, marker = planted(plain, tmp_path, plant)
    with pytest.raises(AttnrxError, match=rf"{PLANTED[plant]}.*trust=True"):
        rx.load(folder)
    assert not marker.exists()
    try:
        rx.load(folder, trust=True)
    except AttnrxError as error:  # its class has no reader
        assert "trust" not in str(error)
    assert marker.exists()


def test_weights_that_are_a_pickle_say_so(tmp_path: Path) -> None:
    torch.save({"state_dict": Bomb(tmp_path / "ran")}, tmp_path / "weights.pth")
    with pytest.raises(
        CheckpointError, match=r"weights\.pth is a pickle that names posix\.mkdir.*--trust.*state_dict\(\).*safetensors"
    ):
        rx.load("timm:vit_tiny_patch16_224", weights=tmp_path / "weights.pth")
    assert not (tmp_path / "ran").exists()


def test_pickles_in_a_folder_that_timm_reads_are_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 5, "pretrained_cfg": {"num_classes": 5}}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"state_dict": Bomb(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(AttnrxError, match=r"folder"):
        rx.load(f"timm:local-dir:{folder}")
    assert not (tmp_path / "ran").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_an_onnx_file_reads_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    secret, folder = tmp_path / "secret.bin", tmp_path / "folder"
    folder.mkdir()
    exported = rx.export(rx.load(of_timm("vit_tiny_patch16_224")).float(), folder / "model.onnx")
    stored = onnx.load(exported.path)
    for tensor in stored.graph.initializer:
        if tensor.raw_data:
            secret.write_bytes(tensor.raw_data)
            onnx.external_data_helper.set_external_data(tensor, "../secret.bin")
            tensor.ClearField("raw_data")
            break
    exported.path.write_bytes(stored.SerializeToString())
    exported.facts["files"] = {"model.onnx": rx.support.storage.file_sha256(exported.path)}
    rx.serialization.write_json(folder / "model.onnx.json", exported.facts)
    with pytest.raises(CheckpointError, match=r"model\.onnx"):
        rx.load(exported.path)(torch.zeros(1, 3, 16, 16, dtype=torch.float32))
