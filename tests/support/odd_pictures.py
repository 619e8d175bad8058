"""Pictures of odd shapes, modes, depths and orientations, as the bytes of image files."""

import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image

SHAPES = {  # height, width
    "landscape": (60, 91),
    "portrait": (113, 64),
    "square": (75, 75),
    "odd": (67, 43),
    "wide": (3, 200),
    "tall": (190, 5),
    "dot": (1, 1),
    "huge": (900, 1301),
}


def scene(height: int, width: int, bands: int = 3) -> np.ndarray:
    """Waves with noise: nothing is symmetric, so that a turned or mirrored picture is another one."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [128 + 90 * np.sin(rows / (5 + 3 * band)) * np.cos(columns / (9 - band) + band) for band in range(bands)]
    noise = np.random.default_rng(height * width).normal(0, 20, (height, width, bands))
    return np.clip(np.stack(waves, -1) + noise + rows[..., None] / height * 30, 0, 255).astype(np.uint8)


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def oriented(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(scene(60, 91)), kind, exif=exif)


def palette(transparency: Any = None) -> bytes:
    picture = Image.fromarray(scene(60, 91)).quantize(17)
    return saved(picture, "png", **({} if transparency is None else {"transparency": transparency}))


def _pictures() -> Iterator[tuple[str, bytes]]:
    for name, shape in SHAPES.items():
        picture = Image.fromarray(scene(*shape))
        yield f"{name} png", saved(picture, "png")
        yield f"{name} jpeg", saved(picture, "jpeg")
    for name in ("landscape", "tall", "dot"):
        shape = SHAPES[name]
        grey = Image.fromarray(scene(*shape, 1)[..., 0])
        yield f"{name} grey", saved(grey, "png")
        yield f"{name} grey jpeg", saved(grey, "jpeg")
        yield f"{name} grey with alpha", saved(Image.fromarray(scene(*shape, 2), "LA"), "png")
        yield f"{name} alpha", saved(Image.fromarray(scene(*shape, 4), "RGBA"), "png")
        yield f"{name} one bit", saved(grey.convert("1"), "png")
        yield f"{name} CMYK", saved(Image.fromarray(scene(*shape)).convert("CMYK"), "jpeg")
    yield "palette", palette()
    yield "palette, a transparent color", palette(3)
    yield "palette, transparency by color", palette(bytes(range(0, 255, 15)))
    yield "RGB, a transparent color", saved(Image.fromarray(scene(60, 91)), "png", transparency=(1, 2, 3))
    yield "palette with alpha", saved(Image.fromarray(scene(60, 91, 4), "RGBA").quantize(9), "png")
    yield "gif", saved(Image.fromarray(scene(60, 91)).quantize(99), "gif")
    for kind in ("webp", "tiff", "bmp", "ppm"):
        yield kind, saved(Image.fromarray(scene(60, 91)), kind)
    for orientation in (3, 6, 8):
        for kind in ("jpeg", "png"):
            yield f"orientation {orientation} {kind}", oriented(kind, orientation)


ODD: Mapping[str, bytes] = dict(_pictures())


def deep(kind: str = "png") -> tuple[bytes, Image.Image]:
    """A picture of 16 bits, and its upper 8 bits."""
    upper = scene(60, 91, 1)[..., 0]
    values = upper.astype(np.uint16) * 256 + np.random.default_rng(0).integers(0, 256, upper.shape, np.uint16)
    return saved(Image.fromarray(values), kind), Image.fromarray(upper)
