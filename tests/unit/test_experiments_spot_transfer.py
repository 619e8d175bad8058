"""Tables 4 and 5 of SPOT on tiny models: candidates that are read, priced and measured in one pass, and refusals."""

from dataclasses import replace
from pathlib import Path

import pytest

from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx_lab.papers.spot_transfer import SpotTransferExperiment, candidate_parts

pytestmark = pytest.mark.usefixtures("single_precision")

TWO = ("spot=spot(variance=false):0.7@4,7,10", "random=random:0.5/0.3@4,7")


def tiny(check: str = "robustness(severities=3,corruptions=fog)", **changes: object) -> SpotTransferExperiment:
    own = SpotTransferExperiment("small", "lvvit:t", "generated", check, TWO)
    return replace(own, **changes).as_tiny()  # type: ignore[arg-type]


@pytest.mark.parametrize("check", ["transfer", "robustness(severities=3,corruptions=fog)"])
def test_every_candidate_is_priced_and_measured(check: str, tmp_path: Path) -> None:
    run = tiny(check).run(tmp_path)
    prices = [run.measure(name, "costs", "gflops") for name in ("original", "spot", "random")]
    values = [price["value"] for price in prices if price is not None]
    assert len(values) == 3 and values[0] > values[1] > values[2]
    for name in ("original", "spot", "random"):
        accuracy, change = (run.measure(name, "measured", quantity) for quantity in ("accuracy", "accuracy_change"))
        original = run.measure("original", "measured", "accuracy")
        assert accuracy is not None and change is not None and original is not None
        assert change["value"] == pytest.approx(accuracy["value"] - original["value"])
    assert tiny(check).run(tmp_path).record == run.record
    with pytest.raises(CheckpointError, match="seed was 0 and is now 3"):
        tiny(check).seeded(3).run(tmp_path)


def test_a_run_goes_on_with_the_evidence_that_is_there(tmp_path: Path) -> None:
    first = tiny().run(tmp_path)
    kept = tmp_path / "evidence" / "spot.json"
    time = kept.stat().st_mtime_ns
    (tmp_path / "result.json").unlink()
    (tmp_path / "evidence" / "random.json").unlink()
    assert tiny().run(tmp_path).record == first.record
    assert kept.stat().st_mtime_ns == time


def test_candidates_are_read_with_their_knobs_and_folders() -> None:
    name, policy, folder = candidate_parts("spot=spot(variance=false,mean=true):0.7@4,7,10=runs/a=b")
    assert (name, str(policy), folder) == ("spot", "spot(variance=false):0.7@4,7,10", "runs/a=b")
    assert candidate_parts("evit=evit:0.7@4")[2] is None
    for wrong in ("spot", "spot=runs/spot", "=spot:0.7@4"):
        with pytest.raises(InvalidInput, match="write NAME=POLICY"):
            candidate_parts(wrong)


def test_what_must_be_trained_is_said_and_the_others_are_measured() -> None:
    own = replace(tiny(), tiny=False)
    with pytest.raises(InvalidInput, match=r"predictors that must be trained.*--candidates spot=.*=FOLDER"):
        replace(own, candidates=TWO[:1]).made()
    assert own.deviations(own) == []
    changed = own.changed({"candidates": TWO[1:], "test_images": 5})
    assert changed.deviations(own) == [
        f"small: candidates = {TWO[1:]} instead of {TWO}",
        "small: test_images = 5 instead of 16",
    ]


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in ("accuracy", "transfer,robustness"):
        with pytest.raises(InvalidInput, match="one of transfer and robustness"):
            tiny(wrong)
    for names in ((), ("a=random:0.5@4", "a=tome:0.5@4"), ("original=random:0.5@4",)):
        with pytest.raises(InvalidInput, match="a name of its own"):
            tiny(candidates=names)
