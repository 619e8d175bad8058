"""SVDA models on the command line: values and MLP with --moments, and a plan over all axes of ranks."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import attnrx as rx
from attnrx.support.errors import InvalidInput
from attnrx_lab.vision_transformer import ViTConfig
from support import cases
from support.command_line import call, record
from support.pictures import write_folder

CONFIG = ViTConfig.uniform(
    "svda", width=16, depth=2, heads=2, image_size=16, patch_size=4, channels=3, classes=3, mlp_ratio=2.0
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("svda")
    data = write_folder(root / "images", {"train": 8, "validation": 4, "test": 4})
    model = rx.save(cases.model(CONFIG).float(), root / "model")
    record("diagnose", model, "--data", data, "--out", root / "plain.json")
    record("diagnose", model, "--data", data, "--out", root / "moments.json", "--moments")
    return SimpleNamespace(root=root, data=data, model=model, plain=root / "plain.json", moments=root / "moments.json")


def test_values_and_mlp_of_an_svda_model_are_prescribed_realized_and_verified(
    files: SimpleNamespace, tmp_path: Path
) -> None:
    rules = ("--rules", "vo=total_rank:0.5", "fc1=uniform_rank:4", "fc2=uniform_rank:4")
    record("prescribe", files.moments, *rules, "--out", tmp_path / "prescription.json")
    prescription = rx.Prescription.load(tmp_path / "prescription.json")
    assert all(tuple(layer.outputs) == ("vo", "fc1", "fc2") for layer in prescription.layers)
    small = tmp_path / "small"
    record("realize", files.model, "--prescription", tmp_path / "prescription.json", "--out", small)
    checks = ("--checks", "accuracy(most_drop=100),costs")
    found = record("verify", small, "--reference", files.model, "--data", files.data, *checks)
    assert {finding["check"] for finding in found["findings"]} == {"accuracy", "costs"}


@pytest.mark.parametrize("rule", ["vo=total_rank:0.5", "fc1=uniform_rank:4"])
def test_a_diagnosis_without_moments_is_refused_with_the_option_that_measures_them(
    rule: str, files: SimpleNamespace, tmp_path: Path
) -> None:
    refused = call("prescribe", files.plain, "--rules", rule, "--out", tmp_path / "prescription.json")
    assert refused.code == 2
    assert "--moments" in refused.err and "metric=weights" in refused.err
    record("prescribe", files.plain, "--rules", f"{rule},metric=weights", "--out", tmp_path / "prescription.json")


@pytest.mark.parametrize("rule", ["total_rank:0.5", "uniform_rank:0.5"])
def test_rules_without_a_metric_use_the_strengths_of_an_svda_model(
    rule: str, files: SimpleNamespace, tmp_path: Path
) -> None:
    record("prescribe", files.plain, "--rules", rule, "--out", tmp_path / "prescription.json")
    prescription = rx.Prescription.load(tmp_path / "prescription.json")
    assert prescription.rules == {"qk": rule}
    assert all(layer.qk.basis is None for layer in prescription.layers)


def test_an_svda_model_is_planned_over_all_axes_from_files(files: SimpleNamespace, tmp_path: Path) -> None:
    model = rx.load(files.model)
    splits = rx.adapt_preprocessing(rx.load_data(files.data), model)
    images, others = splits.train.take(12), splits.validation.take(4)
    settings = rx.planning.PlanSettings.preset("quick", trials=2, batch_size=8)
    found = rx.plan(model, rx.Diagnosis.load(files.moments), "macs=0.7x", images, others, settings=settings)
    found.save(tmp_path / "plan")
    assert found.cost <= 0.7
    small = rx.realize(model, rx.Prescription.load(tmp_path / "plan" / "prescription.json"))
    costs = [rx.models.family_of(each).costs(each).macs for each in (small, model)]
    assert costs[0] / costs[1] == pytest.approx(found.cost, rel=1e-6)
    with pytest.raises(InvalidInput, match="moments"):
        rx.plan(model, rx.Diagnosis.load(files.plain), "macs=0.7x", images, others, settings=settings)
