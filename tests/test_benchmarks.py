"""The benchmarks run, at a size that takes a second, and write what they promise."""

import importlib.util
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attnrx.support.errors import InvalidInput
from attnrx.support.storage import read_json, write_json
from attnrx.vit.models import attach_tokens_, build_model, family_of, save_model
from attnrx.vit.tokens import TokenPolicy
from attnrx_lab.tokens import DynamicViT
from support.pictures import rows, write_folder, write_parquet

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


SCRIPTS = sorted(each.name for each in BENCHMARKS.glob("*.py") if "__main__" in each.read_text())


@pytest.fixture(autouse=True)
def precision() -> None:
    # The benchmarks measure what a user has: float32 by default.
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_benchmark_says_how_it_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch_pruning")
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # the frontier imports another file there
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / name))["main"](["--help"])
    assert end.value.code == 0 and "usage:" in capsys.readouterr().out


@pytest.mark.slow
def test_latency_compares_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "latency.json"
    words = "--scenario digits --rounds 2 --ranks 16 8 --patterns ragged --batches 2 --precisions float32 --device cpu"
    assert runpy.run_path(str(BENCHMARKS / "latency.py"))["main"]([*words.split(), "--out", str(out)]) == 0
    full, half = read_json(out)["results"]
    assert full["macs_ratio"] == 1 > half["macs_ratio"]
    assert full["memory"]["candidate"] == full["memory"]["reference"]
    assert half["latency"]["faster"]["value"] > 0
    assert "8 ragged" in capsys.readouterr().out


