"""The demonstration on generated images: everything is there, and the laws hold."""

from dataclasses import replace

import pytest

from attnrx.api import load
from attnrx.evidence import Evidence
from attnrx.models import model_fingerprint
from attnrx.training import Silent
from attnrx_lab.demo import DemoResult, demo, patch_size, short_training, small_model
from attnrx_lab.papers.sources import generated_splits

# Under the name of the digits, so that the small model of theirs is trained.
SPLITS = replace(generated_splits("digits", 1, 4, 16), name="digits")
STAGES: list[str] = []

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_precision")]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    folder = tmp_path_factory.mktemp("demo")
    return demo(SPLITS, folder, epochs=2, reporter=Silent(), log=STAGES.append)


def test_all_files_are_there_and_are_read_back(result: DemoResult):
    assert Evidence.load(result.evidence_path).outcome == result.evidence.outcome
    assert result.report.read_text().startswith("<!DOCTYPE html>")
    slim = load(result.model)
    assert model_fingerprint(slim) == result.evidence.about["candidate"]
    assert STAGES[0].startswith("[1/7]") and STAGES[-1].startswith("[7/7]")


def test_exact_laws_hold_and_each_was_checked(result: DemoResult):
    for law in ("bounds", "exactness", "costs"):
        assert not {finding.claim for finding in result.evidence.of(law) if finding.outcome == "fails"}, law
        assert any(finding.is_claim for finding in result.evidence.of(law)), law


def test_rows_tell_every_realization(result: DemoResult):
    rows = {row.kind: row for row in result.rows}
    assert list(rows) == ["mask", "renormalized", "exact", "refit"]
    assert rows["exact"].discrepancy == pytest.approx(rows["mask"].discrepancy, rel=1e-2)
    assert rows["mask"].params_down == 0 < rows["refit"].params_down == rows["renormalized"].params_down


def test_report_has_every_section(result: DemoResult):
    page = result.report.read_text()
    for section in ("trade-off", "controls", "costs", "attention", "training", "spectra", "evidence", "prescription"):
        assert f'id="{section}"' in page, section


def test_second_run_uses_the_training_again(result: DemoResult):
    weights = result.folder / "train" / SPLITS.name / "model.safetensors"
    before = weights.stat().st_mtime_ns
    again = demo(SPLITS, result.folder, epochs=2, reporter=Silent())
    assert weights.stat().st_mtime_ns == before
    assert again.rows == result.rows


def test_patches_suit_the_image():
    assert [patch_size(side) for side in (8, 16, 28, 32, 64, 224)] == [1, 2, 4, 4, 8, 16]


def test_any_other_dataset_gets_a_budget_of_steps_and_the_compact_model_of_its_shape():
    other = generated_splits("flowers", 1, 4, 8)
    config = short_training(other, seed=1)
    assert config.batch_size == len(other.train) and config.epochs == 400
    name, model = small_model(other, seed=1)
    images = next(iter(other.test.batches(3))).images
    assert name == "svda:cifar10" and model(images.to(next(model.parameters()).dtype)).shape == (3, 4)
