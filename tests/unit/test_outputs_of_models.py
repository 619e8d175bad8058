"""Embeddings are compared by cosine distance and nearest neighbours, logits by KL and classes, one as two classes."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch.nn.functional import normalize

import attnrx as rx
from attnrx.data.model_data import images_for, splits_for
from attnrx.decide.planning.sensitivity import Answers
from attnrx.show.checks import Accuracy, Calibration, Fidelity, Index, Promises, Retrieval
from attnrx.support.errors import DataError, InvalidInput
from attnrx.vit.models import answer
from attnrx.vit.outputs import GROUP, KINDS, output_kind_of, recalled
from support import pretrained
from support.pretrained import adopted_once

LOGITS, BINARY, EMBEDDINGS = KINDS["logits"], KINDS["binary_logit"], KINDS["embedding"]


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
    other = drawn(70, 1)
    if kind is BINARY:
        base, other = base[:, :1], other[:, :1]
    for measure in (kind.divergence, kind.softened):
        assert measure(base, base).abs().max() < 1e-12
        assert (measure(base, other) > 0).all()
    if kind.has_decisions:
        assert torch.equal(kind.decisions(base), kind.decisions(base + 1e-9))


def test_the_distance_of_embeddings_is_that_of_their_directions():
    base, other = drawn(9), drawn(9, 1)
    found = EMBEDDINGS.divergence(base, 5 * other)
    assert torch.allclose(found, 1 - (normalize(base) * normalize(other)).sum(-1))
    assert EMBEDDINGS.softened(base, 5 * base).mean() == pytest.approx(8)  # (5 - 1)^2 / 2


def test_a_backbone_is_diagnosed_planned_and_verified():
    model = copy.deepcopy(adopted_once("hf clip tower, projected")[2])
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(48, 3, 16, 16, generator=generator, dtype=torch.float64)
    data, others = (torch.utils.data.TensorDataset(each, torch.arange(48) % 4) for each in (images, -images))
    diagnosis = rx.diagnose(model, data, moments=True)
    settings = rx.planning.PlanSettings.preset("quick", axes=("qk", "vo"))
    plan = rx.plan(model, diagnosis, "macs=0.93", data, others, settings=settings)
    slim = rx.realize(model, plan.prescription)
    evidence = rx.verify(slim, model, data, prescription=plan.with_predictions)
    found = {finding.details.get("quantity"): finding for finding in evidence.findings}
    with torch.no_grad():
        outputs = model(images), answer(slim, images)
    distance = 1 - torch.cosine_similarity(*outputs, dim=-1)
    assert found["divergence"].value == pytest.approx(float(distance.mean()), rel=1e-6)
    assert "cosine distance" in found["divergence"].claim and found["divergence"].unit == ""
    assert "nearest neighbour agreement" in found["agreement"].claim
    assert "cosine distance" in rx.reports.summary_of(evidence)
    neighbours = EMBEDDINGS.decisions(outputs[0])
    right = 100 * float(((neighbours % 4) == torch.arange(48) % 4).double().mean())
    accuracy = next(own for own in evidence.findings if own.details.get("model") == "reference")
    assert accuracy.value == pytest.approx(right)
    promised = rx.verify(slim, model, data, [Promises(rounds=2)], prescription=plan.with_predictions)
    assert any("cosine distance" in finding.claim for finding in promised.findings)
    (change,) = promised.findings[2:]
    assert change.details["quantity"] == "promised_change" and "1-nearest-neighbour accuracy" in change.claim


@pytest.fixture(scope="module")
def binary() -> torch.nn.Module:
    """A classifier with one output, whose weights are large enough for decisions of both signs."""
    torch.manual_seed(0)
    model = timm.create_model(pretrained.VIT, **{**pretrained.SMALL, "embed_dim": 24, "num_classes": 1}).double()
    head: Any = model.get_submodule("head")
    head.weight.data.normal_()
    return rx.load(model).eval()


@pytest.fixture(scope="module")
def binary_data() -> torch.utils.data.TensorDataset:
    images = torch.randn(48, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.utils.data.TensorDataset(images, torch.arange(48) % 2)


def test_one_logit_is_compared_as_the_two_classes_of_its_sigmoid():
    base, other = drawn(9)[:, :1], drawn(9, 1)[:, :1]
    two = [torch.cat([torch.zeros_like(logit), logit], dim=1) for logit in (base, other)]
    assert torch.allclose(BINARY.divergence(base, other), LOGITS.divergence(*two))
    assert torch.allclose(BINARY.softened(base, other), (base - other)[:, 0].double().square() / 8)
    # The divergence of Bernoulli distributions, and its limit for a high temperature.
    p, q = base.double().sigmoid()[:, 0], other.double().sigmoid()[:, 0]
    bernoulli = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert torch.allclose(BINARY.divergence(base, other), bernoulli)
    assert torch.allclose(1e6 * BINARY.divergence(base / 1e3, other / 1e3), BINARY.softened(base, other), rtol=1e-2)
    assert torch.equal(BINARY.decisions(base), (base[:, 0] > 0).long())


def test_a_binary_classifier_has_evidence_of_its_errors(binary, binary_data):
    assert output_kind_of(binary) is BINARY
    diagnosis = rx.diagnose(binary, binary_data, moments=True)
    slim = rx.realize(binary, rx.prescribe(diagnosis, "vo=uniform_rank:2 fc1=uniform_rank:2"))
    evidence = rx.verify(slim, binary, binary_data, [Accuracy(), Fidelity(), Calibration()])
    found = {finding.details["quantity"]: finding for finding in evidence.findings}
    logits = [model(binary_data.tensors[0]).detach()[:, 0] for model in (binary, slim)]
    p, q = (logit.sigmoid() for logit in logits)
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert found["divergence"].value == pytest.approx(float(divergence.mean()), rel=1e-6) and divergence.mean() > 1e-3
    agreement = 100 * float(((logits[0] > 0) == (logits[1] > 0)).double().mean())
    assert found["agreement"].value == pytest.approx(agreement) and agreement < 100
    right = 100 * float(((logits[1] > 0) == binary_data.tensors[1]).double().mean())
    assert found["accuracy"].value == pytest.approx(right)  # of the candidate, the later finding
    assert found["expected calibration error of the candidate"].value > 0
    assert any("one output" in note for note in evidence.about["notes"])
    assert rx.distill(slim, binary, binary_data).before[0] > 1e-4


def test_labels_of_two_classes_fit_one_logit(binary, binary_data):
    splits = splits_for(binary, {"train": binary_data, "validation": binary_data})
    assert splits.class_names == ("0", "1")
    fitted = rx.adapt_preprocessing(splits, binary)
    assert fitted.train.has_labels
    wrong = torch.utils.data.TensorDataset(binary_data.tensors[0], torch.arange(48) % 3)
    with pytest.raises(DataError, match=r"label 2, the .* distinguishes 2 classes"):
        rx.verify(binary, binary, wrong, [Accuracy()])


def test_the_accuracy_of_embeddings_is_named_after_the_nearest_neighbour(tmp_path):
    model = adopted_once("vit, no classifier")[2]
    images = torch.randn(48, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(images, torch.arange(48) % 4)
    evidence = rx.verify(copy.deepcopy(model), model, data, [Accuracy(), Fidelity()])
    assert [finding.claim for finding in evidence.of("accuracy")] == [
        "1-nearest-neighbour accuracy of the reference",
        "1-nearest-neighbour accuracy of the candidate",
        "the candidate loses at most 1 points of 1-nearest-neighbour accuracy",
    ]
    assert not any("top-1" in str(finding) for finding in evidence.findings)
    assert "points of 1-nearest-neighbour accuracy" in rx.reports.summary_of(evidence)
    assert not any("labels may not be" in note for note in evidence.about["notes"])
    card = (rx.save(model, tmp_path / "saved", evidence=evidence) / "README.md").read_text()
    assert "pipeline_tag: image-feature-extraction" in card
    assert "embeddings = model(images)" in card
    assert "model-index" not in card and "logits" not in card and "classification" not in card


def test_neighbours_that_every_model_keeps_are_not_counted():
    model = adopted_once("vit, no classifier")[2]
    images = torch.randn(GROUP + 8, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for count, k in ((10, 10), (11, 10), (3, 2)):
        with pytest.raises(InvalidInput, match=rf"retrieval\(ks={k}\): {count} images .* at least {k + 2} images"):
            rx.verify(copy.deepcopy(model), model, images[:count], [Retrieval(ks=(k,))])
    (finding,) = rx.verify(copy.deepcopy(model), model, images[:12], [Retrieval(ks=(10,))]).findings
    assert finding.value == finding.high == 100 and finding.low is not None and finding.low < 99
    few, many = rx.verify(copy.deepcopy(model), model, images, [Retrieval(ks=(1, 10))]).findings
    assert (few.n, many.n) == (GROUP + 8, GROUP)  # the last 8 images have 7 neighbours each
    with pytest.raises(InvalidInput, match=f"from 1 to {GROUP - 2}"):
        Retrieval(ks=(GROUP - 1,))


def test_recall_in_an_index_is_that_of_a_sorted_search() -> None:
    generator = torch.Generator().manual_seed(0)
    old, images, ks = torch.randn(700, 6, generator=generator), torch.arange(700), (1, 10)
    new = old + 0.3 * torch.randn(old.shape, generator=generator)

    def nearest(queries: torch.Tensor, index: torch.Tensor, row: int) -> list[int]:
        similarity = torch.cosine_similarity(queries[row].double(), index.double(), dim=-1)
        return [each for each in similarity.argsort(descending=True).tolist() if each != row]

    for queries, index in ((new, old), (old, new)):
        shares = recalled((old, old), (queries, index), ks, images)
        pairs = [(nearest(old, old, row), nearest(queries, index, row)) for row in images.tolist()]
        expected = [[len({*base[:k]} & {*other[:k]}) / k for k in ks] for base, other in pairs]
        assert shares.tolist() == expected and 0.3 < shares.mean() < 0.9
    # Other images than those of the index; lengths do not count; of repeated images any one is found.
    assert recalled((old[:99], old[99:]), (3 * old[:99], old[99:]), ks).eq(1).all()
    assert recalled((old, torch.cat([old, old])), (old, torch.cat([old, old + 1e-9])), (1,), images).eq(1).all()


def test_evidence_has_the_recall_of_both_directions() -> None:
    model = copy.deepcopy(adopted_once("vit, no classifier")[2])
    images = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    same = rx.verify(copy.deepcopy(model), model, images, "index(ks=1/10,least_recall=97)")
    assert [finding.value for finding in same.findings] == [100.0] * 4
    assert [finding.is_claim for finding in same.findings] == [False, True, False, False]
    assert all(finding.n == 40 and finding.details["index"] == 39 for finding in same.findings)
    assert "100.0 % of the nearest 10 neighbours are found in the old index of 39" in rx.reports.summary_of(same)
    small = rx.realize(model, rx.prescribe(rx.diagnose(model, images), "qk=total_rank:0.3 hidden=uniform_rank:0.3"))
    for limit, outcome in ((99.9, "fails"), (1.0, "holds")):
        verified = rx.verify(small, model, images, [Index(least_recall=limit)])
        assert verified.findings[1].outcome == outcome == verified.outcome and verified.findings[1].value < 99
    with pytest.raises(InvalidInput, match=r"index of 10 images .* at least 12 images"):
        rx.verify(small, model, images[:11], "index")


def test_an_index_of_your_own_is_searched_for_new_images() -> None:
    model = copy.deepcopy(adopted_once("vit, no classifier")[2])
    images = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        vectors = model(images)
    small = rx.realize(model, rx.prescribe(rx.diagnose(model, images), "qk=total_rank:0.3 hidden=uniform_rank:0.3"))
    one, ten = rx.verify(small, model, images[32:], [Index(stored=vectors[:32])]).findings
    assert (one.n, ten.n, ten.details["index"]) == (8, 8, 32)
    with torch.no_grad():
        queries = small(images[32:])
    expected = recalled((vectors[32:], vectors[:32]), (queries, vectors[:32]), (1, 10)).mean(0)
    assert [one.value, ten.value] == pytest.approx((100 * expected).tolist()) and ten.value < 99
    with pytest.raises(InvalidInput, match="stored vectors have 3 numbers"):
        rx.verify(small, model, images[32:], [Index(stored=vectors[:32, :3])])
    with pytest.raises(InvalidInput, match="index of 10 images"):
        rx.verify(small, model, images[32:], [Index(stored=vectors[:10])])


def test_a_plan_needs_embeddings_with_a_direction() -> None:
    model = pretrained.of_hf("CLIPVisionModelWithProjection", projection_dim=7)
    with torch.no_grad():
        model.visual_projection.weight.zero_()
    adopted = rx.load(model)
    with pytest.raises(DataError, match="an embedding of zeros"):
        Answers.of(adopted, images_for(adopted, torch.linspace(-1, 1, 4).view(4, 1, 1, 1).expand(-1, 3, 16, 16)), 4)
