"""The IrrAtt experiments on tiny models: prices that are those of the models made, and runs that go on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnrx.decide.diagnosing import diagnose
from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx.support.progress import no_log
from attnrx.vit.models import build_model
from attnrx.workflows.save import save
from attnrx_lab.papers.fusion import FusionExperiment, blocks
from attnrx_lab.papers.irratt import FACTORS, Factors, IrrattExperiment, IrrattMethod, paper_price, realized_price

pytestmark = pytest.mark.usefixtures("single_precision")

HALF = (
    IrrattMethod("original"),
    IrrattMethod("truncatt", "truncatt", 0.5, 0.5),
    IrrattMethod("cp", "cp", 0.5, 0.5),
    IrrattMethod("irratt", "irratt", 0.5, 0.5),
    IrrattMethod("mlp", mlp=0.5),
    IrrattMethod("trained", "irratt", 0.5, 0.5, by_training=True),
)
SHAPE = {"image_size": 8, "patch_size": 4, "width": 24, "depth": 2, "heads": 3, "classes": 4}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved model of our own, which needs no other library."""
    torch.set_default_dtype(torch.float32)
    return str(save(build_model("dense:cifar10", seed=3, **SHAPE), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def experiment(model_folder: str) -> IrrattExperiment:
    return IrrattExperiment("small", model_folder, "generated", HALF).as_tiny()


@pytest.mark.slow
def test_prices_are_those_of_the_models_that_are_made(experiment: IrrattExperiment, tmp_path: Path):
    model = experiment.original(tmp_path, no_log)
    diagnosis = diagnose(model, experiment.splits(model).train.take(16))
    for method in HALF[:5]:
        made = realized_price(model, method.candidate(model, diagnosis, 0))
        assert made == paper_price(model, method), method.name
        assert (made["params_percent"] < 100) == method.changes


@pytest.mark.slow
def test_every_method_is_priced_and_what_needs_training_is_not_measured(experiment: IrrattExperiment, tmp_path: Path):
    run = experiment.run(tmp_path)
    for method in HALF:
        assert run.measure(method.name, "paper", "mhsa_percent") is not None
        assert (run.measure(method.name, "measured", "accuracy") is None) == method.by_training
    change = run.measure("original", "measured", "accuracy_change")
    assert change is not None and change["value"] == 0
    assert any("Eq. 7" in note for note in run.record["data"]["notes"])
    assert not (tmp_path / "train").exists()
    with pytest.raises(CheckpointError, match="calibration_images was 32 and is now 16"):
        experiment.changed({"calibration_images": 16}).run(tmp_path)


def test_a_run_goes_on_where_it_was_stopped(experiment: IrrattExperiment, tmp_path: Path):
    own = replace(experiment, methods=HALF[:2])
    first = own.run(tmp_path)
    kept, lost = (tmp_path / "evidence" / f"{name}.json" for name in ("original", "truncatt"))
    time = kept.stat().st_mtime_ns
    lost.unlink()
    (tmp_path / "result.json").unlink()
    again = own.run(tmp_path)
    assert lost.exists() and kept.stat().st_mtime_ns == time
    assert again.record == first.record


def test_fine_tuning_trains_the_candidate_and_never_the_original(experiment: IrrattExperiment, tmp_path: Path):
    own = replace(experiment, methods=HALF[:2])
    plain = own.run(tmp_path / "plain")
    tuned = own.changed({"epochs": 1}).run(tmp_path / "tuned")
    assert [path.name for path in (tmp_path / "tuned" / "train").iterdir()] == ["truncatt"]
    measured = [run.measure("truncatt", "measured", "divergence_to_original") for run in (plain, tuned)]
    assert measured[0] is not None and measured[1] is not None and measured[0]["value"] != measured[1]["value"]


@pytest.mark.parametrize("factors", ["weights", "data"])
def test_values_and_mlp_are_factored_by_the_weights_or_on_data(
    factors: Factors, experiment: IrrattExperiment, tmp_path: Path
):
    own = replace(experiment, methods=(HALF[4],), factors=factors)
    run = own.run(tmp_path)
    model = experiment.original(tmp_path, no_log)
    diagnosis = diagnose(model, own.splits(model).train.take(32), batch_size=50, seed=own.seed)
    rules = {text for text in map(str, HALF[4].prescription(model, diagnosis, 0, factors).rules.values()) if text}
    assert all(f"metric={FACTORS[factors]}" in text for text in rules) and rules
    assert any("calibration images" in note for note in run.record["data"]["notes"]) == (factors == "data")


def test_blocks_of_a_fusion_matrix():
    owned = torch.zeros(3, 6)
    owned[torch.tensor([2, 0, 1, 0, 2, 2]), torch.arange(6)] = torch.tensor([5.0, -1, 2, 3, 1, -4])
    found = blocks(owned)
    assert (found["as_fitted"], found["rescaled"]) == pytest.approx((100, 100))
    assert (found["least"], found["most"]) == (1, 3)
    assert 100 / 3 < found["by_chance"] < 100
    assert blocks(torch.ones(4, 8))["rescaled"] == pytest.approx(25)
    mixed = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])  # energies 9 of 9, and 1 of 2
    assert (blocks(mixed)["as_fitted"], blocks(mixed)["rescaled"]) == pytest.approx((100 * 10 / 11, 75))
    with pytest.raises(InvalidInput, match="zeros"):
        blocks(torch.zeros(2, 2))


def test_ranks_of_the_heads_share_the_total(model_folder: str, tmp_path: Path):
    experiment = replace(FusionExperiment("small", model_folder, (0.25, 0.5)), sweeps=3)
    run = experiment.run(tmp_path)
    for kind in ("fusion", "best"):
        means = [run.measure(f"0.5/head-{place}", kind, "mean") for place in (1, 2, 3)]
        values = [mean["value"] for mean in means if mean is not None]
        assert values == sorted(values) and sum(values) == pytest.approx(12)
    assert experiment.run(tmp_path).record == run.record
