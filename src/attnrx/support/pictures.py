"""Turns pictures into the pixels of a model's input, with only Pillow and NumPy.

attnrx copies the source of this module into the scripts beside exported files, so that they preprocess like attnrx.
Therefore this module imports nothing from attnrx. `geometry` is a mapping with the fields of
`preprocessing.ImageGeometry`, as files store them.
"""

import io

import numpy as np

# The allowed Pillow decoders. Others may run programs on untrusted files: the EPS decoder, for example, starts
# Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
ORIENTATION = 0x0112  # the EXIF tag, whose value is 1 for an upright picture
MAX_PIXELS = 2**28  # the limit for a resized picture (3 x 100,000 pixels could become 224 x 7,466,666)


def open_picture(content):
    """Opens the bytes of an image file as a PIL picture.

    Raises:
        ValueError: The bytes are not in one of FORMATS.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError("it is empty, or no image of a known format") from None


def pixels_of(picture, channels, alpha="drop"):
    """Returns the pixels of a PIL picture, upright and with 8 bits, as uint8 [height, width, channels].

    With `channels=1` the pixels are grey, and with `channels=3` they are RGB. With `channels=None`, grey pictures stay
    grey and all others become RGB. Transparent pixels keep their color. With `alpha="white"`, the picture is put on a
    white background.

    Raises:
        ValueError: The pixels are floating-point or negative numbers, or `channels` is not 1, 3 or None.
    """
    from PIL import Image, ImageOps

    if channels not in (None, 1, 3):
        raise ValueError(f"a picture has 1 or 3 channels, not {channels}")
    if picture.getexif().get(ORIENTATION, 1) != 1:
        picture = ImageOps.exif_transpose(picture)
    if picture.mode == "F":
        raise ValueError("its pixels are of kind 'F', not 8 or 16 bits a channel")
    if picture.mode.startswith("I"):
        # Pillow's own conversion to 8 bits clips at 255 instead of dividing. The values may have 16 or 32 bits.
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0:
            raise ValueError("its pixels are negative integers, not 8 or 16 bits a channel")
        picture = Image.fromarray((values >> (8 if values.max() < 2**16 else 23)).astype(np.uint8))
    transparent = "A" in picture.getbands() or "transparency" in picture.info
    grey = picture.mode in ("1", "L", "LA", "La")
    if transparent and alpha == "white":
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
    elif "transparency" in picture.info:
        picture = picture.copy()  # otherwise Pillow warns that its conversion drops the transparency of a palette
        del picture.info["transparency"]
    mode = "L" if channels == 1 or (channels is None and grey) else "RGB"
    pixels = np.array(picture if picture.mode == mode else picture.convert(mode))
    return pixels.reshape(*pixels.shape[:2], -1)


def resized_shape(height, width, geometry):
    """Returns the height and width of a picture after resizing, rounded as in torchvision and timm."""
    kind, (rows, columns) = geometry["resize"], geometry["resize_to"]
    needed_rows, needed_columns = geometry["size"]
    if kind == "none":
        return height, width
    if kind == "exact":
        return rows, columns
    if kind == "shortest_edge":
        short = min(height, width)
        # Without `enlarge`, a picture is only enlarged as far as the crop needs it.
        target = rows if geometry["enlarge"] else min(max(short, needed_rows, needed_columns), rows)
        return int(target * height / short), int(target * width / short)
    # With "cover", no side becomes shorter than requested. With "contain", no side becomes longer.
    choose = min if kind == "cover" else max
    ratio = choose(height / rows, width / columns)
    if not geometry["enlarge"]:
        needed = 1 if kind == "contain" else min(1, height / needed_rows, width / needed_columns)
        ratio = max(ratio, needed)
    return max(round(height / ratio), 1), max(round(width / ratio), 1)


def fit_pixels(pixels, geometry):
    """Resizes pixels [height, width, channels], and crops or pads them to the model's size around their center.

    Raises:
        ValueError: The resized picture would have more than MAX_PIXELS pixels.
    """
    from PIL import Image

    height, width = pixels.shape[:2]
    shape = resized_shape(height, width, geometry)
    if shape != pixels.shape[:2]:
        if shape[0] * shape[1] > MAX_PIXELS:
            raise ValueError(
                f"it has {pixels.shape[0]} x {pixels.shape[1]} pixels, and {shape[0]} x {shape[1]} resized"
            )
        picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        filter_ = Image.Resampling[geometry["interpolation"].upper()]
        pixels = np.array(picture.resize((shape[1], shape[0]), filter_)).reshape(*shape, -1)
    starts, paddings = [], []
    for side, wanted in zip(pixels.shape[:2], geometry["size"], strict=True):
        surplus, missing = max(side - wanted, 0), max(wanted - side, 0)
        # torchvision rounds half a pixel to even and pads less at the start. transformers rounds down and pads more
        # at the start.
        floor = geometry["center"] == "floor"
        starts.append(surplus // 2 if floor else round(surplus / 2))
        before = -(-missing // 2) if floor else missing // 2
        paddings.append((before, missing - before))
    rows, columns = geometry["size"]
    pixels = pixels[starts[0] : starts[0] + rows, starts[1] : starts[1] + columns]
    if pixels.shape[:2] == (rows, columns):
        return pixels
    canvas = np.empty((rows, columns, pixels.shape[2]), np.uint8)
    canvas[:] = geometry["fill"]
    (top, _), (left, _) = paddings
    canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return canvas


def normalize_pixels(pixels, mean, std):
    """Normalizes pixels, uint8 [height, width, channels], and returns them as float32 [channels, height, width]."""
    scaled = (pixels.astype(np.float32) / np.float32(255) - np.float32(mean)) / np.float32(std)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))
