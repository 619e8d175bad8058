"""Models on the hub: what is uploaded is what is fetched, and the card says what the hub wants to read."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import attnrx as rx
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.support.errors import CardWarning, CheckpointError
from attnrx.vit.models import load_model
from support import cases
from support.command_line import record

hub = pytest.importorskip("huggingface_hub")

ACCURACY = Finding("accuracy", "top-1", 93.0, "%", n=200, details={"quantity": "accuracy", "model": "candidate"})


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the hub."""
    root = tmp_path / "cloud"

    class Api:
        def create_repo(self, repo_id: str, **options: Any) -> str:
            (root / repo_id).mkdir(parents=True, exist_ok=True)
            (root / f"{repo_id}.private").write_text(str(options["private"]))
            return f"https://huggingface.co/{repo_id}"

        def upload_folder(self, repo_id: str, folder_path: str, allow_patterns: list[str], **_: Any) -> None:
            for pattern in allow_patterns:
                for file in Path(folder_path).glob(pattern):
                    shutil.copy(file, root / repo_id)

    def fetch(repo_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        if not (root / repo_id).is_dir() or revision not in (None, "main"):
            raise OSError(f"404 for {repo_id} at {revision}\nand more")
        return str(root / repo_id)

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "snapshot_download", fetch)
    return root


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = cases.model(cases.CONFIGS["dense"])
    folder = rx.save(model, tmp_path / "slim", evidence=Evidence((ACCURACY,), {"data": "digits:200:ab"}))
    (folder / "checkpoint.safetensors").write_bytes(b"of the training")
    return folder


def test_what_was_pushed_is_what_is_loaded(cloud: Path, saved: Path) -> None:
    reported = record("push", saved, "me/slim", "--license", "apache-2.0", "--base-model", "timm/vit", "--private")
    assert reported == {"model": "hub:me/slim", "address": "https://huggingface.co/me/slim"}
    names = sorted(each.name for each in (cloud / "me" / "slim").iterdir())
    assert names == ["README.md", "config.json", "evidence.json", "model.safetensors"]
    assert (cloud / "me" / "slim.private").read_text() == "True"
    images = cases.images(cases.CONFIGS["dense"])
    for name in ("hub:me/slim", "hub:me/slim@main"):
        assert torch.equal(rx.load(name)(images), load_model(saved)(images))


def test_a_portable_model_is_pushed_with_the_files_of_its_library(cloud: Path, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = rx.load(timm.create_model("vit_tiny_patch16_224", **sizes).eval())
    folder = rx.save(model, tmp_path / "portable", portable=True)
    rx.push_to_hub(folder, "me/portable", license="mit")
    names = sorted(each.name for each in (cloud / "me" / "portable").iterdir())
    assert names == ["README.md", "attnrx.json", "config.json", "model.safetensors"]
    images = torch.randn(2, 3, 16, 16)
    again = timm.create_model(f"local-dir:{cloud / 'me' / 'portable'}", pretrained=True).eval()
    assert torch.equal(rx.load("hub:me/portable")(images), again(images))
    assert "local-dir:path/to/this/folder" in (cloud / "me" / "portable" / "README.md").read_text()


def test_the_hub_reads_the_head_of_the_card(cloud: Path, saved: Path) -> None:
    rx.push_to_hub(saved, "me/slim", license="mit", base_model="a/b")
    rx.push_to_hub(saved, "me/slim", license="apache-2.0")
    card = hub.ModelCard.load(cloud / "me" / "slim" / "README.md")
    data = card.data
    assert (data.license, data.base_model, data.library_name) == ("apache-2.0", "a/b", "attnrx")
    assert data.pipeline_tag == "image-classification" and data.metrics == ["accuracy"]
    (result,) = data.eval_results
    assert (result.metric_value, result.dataset_type, result.task_type) == (0.93, "digits", "image-classification")
    assert "## Evidence" in card.text


def test_a_hub_that_refuses_is_told(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("403 for you")

    monkeypatch.setattr(hub.HfApi, "create_repo", refuse)
    with pytest.raises(CheckpointError, match=r"403 for you.*hf auth login"):
        rx.push_to_hub(saved, "me/slim")


def test_an_edited_card_is_kept_by_a_new_model_as_by_a_push(cloud: Path, saved: Path) -> None:
    card, model = saved / "README.md", cases.model(cases.CONFIGS["dense"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rx.save(model, saved)  # not edited: replaced
    assert "## Evidence" not in card.read_text()
    edited = card.read_text() + "\nTrained by me.\n"
    card.write_text(edited)
    with pytest.warns(CardWarning, match=r"README\.md was edited and is kept"):
        rx.save(model, saved, evidence=Evidence((ACCURACY,), {"data": "digits:200:ab"}))
    assert card.read_text() == edited
    rx.push_to_hub(saved, "me/slim")
    assert (cloud / "me" / "slim" / "README.md").read_text() == edited
