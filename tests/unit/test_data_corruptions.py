"""Corruptions: the published amounts, laws of each kind, and the published formulas as the independent reference."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from attnrx.data import CORRUPTIONS, SEVERITIES, Corruption
from attnrx.data.passes import generator
from attnrx.errors import InvalidInput, UnknownName


def smooth(side: int = 32, channels: int = 3) -> torch.Tensor:
    """Images with something at every scale: a corruption must change them."""
    images = torch.rand(6, channels, side, side, generator=generator(0))
    wave = torch.sin(torch.linspace(0, 9, side))
    return (0.6 * images + 0.2 * wave[:, None] + 0.2 * wave.abs()).clamp(0, 1)


@pytest.mark.parametrize("side", [28, 32, 64, 96])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_images_stay_images_and_severity_hurts_more(name: str, side: int) -> None:
    images = smooth(side)
    spoilt = [CORRUPTIONS[name](images, severity, generator(1)) for severity in SEVERITIES]
    for result in spoilt:
        assert result.shape == images.shape
        assert result.dtype == images.dtype
        assert result.min() >= 0
        assert result.max() <= 1
    damage = [float((result - images).square().mean()) for result in spoilt]
    assert damage[0] > 0
    assert damage == sorted(damage)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_one_channel_and_no_hidden_randomness(name: str) -> None:
    images = smooth(channels=1)
    corruption = Corruption(name)
    assert torch.equal(corruption(images, 3, generator(5)), corruption(images, 3, generator(5)))
    alone = corruption(images[2:3], 3, generator(5))
    assert name == "noise" or torch.equal(alone, corruption(images, 3)[2:3]), "an image does not depend on its batch"


def test_noise_has_the_published_deviation() -> None:
    grey = torch.full((4, 3, 32, 32), 0.5)
    for severity, deviation in zip(SEVERITIES, (0.04, 0.06, 0.08, 0.09, 0.10), strict=True):
        assert float(CORRUPTIONS["noise"](grey, severity, generator(2)).std()) == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize(("side", "severity", "deviation"), [(32, 1, 0.4), (32, 5, 1.0), (64, 4, 1.25), (80, 5, 6.0)])
def test_blur_is_the_filter_of_scipy(side: int, severity: int, deviation: float) -> None:
    images = smooth(side)
    expected = gaussian_filter(images.numpy(), (0, 0, deviation, deviation), mode="nearest", truncate=4.0)
    assert np.abs(CORRUPTIONS["blur"](images, severity).numpy() - expected).max() < 1e-12


def test_contrast_keeps_the_mean_and_scales_the_rest() -> None:
    images = smooth()
    spoilt = CORRUPTIONS["contrast"](images, 3)
    assert torch.allclose(spoilt.mean((2, 3)), images.mean((2, 3)))
    assert torch.allclose(spoilt.std((2, 3)), 0.4 * images.std((2, 3)))


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_that_of_the_benchmark(channels: int) -> None:
    images = smooth(channels=channels)
    pixels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    expected = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image.squeeze()).save(file, "JPEG", quality=58)
        expected.append(torch.from_numpy(np.array(Image.open(file))).reshape(32, 32, channels).permute(2, 0, 1))
    assert torch.allclose(CORRUPTIONS["jpeg"](images, 3), torch.stack(expected) / 255)


def test_jpeg_keeps_a_flat_image() -> None:
    flat = torch.full((2, 3, 32, 32), 128 / 255)
    assert torch.allclose(CORRUPTIONS["jpeg"](flat, 5), flat, atol=2 / 255)


def test_unknown_names_and_severities_are_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'noise'"):
        Corruption("nois")
    for severity in (0, 6):
        with pytest.raises(InvalidInput, match="choose 1"):
            CORRUPTIONS["blur"](smooth(), severity)
