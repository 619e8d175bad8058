"""The preprocessing of pictures for a model, as one record of settings from the model's own data configuration.

The same record is used for named datasets, for paths, for datasets of PIL pictures, and in the scripts beside exported
files. `attnrx.support.pictures` contains the code that applies these settings.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from attnrx.support.arguments import described, require_fields
from attnrx.support.errors import InvalidInput
from attnrx.support.pictures import fit_pixels, open_picture, pixels_of
from attnrx.support.records import to_dict
from attnrx.support.shapes import Float, Tensor, UInt8

Fit = Literal["pad", "fill", "photo"]

MARGIN = 256 / 224  # photographs are resized to this many times the model's size before the central crop
SMALL = 96  # pictures are treated as photographs if the shorter side of at least one has more pixels than this
MAX_SIDE = 2**15  # the largest side in pixels, for a model's input and for resized pictures
RESIZES = ("shortest_edge", "cover", "contain", "exact", "none")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")


# ImageNet's mean and standard deviation, which most models use to normalize pixels.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImageGeometry:
    """The settings that turn any picture into 8-bit pixels [channels, height, width], with 1 or 3 `channels`.

    A picture is turned upright by its EXIF tag, converted to grey or RGB, and resized by Pillow (with antialiasing).
    Finally, the picture is cropped or padded around its center to `size`. All pairs of numbers are (height, width).

    `resize` is one of these words:

    - "shortest_edge" keeps the proportions and makes the shorter side `resize_to`, whose two numbers must be equal.
    - "cover" keeps the proportions and makes no side shorter than `resize_to`.
    - "contain" keeps the proportions and makes no side longer than `resize_to`.
    - "exact" resizes to `resize_to` without keeping the proportions.
    - "none" does not resize.

    Without `enlarge`, pictures are only enlarged as far as the crop requires. `center` determines how half pixels are
    rounded when a picture is centered: "round" as in torchvision and timm, or "floor" as in transformers. Padded
    borders have the color `fill`. Transparent pixels keep their color or, with `alpha="white"`, are put on a white
    background.
    """

    size: tuple[int, int]
    channels: int
    resize: str
    resize_to: tuple[int, int]
    interpolation: str = "bilinear"
    enlarge: bool = True
    center: str = "round"
    fill: tuple[int, ...] = (0,)
    alpha: str = "drop"

    def __post_init__(self):
        sides = (*self.size, *self.resize_to)
        valid = (
            len(sides) == 4 and all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides),
            self.resize in RESIZES and self.interpolation in INTERPOLATIONS,
            self.center in ("round", "floor") and self.alpha in ("drop", "white"),
            len(self.fill) in (1, self.channels)
            and all(type(level) is int and 0 <= level < 256 for level in self.fill),
            self.resize != "shortest_edge" or self.resize_to[0] == self.resize_to[1],
        )
        if not all(valid):
            raise InvalidInput(
                f"the image geometry {self.to_dict()}: give sides of 1 to {MAX_SIDE} pixels, one of "
                f"{', '.join(RESIZES)} (shortest_edge with one number), one of {', '.join(INTERPOLATIONS)}, and levels "
                "of 0 to 255."
            )

    @classmethod
    def of_size(cls, size: int | tuple[int, int], channels: int, fit: Fit) -> "ImageGeometry":
        """Returns a geometry for data or models without their own preprocessing settings.

        `fit` is one of these words:

        - "pad" puts pictures between black borders and never enlarges them, so 28x28 pixels in 32x32 do not change.
        - "fill" resizes a picture until it fills `size`.
        - "photo" resizes a picture to 256/224 of `size` and crops its center. Smaller pictures are not enlarged further
          than the crop requires.
        """
        rows, columns = (size, size) if isinstance(size, int) else size
        target = (round(MARGIN * rows), round(MARGIN * columns)) if fit == "photo" else (rows, columns)
        resize = "contain" if fit == "pad" else "shortest_edge" if target[0] == target[1] else "cover"
        return cls((rows, columns), channels, resize, target, enlarge=fit == "fill")

    @property
    def side(self) -> int | tuple[int, int]:
        """The side of a square input, or (height, width) of any other input."""
        return self.size[0] if self.size[0] == self.size[1] else self.size

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the pixels: channels, height and width."""
        return (self.channels, *self.size)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return to_dict(self, typed=False)

    def fit(self, picture: UInt8[Tensor, "channels height width"]) -> UInt8[Tensor, "channels rows columns"]:
        """Returns the pixels of a picture, resized and cropped to the model's size without random augmentation."""
        # vars is used, because to_dict takes longer than decoding a small picture.
        return torch.from_numpy(fit_pixels(picture.permute(1, 2, 0).numpy(), vars(self))).permute(2, 0, 1)

    def __str__(self) -> str:
        size, target = ("x".join(map(str, pair)) for pair in (self.size, self.resize_to))
        resized = "not resized" if self.resize == "none" else f"{self.resize} to {target} ({self.interpolation})"
        return f"{resized}, center {size}, {self.channels} channel{'s' * (self.channels != 1)}"


