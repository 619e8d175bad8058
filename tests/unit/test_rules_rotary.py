"""Rotary prescriptions: whole pairs, the limits of slow and fast rotation, and files."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attnrx as rx
from attnrx.change.decompositions import balance
from attnrx.data import LoadedImages, Normalization, from_tensors
from attnrx.decide.rules.metrics import COHERENCE, RotaryDirections
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import Prescription
from attnrx.vit.models import family_of
from support.pretrained import adopted_once, inputs

NAMES = ("dinov3", "rotary, mixed", "perception encoder")


def images(model: torch.nn.Module) -> LoadedImages:
    shape = family_of(model).input_shape(model)
    pixels = torch.randint(0, 256, (8, *shape), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    return from_tensors("random", pixels, torch.zeros(8, dtype=torch.long), Normalization((0.5,) * 3, (0.5,) * 3))


@pytest.fixture(scope="module", params=NAMES)
def diagnosed(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, Diagnosis]:
    model = copy.deepcopy(adopted_once(request.param)[2])
    return model, rx.diagnose(model, images(model), batch_size=8, moments=True)


def with_coherence(diagnosis: Diagnosis, value: float) -> Diagnosis:
    return replace(
        diagnosis,
        layers=tuple(
            replace(layer, readings={**layer.readings, COHERENCE: torch.full_like(layer.reading(COHERENCE), value)})
            for layer in diagnosis.layers
        ),
    )


def grams(diagnosis: Diagnosis) -> tuple[torch.Tensor, torch.Tensor]:
    return diagnosis.layers[0].reading("query_gram"), diagnosis.layers[0].reading("key_covariance")


def test_pairs_that_do_not_rotate_are_ordinary_directions(diagnosed: tuple[torch.nn.Module, Diagnosis]) -> None:
    found = with_coherence(diagnosed[1], 1.0)
    directions = RotaryDirections(*grams(found), found.layers[0])
    plain = balance(*grams(found)).strength
    for head, strength in zip(directions.heads, plain, strict=True):
        tails = strength.square().flip(0).cumsum(0).flip(0)
        errors = torch.tensor([choice.error for choice in head.choices])
        assert bool((errors[:-1] <= tails * (1 + 1e-6) + 1e-12).all())  # never worse than the decomposition


def test_pairs_that_rotate_fast_are_kept_whole(diagnosed: tuple[torch.nn.Module, Diagnosis]) -> None:
    found = with_coherence(diagnosed[1], 0.0)
    directions = RotaryDirections(*grams(found), found.layers[0])
    for rank in range(directions.used.shape[1] + 1):
        decision = directions.decision((rank,) * len(directions.heads), ("",) * len(directions.heads))
        assert decision.basis is not None and decision.basis.pairs is not None
        assert all(kept in (rank, rank - 1) and kept % 2 == 0 for kept in decision.ranks)
        assert bool((decision.basis.pairs[decision.keep] >= 0).all())


def test_errors_fall_and_all_directions_are_exact(diagnosed: tuple[torch.nn.Module, Diagnosis]) -> None:
    directions = RotaryDirections(*grams(diagnosed[1]), diagnosed[1].layers[0])
    for head in directions.heads:
        errors = [choice.error for choice in head.choices]
        assert errors == sorted(errors, reverse=True) and errors[-1] == 0
    assert bool((directions.strength.diff(dim=1) <= 1e-12).all())


def test_prescriptions_and_models_are_saved(diagnosed: tuple[torch.nn.Module, Diagnosis], tmp_path: Path) -> None:
    model, found = diagnosed
    found.save(tmp_path / "diagnosis.json")
    loaded = Diagnosis.load(tmp_path / "diagnosis.json")
    prescription = rx.prescribe(loaded, "qk=total_rank:0.5")
    prescription.save(tmp_path / "prescription.json")
    small = rx.realize(model, prescription)
    again = rx.realize(model, Prescription.load(tmp_path / "prescription.json"))
    rx.save(small, tmp_path / "small")
    batch = inputs(model)
    with torch.no_grad():
        expected = small(batch)
        assert torch.equal(again(batch), expected)
        torch.testing.assert_close(rx.load(tmp_path / "small")(batch), expected, rtol=0, atol=1e-12)
        assert not torch.allclose(expected, model(batch))
