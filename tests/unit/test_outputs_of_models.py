"""Embeddings are compared by cosine distance and nearest neighbours, logits by KL and classes."""

import copy

import pytest
import torch
from torch.nn.functional import normalize

import attnrx as rx
from attnrx.checks import Calibration, Promises
from attnrx.errors import InvalidInput
from attnrx.model_outputs import GROUP, KINDS, output_kind_of
from pretrained import adopted_once

LOGITS, EMBEDDINGS = KINDS["logits"], KINDS["embedding"]


def drawn(images: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(images, 7, generator=torch.Generator().manual_seed(seed))


def test_the_kind_follows_from_the_model():
    kinds = {"vit": LOGITS, "vit, no classifier": EMBEDDINGS, "hf vit": LOGITS, "hf clip tower": EMBEDDINGS}
    for name, kind in kinds.items():
        assert output_kind_of(adopted_once(name)[2]) is kind
    assert output_kind_of(torch.nn.Identity()) is LOGITS


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_equal_outputs_have_no_divergence(kind):
    base = drawn(70)
    for measure in (kind.divergence, kind.softened):
        assert measure(base, base).abs().max() < 1e-12
        assert (measure(base, drawn(70, 1)) > 0).all()
    assert torch.equal(kind.decisions(base), kind.decisions(base + 1e-9))


def test_the_distance_of_embeddings_is_that_of_their_directions():
    base, other = drawn(9), drawn(9, 1)
    found = EMBEDDINGS.divergence(base, 5 * other)
    assert torch.allclose(found, 1 - (normalize(base) * normalize(other)).sum(-1))
    assert EMBEDDINGS.softened(base, 5 * base).mean() == pytest.approx(8)  # (5 - 1)^2 / 2


def test_neighbours_are_sought_in_groups_of_a_fixed_size():
    base = drawn(2 * GROUP + 1)
    found = EMBEDDINGS.decisions(base)
    for image in range(2 * GROUP):
        first = image // GROUP * GROUP
        similar = normalize(base[first : first + GROUP]) @ normalize(base[image : image + 1]).T
        similar[image - first] = -2
        assert found[image] == first + similar.argmax()
    assert found[-1] == 2 * GROUP  # alone in its group
    assert torch.equal(found[:GROUP], EMBEDDINGS.decisions(base[:GROUP]))
    labels = torch.arange(len(base)) % 10
    assert torch.equal(EMBEDDINGS.labels(found, labels), labels[found])
    assert not len(EMBEDDINGS.decisions(base[:0]))


@pytest.mark.parametrize("name", ["hf dinov2, backbone", "hf clip tower, projected", "vit, no classifier"])
def test_a_backbone_is_diagnosed_planned_and_verified(name):
    model = copy.deepcopy(adopted_once(name)[2])
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(48, 3, 16, 16, generator=generator, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(images, torch.arange(48) % 4)
    diagnosis = rx.diagnose(model, data, moments=True)
    settings = rx.planning.PlanSettings.of("quick", axes=("qk", "vo"))
    plan = rx.plan(model, diagnosis, "macs=0.93", data, data, settings=settings)
    slim = rx.realize(model, plan.prescription)
    evidence = rx.verify(slim, model, data, prescription=plan.promising)
    found = {finding.details.get("quantity"): finding for finding in evidence.findings}
    with torch.no_grad():
        outputs = model(images), slim(images)
    distance = 1 - torch.cosine_similarity(*outputs, dim=-1)
    assert found["divergence"].value == pytest.approx(float(distance.mean()), rel=1e-6)
    assert "cosine distance" in found["divergence"].claim and found["divergence"].unit == ""
    assert "nearest neighbour agreement" in found["agreement"].claim
    assert "cosine distance" in rx.reports.summary_of(evidence)
    neighbours = EMBEDDINGS.decisions(outputs[0])
    right = 100 * float(((neighbours % 4) == torch.arange(48) % 4).double().mean())
    accuracy = next(own for own in evidence.findings if own.details.get("model") == "reference")
    assert accuracy.value == pytest.approx(right)
    promised = rx.verify(slim, model, data, [Promises(rounds=2)], prescription=plan.promising)
    assert any("cosine distance" in finding.claim for finding in promised.findings)


def test_calibration_needs_probabilities():
    model = adopted_once("hf clip tower")[2]
    data = torch.utils.data.TensorDataset(torch.zeros(4, 3, 16, 16, dtype=torch.float64), torch.zeros(4).long())
    with pytest.raises(InvalidInput, match="probabilities"):
        rx.verify(copy.deepcopy(model), model, data, [Calibration()])