@pytest.mark.slow
def test_settings_of_svda_are_trained_one_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tiny", "--settings", "recipe", "decayed-strengths", "--out", str(tmp_path)]
    assert runpy.run_path(str(BENCHMARKS / "svda_settings.py"))["main"](words) == 0
    rows = read_json(tmp_path / "rows.json")
    assert [row["setting"] for row in rows] == ["recipe", "decayed-strengths"]
    assert all(row["epochs_done"] == row["epochs"] for row in rows)
    assert "decayed-strengths" in capsys.readouterr().out


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    """In a process of its own: it stops itself where it takes longer than its budget."""
    words = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--precision", "float32", "--tiny"]
    words += ["--out", str(tmp_path), "--only", "content", "tests", "eager", "backends", "real"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    sections, page = read_json(tmp_path / "gpu.json")["sections"], (tmp_path / "gpu.md").read_text()
    assert not [(name, part["error"]) for name, part in sections.items() if "error" in part]
    assert not [
        cell["failures"] for name in ("eager", "backends") for cell in sections[name]["cells"] if cell["failures"]
    ]
    assert sections["backends"]["cells"][0]["errors"]["explicit"] < 1e-5
    differences = sections["content"]["differences"]
    assert all(each["to a copy"] == 0 for each in differences.values())
    assert all(name.startswith("none") == (each["to before"] == 0) for name, each in differences.items())
    assert sections["tests"]["counts"]["skipped"] > 100 or torch.cuda.is_available()
    assert [len(part["speeds"]) for part in sections["real"]["shrink"].values()] == [3]
    assert "| ViT-T | 1 |" in page and "Not finished" not in page


def test_token_relevance_tells_layers_methods_and_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_default_dtype(torch.float32)
    model = build_model("dense:digits", channels=3, classes=3)
    whole = save_model(tmp_path / "whole", model)
    attach_tokens_(model, family_of(model), TokenPolicy.staged(DynamicViT(), 0.5, (2, 3)))
    learned = save_model(tmp_path / "learned", model)
    data, out = write_folder(tmp_path / "images", {"train": 4, "validation": 2, "test": 2}), tmp_path / "out.json"
    main = runpy.run_path(str(BENCHMARKS / "token_relevance.py"))["main"]
    requested = (str(whole), "--data", str(data), *"--images 6 --batch-size 4 --draws 2 --noise 0.1".split())
    requested = (*requested, "--reducers", "random", "class_attention", "attention_received", "--device", "cpu")
    assert main([*requested, "--stages", "0.5@2,3", "--also", f"dynamicvit={learned}", "--out", str(out)]) == 0
    found = read_json(out)
    pairs = {tuple(row["methods"]) for row in found["methods"]}
    assert pairs == {  # no class token, so the reducer that needs one is left out
        ("random", "attention_received"),
        ("random", "dynamicvit"),
        ("attention_received", "dynamicvit"),
    }
    assert all(row["chance"] == 0.5 ** (row["before layer"] - 1) and row["n"] == 6 for row in found["methods"])
    reported = {row["what"]: row for row in found["noise"] if row["before layer"] == 3}
    assert reported["noise left, claimed"]["value"] == 0.5 and 0 < reported["noise left, measured"]["value"] < 10
    assert reported["kept again, one layer"]["value"] <= 1
    assert "rank correlation" in capsys.readouterr().out


def _speed(method: str, batch: int, threads: int, speedup: float) -> dict[str, object]:
    latency = {
        "batch": batch,
        "threads": threads,
        "reference": {"median": 0.02},
        "hardware": "a machine",
        "torch_version": "2.11",
        "clock": "wall",
    }
    interval = (speedup, speedup - 0.1, speedup + 0.1)
    return {"method": method, "latency": latency, "speedup": interval, "of_ideal": speedup / 2}


def test_the_table_of_speeds_has_every_cell(tmp_path: Path) -> None:
    module = runpy.run_path(str(BENCHMARKS / "speed_table.py"))
    folder = tmp_path / "bench"
    for part in module["PARTS"]:
        speeds = [
            _speed(name, batch, threads, 1.5)
            for threads in part.threads
            for batch in part.batches
            for name in ("attnrx", *module["OURS"], *list(module["OTHERS"])[:-1])
        ]
        write_json(folder / f"{part.name}-0.6.json", {"speeds": speeds})  # measured before: read back
    module["main"](["--out", str(folder)])
    lines = [line for line in (folder / "speeds.md").read_text().splitlines() if line.startswith("|")]
    cells = sum(len(part.threads) * len(part.batches) for part in module["PARTS"])
    assert len(lines) == 2 + cells and all(line.count("|") == lines[0].count("|") for line in lines)
    assert "1.50x [1.40, 1.60], 75 %" in lines[2] and lines[2].endswith("| - |")  # the last one could not be had


@pytest.mark.slow
def test_realizations_are_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_default_dtype(torch.float32)
    main = runpy.run_path(str(BENCHMARKS / "realizations.py"))["main"]
    assert main(["--tiny", "--out", str(tmp_path)]) == 0
    (row,) = read_json(tmp_path / "realizations.json")["rows"]
    assert row["removed"] > 0 and row["distance"]["mask"] > 0
    assert row["distance"]["exact"] == pytest.approx(row["distance"]["mask"], rel=1e-3)
    first = capsys.readouterr().out
    assert "| 4:100 |" in first and "refit / renormalized" in first
    assert main(["--tiny", "--out", str(tmp_path)]) == 0  # read back, not made again
    assert capsys.readouterr().out == first


@pytest.mark.slow
def test_the_frontier_measures_every_method_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_pruning")
    data = write_folder(tmp_path / "images", {"train": 24, "validation": 12, "test": 12})
    model = build_model("timm:vit_tiny_patch16_224", depth=10, embed_dim=48, img_size=32, patch_size=8, num_classes=3)
    folder = save_model(tmp_path / "model", model)
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # it imports another file there
    module = runpy.run_path(str(BENCHMARKS / "frontier.py"))
    names = module["main"].__globals__
    small = {"BATCHES": (1, 2), "THREADS": (1,), "CHART_BATCH": 2, "CALIBRATION": 8, "DIAGNOSED": 4, "SHARES": (0.8,)}
    small |= {"FASTER": (), "POLICIES": {"Ward": ("ward:1@every",), "EViT": ("evit:0.9@4,7,10",)}}
    for name, value in small.items():
        monkeypatch.setitem(names, name, value)
    words = [str(folder), "--data", str(data), "--out", str(tmp_path / "out"), "--chart", str(tmp_path / "chart.svg")]
    module["main"](words)
    written = read_json(tmp_path / "out" / "frontier.json")
    assert set(written["speed"]) == {"batch 1, 1 threads", "batch 2, 1 threads"}
    assert len(written["quality"]) == 4 and (tmp_path / "chart.svg").read_text().startswith("<svg xmlns")
    module["main"](words)
    assert read_json(tmp_path / "out" / "frontier.json") == written


@pytest.mark.slow
def test_files_are_timed_beside_the_conversion_of_the_vendor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openvino")
    main = runpy.run_path(str(BENCHMARKS / "runtimes.py"))["main"]
    words = ["--out", str(tmp_path), "--models", "--only", "onnx"]
    cells = ["--shapes", "free", "--batches", "1", "--threads", "1", "--rounds", "2"]
    main([*words, *cells])
    (cell,) = read_json(tmp_path / "speeds.json").values()
    assert cell["anchor_seconds"] > 0 and list(cell["speeds"]) == ["unchanged"]
    table = capsys.readouterr().out
    main([*words, *cells])  # measures nothing anew
    assert capsys.readouterr().out == table
    main([*words, "--counts"])
    assert "onnx-f32 unchanged: 232 operations" in capsys.readouterr().out


@pytest.mark.slow
def test_predicted_speeds_are_compared_with_measured_ones(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dense:digits", "--data", "digits", "--to", "eager", "--batch", "32"]
    assert runpy.run_path(str(BENCHMARKS / "predicted_speed.py"))["main"](words) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| eager")]
    assert len(rows) == 4 and all("x |" in row and row.endswith("% |") for row in rows)


def test_coverage_counts_how_often_intervals_cover_the_truth(capsys: pytest.CaptureFixture[str]) -> None:
    module = runpy.run_path(str(BENCHMARKS / "coverage.py"))
    module["main"](["--repetitions", "2"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    shares = [float(cell) for row in rows for cell in row if re.fullmatch(r"[01]\.\d{3}", cell)]
    assert len(shares) > 40 and {0.0, 0.5, 1.0} >= set(shares)


def test_the_costs_that_spot_prints_are_compared_with_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(BENCHMARKS / "spot_costs.py"))["main"]([])
    assert "22 of 95 cells are off" in capsys.readouterr().out


def test_patch_probe_tells_what_features_lose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = save_model(tmp_path / "whole", build_model("dense:digits", channels=3, classes=3))
    data = write_folder(tmp_path / "images", {"train": 4, "validation": 2, "test": 6})
    words = [str(whole), "--data", str(data), "--policies", "ward:2@every"]
    runpy.run_path(str(BENCHMARKS / "patch_probe.py"))["main"](words)
    printed = capsys.readouterr().out
    assert "ward:2@every: accuracy of the segmentation probe, reference:" in printed
    assert "by the probe trained on the candidate" in printed


@pytest.mark.slow
def test_smaller_images_stand_beside_prescriptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    model = build_model("timm:vit_tiny_patch16_224", depth=2, embed_dim=12, img_size=64, patch_size=16, num_classes=3)
    folder = save_model(tmp_path / "model", model)
    data = write_folder(tmp_path / "images", {"train": 4, "validation": 2, "test": 6})
    words = [str(folder), "--data", str(data), "--sizes", "32", "--rules", "tokens=ward:0.5@2", "--batches", "2"]
    runpy.run_path(str(BENCHMARKS / "smaller_image.py"))["main"]([*words, "--rounds", "2"])
    original, smaller, merged = capsys.readouterr().out.splitlines()[2:]
    assert original.startswith("| original | 1.00 [1.00, 1.00] |") and original.endswith("| 0.000 [0.000, 0.000] |")
    assert smaller.startswith("| 32 x 32 pixels |") and merged.startswith("| tokens=ward:0.5@2 |")


@pytest.mark.slow
def test_a_pruned_model_stands_beside_a_smaller_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["digits", "--blocks", "2", "1", "--train", "128", "--test", "64", "--epochs", "1", "--seeds", "0", "1"]
    main = runpy.run_path(str(BENCHMARKS / "smaller_model.py"))["main"]
    main([*words, "--batch-size", "64", "--effort", "quick", "--out", str(tmp_path)])
    *_, first, second, mean = capsys.readouterr().out.splitlines()
    assert first.startswith("| 0 |") and second.startswith("| 1 |") and mean.startswith("| mean of 2 |")
    small, pruned = (float(share) for share in re.findall(r"([0-9.]+) %", first))
    assert 30 < pruned <= small < 70
    main([*words, "--out", str(tmp_path)])  # trains nothing anew
    assert capsys.readouterr().out.splitlines()[2:] == [first, second, mean]


@pytest.mark.slow
def test_preprocessing_compares_three_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    model = build_model("timm:vit_tiny_patch16_224", depth=1, embed_dim=12, img_size=32, patch_size=16)
    folder = save_model(tmp_path / "model", model)
    content = [{**row, "is_test": True} for row in rows(8, size=(40, 48))]
    data = write_parquet(tmp_path / "pictures.parquet", content)
    words = [str(folder), "--data", str(data), "--label-column", "label", "--test-column", "is_test", "--images", "8"]
    runpy.run_path(str(BENCHMARKS / "preprocessing.py"))["main"](words)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all("timm's transform 100.0 %" in line for line in lines if " top-1 " in line)


@pytest.mark.slow
def test_the_page_of_models_has_a_table_of_every_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = runpy.run_path(str(BENCHMARKS / "models.py"))
    names, page = module["main"].__globals__, tmp_path / "models.md"
    monkeypatch.setitem(names, "SOURCES", {"torchvision": names["SOURCES"]["torchvision"]})
    measured = f"{names['TITLE']}\n\nkept\n"
    page.write_text(f"old introduction\n\n{measured}\n## torchvision\n\nan outdated table\n")
    module["main"]([str(page)])
    written = page.read_text()
    assert written.startswith(f"{names['INTRODUCTION']}\n{measured}\n## torchvision\n")
    assert "| VisionTransformer |" in written and "an outdated table" not in written


DENSE = """
import timm
from torch import nn

class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 0}
        self.backbone = timm.create_model("vit_tiny_patch16_224", global_pool="", **sizes)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(24, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, images):
        return self.decoder(self.backbone(images)[:, 1:].mT.unflatten(2, (4, 4))).sigmoid()
"""


@pytest.mark.slow
def test_maps_of_a_whole_model_are_correlated_with_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    (tmp_path / "dense_for_a_benchmark.py").write_text(DENSE)
    monkeypatch.syspath_prepend(str(tmp_path))
    main = runpy.run_path(str(BENCHMARKS / "dense_model.py"))["main"]
    save_file(__import__("dense_for_a_benchmark").Dense().state_dict(), tmp_path / "weights.safetensors")
    data = write_parquet(tmp_path / "images.parquet", rows(80, size=(32, 32)))
    words = ["dense_for_a_benchmark:Dense", "--weights", str(tmp_path / "weights.safetensors"), "--data", str(data)]
    words += "--size 32 32 --images 60 --macs 0.8 --to onnx --batch 2 --out".split()
    assert main([*words, str(tmp_path / "out")]) == 0
    found = read_json(tmp_path / "out" / "dense_model.json")["mean_correlation"]
    assert set(found) == {"model", "model.onnx"} and found["model"] == pytest.approx(found["model.onnx"], abs=1e-4)
    assert -1 <= found["model"] <= 1


@pytest.mark.slow
def test_the_page_of_models_has_what_was_measured_of_small_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = runpy.run_path(str(BENCHMARKS / "models.py"))
    names, page = module["main"].__globals__, tmp_path / "models.md"
    small_models = names["SMALL_MODELS"]

    def broken() -> torch.nn.Module:
        raise ValueError("no | model")

    def some() -> Iterator[object]:
        for each in small_models["timm"][1]():
            if each.name in ("VisionTransformer", "SwinTransformer", "NaFlexVit"):
                yield each
        yield names["SmallModel"]("Broken", broken)

    # The second library is a module that no environment has.
    monkeypatch.setitem(names, "SMALL_MODELS", {"timm": ("timm", some), "no_such_library": ("absent", some)})
    page.write_text(f"old introduction\n\n{names['TITLE']}\n\nan outdated table\n\n## torchvision\n\nkept\n")
    module["main"]([str(page), "--measure"])
    written = page.read_text()
    assert written.startswith(names["INTRODUCTION"]) and written.endswith("\n\n## torchvision\n\nkept\n")
    assert "an outdated table" not in written
    assert "Not measured, because they are not installed: absent." in written
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in written.splitlines() if "| timm |" in line]
    assert [row[0] for row in rows] == ["VisionTransformer", "SwinTransformer", "NaFlexVit", "Broken"]
    for row in rows[:3]:
        copy, macs, reloads, onnx = row[5:]
        assert float(copy) < 1e-5 and (macs, reloads) == ("equal", "yes")
        assert onnx.startswith("no, nor has the original: " if row[0] == "NaFlexVit" else "yes")
    assert [row[1:5] for row in rows[:2]] == [["yes"] * 4, ["", "", "yes", ""]]
    assert rows[3][1:] == [*[""] * 4, "ValueError: no / model", "", "", ""]


@pytest.mark.slow
def test_every_small_model_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = runpy.run_path(str(BENCHMARKS / "small_models.py"))
    created = 0
    for library, (_, models) in names["SMALL_MODELS"].items():
        if importlib.util.find_spec(library) is not None:
            for each in models():
                assert sum(parameter.numel() for parameter in each.make().parameters()) < 3e7, each.name
                created += 1
    assert created >= 40


@pytest.mark.slow
def test_neighbours_are_searched_in_an_index_of_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model("timm:vit_tiny_patch16_224", depth=2, embed_dim=24, img_size=16, patch_size=8, num_classes=0)
    data = write_folder(tmp_path / "images", {"train": 24, "validation": 12, "test": 12})
    others = write_folder(tmp_path / "others", {"train": 4, "validation": 1, "test": 8}, size=(12, 12))
    words = [str(save_model(tmp_path / "model", model)), "--data", str(data), "--index-data", str(others)]
    words += "--targets macs=0.7 recall=0.3 --index 24 --queries 12 --batches 1 --rounds 2".split()
    main = runpy.run_path(str(BENCHMARKS / "retrieval.py"))["main"]
    main([*words, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if "| " in line]
    assert [row[:2] for row in lines[1:]] == [["macs=0.7", "no"], ["macs=0.7", "yes"], ["recall=0.3", "yes"]]
    for row in lines[1:3]:
        one, ten = (float(cell.split(" ")[0]) for cell in row[3:5])
        assert 0 <= one <= 100 and 10 < ten <= 100 and row[7].endswith("x")
    cell = read_json(tmp_path / "out" / "macs=0.7-keep-index.json")
    assert cell["macs"] <= 0.7 and len(cell["recall"]["10"]) == 12
    main([*words, "--out", str(tmp_path / "out")])  # read back, not made again
    assert capsys.readouterr().out == printed
    with pytest.raises(InvalidInput, match="give a new folder"):
        main([*words, "--out", str(tmp_path / "out"), "--seed", "1"])


@pytest.mark.slow
def test_a_detector_is_trained_made_smaller_and_its_average_precision_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    data = write_parquet(tmp_path / "images.parquet", [*rows(12), *rows(12, "test")])
    names = runpy.run_path(str(BENCHMARKS / "detector.py"))
    words = "--scenes 40 --given 32 --tested 24 --epochs 1 --macs 0.8 --batch 2 --out"
    assert names["main"](["--data", str(data), *words.split(), str(tmp_path)]) == 0
    found = read_json(tmp_path / "detector.json")["average_precision"]
    assert len(found) == 3 and "average precision" in capsys.readouterr().out
    # Answers that are the objects have an average precision of 1, and without one of four scenes 0.75 of a class.
    objects = torch.tensor([[[1, 0.5, 0.5, 0.25, 0.5], [-1, 0, 0, 0, 0]]]).repeat(4, 1, 1)
    marks, boxes, present = names["targets_of"](objects, 3)
    assert present.sum() == 4 and marks.amax() == 1
    answers = torch.cat([20 * marks - 10, boxes], 1)
    assert names["average_precision"](answers, objects) == pytest.approx(1)
    answers[0, :3] = -10.0
    assert names["average_precision"](answers, objects) == pytest.approx(0.75, abs=1e-6)
    assert torch.equal(names["detection_divergence"](answers, answers), torch.zeros(4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "tokens"), [("--macs 0.7", "kept|ward"), ("--policy ward:0.7@2", "ward:0.7@2")], ids=["plan", "policy"]
)
def test_an_encoder_that_attends_within_windows_is_made_smaller(tmp_path: Path, words: str, tokens: str) -> None:
    pytest.importorskip("transformers")
    data = write_parquet(tmp_path / "images.parquet", [*rows(24), *rows(12, "test")])
    main = runpy.run_path(str(BENCHMARKS / "windows.py"))["main"]
    sizes = "--side 64 --sizes hidden_size=48 num_hidden_layers=4 num_attention_heads=4 window_size=3 mlp_dim=96"
    given = ["sam", "--data", str(data), *sizes.split(), "output_channels=16", "--given", "16", "--tested", "8"]
    assert main([*given, *words.split(), "--out", str(tmp_path / "out")]) == 0
    record = read_json(tmp_path / "out" / "windows.json")
    assert re.match(tokens, record["tokens"]) and 0.9 < float(record["cosine"].split()[0]) <= 1
    assert ("faster" in record) == ("policy" in words)


@pytest.mark.slow
def test_portable_models_are_priced_timed_and_reloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(BENCHMARKS / "portable.py"))["main"]
    model = build_model("timm:vit_tiny_patch16_224", depth=2, embed_dim=24, img_size=16, patch_size=8, num_classes=3)
    data = write_folder(tmp_path / "images", {"train": 24, "validation": 12, "test": 12})
    words = ["price", str(save_model(tmp_path / "model", model)), "--data", str(data), "--params", "0.8"]
    main([*words, "--out", str(tmp_path / "price")])
    printed = capsys.readouterr().out
    main([*words, "--out", str(tmp_path / "price")])  # both models are read back
    assert capsys.readouterr().out == printed
    shares = [float(line.split("|")[4].removesuffix("% ")) for line in printed.splitlines() if "| 6 |" in line]
    assert len(shares) == 2 and shares[1] <= shares[0] <= 80 and "portable / free: " in printed
    main(["speed", "--modes", "eager", "--batches", "1", "--rounds", "2", "--out", str(tmp_path / "speed")])
    assert re.search(r"\| eager \| 1 +\| \d+\.\d\dx", capsys.readouterr().out)
    main(["reload", "--classes", "1", "--tags", "1", "--out", str(tmp_path / "reload")])
    printed = capsys.readouterr().out
    assert "transformers: 1 of 1" in printed and "timm: 1 of 1" in printed
