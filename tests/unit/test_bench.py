"""The table of the field: rows, resumption, repeats, plug-ins and the page."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attnrx as rx
from attnrx.data import ImageSet, from_tensors
from attnrx.nouns.target import Target
from attnrx.support.errors import CheckpointError, InvalidInput, NotSupported
from attnrx.support.estimate import Estimate
from attnrx.support.optional import is_installed
from attnrx.support.storage import read_json
from attnrx.vit.costs import Conditions, LatencyProtocol
from attnrx.vit.models import family_of
from attnrx_lab.comparison import (
    BASELINES,
    TASKS,
    FieldBench,
    Method,
    Rates,
    Row,
    baseline,
    field,
    field_methods,
    tables_of,
)
from support.command_line import call, record
from support.pictures import write_folder

timm = pytest.importorskip("timm")
SIZES = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2, "num_classes": 3}
PLUGIN = """
import attnrx as rx
from attnrx_lab.comparison import baseline

@baseline
def narrow(model, images, macs):
    diagnosis = rx.diagnose(model, images, moments=True)
    return rx.realize(model, rx.prescribe(diagnosis, f"hidden=uniform_rank:{macs / 2}"))
"""


def vit() -> torch.nn.Module:
    torch.manual_seed(0)
    return rx.load(timm.create_model("vit_tiny_patch16_224", **SIZES).float().eval())


def pictures(count: int, seed: int) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return from_tensors("pictures", pixels, torch.arange(count) % 3, rx.data.Normalization((0.5,) * 3, (0.5,) * 3))


def table(
    *texts: str, tasks: tuple[str, ...] = ("classification",), targets: tuple[str, ...] = ("macs=0.7x",)
) -> FieldBench:
    methods = tuple(map(Method.parse, texts))
    parsed = tuple(map(Target.parse, targets))
    return FieldBench(vit(), pictures(16, 0), pictures(24, 1), tasks, methods, parsed, batch_size=8)


RANKS = "ranks=qk=total_rank:{share} vo=total_rank:{share} fc1=uniform_rank:{share} fc2=uniform_rank:{share}"


def test_every_task_has_a_row_per_method_and_budget(tmp_path: Path) -> None:
    texts = "same=baseline:unchanged", RANKS, "small=baseline:resolution", "scores=qk=total_rank:{share}"
    bench = table(*texts, tasks=("classification", "retrieval", "dense"), targets=("macs=0.7x", "macs=0.5x"))
    rows = bench.run(tmp_path)
    assert len(rows) == 3 * (1 + 3 * 2) and {row.task for row in rows} == {"classification", "retrieval", "dense"}
    found = {(row.task, row.method, row.budget): row for row in rows}
    costs = family_of(bench.model).costs(bench.model)
    for task, name, best in (
        ("classification", "answers kept, %", 100),
        ("retrieval", "recall@10, %", 100),
        ("dense", "feature cosine", 1),
    ):
        same, ranks = found[task, "same", ""], found[task, "ranks", "macs=0.5x"]
        assert same.measures[name].value == pytest.approx(best) and same.share is None and same.macs_share == 1
        assert ranks.measures[name].value <= best and 0.3 < ranks.macs_share <= 0.5 and ranks.n == 24
        unreached = found[task, "scores", "macs=0.5x"]
        assert unreached.state == "unreached" and "cannot cost 50 % of the MACs: at least" in unreached.note
        assert not unreached.measures
    assert found["classification", "same", ""].macs == costs.macs
    # The largest square of whole patches: 3 x 3 of 4 x 4.
    small = found["classification", "small", "macs=0.7x"]
    assert (small.state, small.share) == ("measured", 0.75) and 0.4 < small.macs_share <= 0.7
    assert found["dense", "small", "macs=0.7x"].state == "refused"  # it has other patches
    for path in (tmp_path / "rows").glob("*.json"):
        assert Row.load(path) in rows
    page, json = (tmp_path / "index.html").read_text(), read_json(tmp_path / "bench.json")
    assert len(json["rows"]) == len(rows) and page.count("<tr>") == len(rows) + 3
    assert not re.search(r"https?://|src=|@import|url\(", page) and "default-src 'none'" in page
    assert (tmp_path / "bench.md").read_text().count("| macs=0.7x |") == 9
    names = [row[1] for row in tables_of(rows)[0].rows]
    assert names[0] == "same" and names.count("ranks") == 2


def test_a_stopped_run_goes_on_row_by_row(tmp_path: Path) -> None:
    bench = table("same=baseline:unchanged", RANKS, "tome=tokens=tome:{share}@2", targets=("macs=0.8x",))
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if line.startswith("classification ranks"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(tmp_path, stop)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").glob("*.json")}
    assert len(files) == 2
    assert len(bench.run(tmp_path)) == 3
    assert all(path.stat().st_mtime_ns == time for path, time in files.items())
    again: list[str] = []
    assert len(bench.run(tmp_path, again.append)) == 3 and not again  # no diagnosis either
    with pytest.raises(InvalidInput, match="was measured with seed=0, and this call has 1"):
        replace(bench, seed=1).run(tmp_path)
    next(iter(files)).write_text("{")
    with pytest.raises(CheckpointError):
        bench.run(tmp_path)


def test_rows_are_repeated_with_another_seed(tmp_path: Path) -> None:
    bench = table("same=baseline:unchanged", RANKS, "chance=tokens=random:{share}@2", targets=("macs=0.8x",))
    rows = bench.run(tmp_path)
    repeats = bench.repeat(tmp_path, 10)
    assert len(repeats) == 3 and all(each.holds for each in repeats)
    assert {each.again.conditions["seed"] for each in repeats} == {1}
    path = next(path for path in (tmp_path / "rows").glob("*.json") if "same" in path.name)
    row = next(row for row in rows if row.method == "same")
    beyond = {name: each.high + 1.0 for name, each in row.measures.items()}
    moved = {name: Estimate(value, value, value) for name, value in beyond.items()}
    replace(row, measures=moved).save(path)
    verdicts = {each.stored.method: each.cells[-1] for each in bench.repeat(tmp_path, 10)}
    assert verdicts == {"same": "DIFFERS", "ranks": "holds", "chance": "holds"}


def test_methods_that_do_not_fit_are_rows_that_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BASELINES, "_things", dict(BASELINES._things))

    @baseline
    def wasteful(model: torch.nn.Module, images: ImageSet, macs: float) -> torch.nn.Module:
        return model

    @baseline
    def broken(model: torch.nn.Module, images: ImageSet, macs: float) -> torch.nn.Module:
        raise ValueError("no luck")

    with pytest.raises(InvalidInput, match="svd exists already"):
        BASELINES.register(BASELINES["corp"], "svd")
    bench = table("wasteful=baseline:wasteful", "broken=baseline:broken", "spot=tokens=spot:{share}@2")
    notes = {row.method: (row.state, row.note) for row in bench.run(tmp_path)}
    assert all(state == "refused" for state, _ in notes.values())
    assert "100.0 % of the MACs, and was asked for 70.0 %" in notes["wasteful"][1]
    assert "the method broken raised ValueError: no luck" in notes["broken"][1]
    assert "needs training" in notes["spot"][1]


@pytest.mark.slow
def test_a_budget_of_latency_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = LatencyProtocol(Conditions(threads=1), rounds=2, warmup=1, clock="cpu")
    bench = table(RANKS, tasks=("speed",))
    with pytest.raises(InvalidInput, match="needs batches"):
        replace(bench, targets=(Target.parse("faster=900"),))
    timed = replace(bench, rates=Rates((2,), (protocol,)))
    (row,) = replace(timed, targets=(Target.parse("faster=900"),)).run(tmp_path / "fast")
    assert (row.state, row.budget) == ("unreached", "faster=900x") and row.note.endswith("x was measured")
    # Fast enough in every measurement of the search, so the largest share is taken.
    speed = {"faster": {"value": 2.0, "low": 1.9, "high": 2.1}, "batch": 2, "threads": 1}
    monkeypatch.setattr(field._TaskRun, "_speeds", lambda *_: (speed,))
    (row,) = replace(timed, targets=(Target.parse("faster=1.5"),), rates=timed.rates).run(tmp_path / "slow")
    assert row.state == "measured" and 0.8 < row.macs_share <= 15 / 16


def test_a_tower_is_needed_for_retrieval(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="needs 12 test images"):
        replace(table(RANKS), tasks=("retrieval",), test=pictures(11, 1))
    with pytest.raises(InvalidInput, match="needs a classifier"):
        tower = rx.load(timm.create_model("vit_tiny_patch16_224", **{**SIZES, "num_classes": 0}).float())
        replace(table(RANKS), model=rx.load(tower, outputs="embedding"))
    with pytest.raises(NotSupported, match="embedding tower"):
        TASKS["retrieval"].prepared(rx.models.build_model("dense:digits", channels=3).float())


def test_a_file_outside_the_repository_is_a_method_of_the_table(tmp_path: Path) -> None:
    plugin = tmp_path / "narrow_plugin.py"
    plugin.write_text(PLUGIN)
    rx.save(vit(), tmp_path / "model")
    data = write_folder(tmp_path / "images", {"train": 8, "validation": 2, "test": 6})
    words = ("bench", tmp_path / "model", "--data", data, "--tasks", "classification", "--out", tmp_path / "table")
    mine = (*words, "--plugin", plugin, "--methods", "mine=baseline:narrow", "--macs", "0.8")
    assert [(row["state"], row["note"]) for row in record(*mine)["rows"]] == [("measured", "")]
    both = record(*words, "--methods", "same=baseline:unchanged")["rows"]
    assert {row["method"] for row in both} == {"mine", "same"}
    repeated = call(*mine, "--repeat", 1)
    assert repeated.code == 0 and "1 of 1 rows hold: their intervals overlap" in repeated.out
    refused = call("bench", tmp_path / "model", "--tasks", "dense", "--out", tmp_path / "other")
    assert refused.code == 2 and "needs images" in refused.err


def test_the_methods_of_the_table_fit_the_model() -> None:
    methods = {method.name: method for method in field_methods(vit())}
    assert len(methods) >= 12 and "@2" in methods["merging"].text
    assert not methods["vendor's int8"].varies and methods["plan"].varies


@pytest.mark.slow
def test_all_methods_of_the_table_make_rows(tmp_path: Path) -> None:
    bench = table(RANKS, tasks=("classification", "retrieval"), targets=("macs=0.8x",))
    rows = replace(bench, methods=tuple(field_methods(bench.model))).run(tmp_path)
    assert len(rows) == 2 * 14
    needs = {"vendor's int8": "openvino", "Torch-Pruning": "torch_pruning"}
    notes = {(row.task, row.method): row.note for row in rows if row.state != "measured"}
    assert all(not is_installed(needs.get(method, "torch")) for _, method in notes), notes
    assert all(row.macs_share <= 0.8 for row in rows if row.budget)
