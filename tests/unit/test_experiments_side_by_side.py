"""Runs side by side, with a limit on their time, and the estimate of that time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnrx.support.errors import NotSupported, TrainingInterrupted, UnknownName
from attnrx.vit.attention import Explicit
from attnrx.vit.models import family_of
from attnrx_lab.papers import ReproducedTable, estimate_training, reproduce
from attnrx_lab.papers.estimate import training_flops
from attnrx_lab.papers.reproduce import planned_experiments
from attnrx_lab.papers.svda import SvdaExperiment

pytestmark = pytest.mark.usefixtures("single_precision")

TINY: dict[str, Any] = {"only": "cifar10", "seeds": (1, 2), "tiny": True}


def values(table: ReproducedTable) -> dict[tuple[str, str], float]:
    return {(cell.row, cell.column): cell.value for cell in table.cells}


def test_processes_give_the_tables_of_one(tmp_path: Path) -> None:
    names = ("svda/table1", "svda/table2")
    one, several = (
        reproduce(names, folder=tmp_path / str(processes), processes=processes, **TINY) for processes in (1, 2)
    )
    assert [table.recipe.name for table in several] == list(names)
    for alone, beside in zip(one, several, strict=True):
        assert values(beside) == pytest.approx(values(alone), rel=1e-3, abs=1e-6) and beside.seeds == (1, 2)


@pytest.mark.parametrize("processes", [1, 2])
def test_when_the_time_is_up_the_table_has_the_finished_runs(processes: int, tmp_path: Path) -> None:
    long: dict[str, Any] = {**TINY, "epochs": 50_000, "processes": processes, "folder": tmp_path}
    with pytest.raises(TrainingInterrupted, match="no run was finished in 8 seconds"):
        reproduce(["svda/table1"], seconds=8.0, **long)
    runs = tmp_path / "svda" / "cifar10-tiny"
    # New processes may need all of the time to start.
    assert processes > 1 or list((runs / "seed-1" / "train" / "checkpoints").glob("step-*"))
    assert not list(runs.glob("*/result.json")) and not (tmp_path / "svda" / "table1.md").exists()
    short: dict[str, Any] = {**TINY, "folder": tmp_path / "short"}
    reproduce(["svda/table1"], **{**short, "seeds": (2,)})
    (table,) = reproduce(["svda/table1"], seconds=1e-3, processes=processes, **short)
    assert table.seeds == (2,) and "cifar10: seeds 2 instead of 42, 43, 44" in table.deviations


def test_every_table_takes_the_scenarios_that_it_has(tmp_path: Path) -> None:
    names, seeds = ("svda/table1", "svda/table2"), {**TINY, "seeds": (1,)}
    planned = planned_experiments(names, **{**seeds, "only": ("cifar10", "fashion_mnist")})
    assert [experiment.scenario for experiment in planned] == ["cifar10", "fashion_mnist", "cifar10"]
    with pytest.raises(UnknownName, match=r"scenario of the recipe svda/table1, svda/table2.*fashion_mnist"):
        reproduce(names, folder=tmp_path, **{**seeds, "only": ("cifar10", "fashion")})


def test_an_error_in_a_process_ends_the_others(tmp_path: Path) -> None:
    reproduce(["svda/table1"], folder=tmp_path, **{**TINY, "seeds": (1,)})
    with pytest.raises(NotSupported, match="draws was 3 and is now 4"):
        reproduce(["svda/table1"], folder=tmp_path, processes=2, draws=4, **TINY)


def test_operations_of_a_step_are_those_that_torch_counts() -> None:
    experiment = replace(SvdaExperiment("cifar10").as_tiny(), batch_size=8)
    splits = experiment.images()
    model = experiment.model(splits)
    for layer in family_of(model).attention(model):
        layer.backend = Explicit()  # a fused kernel computes the scores again in the backward pass
    batch = next(splits.train.batches(8))
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.cross_entropy(model(batch.images), batch.labels).backward()
    assert counter.get_total_flops() == training_flops(experiment, 8)


def test_the_estimate_counts_every_run_once() -> None:
    (estimate,) = estimate_training(["svda/table1", "svda/table2"], **TINY)
    experiment = SvdaExperiment("cifar10").as_tiny()
    assert (estimate.runs, estimate.steps) == (2, 2 * (96 // 16))
    assert estimate.flops == training_flops(experiment, 2 * 96) and estimate.images_per_second > 0
    assert estimate.seconds == pytest.approx(2 * 96 / estimate.images_per_second)
    assert "2 one after the other" in str(estimate)
    with pytest.raises(NotSupported, match="irratt runs are not estimated"):
        estimate_training(["irratt/table1"], only="cluttered_digits", tiny=True)
