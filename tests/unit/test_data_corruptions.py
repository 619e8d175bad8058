"""Corruptions: the published amounts, laws of each kind, and the published formulas as the independent reference."""

import colorsys
import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter, zoom

from attnrx.data.images import generator
from attnrx.support.errors import InvalidInput
from attnrx_lab.corruptions import CORRUPTIONS, SEVERITIES, Corruption
from attnrx_lab.corruptions.methods import streaked

# One amount that rises. The others trade several against each other, or hang on what the image shows.
RISING = ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "gaussian_blur", "brightness", "contrast")


def smooth(side: int = 32, channels: int = 3) -> torch.Tensor:
    """Images with something at every scale: a corruption must change them."""
    images = torch.rand(6, channels, side, side, generator=generator(0))
    wave = torch.sin(torch.linspace(0, 9, side))
    return (0.6 * images + 0.2 * wave[:, None] + 0.2 * wave.abs()).clamp(0, 1)


@pytest.mark.parametrize("side", [28, 64])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_images_stay_images_and_severity_hurts_more(name: str, side: int) -> None:
    images = smooth(side)
    corrupted = [CORRUPTIONS[name](images, severity, generator(1)) for severity in SEVERITIES]
    for result in corrupted:
        assert result.shape == images.shape
        assert result.dtype == images.dtype
        assert result.min() >= 0
        assert result.max() <= 1
    damage = [float((result - images).square().mean()) for result in corrupted]
    assert damage[0] > 0 or (name, side) in [("defocus_blur", 28), ("glass_blur", 28)]
    assert damage == sorted(damage) or name not in RISING


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_does_not_depend_on_what_follows_and_nothing_is_random_without_the_generator(
    name: str, channels: int
) -> None:
    images, corruption = smooth(channels=channels), Corruption(name)
    if (name, channels) == ("saturate", 1):
        with pytest.raises(InvalidInput, match="leave this corruption out"):
            corruption(images, 3)
        return
    whole = corruption(images, 3, generator(5))
    assert torch.equal(whole, corruption(images, 3, generator(5)))
    draws = generator(5)
    parts = [corruption(part, 3, draws) for part in images.split([1, 2, 3])]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-12)


def test_the_other_noises_have_their_moments() -> None:
    grey = torch.full((8, 3, 96, 96), 0.25)
    shot, speckle, impulse = (
        CORRUPTIONS[name](grey, 1, generator(2)) for name in ("shot_noise", "speckle_noise", "impulse_noise")
    )
    assert float(shot.std()) == pytest.approx((0.25 / 60) ** 0.5, rel=0.02)
    assert float(shot.mean()) == pytest.approx(0.25, rel=0.01)
    assert torch.allclose((60 * shot).round(), 60 * shot, atol=1e-9)
    assert float(speckle.std()) == pytest.approx(0.15 * 0.25, rel=0.02)
    for value in (0.0, 1.0):
        assert float((impulse == value).double().mean()) == pytest.approx(0.015, rel=0.1)
    assert float((impulse == 0.25).double().mean()) == pytest.approx(0.97, rel=0.005)


@pytest.mark.parametrize(("side", "severity", "deviation"), [(32, 1, 0.4), (32, 5, 1.0), (64, 4, 1.25), (80, 5, 6.0)])
def test_blur_is_the_filter_of_scipy(side: int, severity: int, deviation: float) -> None:
    images = smooth(side)
    expected = gaussian_filter(images.numpy(), (0, 0, deviation, deviation), mode="nearest", truncate=4.0)
    assert np.abs(CORRUPTIONS["gaussian_blur"](images, severity).numpy() - expected).max() < 1e-12


def test_defocus_averages_over_a_disk() -> None:
    point = torch.zeros(1, 1, 96, 96)
    point[..., 48, 48] = 1
    for severity, radius in ((1, 3), (5, 10)):
        seen = CORRUPTIONS["defocus_blur"](point, severity)[0, 0]
        rows, columns = torch.meshgrid(torch.arange(96) - 48, torch.arange(96) - 48, indexing="ij")
        distance = (rows**2 + columns**2).double().sqrt()
        assert float(seen.sum()) == pytest.approx(1, abs=0.02)  # as published: its edge is mirrored when smoothed
        inside = int((distance <= radius).sum())
        assert float(seen[48, 48]) == pytest.approx(1 / inside)
        assert float(seen[distance > radius + 3].abs().max()) == 0


