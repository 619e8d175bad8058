"""Whether images are on the scale that a model was trained with, by their pixel statistics."""

import torch

from attnrx.support.shapes import Float, Tensor

# Taken back to pixels, images on their model's scale fill [0, 1]: four or more of ImageNette, Tiny-ImageNet, CIFAR-10,
# FashionMNIST or the digits always reached over 0.95 of it. Wrong constants exceed it (unnormalised bytes, or
# ImageNet's where 0.5 is meant: by 0.5 and more) or fill at most 0.62 of it (0.5 where ImageNet's or CLIP's are meant;
# unnormalised: 0.5 and less). Means and standard deviations distinguish them less well: with the right constants eight
# such images have standard deviations of 0.18 to 0.40, and half of that overlaps. Constants as near as ImageNet's and
# CIFAR-10's (0.01 to 0.96) change little and are not distinguished.
OUTSIDE, FILLED = 0.1, 0.8
FEW = 4  # images; fewer may be dark or pale without being on another scale

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Other scales in common use: the mean and the standard deviation that pixels in [0, 1] were normalized with.
COMMON = {
    "pixels in [0, 1] that were not normalized": (0.0, 1.0),
    "pixels in 0 to 255": (0.0, 1 / 255),
    "pixels normalized with mean and std 0.5": (0.5, 0.5),
    "pixels normalized with the mean and std of ImageNet": IMAGENET,
}


class ImageScale:
    """The range of images that should be pixels in [0, 1], minus `mean`, divided by `std`; constant memory."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]):
        self.mean, self.std = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
        self.images = 0
        # [low or high, channels]: the empty range, which the first images replace.
        self._ends = torch.tensor([[torch.inf], [-torch.inf]], dtype=torch.float64).expand(2, len(mean)).clone()

    def observe(self, images: Float[Tensor, "batch channels height width"]) -> None:
        channels = images.detach().transpose(0, 1).flatten(1)
        low, high = (end.double().cpu() for end in channels.aminmax(dim=-1))
        self._ends = torch.stack([torch.minimum(self._ends[0], low), torch.maximum(self._ends[1], high)])
        self.images += len(images)

    @property
    def is_finite(self) -> bool:
        return not self.images or bool(self._ends.isfinite().all())

    @property
    def leaves(self) -> bool:
        """Whether a value is impossible for pixels on this scale, independent of later images."""
        return bool(self.images) and not self._holds(self.mean, self.std)

    @property
    def fits(self) -> bool:
        """Whether the images are compatible with this scale: no other known scale fits them better."""
        if not self.images:
            return True
        # A narrow range is evidence only together with a scale on which the images fill [0, 1].
        settled = self.images < FEW or self._range(self.mean, self.std) >= FILLED
        return self._holds(self.mean, self.std) and (settled or not self._explanations())

    def describe(self) -> str:
        """Returns the expected scale, the range of the images, and the scales that fit them."""
        wanted = f"pixels in [0, 1] less {_listed(self.mean)}, by {_listed(self.std)}"
        low, high = float(self._ends[0].min()), float(self._ends[1].max())
        measured = f"in units of that std the {self.images} images have values from {low:.3g} to {high:.3g}"
        looks = " or ".join(self._explanations())
        return f"{wanted}; {measured}" + (f". They look like {looks}" if looks else "")

    def _explanations(self) -> list[str]:
        """The names of the common scales on which these images are pixels."""
        fitting_names = []
        for name, constants in COMMON.items():
            mean, std = (torch.tensor(values, dtype=torch.float64) for values in constants)
            fits_channels = mean.numel() in (1, len(self.mean))
            if fits_channels and self._holds(mean, std) and self._range(mean, std) >= FILLED:
                fitting_names.append(name)
        return fitting_names

    def _holds(self, mean: Tensor, std: Tensor) -> bool:
        pixels = self._ends * std + mean
        return float(pixels[0].min()) >= -OUTSIDE and float(pixels[1].max()) <= 1 + OUTSIDE

    def _range(self, mean: Tensor, std: Tensor) -> float:
        """The length of the range of the pixels on a scale."""
        pixels = self._ends * std + mean
        return float(pixels[1].max() - pixels[0].min())


def _listed(values: Tensor) -> str:
    return ", ".join(f"{value:.3g}" for value in values.tolist())
