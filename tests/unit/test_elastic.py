"""Elastic models: sizes in one folder, the size of a budget, what is refused, and how a call goes on."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnrx as rx
from attnrx.nouns.elastic import Elastic, Size
from attnrx.nouns.plan import Plan, TargetMet
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, NoOpPrescription, NotSupported
from attnrx.vit.models import family_of, model_fingerprint, reduction_of
from attnrx.workflows import shrink as shrink_module
from support.comparisons import pixels
from support.planned import CONFIG, original

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BUDGETS = (0.85, 0.6)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Elastic:
    return rx.elastic(original(), images(48), tmp_path_factory.mktemp("elastic"), macs=BUDGETS, batch=4, threads=1)


def images(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(batch.images, batch.labels) for batch in pixels(CONFIG, count).batches(8)]


def share_of_macs(model: torch.nn.Module) -> float:
    return family_of(model).costs(model).macs / family_of(original()).costs(original()).macs


def test_every_stored_size_is_its_own_plan(made: Elastic) -> None:
    assert [size.name for size in made.sizes] == ["original", "macs-0.85", "macs-0.6"]
    assert Elastic.read(made.folder) == made
    for size, most in zip(made.sizes[1:], BUDGETS, strict=True):
        own = rx.load(made.folder / size.name)
        assert model_fingerprint(rx.load(made.folder, macs=most)) == model_fingerprint(own)
        assert size.macs == pytest.approx(share_of_macs(own)) and size.macs <= most
        assert size.latency is not None and size.latency > 0 and size.divergence is not None
        assert rx.Evidence.load(made.folder / size.name / "evidence.json").about["effort"] == "quick"
    assert model_fingerprint(rx.load(made.folder / "original")) == model_fingerprint(original())


def test_a_budget_that_the_original_meets_needs_no_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_sharing = shrink_module.plan_sharing

    def met(*given: Any, **settings: Any) -> Plan | TargetMet:
        if given[2].limit > 0.8:
            return TargetMet("macs=0.9x is met by the unchanged model")
        return plan_sharing(*given, **settings)

    monkeypatch.setattr(shrink_module, "plan_sharing", met)
    lines: list[str] = []
    given = {"batch": 4, "threads": 1, "log": lines.append}
    found = rx.elastic(original(), images(48), tmp_path / "some", macs=(0.9, 0.7), **given)
    assert [size.name for size in found.sizes] == ["original", "macs-0.7"]
    assert any(line.startswith("macs-0.9: macs=0.9x is met") for line in lines)
    with pytest.raises(NoOpPrescription, match="is met"):
        rx.elastic(original(), images(48), tmp_path / "none", macs=(0.9,), **given)


@pytest.mark.parametrize(("most", "name"), [(1.0, "original"), (0.95, "macs-0.85"), (0.8, "macs-0.6")])
def test_a_budget_in_between_has_the_size_within_it(made: Elastic, most: float, name: str) -> None:
    model = rx.load(f"{made.folder}@macs={most}" if most < 1 else made.folder / name)
    assert share_of_macs(model) <= most and made.best("macs", most).name == name
    assert model_fingerprint(model) == model_fingerprint(rx.load(made.folder / name))


def test_speeds_and_parameters_have_the_size_that_diverges_least() -> None:
    sizes = tuple(
        Size(name, macs, macs, "", latency, divergence)
        for name, macs, latency, divergence in (
            ("original", 1.0, 0.6, None),
            ("large", 0.85, 0.8, 0.02),
            ("worse", 0.75, 0.7, 0.03),
            ("small", 0.6, 0.5, 0.02),
        )
    )
    found = Elastic(Path("x"), sizes)
    for latency, name in ((1.5, "original"), (0.6, "original"), (0.59, "small"), (0.5, "small")):
        assert found.best("latency", latency).name == name  # the original is faster than two sizes
    for share, name in ((0.9, "large"), (0.85, "large"), (0.84, "small"), (0.6, "small")):
        assert found.best("params", share).name == found.best("macs", share).name == name
    for quantity in ("latency", "params"):
        with pytest.raises(NotSupported, match=f"no size with 0.4 of the original's {quantity}"):
            found.best(quantity, 0.4)
    unknown = Elastic(Path("x"), tuple(replace(size, latency=None, divergence=None) for size in sizes))
    assert unknown.best("macs", 0.8).name == "worse"
    with pytest.raises(NotSupported, match="was not measured"):
        unknown.best("latency", 0.5)


def test_an_interrupted_call_makes_the_missing_sizes_only(made: Elastic, tmp_path: Path) -> None:
    lines: list[str] = []
    for size in made.sizes[:2]:
        rx.save(rx.load(made.folder / size.name), tmp_path / size.name)
    (tmp_path / "macs-0.85/evidence.json").write_text((made.folder / "macs-0.85/evidence.json").read_text())
    again = rx.elastic(original(), images(48), tmp_path, macs=BUDGETS, batch=4, threads=1, log=lines.append)
    assert sum("realizing and repairing" in line for line in lines) == 1
    assert [size.name for size in again.sizes] == [size.name for size in made.sizes]
    with pytest.raises(InvalidInput, match="effort quick, not normal"):
        rx.elastic(original(), images(48), tmp_path, macs=BUDGETS, effort="normal")


def test_a_call_with_other_budgets_keeps_the_sizes_of_the_folder(made: Elastic, tmp_path: Path) -> None:
    folder, lines = tmp_path / "elastic", list[str]()
    shutil.copytree(made.folder, folder)
    more = rx.elastic(original(), images(48), folder, macs=(0.7,), batch=8, threads=1, log=lines.append)
    assert sum("realizing and repairing" in line for line in lines) == 1
    assert [size.name for size in more.sizes] == ["original", "macs-0.85", "macs-0.7", "macs-0.6"]
    assert [size.macs for size in more.sizes] == sorted((size.macs for size in more.sizes), reverse=True)
    assert Elastic.read(folder) == more
    assert model_fingerprint(rx.load(folder, macs=0.85)) == model_fingerprint(rx.load(made.folder / "macs-0.85"))


def test_sizes_of_other_data_are_refused(made: Elastic) -> None:
    other = [(batch.flip(-1), labels) for batch, labels in images(48)]
    for budgets in (BUDGETS, (0.7,)):
        with pytest.raises(InvalidInput, match=r"macs-0\.6 was made with data .*choose another folder"):
            rx.elastic(original(), other, made.folder, macs=budgets, batch=4, threads=1)


@pytest.mark.parametrize(("macs", "params"), [((), ()), ((0.8,), (0.8,)), ((1.5,), ())])
def test_other_budgets_are_refused(macs: Sequence[float], params: Sequence[float], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        rx.elastic(original(), images(48), tmp_path / "new", macs=macs, params=params)
    assert not (tmp_path / "new").exists()


def test_bad_requests_of_a_folder_are_named(made: Elastic, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"Give macs=0\.6"):
        rx.load(made.folder)
    with pytest.raises(InvalidInput, match="not an elastic model"):
        rx.load("svda:digits", macs=0.5)
    with pytest.raises(InvalidInput, match="exactly one"):
        rx.load(made.folder, macs=0.5, params=0.5)
    with pytest.raises(AttnrxError, match="Targets read like"):
        rx.load(f"{made.folder}@half")
    with pytest.raises(NotSupported, match="It has"):
        rx.load(made.folder, macs=0.01)
    damaged = json.loads((made.folder / "elastic.json").read_text())
    del damaged["sizes"][0]["macs"]
    (tmp_path / "elastic.json").write_text(json.dumps(damaged))
    with pytest.raises(CheckpointError, match="macs"):
        rx.load(tmp_path, macs=0.5)


def test_a_folder_has_a_model_or_sizes(made: Elastic, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="the folder of an elastic model"):
        rx.save(original(), made.folder)
    lines: list[str] = []
    with pytest.raises(InvalidInput, match="the folder of an elastic model"):
        rx.shrink(original(), images(48), macs=0.8, folder=made.folder, log=lines.append)
    rx.save(original(), tmp_path / "model")
    with pytest.raises(InvalidInput, match="has a model"):
        rx.elastic(original(), images(48), tmp_path / "model", macs=(0.8,), log=lines.append)
    (tmp_path / "elastic.json").write_text("mine")
    with pytest.raises(InvalidInput, match=r"elastic\.json"):
        rx.elastic(original(), images(48), tmp_path, macs=(0.8,), log=lines.append)
    assert not any("diagnosing" in line for line in lines) and (tmp_path / "elastic.json").read_text() == "mine"


def edited_copy(made: Elastic, folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the folder with an edited index."""
    shutil.copytree(made.folder, folder)
    record = json.loads((folder / "elastic.json").read_text())
    edit(record)
    (folder / "elastic.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("change", ["swapped", "another model", "exchanged names", "another policy"])
def test_a_size_that_is_another_model_is_refused(made: Elastic, tmp_path: Path, change: str) -> None:
    def edit(record: dict[str, Any]) -> None:
        if change == "exchanged names":
            first, second = record["sizes"][1:]
            first["name"], second["name"] = second["name"], first["name"]

    folder = edited_copy(made, tmp_path / "copy", edit)
    first, second = folder / "macs-0.85", folder / "macs-0.6"
    if change == "swapped":
        first.rename(folder / "x")
        second.rename(first)
        (folder / "x").rename(second)
    elif change == "another model":
        shutil.rmtree(second)
        rx.save(rx.realize(original(), rx.prescribe(original(), "tokens=ward:0.5@2")), second)
    elif change == "another policy":
        model = rx.load(second)
        if (reduction := reduction_of(model)) is None:
            pytest.skip("this size keeps all tokens")
        keep = tuple((1 + share) / 2 for share in reduction.policy.keep)
        reduction.policy = replace(reduction.policy, keep=keep, num_pruned=None)
        shutil.rmtree(second)
        rx.save(model, second)
    with pytest.raises(CheckpointError, match=r"is not the model that elastic\.json describes"):
        rx.load(folder, macs=0.6)


@pytest.mark.parametrize("name", ["../macs-0.6", "/tmp", ".", "", "\0"])
def test_the_name_of_a_size_is_that_of_one_folder_within(made: Elastic, tmp_path: Path, name: str) -> None:
    def edit(record: dict[str, Any]) -> None:
        record["sizes"][2]["name"] = name

    folder = edited_copy(made, tmp_path / "copy", edit)
    with pytest.raises(CheckpointError, match=r"elastic\.json: sizes\[2\]\.name is"):
        rx.load(folder, macs=0.6)
