"""Rank maps show what every part of every layer keeps."""

import re
from dataclasses import replace

import torch

from attnrx.change.realization import realize
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.diagnostics import suited_diagnostics
from attnrx.decide.rules import TotalRank, prescribe_maps
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import LayerPrescription, Prescription, ScoreDecision
from attnrx.show.reports import ReportContent
from attnrx.show.reports.layers import changes, ranks
from attnrx.show.reports.page import render
from attnrx.vit.models import family_of
from support.cases import CONFIGS, model, with_heads
from support.pictures import speckles


def diagnosed(name: str = "dense") -> tuple[torch.nn.Module, Diagnosis]:
    vit = model(CONFIGS[name])
    spectra = tuple(layer.spectrum() for layer in family_of(vit).attention(vit))
    return vit, diagnose(vit, speckles(CONFIGS[name]), diagnostics=suited_diagnostics(spectra))


def test_the_ranks_of_a_prescription() -> None:
    _, found = diagnosed()
    given = prescribe_maps(found, "qk=total_rank:0.6 vo=total_rank:0.5 fc1=uniform_rank:3 fc2=uniform_rank:3")
    reported = ranks(given, found)
    assert list(reported) == ["Query and key", "Value and output", "MLP"]
    columns = [columns for columns, _ in reported.values()]
    assert columns == [("head 1", "head 2", "head 3")] * 2 + [("fc1", "fc2")]
    scores, values, mlp = (rows for _, rows in reported.values())
    for index, layer in enumerate(given.layers):
        assert tuple(part[0] for part in scores[index] if part) == layer.qk.ranks
        assert tuple(part[0] for part in values[index] if part) == layer.outputs["vo"].ranks
    assert [part[0] for row in mlp for part in row if part] == [3] * 4
    assert sum(part[1] for row in scores for part in row if part) == 2 * 12


def test_removed_heads_and_ragged_heads_are_told_apart() -> None:
    vit, found = diagnosed()
    given = prescribe_maps(found, TotalRank(0.6))
    layers = [with_heads(layer, [False, True, True]) for layer in given.layers]
    slim = realize(vit, replace(given, layers=tuple(layers)))
    again = diagnose(slim, speckles(CONFIGS["dense"]))
    second = prescribe_maps(again, TotalRank(0.5))
    _, rows = ranks(second, again)["Query and key"]
    for row, layer in zip(rows, again.layers, strict=True):
        assert row[0] is None
        pairs = [row[head] for head in layer.spectrum.heads]
        assert [pair[1] for pair in pairs if pair] == [int(rank) for rank in layer.spectrum.rank]


def test_the_picture_holds_every_number_in_its_colour() -> None:
    kept = [[layer * 5 + head % 5 for head in range(12)] for layer in range(12)]
    keeps = [torch.arange(60) < torch.tensor(row)[:, None] for row in kept]
    layers = tuple(LayerPrescription({"qk": ScoreDecision(keep, torch.ones(12, 60), ("",) * 12)}) for keep in keeps)
    prescription = Prescription(layers, {}, "", {})
    section = changes(prescription, None)
    assert section is not None
    (figure,) = section["figures"]
    assert [cell.text for row in figure.rows for cell in row] == [str(rank) for row in kept for rank in row]
    assert figure.rows[0][0].step == 0 and figure.rows[-1][-1].step == 8
    assert figure.rows[-1][-1].tip == "layer 12, head 12: 56 of 60"
    page = render(ReportContent("12 x 12", prescription=prescription))
    assert len(re.findall(r'<td class="level-\d" title="layer \d+, head \d+: \d+ of 60">\d+</td>', page)) == 144