@dataclass(frozen=True)
class Normalization:
    """The normalization of pixels: subtract the mean of each channel, and divide by its standard deviation.

    Up to rounding, `invert(apply(x)) == x`.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self):
        require_fields(self)
        if not self.mean or len(self.mean) != len(self.std) or min(self.std) <= 0:
            given = f"mean={described(self.mean)}, std={described(self.std)}"
            raise InvalidInput(f"Normalization({given}): give one mean and one positive std per channel.")

    @classmethod
    def half(cls, channels: int) -> "Normalization":
        """Returns the normalization with mean = std = 0.5, which is used for data without published statistics."""
        return cls((0.5,) * channels, (0.5,) * channels)

    def apply(
        self, images: Float[Tensor, "*batch channels height width"]
    ) -> Float[Tensor, "*batch channels height width"]:
        """Returns pixels in [0, 1] as normalized images.

        Raises:
            InvalidInput: The images do not have the number of channels that the normalization expects.
        """
        mean, std = self._columns(images)
        return (images - mean) / std

    def invert(
        self, images: Float[Tensor, "*batch channels height width"]
    ) -> Float[Tensor, "*batch channels height width"]:
        """Returns normalized images as pixels in [0, 1].

        Raises:
            InvalidInput: The images do not have the number of channels that the normalization expects.
        """
        mean, std = self._columns(images)
        return images * std + mean

    def _columns(self, images: Tensor) -> Tensor:
        if images.shape[-3] != len(self.mean):
            raise InvalidInput(
                f"images of {images.shape[-3]} channels were given to a normalization of {len(self.mean)}; "
                "use the one of the dataset they came from."
            )
        columns = torch.tensor([self.mean, self.std], dtype=images.dtype)
        return without_waiting(columns, images.device)[..., None, None]


@dataclass(frozen=True)
class Preprocessing:
    """The whole preprocessing of a picture for a model: a geometry, followed by a normalization."""

    geometry: ImageGeometry
    normalization: Normalization

    def __call__(self, picture: Any) -> Float[Tensor, "channels height width"]:
        """Returns the model's input, in torch's default dtype, for a PIL picture or the bytes of an image file.

        Raises:
            ValueError: The picture cannot be decoded, its pixels are floating-point or negative numbers, or it would
                have too many pixels after resizing.
        """
        if isinstance(picture, bytes):
            picture = open_picture(picture)
        pixels = pixels_of(picture, self.geometry.channels, self.geometry.alpha)
        fitted = torch.from_numpy(fit_pixels(pixels, vars(self.geometry))).permute(2, 0, 1)
        # The dtype and the order of the operations are the same as in torchvision's transforms.
        return self.normalization.apply(fitted.to(torch.get_default_dtype()).contiguous() / 255)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields in one flat mapping of JSON values."""
        scale = self.normalization
        return {**self.geometry.to_dict(), "mean": list(scale.mean), "std": list(scale.std)}


def without_waiting(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of any shape from the CPU to a device. On a GPU, the copy is queued after earlier operations.

    A plain copy from pageable memory would wait for all queued operations. The next training step would then begin on
    an idle GPU.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
