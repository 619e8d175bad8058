"""Fits are recorded with all their settings, seeds included, and repeated from the record."""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnrx as rx
from attnrx.change.realization import realizing
from attnrx.change.realization.distillation import Distill
from attnrx.change.realization.realizing import KINDS, fits_record, realize_and_fit
from attnrx.change.realization.repair import Repair
from attnrx.nouns.effort import EFFORTS
from attnrx.support.errors import InvalidInput
from attnrx.vit.models import model_fingerprint
from attnrx_lab.checks.controls import recorded_fits
from support.command_line import record
from support.comparisons import pixels
from support.pictures import write_folder
from support.planned import CONFIG, original

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SETTINGS = (Repair(2, 0.01, 3, 64, 0.1, 8, 1e12), Distill(1, (1e-3,), 16, 9))
HOW = {"by": "renormalized", "calibration_images": 24}


def prescribed() -> rx.Prescription:
    return rx.prescribe(
        rx.diagnose(original(), pixels(CONFIG, 16), batch_size=8), "qk=total_rank:0.5 vo=total_rank:0.5"
    )


def again(model: torch.nn.Module, prescription: rx.Prescription, how: Any, images: Any) -> torch.nn.Module:
    """Makes a model from its record."""
    return realize_and_fit(model, prescription, images, recorded_fits(how), how["by"])


def test_every_setting_of_a_fit_is_recorded_and_read_again(tmp_path: Path) -> None:
    how = {**HOW, **fits_record(*SETTINGS)}
    for name, (kind, count) in KINDS.items():
        assert {count, *how["settings"][name]} == {field.name for field in fields(kind)}
    stored = replace(prescribed(), about={"realized": how})
    read = rx.Prescription.load(stored.save(tmp_path / "prescription.json")).about["realized"]
    assert recorded_fits(read) == SETTINGS
    assert recorded_fits({"repair": 300}) == (Repair(300),) and recorded_fits({}) == ()
    with pytest.raises(InvalidInput, match="unknown setting 'rate'"):
        recorded_fits({"repair": 2, "settings": {"repair": {"rate": 0.1}}})
    with pytest.raises(InvalidInput, match="learning_rate"):
        recorded_fits({"repair": 2, "settings": {"repair": {"learning_rate": [0.1]}}})


def test_every_fit_is_repeated_with_its_recorded_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    def fit(found: torch.nn.Module, model: torch.nn.Module, images: Any, settings: Any) -> SimpleNamespace:
        used.append(settings)
        return SimpleNamespace(model=found, before=[0.0], after=[0.0], learning_rate=None, notes=[])

    for name in KINDS:
        monkeypatch.setattr(realizing, name, fit)
    again(original(), prescribed(), {**HOW, **fits_record(*SETTINGS)}, pixels(CONFIG, 24))
    assert tuple(used) == SETTINGS


@pytest.mark.slow
def test_a_shrunk_model_is_repeated_from_its_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(EFFORTS, "quick", replace(EFFORTS["quick"], fitted_images=512, distill_epochs=1))
    batches = [(batch.images, batch.labels) for batch in pixels(CONFIG, 48).batches(8)]
    found = rx.shrink(original(), batches, macs=0.8, seed=5)
    assert found.prescription is not None and found.images is not None
    path = found.prescription.save(tmp_path / "prescription.json")
    read = rx.Prescription.load(path)
    how = read.about["realized"]
    assert how["settings"]["repair"]["seed"] == how["settings"]["distill"]["seed"] == 5
    repeated = again(original(), read, how, found.images.planned)
    for name, tensor in repeated.state_dict().items():
        assert torch.equal(tensor, found.model.state_dict()[name]), name
    other = again(original(), read, {**how, "settings": {}}, found.images.planned)
    assert model_fingerprint(other) != model_fingerprint(found.model)


def test_the_command_takes_a_seed_and_records_it(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "images", {"train": 8, "validation": 2, "test": 4})
    folder, files = rx.save(rx.models.build_model("svda:digits"), tmp_path / "model"), tmp_path / "prescription.json"
    record("diagnose", folder, "--data", data, "--out", tmp_path / "diagnosis.json")
    record("prescribe", tmp_path / "diagnosis.json", "--rules", "qk=top_rank:6", "--out", files)
    words = ("realize", folder, "--prescription", files, "--repair", 1, "--data", data)
    record(*words, "--seed", 3, "--out", tmp_path / "slim")
    stored = rx.Prescription.load(tmp_path / "slim" / "prescription.json").about["realized"]
    assert recorded_fits(stored) == (Repair(1, seed=3),)
