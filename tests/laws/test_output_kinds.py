"""Every kind of outputs is judged as what it is: what changes its decisions shows, and an equal model is equal."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import attnrx as rx
from attnrx.change.realization.distillation import Distill
from attnrx.change.realization.realizing import nearest_candidate
from attnrx.change.realization.repair import token_importance
from attnrx.data.model_data import images_for
from attnrx.decide.planning.planner import expected_of
from attnrx.decide.planning.sensitivity import Answers
from attnrx.nouns.evidence import Evidence
from attnrx.show.checks import Accuracy, Calibration, Fidelity, Index, Promises, Retrieval
from attnrx.support.errors import DataError, InvalidInput
from attnrx.vit.outputs import KINDS, output_kind_of
from attnrx_lab.checks import Controls
from support import pretrained
from support.users_models import Around

IMAGES = torch.randn(48, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """What is stated of a model with so many outputs, its kind, and a shift of the outputs that changes decisions; 0
    stands for their negation.
    """

    stated: str
    outputs: int
    kind: str
    shift: float


CASES = {
    "classes": Case("classes", 4, "logits", 0.0),
    "one logit": Case("classes", 1, "binary_logit", 0.0),
    "labels": Case("multilabel", 5, "multilabel", 5.0),
    "a number": Case("regression", 1, "regression", 5.0),
    "numbers": Case("regression", 3, "regression", 5.0),
    "embedding": Case("embedding", 6, "embedding", 5.0),
}


def vit(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "num_classes": outputs,
    }
    model = timm.create_model("vit_tiny_patch16_224", **shape).double()
    head: Any = model.get_submodule("head")
    head.weight.data.normal_()
    return model


def shifted(model: nn.Module, by: float) -> nn.Module:
    """A copy with a number added to every output, or, for 0, with its outputs negated."""
    candidate = copy.deepcopy(model)
    head: Any = candidate.get_submodule("head")
    with torch.no_grad():
        if by:
            head.bias += by
        else:
            head.weight *= -1
    return candidate


def loaded(case: Case) -> nn.Module:
    return rx.load(vit(case.outputs), outputs=case.stated).eval()


def quantities(evidence: Evidence) -> dict[str, float]:
    return {finding.details["quantity"]: finding.value for finding in evidence.findings}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_change_of_decisions_shows_and_an_equal_model_is_equal(case: Case) -> None:
    model = loaded(case)
    kind, candidate = output_kind_of(model), shifted(model, case.shift)
    assert kind is KINDS[case.kind]
    changed = quantities(rx.verify(candidate, model, IMAGES, [Fidelity()]))
    same = quantities(rx.verify(copy.deepcopy(model), model, IMAGES, [Fidelity()]))
    assert changed["divergence"] > 0.1 and same["divergence"] == pytest.approx(0, abs=1e-12)
    assert changed["discrepancy"] > 0.1 and same["discrepancy"] == 0
    if kind.has_decisions:
        assert changed["agreement"] < 90 and same["agreement"] == 100
    else:
        assert "agreement" not in changed
    # Plans, predictions, the choice of the nearest, distillation and the weights of repair read outputs alike.
    images = images_for(model, IMAGES)
    answers = Answers.of(model, images, 16)
    deviation = answers.measure(candidate)
    assert deviation.mean == pytest.approx(changed["divergence"]) and deviation.softened.mean() > 0.1
    assert answers.measure(model).mean == pytest.approx(0, abs=1e-12)
    assert (deviation.agrees is None) == (not kind.has_decisions)
    assert ("agreement" in expected_of(deviation, kind)) == kind.has_decisions
    assert nearest_candidate([candidate, copy.deepcopy(model)], model, images) is not candidate
    assert rx.distill(candidate, model, IMAGES, Distill(1, (1e-4,))).before[0] > 0.1
    assert all(len(set(weights.tolist())) > 1 for weights in token_importance(model, images)[:-1])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_copies_and_files_keep_the_kind(case: Case, tmp_path: Any) -> None:
    model = loaded(case)
    assert output_kind_of(rx.load(rx.save(model, tmp_path / "saved"))).name == case.kind
    slim = rx.realize(model, rx.prescribe(model, "tokens=evit:0.5@2"))
    assert output_kind_of(slim).name == output_kind_of(rx.load(slim)).name == case.kind
    evidence = rx.verify(slim, model, IMAGES, [Fidelity()])
    assert evidence.about["outputs"] == case.kind and KINDS[case.kind].columns[1] in rx.reports.summary_of(evidence)
    card = (rx.save(slim, tmp_path / "slim", evidence=evidence) / "README.md").read_text()
    assert ("classification" in card) == (case.stated in ("classes", "multilabel"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_exported_file_keeps_the_kind(case: Case, tmp_path: Any) -> None:
    pytest.importorskip("onnxruntime")
    file = rx.export(loaded(case).float(), tmp_path / "model.onnx")
    assert output_kind_of(rx.load(tmp_path / "model.onnx")).name in (case.kind, "logits")
    assert (len(file.facts["parity"]) == 2) == (case.stated in ("classes", "multilabel"))


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        ("multi_label_classification", "multilabel"),
        ("regression", "regression"),
        ("single_label_classification", "logits"),
        (None, "logits"),
    ],
)
def test_a_transformers_model_states_its_problem(problem: str | None, kind: str, tmp_path: Any) -> None:
    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "num_labels": 3}
    sizes |= {"intermediate_size": 48, "image_size": 16, "patch_size": 8}
    config = ViTConfig(**sizes, problem_type=problem)  # type: ignore[arg-type]
    model = rx.load(ViTForImageClassification(config).double().eval())
    assert output_kind_of(model).name == kind
    assert output_kind_of(rx.load(rx.save(model, tmp_path / "saved"))).name == kind
    assert output_kind_of(rx.load(model, outputs="regression")).name == "regression"  # what is stated has precedence


def test_the_divergence_of_labels_is_that_of_their_bernoulli_distributions() -> None:
    base, other = torch.randn(9, 4), torch.randn(9, 4)
    distributions = [torch.distributions.Bernoulli(logits=logits) for logits in (base, other)]
    expected = torch.distributions.kl_divergence(*distributions).sum(-1)
    kind = KINDS["multilabel"]
    torch.testing.assert_close(kind.divergence(base, other), expected)
    torch.testing.assert_close(
        1e6 * kind.divergence(base / 1e3, other / 1e3), kind.softened(base, other), rtol=1e-2, atol=0
    )
    far = kind.divergence(torch.full((1, 2), 900.0), torch.full((1, 2), -900.0))
    assert far.item() == pytest.approx(1800.0)  # no overflow


def test_the_divergence_of_numbers_is_the_share_of_the_variance_that_is_lost() -> None:
    base = torch.randn(30, 2) * torch.tensor([1.0, 1000.0])
    other = base + torch.tensor([0.1, 100.0])
    kind = KINDS["regression"]
    expected = ((other - base).square().mean(0) / base.var(0, correction=0)).mean()
    assert kind.divergence(base, other).mean() == pytest.approx(float(expected))
    assert torch.isfinite(kind.divergence(base[:1], other[:1])).all()
    with pytest.raises(InvalidInput, match="no decision"):
        kind.decisions(base)


def test_several_labels_are_vectors_of_0_and_1() -> None:
    model = loaded(CASES["labels"])
    with torch.no_grad():
        labels = (model(IMAGES) > 0).long()
    labels[:12, 0] = 1 - labels[:12, 0]  # a quarter of the images has a wrong label
    for given in (labels, labels.float(), labels.bool()):
        evidence = rx.verify(model, model, (IMAGES, given), [Accuracy(None)])
        assert evidence.findings[0].value == pytest.approx(75) and "exact-match" in evidence.findings[0].claim
    items = torch.utils.data.TensorDataset(IMAGES, labels)
    loader = torch.utils.data.DataLoader(items, batch_size=7, shuffle=True)
    for data in (items, loader, [(image, label.tolist()) for image, label in items]):
        assert rx.verify(model, model, data, [Accuracy(None)]).findings[0].value == pytest.approx(75)
    for wrong in (torch.zeros(48, dtype=torch.long), labels + 1, labels[:, :3]):
        with pytest.raises((InvalidInput, DataError), match="0 and 1"):
            rx.verify(model, model, (IMAGES, wrong), [Accuracy(None)])


def test_targets_of_a_regression_are_not_read() -> None:
    model, targets = loaded(CASES["numbers"]), torch.randn(48, 3)
    found = rx.verify(shifted(model, 5.0), model, (IMAGES, targets), batch_size=16)
    assert any("accuracy" in note for note in found.about["notes"])
    assert {finding.check for finding in found.findings} >= {"fidelity", "costs"}
    evidence = rx.verify(model, model, [(image, 0.5) for image in IMAGES], [Fidelity()])
    assert quantities(evidence)["divergence"] == 0


REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("classes", lambda: Retrieval()),
    ("classes", lambda: Index()),
    ("labels", lambda: Calibration()),
    ("numbers", lambda: Accuracy()),
    ("numbers", lambda: Controls({}, lambda _: nn.Identity())),
    ("numbers", lambda: Fidelity(least_agreement=99.0)),
]


@pytest.mark.parametrize(("name", "make"), REFUSED, ids=lambda part: part if isinstance(part, str) else "")
def test_a_check_that_means_nothing_for_a_kind_is_refused_by_name(name: str, make: Callable[[], Any]) -> None:
    model, check = loaded(CASES[name]), make()
    with pytest.raises(InvalidInput, match=check.name):
        rx.verify(copy.deepcopy(model), model, IMAGES, [check])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_candidate_that_returns_nan_fails_by_name(case: Case) -> None:
    model = loaded(case)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_parameter("head.bias").fill_(torch.nan)
    evidence = rx.verify(broken, model, IMAGES, [Fidelity(), Promises(promised={"expected": {}, "measured": None})])
    assert evidence.failures[0].claim == "the candidate returns NaN or infinity for no image"
    assert evidence.failures[0].value == 48 and any("not checked: fidelity" in note for note in evidence.about["notes"])
    with pytest.raises(InvalidInput, match="the reference returns NaN"):
        rx.verify(model, broken, IMAGES, [Fidelity()])


def test_labels_at_chance_level_are_said_everywhere(tmp_path: Any) -> None:
    model = loaded(CASES["classes"])
    with torch.no_grad():
        labels = (model(IMAGES).argmax(-1) + 1) % 4
    evidence = rx.verify(model, model, (IMAGES, labels), [Accuracy(None), Fidelity()])
    (warning,) = evidence.warnings
    assert warning.startswith("LABELS AT CHANCE LEVEL")
    assert warning in evidence.summary and warning in rx.reports.summary_of(evidence)
    card = (rx.save(model, tmp_path / "saved", evidence=evidence) / "README.md").read_text()
    assert "LABELS AT CHANCE LEVEL" in card and "model-index" not in card
    assert "LABELS AT CHANCE LEVEL" in rx.reports.render(rx.reports.ReportContent("evidence", evidence=evidence))
    assert not rx.verify(model, model, (IMAGES, (labels - 1) % 4), [Accuracy(None)]).warnings


# outputs of users' own modules


def of_norm_one(module: Any, images: torch.Tensor) -> torch.Tensor:
    return nn.functional.normalize(module.head(module.net(images)), dim=1)


def some_classes(module: Any, images: torch.Tensor) -> torch.Tensor:
    return module.head(module.net(images))[:, [0, 2, 4]]


def with_a_temperature(module: Any, images: torch.Tensor) -> torch.Tensor:
    return (module.head(module.net(images)) + module.head(module.net(images.flip(-1)))) * 3 / 2


def log_probabilities(module: Any, images: torch.Tensor) -> torch.Tensor:
    return module.head(module.net(images)).log_softmax(-1)


def sigmoids(module: Any, images: torch.Tensor) -> torch.Tensor:
    return module.head(module.net(images)).sigmoid()


def one_logit(module: Any, images: torch.Tensor) -> torch.Tensor:
    return module.head(module.net(images))[:, 0]


def one_number(module: Any, images: torch.Tensor) -> torch.Tensor:
    return module.net(images).mean(1)


def after_a_tanh(module: Any, images: torch.Tensor) -> torch.Tensor:
    return module.head(module.net(images)).tanh()


RETURNED: dict[Callable[[Any, torch.Tensor], torch.Tensor], str] = {
    of_norm_one: "embedding",
    some_classes: "logits",
    with_a_temperature: "logits",
    log_probabilities: "logits",
    sigmoids: "label_probabilities",
    one_logit: "binary_logit",
    one_number: "regression",
    after_a_tanh: "embedding",
}


def around(run: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    module = Around(run, img_size=16).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


@pytest.mark.parametrize("run", RETURNED, ids=lambda run: run.__name__)
def test_the_kind_is_that_of_the_operation_which_makes_the_outputs_and_is_said(run: Any) -> None:
    model = rx.load(around(run))
    kind = output_kind_of(model)
    assert kind.name == RETURNED[run] and 'load the model with outputs="' in kind.note
    assert kind.note in rx.verify(model, model, IMAGES, [Fidelity()]).about["notes"]
    stated = rx.load(around(run), outputs="regression")
    assert output_kind_of(stated) is KINDS["regression"]


@pytest.mark.parametrize("name", ["hf dpt", "hf yolos"])
def test_the_kind_is_that_of_the_task_where_the_library_states_it(name: str) -> None:
    kind = output_kind_of(rx.load(pretrained.CASES[name][1]()))
    assert kind.name == {"hf dpt": "map", "hf yolos": "regression"}[name]


def test_probabilities_of_labels_are_judged_as_their_logits() -> None:
    logits = torch.randn(2, 20, 5, dtype=torch.float64)
    of_logits, of_probabilities = KINDS["multilabel"], KINDS["label_probabilities"]
    for method in ("divergence", "softened"):
        expected = getattr(of_logits, method)(*logits)
        torch.testing.assert_close(getattr(of_probabilities, method)(*logits.sigmoid()), expected)
    assert torch.equal(of_probabilities.decisions(logits[0].sigmoid()), of_logits.decisions(logits[0]))
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    drawn = of_probabilities.drawn(logits[0].sigmoid(), generators[0])
    torch.testing.assert_close(drawn, of_logits.drawn(logits[0], generators[1]))


def test_targets_of_a_binary_cross_entropy_are_labels() -> None:
    model = rx.load(vit(1))
    for targets in (torch.ones(4), torch.tensor([[0.0], [1.0], [1.0], [0.0]])):
        found = images_for(model, [(IMAGES[:4], targets)])
        assert torch.equal(next(iter(found.batches(4))).labels, targets.flatten().long())
    with pytest.raises(InvalidInput, match=r'give 0 or 1 for each image, or load it with outputs="regression"'):
        images_for(model, [(IMAGES[:4], torch.rand(4))])
