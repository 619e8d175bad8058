"""One call to a smaller model: its target, the images it plans and verifies on, its folder, and how it goes on."""

import copy
import gc
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import attnrx as rx
from attnrx.data import three_parts
from attnrx.data.model_data import splits_for
from attnrx.decide.planning import Plan, Target
from attnrx.decide.planning.measured_costs import timing_conditions
from attnrx.exporting import load_exported, parse_format
from attnrx.nouns import effort as efforts
from attnrx.nouns.effort import EFFORTS
from attnrx.nouns.target import target_of
from attnrx.show.checks import Costs
from attnrx.show.reports import summary_of
from attnrx.support.errors import DataError, InvalidInput, NotSupported
from attnrx.vit.models import model_fingerprint
from attnrx.vit.outputs import output_kind_of
from attnrx.workflows.shrunk import Shrunk
from attnrx_lab.vision_transformer import ViTConfig
from support import cases
from support.comparisons import pixels
from support.planned import CONFIG, original

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def images(count: int, seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of a user's own."""
    return [(batch.images, batch.labels) for batch in pixels(CONFIG, count, seed).batches(8)]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shrunk, list[str]]:
    """The folder, the result and the log of a call."""
    folder, lines = tmp_path_factory.mktemp("first"), list[str]()
    return folder, rx.shrink(original(), images(48), macs=0.8, folder=folder, log=lines.append), lines


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ({"faster": 1.6}, Target("latency", 1 / 1.6)),
        ({"macs": 0.5}, Target("macs", 0.5)),
        ({"params": 0.7}, Target("params", 0.7)),
        ({"max_drop": 1.0}, Target("max-drop", 1.0)),
        ({"max_kl": 0.05}, Target("max-kl", 0.05)),
        ({"recall": 0.98}, Target("recall", 0.98)),
        ({"size": 4}, Target("size", 4.0)),
    ],
)
def test_a_target_is_one_number(given: dict[str, float], target: Target) -> None:
    assert target_of(**given) == target


def test_shares_are_numbers_or_percent() -> None:
    for given in ("60%", " 60.0 % ", 0.6):
        assert vars(rx.shrink)["kinds"]["macs"].checked(given, "shrink", "macs") == 0.6
    assert vars(rx.elastic)["kinds"]["macs"].checked(["80%", 0.6], "elastic", "macs") == (0.8, 0.6)
    for wrong in ("160%", "0%", "60", "60 MB", 1.2):
        with pytest.raises(InvalidInput, match="give a share"):
            rx.shrink(original(), images(8), macs=wrong)


@pytest.mark.parametrize("given", [{}, {"faster": 1.6, "macs": 0.5}, {"faster": 1.0}, {"macs": 1.5}])
def test_other_targets_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        target_of(**given)


def test_images_of_the_plan_are_not_those_of_the_evidence() -> None:
    parts = three_parts(splits_for(original(), images(48)))
    seen = [{tuple(row.flatten().tolist()) for batch in part.batches(8) for row in batch.images} for part in parts]
    assert sum(map(len, seen)) == len(set().union(*seen)) and min(map(len, seen)) >= 15
    two = three_parts(splits_for(original(), {"train": images(24), "test": images(16, seed=4)}))
    assert [len(part) for part in two] == [12, 12, 16]
    # Images of the test are not planned on: the first 16 of these 24 are the same.
    two = three_parts(splits_for(original(), {"train": images(24), "test": images(16)}))
    assert [len(part) for part in two] == [4, 4, 16]
    assert any("train: 16 of 24 images occur before or in test" in note for note in two.notes)
    with pytest.raises(DataError, match="at least 6"):
        three_parts(splits_for(original(), images(5)))


def test_a_model_is_made_smaller_and_its_folder_loads(first, tmp_path: Path) -> None:
    folder, found, _ = shutil.copytree(first[0], tmp_path / "shrunk"), *first[1:]
    slim, prescription, evidence = found
    macs = [rx.models.family_of(model).costs(model).macs for model in (slim, original())]
    assert macs[0] <= 0.8 * macs[1] and prescription.about["plan"]["target"] == "macs=0.8x"
    assert evidence.about["images"] == 16 and "fewer MACs" in found.summary() and len(repr(found)) < 2000
    assert "<table>" in evidence._repr_html_()
    found.save(folder, onnx=False)
    assert {"model.safetensors", "README.md", "report.html", "evidence.json"} <= {one.name for one in folder.iterdir()}
    page = (folder / "report.html").read_text()
    sections = re.findall(r'<section id="([^"]*)"', page)
    assert sections[0] == "verdict" and {"changes", "maps", "evidence"} <= set(sections)
    assert ("tokens" in sections) == (prescription.tokens is not None)
    assert found.summary() == summary_of(evidence) and "fewer MACs" in page.partition("</p>")[2]
    assert model_fingerprint(rx.load(folder)) == model_fingerprint(slim)
    stored = rx.Prescription.load(folder / "prescription.json")
    assert stored.rules == prescription.rules
    unreadable = replace(prescription, about={"realized": {**stored.about["realized"], "colour": 1}})
    with pytest.raises(InvalidInput, match=r"about\.realized\.colour is unknown"):
        unreadable.save(tmp_path / "unreadable.json")
    assert not (tmp_path / "unreadable.json").exists()


