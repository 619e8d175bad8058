"""One small model that plans are made for, with its diagnosis and images."""

from functools import cache

import torch
from torch import nn

from attnrx.change.realization import realize
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.planning import PlanSettings
from attnrx.decide.planning.cost_table import CostTable
from attnrx.decide.planning.measured_costs import measured_cost_table
from attnrx.decide.planning.space import Choices, Space
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.vit.costs import Conditions
from attnrx.vit.tokens import Ward
from attnrx_lab.vision_transformer import VisionTransformer, ViTConfig
from support import cases
from support.comparisons import pixels

# Three layers of 16 patches, heads of eight directions: every level is another rank.
CONFIG = ViTConfig.uniform(
    "dense", width=16, depth=3, heads=2, **{**cases.TINY, "patch_size": cases.TINY["patch_size"] // 2}
)
# Short timings in this process.
SETTINGS = PlanSettings(
    batch=2, conditions=Conditions(threads=1), clock="cpu", rounds=2, timed_levels=tuple(range(7)), in_subprocess=False
)


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


def timed(space: Space, levels: tuple[int, ...] = SETTINGS.timed_levels) -> CostTable:
    """Returns a cost table of few timings in this process."""
    return measured_cost_table(space, SETTINGS.protocol, SETTINGS.noise(space.model), levels)


def made(space: Space, choices: Choices) -> nn.Module:
    return realize(space.model, space.prescription(choices))
