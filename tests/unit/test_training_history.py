"""What a run writes and says about itself: indicators of every head, plain lines."""

import json
from pathlib import Path

import pytest
import torch

from attnrx.decide.diagnostics.spectral_shape import effective_rank
from attnrx.training import Console
from attnrx.training.evaluation import Probe
from attnrx.training.reporters import Outline
from attnrx.vit.models import VisionTransformer, ViTConfig, family_of, initialize_
from support.cases import CONFIGS, model
from support.tiny_runs import images, run

SPECTRAL = {"entropy", "effective_rank", "sparsity", "max_strength", "retained_rank"}
GEOMETRIC = {"alignment", "selectivity", "perturbation_response"}


def probe(vit: VisionTransformer) -> list[dict[str, list[float]]]:
    return Probe(images("probe", 6), torch.device("cpu")).read(vit)


def test_the_history_has_one_line_an_epoch_with_every_indicator_of_every_head(tmp_path: Path) -> None:
    made = run(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert lines == list(made.history)
    assert [line["epoch"] for line in lines] == [1, 2]
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        assert set(line["losses"]) == {"task", "target_rank", "perturbation_robustness"}
        assert len(line["layers"]) == 2
        for layer in line["layers"]:
            assert set(layer) == SPECTRAL | GEOMETRIC
            assert all(len(heads) == 2 for heads in layer.values())


def test_indicators_agree_with_the_diagnostics_and_leave_the_model_as_it_was() -> None:
    vit = model(CONFIGS["svda"]).train()
    readings = probe(vit)
    assert vit.training
    for layer, attention in zip(readings, family_of(vit).attention(vit), strict=True):
        spectrum = attention.spectrum()
        assert layer["effective_rank"] == pytest.approx(effective_rank(spectrum.strength).tolist())
        assert layer["max_strength"] == pytest.approx(spectrum.strength.abs().amax(-1).tolist())
        energy = spectrum.energy.sort(-1, descending=True).values
        for head, kept in enumerate(layer["retained_rank"]):
            assert energy[head, : int(kept)].sum() >= 0.9
            assert energy[head, : int(kept) - 1].sum() < 0.9
        assert all(response > 0 for response in layer["perturbation_response"])


def test_equal_strengths_need_nine_tenths_of_the_directions() -> None:
    config = ViTConfig.uniform("svda", width=40, depth=1, heads=2, image_size=8, patch_size=4, channels=1, classes=3)
    (layer,) = probe(initialize_(VisionTransformer(config), 0))
    assert layer["retained_rank"] == [18.0, 18.0]
    assert layer["effective_rank"] == pytest.approx([20.0, 20.0])


def test_a_dense_model_has_geometry_but_no_spectrum() -> None:
    for layer in probe(model(CONFIGS["dense"])):
        assert set(layer) == GEOMETRIC


def test_plain_lines_say_every_epoch_and_where_a_run_resumes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(tmp_path, Console(every=0.0))
    said = capsys.readouterr()
    assert said.out == ""
    assert "training 2 epochs of 3 steps" in said.err
    assert said.err.count("\nepoch ") == 2
    assert "step 1/6" in said.err
    Console().started(Outline(2, 3, 4))
    assert "resuming at step 4 of 6" in capsys.readouterr().err
