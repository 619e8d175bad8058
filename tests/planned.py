"""One small model that plans are made for, with its diagnosis and images."""

from functools import cache

import torch
from torch import nn

import cases
from attnrx.costs import Conditions
from attnrx.diagnosis import Diagnosis
from attnrx.model_diagnosis import diagnose
from attnrx.models import VisionTransformer, ViTConfig
from attnrx.planning import TimingSettings
from attnrx.planning.space import Choices, Space
from attnrx.realization import realize
from attnrx.tokens import Ward
from comparisons import pixels

# Three layers of 16 patches, heads of eight directions: every level is another rank.
CONFIG = ViTConfig.uniform(
    "dense", width=16, depth=3, heads=2, **{**cases.TINY, "patch_size": cases.TINY["patch_size"] // 2}
)
CLOCK = TimingSettings(2, Conditions(threads=1), "cpu", 2, in_subprocess=False)


@cache
def original() -> VisionTransformer:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # a fixture of a module is made before the float64 of its tests
    try:
        return cases.model(CONFIG)
    finally:
        torch.set_default_dtype(before)


@cache
def diagnosed() -> Diagnosis:
    return diagnose(original(), pixels(CONFIG, 16), batch_size=8)


@cache
def spanned() -> Space:
    return Space(original(), diagnosed(), Ward(), form="total_rank", step=2)


def made(space: Space, choices: Choices) -> nn.Module:
    return realize(space.model, space.prescription(choices))
