"""Whether images are on the scale that a model was trained with, by their pixel statistics."""

from dataclasses import dataclass

import torch

from attnrx.shapes import Float, Tensor

# Taken back to pixels, images on their model's scale fill [0, 1]: four or more of ImageNette, Tiny-ImageNet, CIFAR-10,
# FashionMNIST or the digits always reached over 0.95 of it. Wrong constants exceed it (unnormalised bytes, or
# ImageNet's where 0.5 is meant: by 0.5 and more) or fill at most 0.62 of it (0.5 where ImageNet's or CLIP's are meant;
# unnormalised: 0.5 and less). Means and standard deviations distinguish them less well: with the right constants eight
# such images have standard deviations of 0.18 to 0.40, and half of that overlaps. Constants as near as ImageNet's and
# CIFAR-10's (0.01 to 0.96) change little and are not distinguished.
OUTSIDE, FILLED = 0.1, 0.8
FEW = 4  # images; fewer may be dark or pale without being on another scale

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class NamedScale:
    """A named normalization of pixels in [0, 1]."""

    name: str
    mean: Float[Tensor, "channels"]
    std: Float[Tensor, "channels"]


class ImageScale:
    """Statistics of images that should be pixels in [0, 1], minus `mean`, divided by `std`; constant memory."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]):
        self.own = NamedScale(
            "its own", torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
        )
        self.images, self._values = 0, 0
        self._sums = torch.zeros(2, len(mean), dtype=torch.float64)
        self._ends = torch.tensor([[torch.inf], [-torch.inf]], dtype=torch.float64).expand(2, len(mean)).clone()

    def observe(self, images: Float[Tensor, "batch channels height width"]) -> None:
        channels = images.detach().transpose(0, 1).flatten(1)
        sums = (channels.sum(-1, dtype=torch.float64), channels.square().sum(-1, dtype=torch.float64))
        self._sums += torch.stack(sums).cpu()
        low, high = (end.double().cpu() for end in channels.aminmax(dim=-1))
        self._ends = torch.stack([torch.minimum(self._ends[0], low), torch.maximum(self._ends[1], high)])
        self.images += len(images)
        self._values += channels.shape[1]

    @property
    def is_finite(self) -> bool:
        return not self.images or bool(self._ends.isfinite().all())

    @property
    def leaves(self) -> bool:
        """Whether a value is impossible for pixels on this scale, independent of later images."""
        return bool(self.images) and not self._holds(self.own)

    @property
    def fits(self) -> bool:
        """Whether the images are compatible with this scale: no other known scale fits them better."""
        if not self.images:
            return True
        return self._holds(self.own) and (self.images < FEW or self._fills(self.own) or not self._explanations())

    def describe(self) -> str:
        """Returns the expected scale, the statistics of the images, and the scales that fit them."""
        mean = self._sums[0] / self._values
        spread = (self._sums[1] / self._values - mean.square()).clamp_min(0).sqrt()
        wanted = f"pixels in [0, 1] less {_listed(self.own.mean)}, by {_listed(self.own.std)}"
        found = (
            f"in units of that std the channels of the {self.images} images have means {_listed(mean)} and standard "
            f"deviations {_listed(spread)}, from {float(self._ends[0].min()):.3g} to {float(self._ends[1].max()):.3g}"
        )
        looks = " or ".join(scale.name for scale in self._explanations())
        return f"{wanted}; {found}" + (f". They look like {looks}" if looks else "")

    def _explanations(self) -> list[NamedScale]:
        """Other scales in common use on which these images are pixels."""
        one = torch.ones_like(self.own.mean)
        others = [
            NamedScale("pixels in [0, 1] that were not normalized", 0 * one, one),
            NamedScale("pixels in 0 to 255", 0 * one, one / 255),
            NamedScale("pixels normalized with mean and std 0.5", one / 2, one / 2),
        ]
        if len(one) == 3:
            mean, std = (torch.tensor(each, dtype=torch.float64) for each in IMAGENET)
            others.append(NamedScale("pixels normalized with the mean and std of ImageNet", mean, std))
        return [scale for scale in others if self._holds(scale) and self._fills(scale)]

    def _range(self, scale: NamedScale) -> tuple[float, float]:
        low, high = self._ends * scale.std + scale.mean
        return float(low.min()), float(high.max())

    def _holds(self, scale: NamedScale) -> bool:
        low, high = self._range(scale)
        return low >= -OUTSIDE and high <= 1 + OUTSIDE

    def _fills(self, scale: NamedScale) -> bool:
        low, high = self._range(scale)
        return high - low >= FILLED


def _listed(values: Tensor) -> str:
    return ", ".join(f"{value:.3g}" for value in values.tolist())