def test_glass_moves_pixels_no_farther_than_it_may() -> None:
    # A ramp: what a pixel shows tells from which column it came; the smoothing of severity 1 at this side is none.
    ramp = (torch.arange(32) / 255).expand(1, 3, 32, 32).clone()
    moved = 255 * CORRUPTIONS["glass_blur"](ramp, 1, generator(3)) - torch.arange(32)
    assert set(moved.round().unique().tolist()) == {-1.0, 0.0}  # the benchmark draws from -1 and 0
    assert 0.3 < float((moved.round() == -1).double().mean()) < 0.6


def test_motion_smears_in_its_own_direction() -> None:
    point = np.zeros((1, 33, 33))
    point[0, 16, 16] = 1
    along, down = (streaked(point, 3, 1.5, degrees)[0] for degrees in (0.0, 90.0))
    weights = np.exp(-0.5 * (np.arange(7) / 1.5) ** 2)
    weights = weights / weights.sum()
    assert np.allclose(along[16, 10:17][::-1], weights) and float(along.sum()) == pytest.approx(1)
    assert np.allclose(down[10:17, 16][::-1], weights)


def test_zoom_is_that_of_scipy() -> None:
    images = smooth(40)[:1]
    total = images[0].numpy().copy()
    factors = np.arange(1, 1.16, 0.01)  # severity 3 of Tiny-ImageNet-C
    for factor in factors:
        crop = int(np.ceil(40 / factor))
        start = (40 - crop) // 2
        large: np.ndarray = zoom(
            images[0].numpy()[:, start : start + crop, start : start + crop], (1, factor, factor), order=1
        )  # type: ignore[assignment]
        trim = (large.shape[1] - 40) // 2
        total += large[:, trim : trim + 40, trim : trim + 40]
    expected = torch.from_numpy(total / (len(factors) + 1))
    assert torch.allclose(CORRUPTIONS["zoom_blur"](images, 3)[0], expected, atol=1e-9)


def test_colours_are_those_of_the_standard_library() -> None:
    images = smooth(32)[:1]
    images[..., 0, :4] = torch.tensor([0.0, 0.4, 1.0, 0.7])  # grey ones, black and white among them
    brighter, fuller = (CORRUPTIONS[name](images, 4)[0] for name in ("brightness", "saturate"))
    for row, column in ((0, 0), (0, 1), (0, 2), (5, 7), (20, 3), (31, 31)):
        hue, saturation, value = colorsys.rgb_to_hsv(*images[0, :, row, column].tolist())
        expected = colorsys.hsv_to_rgb(hue, saturation, min(value + 0.2, 1))
        assert brighter[:, row, column].tolist() == pytest.approx(expected)
        expected = colorsys.hsv_to_rgb(hue, min(2 * saturation + 0.1, 1), value)
        assert fuller[:, row, column].tolist() == pytest.approx(expected)


def test_contrast_keeps_the_mean_and_scales_the_rest() -> None:
    images = smooth()
    corrupted = CORRUPTIONS["contrast"](images, 3)
    assert torch.allclose(corrupted.mean((2, 3)), images.mean((2, 3)))
    assert torch.allclose(corrupted.std((2, 3)), 0.4 * images.std((2, 3)))


def test_elastic_moves_the_plane_with_its_three_points() -> None:
    # Severity 1 of CIFAR-C has no small moves, so a plane of brightness stays one.
    down, right = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    plane = (0.3 + 0.005 * down + 0.007 * right).expand(1, 1, 32, 32)
    moved = CORRUPTIONS["elastic_transform"](plane, 1, generator(6))[0, 0, 8:24, 8:24]
    steps = moved.diff(dim=0), moved.diff(dim=1)
    assert all(torch.allclose(step, step[:1, :1].expand_as(step), atol=1e-9) for step in steps)
    assert not torch.allclose(moved, plane[0, 0, 8:24, 8:24])


@pytest.mark.parametrize("side", [28, 64, 224])
def test_pixels_are_those_of_pillow(side: int) -> None:
    image = (255 * smooth(side)[0]).round().to(torch.uint8)
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    for severity in SEVERITIES:
        small = int(side * Corruption("pixelate").levels(side, severity)[0])
        boxes = picture.resize((small, small), Image.Resampling.BOX).resize((side, side), Image.Resampling.BOX)
        found = 255 * CORRUPTIONS["pixelate"](image[None] / 255, severity)[0].permute(1, 2, 0)
        assert np.abs(found.numpy() - np.asarray(boxes)).max() <= 1.01  # Pillow rounds twice


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_that_of_the_benchmark(channels: int) -> None:
    images = smooth(channels=channels)
    pixels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    expected = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image.squeeze()).save(file, "JPEG", quality=58)
        expected.append(torch.from_numpy(np.array(Image.open(file))).reshape(32, 32, channels).permute(2, 0, 1))
    assert torch.allclose(CORRUPTIONS["jpeg_compression"](images, 3), torch.stack(expected) / 255)
