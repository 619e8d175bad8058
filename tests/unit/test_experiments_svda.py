"""One run of the SVDA experiment: it resumes, refuses to become another one, and its numbers obey the laws."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attnrx.data import DATASETS
from attnrx.nouns.evidence import Evidence
from attnrx.support.errors import CheckpointError, DataError, UnknownName
from attnrx_lab.papers import Run, reproduce
from attnrx_lab.papers.svda import CONTROL_KINDS, RATIO, SvdaExperiment
from support.pictures import write_tree

pytestmark = pytest.mark.usefixtures("single_precision")

TINY = SvdaExperiment("cifar10").as_tiny()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return TINY.run(tmp_path_factory.mktemp("svda"))


def value(run: Run, rule: str, kind: str, quantity: str) -> float:
    measure = run.measure(rule, kind, quantity)
    assert measure is not None, (rule, kind, quantity)
    return measure["value"]


def test_exact_is_the_mask_and_renormalized_is_not(run: Run):
    assert value(run, "share-0.50", "exact", "discrepancy_to_masked") < 1e-5
    assert value(run, "share-0.50", "renormalized", "discrepancy_to_masked") > 1e-5
    exact, mask = (value(run, "share-0.50", kind, "discrepancy_to_original") for kind in ("exact", "mask"))
    assert exact == pytest.approx(mask, rel=1e-2)


def test_refit_is_nearer_to_the_original_at_the_same_cost(run: Run):
    assert value(run, "share-0.50", "refit", "discrepancy_over_renormalized") < 1
    for quantity in ("params_down", "macs_down"):
        refit, renormalized = (value(run, "share-0.50", kind, quantity) for kind in ("refit", "renormalized"))
        assert refit == renormalized > 0


def test_half_the_directions_go_and_every_bound_holds(run: Run):
    assert value(run, "share-0.50", "mask", "removed") == pytest.approx(50)
    bounds = Evidence.load(run.folder / "evidence" / "share-0.50" / "mask.json").of("bounds")
    assert len(bounds) == 6 and all(bound.outcome == "holds" for bound in bounds)


@pytest.mark.parametrize("kind", CONTROL_KINDS)
def test_controls_have_their_draws(run: Run, kind: str):
    random = run.measure("rho-0.90", kind, "nearer_than_random")
    assert random is not None and random["low"] <= random["value"] <= random["high"]
    findings = Evidence.load(run.folder / "evidence" / "rho-0.90" / f"controls-{kind}.json").of("controls")
    drawn = [len(finding.details["draws"]) for finding in findings if finding.details["kind"] == "random"]
    assert drawn and set(drawn) == {TINY.draws}


def test_a_lost_stage_is_made_again_and_nothing_else(run: Run):
    before = json.dumps(run.record["rules"])
    lost = run.folder / "evidence" / "rho-0.90" / "controls-renormalized.json"
    other = run.folder / "evidence" / "rho-0.90" / "refit.json"
    weights = run.folder / "train" / "model.safetensors"
    times = [path.stat().st_mtime_ns for path in (other, weights)]
    lost.unlink()
    (run.folder / "result.json").unlink()
    again = TINY.run(run.folder)
    assert lost.exists() and [path.stat().st_mtime_ns for path in (other, weights)] == times
    assert json.dumps(again.record["rules"]) == before


def test_another_experiment_is_refused_with_what_differs(run: Run):
    with pytest.raises(CheckpointError, match=r"draws was 3 and is now 4"):
        replace(TINY, draws=4).run(run.folder)


def test_a_table_measures_what_it_shows_and_the_next_one_adds_to_it(tmp_path: Path):
    first, second = {("rho-0.90", "mask", "discrepancy_to_original")}, {("rho-0.90", "refit", RATIO)}
    record = TINY.run(tmp_path, keys=first).record
    assert list(record["rules"]) == ["rho-0.90"] and record["stages"] == ["rho-0.90/mask"]
    assert [path.name for path in (tmp_path / "evidence").rglob("*.json")] == ["mask.json"]
    run = TINY.run(tmp_path, keys=second)
    assert set(run.record["stages"]) == {f"rho-0.90/{kind}" for kind in ("mask", "refit", "renormalized")}
    assert run.measure("rho-0.90", "refit", RATIO) is not None
    assert run.record["rules"]["rho-0.90"]["mask"] == record["rules"]["rho-0.90"]["mask"]


def test_every_table_takes_the_scenarios_that_it_has(tmp_path: Path):
    names, tiny = ("svda/table1", "svda/table2"), {"folder": tmp_path, "seeds": (1,), "tiny": True}
    first, second = reproduce(names, only=("cifar10", "fashion_mnist"), **tiny)
    assert [len(table.rows) for table in (first, second)] == [2, 3]
    with pytest.raises(UnknownName, match=r"scenario of the recipe svda/table1, svda/table2.*fashion_mnist"):
        reproduce(names, only=("cifar10", "fashion"), **tiny)


def test_data_may_be_given_by_a_path_and_another_dataset_is_refused(tmp_path: Path):
    """A folder of the classes of a subject is read at its size and scale; its name tells whether it is a copy."""
    root = write_tree(
        tmp_path / "pictures", " ".join(f"{split}/c{n}" for split in ("train", "test") for n in range(10)), 3
    )
    given = SvdaExperiment("fashion_mnist", dataset=str(root))
    splits = given.images()
    assert (splits.channels, splits.image_size, len(splits.class_names)) == (1, 32, 10)
    assert splits.normalization == DATASETS["fashion_mnist"].normalization
    assert given.deviations(SvdaExperiment("fashion_mnist")) == [
        f"fashion_mnist: dataset = {root} instead of the default"
    ]
    copy = SvdaExperiment("fashion_mnist", dataset=str(tmp_path / "fashion_mnist"))
    assert copy.deviations(SvdaExperiment("fashion_mnist")) == []
    with pytest.raises(DataError, match="has 10 classes, and cifar100 has 100"):
        SvdaExperiment("cifar100", dataset=str(root)).images()


def test_what_no_paper_states_is_said_to_be_chosen():
    protocol = SvdaExperiment("cifar10")
    (text,) = protocol.changed({"draws": 3}).deviations(protocol)
    assert text == "cifar10: draws = 3; the default is 10, and the paper states none"