def test_the_report_of_merged_tokens_shows_them_on_test_images(tmp_path: Path) -> None:
    model = original()
    prescription = rx.prescribe(model, "tokens=ward:0.5@2,3")
    evidence = rx.verify(rx.realize(model, prescription), model, images(16), prescription=prescription)
    plan = Plan(prescription, "macs=0.7x", "macs", 0.7, {}, ())
    shown = next(pixels(CONFIG, 8).batches(8)).images, ("cat",) * 8
    found = Shrunk(rx.realize(model, prescription), prescription, evidence, plan, Target("macs", 0.7), None, shown)
    page = found.save(tmp_path / "slim", onnx=False) / "report.html"
    assert page.read_text().count("<h3>cat</h3>") == 8 and 'class="group"' in page.read_text()
    assert "% of the score directions" not in page.read_text()


def test_the_log_has_the_phases_of_the_call_in_their_order(first) -> None:
    found = [re.match(r"\[(\d+) of (\d+)\] ([\w ]+)", line) for line in first[2]]
    numbers = [int(match[1]) for match in found if match]
    assert numbers == sorted(numbers) == list(range(1, numbers[-1] + 1)), first[2]
    assert {match[2] for match in found if match} == {str(numbers[-1])}


@pytest.mark.slow
def test_a_quick_call_for_a_large_model_takes_fewer_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efforts, "HUGE", 0.0)
    monkeypatch.setattr(efforts, "VERIFICATION_MACS", 0.0)
    monkeypatch.setattr(efforts, "MIN_VERIFICATION_IMAGES", 8)
    lines = list[str]()
    found = rx.shrink(original(), images(96), macs=0.5, log=lines.append)
    assert found.images is not None and len(found.images.verified) == found.evidence.about["images"] == 8
    assert any("verified on 8 of" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("most", [EFFORTS["normal"].most_distilled, 0])
def test_a_normal_call_distills_small_models(monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    fits = {"fitted_images": 64, "repair": None, "distill_epochs": 1, "most_distilled": most}
    monkeypatch.setitem(EFFORTS, "normal", replace(EFFORTS["normal"], **fits))
    prescription = rx.shrink(original(), images(96), macs=0.35, effort="normal").prescription
    assert prescription is not None and ("distill" in prescription.about["realized"]) == (most > 0)


@pytest.mark.slow
def test_an_effort_with_distillation_comes_nearer_to_the_original(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batches, lines = images(96), list[str]()
    plain = rx.shrink(original(), batches, macs=0.3, folder=tmp_path)
    monkeypatch.setitem(EFFORTS, "quick", replace(EFFORTS["quick"], fitted_images=512, distill_epochs=4))
    fitted = rx.shrink(original(), batches, macs=0.3, folder=tmp_path, log=lines.append)
    assert any(line.startswith("distilled at ") for line in lines)
    assert plain.prescription is not None and fitted.prescription is not None
    assert fitted.prescription.rules == plain.prescription.rules
    stored = [each.about["realized"] for each in (plain.prescription, fitted.prescription)]
    assert "distill" not in stored[0] and stored[1]["distill"] == 4
    loaded = rx.load(fitted.save(tmp_path / "slim", onnx=False))
    assert rx.Prescription.load(tmp_path / "slim" / "prescription.json").about["realized"]["distill"] == 4
    kind, every = output_kind_of(loaded), torch.cat([pixels for pixels, _ in batches]).double()
    with torch.no_grad():
        before, after = (kind.softened(original()(every), each(every)).mean() for each in (plain.model, loaded))
    assert after < before


@pytest.mark.slow
def test_an_allowed_divergence_is_kept_on_other_images() -> None:
    found = rx.shrink(original(), images(96), max_kl=1e-4)
    (claim,) = [each for each in found.evidence.findings if each.details.get("quantity") == "divergence"]
    assert claim.limit == 1e-4 and claim.value <= 3e-4  # other images than those that it was chosen on
    costs = [rx.models.family_of(model).costs(model).macs for model in (found.model, original())]
    assert costs[0] < 0.5 * costs[1]  # as few as are allowed
    with pytest.raises(NotSupported, match="the least that one loses is"):
        rx.shrink(original(), images(96), max_kl=1e-20)


@pytest.mark.slow
@pytest.mark.parametrize("to", [None, "int8(images=16)"])
def test_a_file_is_as_small_as_requested(to: str | None, tmp_path: Path) -> None:
    model = copy.deepcopy(original()).float()
    name = "model.safetensors" if to is None else "model-int8.onnx"
    if to is not None:
        pytest.importorskip("onnxscript")
    batches = [(pixels.float(), labels) for pixels, labels in images(96)]
    whole = rx.shrink(model, batches, size=9.0, to=to)  # the unchanged model
    assert whole.plan is None
    limit = 0.85 * (whole.save(tmp_path / "whole", to=to, original=model) / name).stat().st_size / 1e6
    found = rx.shrink(model, batches, size=limit, to=to)
    path = found.save(tmp_path / "small", to=to, original=model) / name
    assert found.plan is not None and 0.8 * limit < path.stat().st_size / 1e6 < 1.03 * limit
    with pytest.raises(NotSupported, match=r"the smallest that .* could be made is"):
        rx.shrink(model, batches, size=0.002, to=to)


def test_a_target_of_accuracy_needs_labels() -> None:
    model = cases.model(ViTConfig.uniform("dense", width=16, depth=3, heads=2, **cases.TINY))
    with pytest.raises(DataError, match="label"):
        rx.shrink(model, torch.randn(24, 1, 8, 8, dtype=torch.float32), max_drop=1.0)


@cache
def result(rules: str = "vo=uniform_rank:0.5", dtype: torch.dtype = torch.float32) -> Shrunk:
    """A smaller model as `shrink` returns it, without a plan."""
    model = copy.deepcopy(original()).to(dtype)
    prescription = rx.prescribe(rx.diagnose(model, images(16), moments=True), rules)
    small = rx.realize(model, prescription)
    evidence = rx.verify(small, model, images(16), [Costs()], prescription=prescription)
    parts = three_parts(splits_for(model, images(24)))
    return Shrunk(small, prescription, evidence, None, Target("macs", 0.9), images=parts)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["report.html", "run_model.py", "config.json"])
def test_files_of_the_user_are_kept_and_refused_before_the_work(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(InvalidInput, match=re.escape(name)):
        result().save(tmp_path)
    lines: list[str] = []
    with pytest.raises(InvalidInput, match=re.escape(name)):
        rx.shrink(original(), images(48), macs=0.8, folder=tmp_path, log=lines.append)
    assert not any("diagnosing" in line for line in lines)
    assert names(tmp_path) == {name} and (tmp_path / name).read_text() == "mine"


@pytest.mark.slow
def test_the_file_that_was_measured_is_the_file_that_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    found = rx.shrink(original(), images(48), macs=0.8, batch=2, threads=1, to="onnx")
    measured = found.file
    assert measured is not None and found.prescription is not None
    content, folder = measured.path.read_bytes(), measured.path.parent
    with monkeypatch.context() as patch:
        patch.setattr("attnrx.exporting.export", lambda *_, **__: pytest.fail("written again"))
        found.save(tmp_path / "kept")
    saved = load_exported(tmp_path / "kept" / "model.onnx")
    assert saved.path.read_bytes() == content and saved.facts == measured.facts and saved.facts["parity"]
    assert load_exported(saved.path).facts["class_names"] == list(found.class_names)
    del measured, found
    gc.collect()
    assert not folder.exists()


@pytest.mark.slow
def test_exports_of_an_earlier_model_are_removed(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    first, before = result(), copy.deepcopy(original()).float()
    first.save(tmp_path, opset=17)
    assert rx.exporting.load_exported(tmp_path / "model.onnx").form == rx.exporting.Onnx(17)
    assert not (tmp_path / "evidence-onnx.json").exists()
    first.save(tmp_path, False, to="onnx(opset=18)", original=before, batch=2, threads=1)
    exports = {"model.onnx", "model.onnx.json", "run_model.py"}
    exports |= {"evidence-onnx.json"}
    assert exports < names(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    first.save(tmp_path, onnx=False)  # the same model: its exports are still true
    assert exports < names(tmp_path)
    result("vo=uniform_rank:0.75").save(tmp_path, onnx=False)
    assert not exports & names(tmp_path) and "mine.txt" in names(tmp_path)


@pytest.mark.slow
def test_a_model_in_bfloat16_is_saved_with_its_exports(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    found, before = result(dtype=torch.bfloat16), copy.deepcopy(original()).bfloat16()
    found.save(tmp_path)
    assert load_exported(tmp_path / "model.onnx").images.precision == "float32"
    found.save(tmp_path, False, to="onnx", original=before, batch=2, threads=1)
    evidence = rx.Evidence.load(tmp_path / "evidence-onnx.json")
    assert evidence.about["file"] == "model.onnx"
    assert "'precision': 'float32'" in str(evidence.about["checks"])


@pytest.mark.parametrize(
    ("dtype", "form", "precision"),
    [
        (torch.bfloat16, None, "bfloat16"),
        (torch.float64, None, "float32"),
        (torch.bfloat16, "onnx", "float32"),
        (torch.bfloat16, "program", "bfloat16"),
    ],
)
def test_a_model_is_timed_at_its_own_precision(dtype: torch.dtype, form: str | None, precision: str) -> None:
    model = copy.deepcopy(original()).to(dtype)
    assert timing_conditions(model, None, 1, None if form is None else parse_format(form)).precision == precision
