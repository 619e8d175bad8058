"""Noise: Gaussian, shot, impulse and speckle."""

import torch

from attnrx_lab.corruptions.filters import Draws, Images, normal, uniform_noise
from attnrx_lab.corruptions.severities import Levels


def gaussian_noise(images: Images, levels: Levels, draws: Draws) -> Images:
    """Adds noise of a standard deviation."""
    return images + levels[0] * normal(images, tuple(images.shape[1:]), draws)


def shot_noise(images: Images, levels: Levels, draws: Draws) -> Images:
    """Counts photons: a pixel of 1 is this many on average."""
    device = images.device if draws is None else draws.device
    counts = [torch.poisson(levels[0] * image.to(device).clamp(min=0), generator=draws) for image in images]
    return torch.stack(counts).to(images.device) / levels[0]


def impulse_noise(images: Images, levels: Levels, draws: Draws) -> Images:
    """Sets a share of the values to 0 or to 1, by the flip of a coin."""
    hit, coin = uniform_noise(images, (2, *images.shape[1:]), draws).unbind(1)
    return torch.where(hit <= levels[0], (coin <= 0.5).to(images.dtype), images)


def speckle_noise(images: Images, levels: Levels, draws: Draws) -> Images:
    """Adds noise of a standard deviation, times the pixel."""
    return images + levels[0] * images * normal(images, tuple(images.shape[1:]), draws)
