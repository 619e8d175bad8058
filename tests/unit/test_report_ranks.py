"""Rank maps show what every part of every layer keeps."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import torch

from attnrx.change.realization import realize
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.diagnostics import suited_diagnostics
from attnrx.decide.rules import TotalRank, prescribe_maps
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import LayerPrescription, Prescription, ScoreDecision
from attnrx.show.reports import ReportContent
from attnrx.show.reports.page import render
from attnrx.show.reports.ranks import prescribed_ranks
from attnrx.show.reports.sections.layers import changes
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
    reported = prescribed_ranks(given, found)
    assert [each.name for each in reported] == ["Query and key", "Value and output", "MLP"]
    assert [each.columns for each in reported] == [("head 0", "head 1", "head 2")] * 2 + [("fc1", "fc2")]
    for index, layer in enumerate(given.layers):
        assert tuple(part.rank for part in reported[0].layers[index]) == layer.qk.ranks
        assert tuple(part.rank for part in reported[1].layers[index]) == layer.outputs["vo"].ranks
    assert [part.rank for layer in reported[2].layers for part in layer] == [3] * 4
    assert reported[0].kept == sum(map(sum, given.ranks)) and reported[0].full == 2 * 12


def test_removed_heads_and_ragged_heads_are_told_apart() -> None:
    vit, found = diagnosed()
    given = prescribe_maps(found, TotalRank(0.6))
    layers = [with_heads(layer, [False, True, True]) for layer in given.layers]
    slim = realize(vit, replace(given, layers=tuple(layers)))
    again = diagnose(slim, speckles(CONFIGS["dense"]))
    second = prescribe_maps(again, TotalRank(0.5))
    for reported, spectrum in zip(prescribed_ranks(second, again)[0].layers, again.layers, strict=True):
        assert reported[0].rank is None
        assert [reported[head].full for head in spectrum.spectrum.heads] == [int(r) for r in spectrum.spectrum.rank]


def test_the_picture_holds_every_number_in_its_colour() -> None:
    ranks = [[layer * 5 + head % 5 for head in range(12)] for layer in range(12)]
    keeps = [torch.arange(60) < torch.tensor(row)[:, None] for row in ranks]
    layers = tuple(LayerPrescription({"qk": ScoreDecision(keep, torch.ones(12, 60), ("",) * 12)}) for keep in keeps)
    content = ReportContent("12 x 12", prescription=Prescription(layers, {}, "", {}))
    section = changes(content)
    assert section is not None
    (drawn,) = [ElementTree.fromstring(figure.picture) for figure in section.data["figures"]]
    cells = list(drawn.iter("rect"))
    assert len(cells) == 144
    assert cells[0].get("class") == "cell level-0" and cells[-1].findtext("title") == "layer 11, head 11: 56 of 60"
    assert cells[-1].get("class") == "cell level-8"
    texts = [element.text for element in drawn.iter("text") if "value" in element.get("class", "")]
    assert texts == [str(rank) for row in ranks for rank in row]
    assert len(re.findall(r"<title>layer \d+, head \d+: \d+ of 60</title>", render(content))) == 144
