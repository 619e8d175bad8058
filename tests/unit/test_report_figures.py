"""Heat maps of readings show the values they were given."""

from dataclasses import replace

import torch

from attnrx.nouns.diagnosis import LayerDiagnosis
from attnrx.show.reports.layers import LEVELS, Cell, colour_step, maps
from support import report_content


def test_the_colour_scale_clips_and_ends_at_its_last_step() -> None:
    assert [colour_step(share) for share in (-1.0, 0.0, 0.5, 1.0, 9.0)] == [0, 0, 4, LEVELS - 1, LEVELS - 1]


def test_readings_are_cells_by_head_and_those_of_the_metric_of_plans_are_open() -> None:
    diagnosis = report_content.example().diagnosis
    assert diagnosis is not None
    spectrum = diagnosis.layers[0].spectrum
    selectivity = torch.tensor([0.0, 1.0, float("nan"), 0.5])
    names = ("effective_rank", "effective_rank_mix", "entropy")
    readings = {name: torch.rand(4) for name in names} | {"selectivity": selectivity}
    layers = (LayerDiagnosis(spectrum, readings), LayerDiagnosis(replace(spectrum, heads=(0, 1, 2, 5)), readings))
    section = maps(replace(diagnosis, layers=layers))
    assert section is not None
    titles = [figure.title for figure in section["main"]]
    assert titles == ["Effective rank, mix", "Selectivity"]
    assert [figure.title for figure in section["rest"]] == ["Effective rank", "Entropy"]
    figure = section["main"][1]
    assert figure.note == "0 to 1" and figure.columns == tuple(f"head {head}" for head in range(1, 7))
    first, second = figure.rows
    assert [cell.step for cell in first] == [0, LEVELS - 1, None, 4, None, None]
    assert first[3] == Cell("0.50", 4, "layer 1, head 4: 0.500") and first[5].text == "removed"
    assert second[3].text == second[4].text == "removed" and second[5].text == "0.50"
