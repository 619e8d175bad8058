"""Images that a model was not trained to read are refused or noted before anything is decided on them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.cli.main import show_warning
from attnrx.data import LoadedImages, Normalization, Splits, from_tensors
from attnrx.data.model_data import adapt_preprocessing
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.rules import prescribe_maps
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.show.reports import ReportContent
from attnrx.show.reports.page import render
from attnrx.support.errors import DataError, ScaleWarning
from attnrx.vit.models import load_model
from attnrx.vit.models.input_validation import IMAGENET, ImageScale
from attnrx_lab.rules import ContributionEnergy, measure_divergence
from support.cases import CONFIGS, model
from support.pictures import speckles
from support.pretrained import of_hf

SCALES = {
    "unit": Normalization((0.0,) * 3, (1.0,) * 3),
    "bytes": Normalization((0.0,) * 3, (1 / 255,) * 3),
    "half": Normalization.half(3),
    "imagenet": Normalization(*IMAGENET),
}
LOOKS = {
    "unit": "that were not normalized",
    "bytes": "pixels in 0 to 255",
    "half": "mean and std 0.5",
    "imagenet": "of ImageNet",
}


def photographs(count: int = 8, seed: int = 0) -> torch.Tensor:
    """Smooth pixels in [0, 1] with a mean of 0.45 and a standard deviation of about 0.25, as photographs have."""
    coarse = torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return (0.45 + 0.27 * torch.nn.functional.interpolate(coarse, size=24, mode="nearest")).clamp(0, 1)


def scale(stated: str, given: str, pixels: torch.Tensor) -> ImageScale:
    seen = ImageScale(SCALES[stated].mean, SCALES[stated].std)
    for part in SCALES[given].apply(pixels).split(3):
        seen.observe(part)
    return seen


@pytest.mark.parametrize("given", SCALES)
@pytest.mark.parametrize("stated", ["unit", "half", "imagenet"])
def test_every_confusion_of_constants_is_noted_and_named(stated: str, given: str) -> None:
    seen = scale(stated, given, photographs())
    assert seen.fits == (stated == given)
    if stated != given:
        assert LOOKS[given] in seen.describe()


@pytest.mark.parametrize("stated", ["unit", "half", "imagenet"])
def test_dull_and_few_images_on_the_right_scale_are_not_noted(stated: str) -> None:
    assert scale(stated, stated, 0.4 + 0.1 * photographs()).fits
    assert scale(stated, stated, 0.4 + 0.1 * photographs(3)).fits
    assert ImageScale(SCALES[stated].mean, SCALES[stated].std).fits


def shown_to() -> dict[str, Callable[[LoadedImages], Any]]:
    vit, images = model(CONFIGS["dense"]), speckles(CONFIGS["dense"])
    found = diagnose(vit, images)
    given = prescribe_maps(found, ContributionEnergy(0.6))
    return {
        "diagnose": lambda data: diagnose(vit, data),
        "measure_divergence": lambda data: measure_divergence(vit, found, data, "weights"),
        "realize": lambda data: realize(vit, given, by="refit", calibration=data),
    }


@pytest.mark.parametrize("verb", ["diagnose", "measure_divergence", "realize"])
def test_whatever_is_decided_on_images_warns_once_and_refuses_what_cannot_be_read(verb: str) -> None:
    show, config = shown_to()[verb], CONFIGS["dense"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        show(speckles(config))
    with pytest.warns(ScaleWarning, match="that were not normalized") as heard:
        show(speckles(config, normalization=Normalization((0.0,), (1.0,))))
    assert len([each for each in heard if each.category is ScaleWarning]) == 1
    with pytest.raises(DataError, match=r"1 x 12 x 12 .* 1 x 8 x 8"):
        show(speckles(CONFIGS["dense"], size=12))
    broken = Normalization((0.0,), (1.0,))
    object.__setattr__(broken, "mean", (float("nan"),))  # which no normalization of a user has
    with pytest.raises(DataError, match=f"{verb} was given images with NaN"):
        show(speckles(config, normalization=broken))


def test_the_note_stays_with_the_record_and_is_shown(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    vit, config = model(CONFIGS["dense"]), CONFIGS["dense"]
    assert "notes" not in diagnose(vit, speckles(config)).about
    with pytest.warns(ScaleWarning) as heard:
        found = diagnose(vit, speckles(config, normalization=Normalization((0.0,), (1.0,))))
    (note,) = found.about["notes"]
    assert str(heard[0].message) == note
    found.save(tmp_path / "diagnosis.json")
    given = prescribe_maps(Diagnosis.load(tmp_path / "diagnosis.json"), ContributionEnergy(0.6))
    assert given.about["notes"] == [note]
    page = render(ReportContent("noted", diagnosis=found, prescription=given))
    assert page.count("<strong>Warning:</strong>") == 1 and "not normalized" in page
    assert "<strong>Warning:</strong>" not in render(ReportContent("bare", diagnosis=diagnose(vit, speckles(config))))
    show_warning(note, ScaleWarning, "x.py", 3)
    assert capsys.readouterr().err == f"attnrx: warning: {note}\n"


def test_an_unknown_normalization_is_called_unknown() -> None:
    """A model of transformers that was made from its configuration has no statistics, whatever images it gets."""
    model = load_model(of_hf("Dinov2Model"))
    imagenet = (torch.rand(16, 3, 16, 16) - 0.45) / 0.225
    with pytest.warns(ScaleWarning, match="its normalization is unknown") as caught:
        notes = diagnose(model, imagenet).about["notes"]
    assert len(caught) == 1 and len(notes) == 1 and "0.5" not in notes[0]
    assert diagnose(model, 2 * torch.rand(16, 3, 16, 16) - 1).about["notes"] == notes
    # Pixels that attnrx normalizes are on any scale, so there the statistics are named.
    pixels = from_tensors("a", torch.zeros(4, 3, 16, 16, dtype=torch.uint8), torch.zeros(4).long(), SCALES["half"])
    splits = Splits("named", pixels, pixels, pixels, ("0",), 3, 16, pixels.normalization, None)
    with pytest.warns(ScaleWarning, match=r"unknown: pixels are normalized with mean \(0\.5, 0\.5, 0\.5\)") as caught:
        adapted = adapt_preprocessing(splits, model)
    assert len(caught) == 1 and adapted.notes == (str(caught[0].message),)
