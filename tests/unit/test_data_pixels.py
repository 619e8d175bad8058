"""What happens to pixels: decoding, fitting to the model's size, cropping and mirroring, normalising."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from torchvision.transforms.v2 import functional as reference

from attnrx.data import Augmentation, Normalization
from attnrx.data.images import StoredImages, generator
from attnrx.data.loading import guess_geometry
from attnrx.support.errors import DataError, InvalidInput
from attnrx.support.preprocessing import ImageGeometry
from attnrx.support.shapes import Tensor


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def saved(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind)
    return file.getvalue()


def decode(content: bytes, channels: int | None) -> Tensor:
    return StoredImages(torch.zeros(1).long(), torch.arange(1), lambda at: content, str).picture(0, channels)


def test_every_crop_is_a_window_of_the_padded_image() -> None:
    images, augmentation = noise(64, 3, 8, 8), Augmentation(padding=3)
    draws = augmentation.draw(64, generator(0))
    found = augmentation.apply(images, draws)
    padded = functional.pad(images, (3, 3, 3, 3))
    for i in range(64):
        down, across = draws.shift[i].tolist()
        window = padded[i, :, down : down + 8, across : across + 8]
        assert torch.equal(found[i], window.flip(-1) if draws.mirror[i] else window)
    assert 10 < draws.mirror.sum() < 54
    assert draws.shift.min() == 0
    assert draws.shift.max() == 6


def test_random_windows_hold_their_share_and_stay_inside() -> None:
    augmentation = Augmentation(area=(0.2, 0.6))
    draws = augmentation.draw(200, generator(1))
    shares = []
    for window in draws.window:
        top, left, rows, columns = augmentation.box(90, 130, window)
        assert top >= 0
        assert left >= 0
        assert top + rows <= 90
        assert left + columns <= 130
        shares.append(rows * columns / (90 * 130))
        assert 0.7 < columns / rows < 1.4
    assert 0.18 < min(shares) < 0.25
    assert 0.5 < max(shares) < 0.62


def test_normalization_is_undone_by_its_inverse() -> None:
    scale = Normalization((0.2, 0.5, 0.7), (0.1, 0.3, 2.0))
    images = torch.rand(4, 3, 5, 5)
    assert torch.allclose(scale.invert(scale.apply(images)), images, atol=1e-15, rtol=0)
    assert torch.allclose(scale.apply(images)[:, 1], (images[:, 1] - 0.5) / 0.3)
    with pytest.raises(InvalidInput, match="1 channels"):
        scale.apply(torch.rand(2, 1, 5, 5))
    with pytest.raises(InvalidInput, match="std"):
        Normalization((0.5,), (0.0,))


def test_padding_moves_no_pixel() -> None:
    picture = noise(1, 28, 28)
    fitted = ImageGeometry.of_size(32, 1, "pad").fit(picture)
    assert torch.equal(fitted[:, 2:30, 2:30], picture)
    assert fitted.sum() == picture.sum()


def test_a_picture_of_the_right_size_is_left_alone() -> None:
    picture = noise(3, 32, 32)
    for fit in ("pad", "fill", "photo"):
        assert torch.equal(ImageGeometry.of_size(32, 3, fit).fit(picture), picture)


@pytest.mark.parametrize(("height", "width"), [(60, 40), (40, 60), (17, 16), (33, 200)])
def test_photographs_are_resized_and_cropped_as_torchvision_does(height: int, width: int) -> None:
    picture = noise(3, height, width)
    short = min(max(min(height, width), 28), 32)
    expected = reference.center_crop(reference.resize(picture, [short]), [28, 28])
    found = ImageGeometry.of_size(28, 3, "photo").fit(picture)
    assert (found.int() - expected.int()).abs().max() <= 1  # Pillow and torchvision round differently
    assert found.shape == (3, 28, 28)


def test_the_geometry_of_an_unknown_dataset_is_that_of_its_pictures() -> None:
    small = [noise(1, 28, 28), noise(1, 28, 28), noise(1, 30, 28)]
    assert guess_geometry(small, None) == ImageGeometry.of_size(28, 1, "fill")
    assert guess_geometry(small, 16) == ImageGeometry.of_size(16, 1, "fill")
    assert guess_geometry([noise(3, 300, 200), noise(1, 400, 300)], None) == ImageGeometry.of_size(224, 3, "photo")


def test_decoding_keeps_lossless_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    for kind in ("png", "bmp", "tiff"):
        assert torch.equal(decode(saved(Image.fromarray(pixels), kind), 3), torch.from_numpy(pixels).permute(2, 0, 1))
    assert decode(saved(Image.fromarray(pixels[..., 0]), "png"), None).shape == (1, 9, 7)
    assert decode(saved(Image.fromarray(pixels).convert("CMYK"), "jpeg"), 3).shape == (3, 9, 7)
    assert decode(saved(Image.fromarray(pixels).convert("P"), "gif"), None).shape == (3, 9, 7)


@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_image_is_no_image(kind: str, share: float) -> None:
    content = saved(Image.fromarray(noise(32, 32, 3).numpy()), kind)
    with pytest.raises(DataError, match="cannot decode the image 0: "):
        decode(content[: int(share * len(content))], 3)
