"""A user's divergence and metric: plans, fits and evidence use them, for outputs as the model returns them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import kl_div

import attnrx as rx
from attnrx.change.realization.repair import token_importance
from attnrx.data.model_data import images_for
from attnrx.decide.planning.sensitivity import Answers
from attnrx.show.checks import Fidelity
from attnrx.show.reports import ReportContent, render, sample_maps, summary_of
from attnrx.support.errors import InvalidInput, UserCodeError
from attnrx.vit.models import family_of, library_form, working_copy
from attnrx.vit.outputs import KINDS, judging, output_kind_of

timm = pytest.importorskip("timm")
pytestmark = pytest.mark.filterwarnings("ignore::attnrx.support.errors.ScaleWarning")
SIZE, PATCH, WIDTH, CLASSES = 32, 8, 32, 3
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(24, 3, SIZE, SIZE, generator=GENERATOR, dtype=torch.float64)
MASKS = torch.randint(CLASSES, (24, SIZE, SIZE), generator=GENERATOR)


class Segmenter(nn.Module):
    """The class of every pixel, and with `is_several` its depth too."""

    def __init__(self, is_several: bool = False):
        super().__init__()
        sizes: dict[str, Any] = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": 3, "num_heads": 2}
        self.vit = timm.create_model("vit_tiny_patch16_224", num_classes=0, **sizes)
        self.head, self.is_several = nn.ConvTranspose2d(WIDTH, CLASSES + 1, PATCH, PATCH), is_several

    def forward(self, images: torch.Tensor) -> Any:
        tokens = self.vit.forward_features(images)[:, 1:]
        maps = self.head(tokens.transpose(1, 2).unflatten(2, (SIZE // PATCH, SIZE // PATCH)))
        return {"classes": maps[:, :-1], "depth": maps[:, -1]} if self.is_several else maps[:, :-1]


def made(is_several: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Segmenter(is_several)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.double().eval()


def changed(model: Any) -> Any:
    other = working_copy(copy.deepcopy(model))
    with torch.no_grad():
        for layer in family_of(other).attention(other):
            layer.value.weight.mul_(0.5)  # type: ignore[union-attr, operator]
    return library_form(other)


def pixel_divergence(original: Any, smaller: Any) -> torch.Tensor:
    """The mean over pixels of the divergence of their classes."""
    if isinstance(original, dict):
        assert original.keys() == {"classes", "depth"} and original["depth"].shape[1:] == (SIZE, SIZE)
        original, smaller = original["classes"], smaller["classes"]
    assert original.shape[1:] == (CLASSES, SIZE, SIZE)
    logits = smaller.log_softmax(1), original.log_softmax(1)
    return kl_div(*logits, log_target=True, reduction="none").sum(1).mean((1, 2))


def mean_iou(outputs: Any, batch: Any) -> torch.Tensor:
    """The intersection over union with the masks, mean over the classes."""
    images, masks = batch
    assert images.shape[1:] == (3, SIZE, SIZE)
    found = (outputs["classes"] if isinstance(outputs, dict) else outputs).argmax(1)
    shares = [
        ((found == each) & (masks == each)).sum((1, 2)) / ((found == each) | (masks == each)).sum((1, 2)).clamp_min(1)
        for each in range(CLASSES)
    ]
    return torch.stack(shares).mean(0)


def left_half(original: torch.Tensor, smaller: torch.Tensor) -> torch.Tensor:
    return (original - smaller)[..., : SIZE // 2].square().mean((1, 2, 3))


def same_classes(original: torch.Tensor, smaller: torch.Tensor) -> torch.Tensor:
    return (original.argmax(1) != smaller.argmax(1)).float().mean((1, 2))


def loader(count: int = 24) -> torch.utils.data.DataLoader[Any]:
    images, masks = IMAGES.repeat(-(-count // 24), 1, 1, 1)[:count], MASKS.repeat(-(-count // 24), 1, 1)[:count]
    images = images + torch.randn(images.shape, generator=torch.Generator().manual_seed(1)).double()  # no two are equal
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, masks), batch_size=8)


@pytest.mark.parametrize("is_several", [False, True])
def test_evidence_has_the_users_divergence_and_metric(is_several: bool) -> None:
    model = made(is_several)
    whole: Any = rx.load(model)
    other = changed(whole)
    functions: dict[str, Any] = {"divergence": pixel_divergence, "metric": mean_iou}
    evidence = rx.verify(other, whole, [(IMAGES, MASKS)], [Fidelity()], **functions)
    found = {(finding.details["quantity"], finding.details.get("model")): finding for finding in evidence.findings}
    with torch.no_grad():
        before, after = model(IMAGES), other(IMAGES)
    divergence, change = found["divergence", None], found["metric change", None]
    assert divergence.value == pytest.approx(float(pixel_divergence(before, after).mean()), rel=1e-4)
    assert "pixel divergence" in divergence.claim and "mean iou" in change.claim
    values = [mean_iou(each, (IMAGES, MASKS)) for each in (before, after)]
    for role, value in zip(("reference", "candidate"), values, strict=True):
        assert found["metric", role].value == pytest.approx(float(value.mean()), abs=1e-5)
    assert change.value == pytest.approx(float((values[1] - values[0]).mean()), abs=1e-5)
    assert change.low is not None and change.high is not None and change.low < change.value < change.high
    assert "mean iou" in summary_of(evidence) and "pixel divergence" in summary_of(evidence)
    same = rx.verify(copy.deepcopy(whole), whole, [(IMAGES, MASKS)], [Fidelity()], **functions)
    assert [each.value for each in same.findings if each.details["quantity"] in ("divergence", "metric change")] == [
        pytest.approx(0, abs=1e-7)
    ] * 2
    assert output_kind_of(whole).distance == KINDS["several" if is_several else "map"].distance  # the call is over


def iou_of_set(outputs: Any, masks: torch.Tensor) -> torch.Tensor:
    """The intersection over union of all pixels of all images, mean over the classes."""
    found = (outputs["classes"] if isinstance(outputs, dict) else outputs).argmax(1)
    pairs = [(found == each, masks == each) for each in range(CLASSES)]
    return torch.stack([(one & other).sum() / (one | other).sum().clamp_min(1) for one, other in pairs]).mean()


def mean_of_values(outputs: Any, masks: torch.Tensor) -> torch.Tensor:
    return mean_iou(outputs, (torch.zeros(len(masks), 3, SIZE, SIZE), masks)).mean()


@pytest.mark.parametrize("is_several", [False, True])
def test_a_measure_of_a_whole_set_has_an_interval_of_resamples(is_several: bool) -> None:
    model = made(is_several)
    whole: Any = rx.load(model)
    other = changed(whole)
    evidence = rx.verify(other, whole, [(IMAGES, MASKS)], [Fidelity()], metric_of_set=iou_of_set)
    found = {(finding.details["quantity"], finding.details.get("model")): finding for finding in evidence.findings}
    with torch.no_grad():
        before, after = (float(iou_of_set(each(IMAGES), MASKS)) for each in (model, other))
    for role, value in {"reference": before, "candidate": after}.items():
        finding: Any = found["metric", role]
        assert finding.value == pytest.approx(value, abs=1e-6) and finding.low < finding.value < finding.high
    change: Any = found["metric change", None]
    assert change.value == pytest.approx(after - before, abs=1e-6) and change.low < change.value < change.high
    assert "iou of set" in summary_of(evidence)
    again = rx.verify(other, whole, [(IMAGES, MASKS)], [Fidelity()], metric_of_set=iou_of_set)
    assert [each.low for each in again.findings] == [each.low for each in evidence.findings]
    wrongs: list[Any] = [lambda outputs, masks: None, lambda outputs, masks: float("nan"), lambda outputs, masks: masks]
    for wrong in wrongs:
        with pytest.raises(InvalidInput, match="one finite number"):
            rx.verify(other, whole, [(IMAGES, MASKS)], [Fidelity()], metric_of_set=wrong)


def test_the_interval_of_a_mean_over_the_set_is_that_of_a_mean_over_images() -> None:
    whole: Any = rx.load(made())
    about = changed(whole), whole, [(IMAGES, MASKS)], [Fidelity()]
    measures: list[dict[str, Any]] = [{"metric": mean_iou}, {"metric_of_set": mean_of_values}]
    pairs = []
    for measure in measures:
        evidence = rx.verify(*about, **measure)
        pairs.append([each for each in evidence.findings if each.details["quantity"].startswith("metric")])
    for expected, found in zip(*pairs, strict=True):
        assert found.value == pytest.approx(expected.value, abs=1e-6)
        assert 0.6 < (found.high - found.low) / (expected.high - expected.low) < 1.6, found.claim


@pytest.mark.parametrize("measure", [{"metric": mean_iou}, {"metric_of_set": iou_of_set}], ids=["image", "set"])
def test_masks_are_not_read_without_a_metric(measure: dict[str, Any]) -> None:
    whole = rx.load(made())
    assert not images_for(whole, loader()).has_labels
    with judging(None, **measure):
        images = images_for(whole, loader())
    assert next(iter(images.batches(8))).labels.shape == (8, SIZE, SIZE)


def test_plans_are_measured_by_the_users_divergence() -> None:
    whole = rx.load(made())
    images = images_for(whole, loader())
    with judging(pixel_divergence):
        measured = Answers.of(whole, images, 8).measure(changed(whole))
    pixels = torch.cat([batch.images for batch in images.batches(8)])
    with torch.no_grad():
        expected = pixel_divergence(whole(pixels), changed(whole)(pixels))
    torch.testing.assert_close(measured.divergence, expected.double(), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(measured.softened, measured.divergence)


def test_a_repair_weights_the_tokens_that_the_users_divergence_reads() -> None:
    whole, side = rx.load(made()), SIZE // PATCH

    def shares(function: Any) -> float:
        with judging(function):
            weights = token_importance(whole, images_for(whole, IMAGES))[-1][1:].unflatten(0, (side, side))
        return float(weights[:, : side // 2].mean() / weights[:, side // 2 :].mean())

    assert shares(left_half) > 5  # what is left is the share that all tokens have
    assert 0.5 < shares(None) < 2
    assert shares(same_classes) == pytest.approx(shares(None), rel=0.05)  # without a gradient


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "one number": (lambda original, smaller: (original - smaller).square().mean(), InvalidInput, "one finite number"),
    "raises": (lambda original, smaller: original["no"], UserCodeError, "divergence .*raised"),
    "nan": (lambda original, smaller: original.flatten(1).mean(1) * torch.nan, InvalidInput, "one finite number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_functions_that_measure_nothing_are_refused(name: str) -> None:
    function, error, message = WRONG[name]
    whole = rx.load(made())
    with pytest.raises(error, match=message):
        rx.verify(changed(whole), whole, IMAGES, [Fidelity()], divergence=function)


@pytest.mark.slow
@pytest.mark.parametrize("is_several", [False, True])
def test_a_segmenter_is_shrunk_by_the_users_functions(is_several: bool, tmp_path: Path) -> None:
    model = made(is_several).float()
    data = [(images.float(), masks) for images, masks in loader(160)]
    shrunk = rx.shrink(model, data, macs=0.8, divergence=pixel_divergence, metric=mean_iou)
    assert shrunk.plan is not None and shrunk.plan.about["divergence"] == "pixel divergence"
    changes = [each for each in shrunk.evidence.findings if each.details.get("quantity") == "metric change"]
    assert len(changes) == 1 and changes[0].low is not None and "mean iou" in shrunk.summary()
    shrunk.save(tmp_path / "slim", onnx=False)
    page = (tmp_path / "slim" / "report.html").read_text()
    assert "pixel divergence" in page and "mean iou" in page


def test_large_outputs_are_compared_on_as_many_images_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Any = rx.load(made())
    monkeypatch.setattr("attnrx.vit.outputs.MOST_NUMBERS", 5 * CLASSES * SIZE * SIZE)
    evidence = rx.verify(changed(whole), whole, IMAGES, [Fidelity()])
    assert evidence.about["images"] == 5 and "5 of 24 images" in " ".join(evidence.about["notes"])


@pytest.mark.parametrize("is_several", [False, True])
def test_a_report_shows_the_maps_of_both_models(is_several: bool) -> None:
    whole: Any = rx.load(made(is_several))
    samples = sample_maps({"original": whole, "this model": changed(whole)}, IMAGES[:2])
    assert samples is not None
    with torch.no_grad():
        found = whole(IMAGES[:2])
    expected = (found["classes"] if is_several else found).argmax(1)
    torch.testing.assert_close(samples.maps["original"], expected.float())
    assert not torch.equal(samples.maps["this model"], expected.float())
    page = render(ReportContent("maps", outputs=samples))
    assert page.count("mean absolute difference") == 2 and "map of this model for image 1" in page
