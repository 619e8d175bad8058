"""Figures: the numbers of results as CSV, SVG and PDF."""

import csv
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.cli import main
from attnrx.decide.rules.metrics import directions_in
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.elastic import Elastic, Size
from attnrx.nouns.prescription import Prescription
from attnrx.show.figures import DRAWN, Figure, figures_of
from attnrx.show.reports import sample_tokens
from attnrx.show.reports.samples import as_colours, left_pictures
from attnrx.support.errors import InvalidInput, NotSupported, UserCodeError
from attnrx_lab.comparison import Method, MethodBench, MethodComparison, compare_methods
from support import cases
from support.cases import pixels

DENSE = cases.CONFIGS["dense"]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return cases.model(DENSE)


@pytest.fixture(scope="module")
def diagnosis(model: nn.Module) -> Diagnosis:
    return rx.diagnose(model, pixels(DENSE, 8), moments=True)


@pytest.fixture(scope="module")
def prescription(diagnosis: Diagnosis) -> Prescription:
    return rx.prescribe(diagnosis, "qk=total_rank:0.5 hidden=uniform_rank:0.5 tokens=ward:0.5@2")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_of_a_diagnosis_are_in_its_files(diagnosis: Diagnosis, tmp_path: Path) -> None:
    written = rx.figures(diagnosis, tmp_path)
    assert {path.suffix for path in written} == {".csv", ".svg", ".pdf"} and all(map(Path.exists, written))
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows_of(tmp_path / "spectra.csv"):
        found.setdefault((row["panel"], row["series"]), []).append(float(row["y"]))
    for index, layer in enumerate(diagnosis.layers, 1):
        strength = directions_in("mix", layer).strength.double()
        for head, values in enumerate(strength, 1):
            assert found[f"layer {index}", f"head {head}"] == pytest.approx((values / values[0]).tolist())
    last = {row["series"]: float(row["y"]) for row in rows_of(tmp_path / "energy.csv")}
    assert list(last.values()) == pytest.approx([1.0] * len(last))
    selectivity = rows_of(tmp_path / "selectivity.csv")
    assert float(selectivity[0]["y"]) == pytest.approx(float(diagnosis.layers[0].readings["selectivity"][0]))


def test_ranks_and_tokens_of_a_prescription(prescription: Prescription, tmp_path: Path) -> None:
    rx.figures(prescription, tmp_path, ["csv"])
    ranks = [row for row in rows_of(tmp_path / "ranks.csv") if row["series"] == "Hidden units"]
    assert [float(row["y"]) for row in ranks] == pytest.approx([0.5] * len(prescription.layers), abs=0.02)
    tokens = [float(row["y"]) for row in rows_of(tmp_path / "tokens.csv")]
    assert tokens == [1.0] + [0.5] * (len(prescription.layers) - 1)


def test_files_can_be_read_and_are_the_same_again(diagnosis: Diagnosis, tmp_path: Path) -> None:
    first, second = ({path.name: path.read_bytes() for path in rx.figures(diagnosis, tmp_path / name)} for name in "ab")
    assert first == second
    assert ElementTree.fromstring(first["spectra.svg"]).tag.endswith("svg")
    assert first["spectra.pdf"].startswith(b"%PDF")
    assert b"layer 1" in first["spectra.svg"]  # text stays text


def results(model: nn.Module, diagnosis: Diagnosis, prescription: Prescription, folder: Path) -> dict[str, object]:
    """One result of every kind in DRAWN, saved in `folder`."""
    bench = MethodBench(model, diagnosis, pixels(DENSE, 8), pixels(DENSE, 16), batch_size=8)
    comparison = compare_methods(bench, [Method("mix", "total_rank:{share}")], (0.75, 0.25))
    sizes = Size("original", 1.0, 1.0, "a", 1.0, 0.0), Size("macs-0.6", 0.6, 0.7, "b", 0.7, 0.05)
    elastic = Elastic(folder, sizes, {"macs": 10, "params": 10})
    diagnosis.save(folder / "diagnosis.json")
    prescription.save(folder / "prescription.json")
    comparison.save(folder / "comparison.json")
    elastic.write()
    return {result.name: part for result in DRAWN.values() for part in (diagnosis, prescription, comparison, elastic)
            if isinstance(part, result.result)}  # fmt: skip


def test_every_kind_is_drawn_and_its_file_gives_the_same(
    model: nn.Module, diagnosis: Diagnosis, prescription: Prescription, tmp_path: Path
) -> None:
    found = results(model, diagnosis, prescription, tmp_path)
    assert found.keys() == {*DRAWN}
    direct = {figure.name: figure for figure in figures_of(list(found.values()))}
    read = {figure.name: figure for figure in figures_of(tmp_path)}
    assert direct.keys() == read.keys() >= {"spectra", "ranks", "sizes", "speeds", "trade-off", "quality"}
    assert all(numbers(direct[name]) == numbers(read[name]) for name in direct)
    trade_off = direct["trade-off"].panels[0].series[0]
    comparison = found["attnrx comparison"]
    assert isinstance(comparison, MethodComparison)
    assert trade_off.x == tuple(sorted(trial.macs_share for trial in comparison.trials))
    written = rx.figures(list(found.values()), tmp_path / "drawn", ["svg"])
    assert len(written) == len(direct)


