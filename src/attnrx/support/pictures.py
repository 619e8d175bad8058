"""From a picture to the pixels of a model's input, only with Pillow and NumPy.

Scripts beside exported files contain the text of this module, so that they do what attnrx does: it imports nothing of
attnrx. `geometry` is a mapping with the fields of `preprocessing.ImageGeometry`, as they are stored in files.
"""

import io

import numpy as np

# The decoders of Pillow that are used. The others stay closed: the one for EPS starts Ghostscript, for example.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
MAX_PIXELS = 2**28  # the most of a resized picture: one of 3 x 100,000 pixels would become 224 x 7,466,666


def open_picture(content):
    """Opens the bytes of an image file as a PIL picture.

    Raises:
        ValueError: They are not in one of FORMATS.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError("it is empty, or no image of a known format") from None


def pixels_of(picture, channels, alpha="drop"):
    """Returns the pixels of a PIL picture, upright and with 8 bits, as uint8 [height, width, channels].

    They are grey (1 channel), RGB (3) or, with None, whichever of the two the picture is. Transparent pixels keep their
    color; with `alpha` "white" the picture is laid on white.

    Raises:
        ValueError: The pixels have neither 8 nor 16 bits, or `channels` is another number.
    """
    from PIL import Image, ImageOps

    if channels not in (None, 1, 3):
        raise ValueError(f"a picture has 1 or 3 channels, not {channels}")
    if picture.getexif().get(ORIENTATION, 1) != 1:
        picture = ImageOps.exif_transpose(picture)
    if picture.mode == "F":
        raise ValueError("its pixels are of kind 'F', not 8 or 16 bits a channel")
    if picture.mode.startswith("I"):
        # Pillow's own conversion to 8 bits clips at 255 instead of dividing. Its mode I holds 16 bits of some formats.
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
        picture = picture.copy()  # that of a palette, about which Pillow's conversion warns and which it then drops
        del picture.info["transparency"]
    mode = "L" if channels == 1 or (channels is None and grey) else "RGB"
    pixels = np.array(picture if picture.mode == mode else picture.convert(mode))
    return pixels.reshape(*pixels.shape[:2], -1)


def resized_shape(height, width, geometry):
    """Returns height and width of a picture after resizing, rounded as torchvision and timm round."""
    kind, (rows, columns) = geometry["resize"], geometry["resize_to"]
    needed_rows, needed_columns = geometry["size"]
    if kind == "none":
        return height, width
    if kind == "exact":
        return rows, columns
    if kind == "shortest_edge":
        short = min(height, width)
        # Not enlarged: only as far as the crop needs it.
        target = rows if geometry["enlarge"] else min(max(short, needed_rows, needed_columns), rows)
        return int(target * height / short), int(target * width / short)
    # `cover`: no side is shorter than requested; `contain`: none is longer.
    choose = min if kind == "cover" else max
    ratio = choose(height / rows, width / columns)
    if not geometry["enlarge"]:
        needed = 1 if kind == "contain" else min(1, height / needed_rows, width / needed_columns)
        ratio = max(ratio, needed)
    return max(round(height / ratio), 1), max(round(width / ratio), 1)


def fit_pixels(pixels, geometry):
    """Resizes pixels [height, width, channels], and crops or pads them around their center to the model's size.

    Raises:
        ValueError: The resized picture would have more than MAX_PIXELS.
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
        # torchvision rounds half a pixel to even and pads less before; transformers rounds down and pads more before.
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
    """Returns pixels uint8 [height, width, channels] on the model's scale, float32 [channels, height, width]."""
    scaled = (pixels.astype(np.float32) / np.float32(255) - np.float32(mean)) / np.float32(std)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))