@pytest.mark.parametrize("reducer", ["attention_received", "ward"])
def test_kept_patches_are_pictures_with_their_numbers(reducer: str, model: nn.Module, tmp_path: Path) -> None:
    pruned = rx.realize(model, rx.prescribe(model, f"tokens={reducer}:0.5@2"))
    (batch,) = pixels(DENSE, 2).batches(2)
    samples = sample_tokens(pruned, batch.images, ("cat & dog", "b"))
    (figure,) = figures_of(samples)
    assert [panel.title for panel in figure.panels] == [
        "image 1, cat & dog",
        "image 1, layer 2: 2 of 4 left",
        "image 2, b",
        "image 2, layer 2: 2 of 4 left",
    ]
    written = {path.suffix: path for path in rx.figures(samples, tmp_path)}
    kept = [float(row["y"]) for row in rows_of(written[".csv"]) if row["panel"].startswith("image 1")]
    assert kept == samples.left[0, 0].double().tolist() and sum(kept) == 2
    svg = ElementTree.fromstring(written[".svg"].read_bytes())
    assert len([each for each in svg.iter() if each.tag.endswith("image")]) == 4
    assert written[".pdf"].read_bytes().startswith(b"%PDF")
    # Patches that are left have the pixels of the image; pruned ones are faded, merged ones have one colour.
    image, (picture,) = as_colours(samples.images[0]), left_pictures(samples, 0)
    side = image.shape[1] // 2
    for place, left in enumerate(samples.left[0, 0].tolist()):
        row, column = divmod(place, 2)
        patch = (slice(None), slice(row * side, (row + 1) * side), slice(column * side, (column + 1) * side))
        if samples.groups is None:
            expected = image[patch] if left else image[patch] + 0.84 * (1 - image[patch])
            torch.testing.assert_close(picture[patch], expected)
        elif (samples.groups[0, 0] == samples.groups[0, 0, place]).sum() > 1:
            assert float(picture[patch].flatten(1).std(1).max()) < 1e-6
        else:
            torch.testing.assert_close(picture[patch], image[patch])


def numbers(figure: Figure) -> list[object]:
    return [None if value != value else value for row in figure.rows for value in row]


def test_a_result_of_shrink_is_drawn_with_all_that_it_has(diagnosis: Diagnosis, prescription: Prescription) -> None:
    class Result:
        pass

    result = Result()
    vars(result).update(diagnosis=diagnosis, prescription=prescription)
    assert {figure.name for figure in figures_of(result)} >= {"spectra", "ranks", "tokens"}


def test_what_cannot_be_drawn_is_refused(diagnosis: Diagnosis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.json").write_text("{}")
    for source in (3, torch.nn.Linear(2, 2), tmp_path / "missing", tmp_path / "other.json", tmp_path):
        with pytest.raises(InvalidInput, match="diagnosis"):
            rx.figures(source, tmp_path / "out")
    with pytest.raises(InvalidInput, match="nothing to draw"):
        rx.figures([], tmp_path / "out")
    with pytest.raises(InvalidInput, match="png"):
        rx.figures(diagnosis, tmp_path / "out", ["png"])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(NotSupported, match=r"attnrx\[figures\]"):
        rx.figures(diagnosis, tmp_path / "out")
    assert rx.figures(diagnosis, tmp_path / "out", ["csv"])  # numbers need no library


def test_the_command_draws_files(diagnosis: Diagnosis, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(diagnosis.save(tmp_path / "diagnosis.json"))
    assert main(["figures", path, "--out", str(tmp_path / "drawn"), "--formats", "csv", "svg"]) == 0
    assert "spectra" in capsys.readouterr().out
    assert (tmp_path / "drawn" / "spectra.svg").exists() and not (tmp_path / "drawn" / "spectra.pdf").exists()


PLUGIN = """
from dataclasses import dataclass
import attnrx as rx

@dataclass(frozen=True)
class FirstPatches(rx.tokens.Selecting):
    def relevance(self, state, predictor):
        return -state.patches.new_tensor(range(state.patches.shape[1])).expand(state.patches.shape[:2])

rx.tokens.REDUCERS.register(FirstPatches)
"""


def test_a_plug_in_is_a_file(model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = rx.save(model, tmp_path / "model")
    plugin = tmp_path / "first_patches.py"
    plugin.write_text(PLUGIN)
    out = tmp_path / "prescription.json"
    words = ["prescribe", str(folder), "--rules", "tokens=first_patches:0.5@2", "--out", str(out)]
    assert main(words) == 2
    assert main([*words, "--plugin", str(plugin)]) == 0, capsys.readouterr().err
    assert Prescription.load(out).tokens is not None
    assert main([*words, "--plugin", str(tmp_path / "missing.py")]) == 2
    plugin.with_name("wrong.py").write_text("1 / 0")
    assert main([*words, "--plugin", str(plugin.with_name("wrong.py"))]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert issubclass(UserCodeError, rx.AttnrxError)
