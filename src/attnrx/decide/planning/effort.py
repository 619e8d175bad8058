"""How much is measured for a plan: presets of images, choices, timings and trials."""

from collections.abc import Mapping
from dataclasses import dataclass

from attnrx.support.errors import UnknownName

ALL_LEVELS = tuple(range(7))  # indices into `space.LEVELS`


@dataclass(frozen=True)
class Effort:
    """The amount of measurement for a plan.

    Sensitivities of single choices are measured on `sensitivity_images`, at the levels `probed` (indices into
    `space.LEVELS`) and at the shares `pruned_shares` of the patches, in every `layer_stride`-th layer; in between
    they are interpolated. Blocks are timed at the levels `timed`, for `rounds` rounds, and whole models for
    `whole_rounds`.

    `trials` plans, each the best predicted of some `variations`, are measured on `trial_images`, the best `finalists`
    of them on all `images`. A plan for latency is repeated up to `attempts` times, until its measured latency is
    between `min_ratio` and `max_ratio` times the target; the first attempt is not searched, and with `adjusts` those
    after the second correct the cost without a new search. `num_front` is the number of plans from the original to
    the target that are measured for comparison.

    The realized plan is repaired on `repair_images` images by `repair_steps` steps per block, or fewer of both, within
    `repair_macs` multiply-accumulates, and distilled in `distill_epochs` passes over the images.
    """

    sensitivity_images: int
    trial_images: int
    images: int
    trials: int
    variations: int
    finalists: int
    probed: tuple[int, ...]
    pruned_shares: tuple[float, ...]
    timed: tuple[int, ...]
    rounds: int
    whole_rounds: int
    attempts: int
    min_ratio: float
    max_ratio: float
    layer_stride: int
    num_front: int
    adjusts: bool
    repair_images: int
    repair_steps: int
    repair_macs: float
    distill_epochs: int


EFFORTS: Mapping[str, Effort] = {
    "quick": Effort(
        sensitivity_images=32,
        # On 32 images (the better half on 96) the search for a ViT-Tiny at 60 % of the MACs found a plan of 0.043
        # instead of 0.038 nats on 500 test images, in 6 % less CPU time (one seed, 2026-11-26).
        trial_images=96,
        images=192,
        trials=10,
        variations=3,
        finalists=3,
        probed=(4,),  # half of the rank
        pruned_shares=(1 / 12, 1 / 3, 5 / 6),
        timed=(0, 4),
        rounds=5,
        whole_rounds=4,
        attempts=4,
        min_ratio=0.93,
        max_ratio=1.01,
        layer_stride=2,
        num_front=2,
        # Every search measures many plans; an adjustment of the cost measures a few.
        adjusts=True,
        repair_images=512,
        repair_steps=100,
        # A ViT-S needs 1.2e13 for all images, a ViT-B would need 4e13.
        repair_macs=2e13,
        distill_epochs=0,
    ),
    "normal": Effort(
        sensitivity_images=64,
        trial_images=96,
        images=512,
        trials=32,
        variations=8,
        finalists=4,
        probed=(2, 4),
        pruned_shares=(1 / 24, 1 / 6, 1 / 2),
        timed=(0, 2, 4),
        rounds=5,
        whole_rounds=12,
        attempts=3,
        min_ratio=0.98,
        max_ratio=1.0,
        layer_stride=1,
        num_front=5,
        adjusts=False,
        repair_images=1024,
        repair_steps=300,
        repair_macs=1e14,
        distill_epochs=0,
    ),
    "thorough": Effort(
        sensitivity_images=96,
        # The best of many plans is selected by chance on few images (docs/results/plan.md, "How many trials?").
        trial_images=128,
        images=1024,
        trials=48,
        variations=8,
        finalists=6,
        probed=(2, 4),
        pruned_shares=(1 / 24, 1 / 8, 1 / 3, 2 / 3, 11 / 12),
        timed=ALL_LEVELS,
        rounds=7,
        whole_rounds=28,
        attempts=4,
        min_ratio=0.98,
        max_ratio=1.0,
        layer_stride=1,
        num_front=5,
        adjusts=False,
        # At 60 % of the parameters 0.376 nats, with 1,024 images and 300 steps 0.420 (docs/results/plan.md).
        repair_images=3072,
        repair_steps=500,
        # The tokens of the images that it leaves of a ViT-L are in memory seven times, in 12 GB.
        repair_macs=4e14,
        distill_epochs=2,
    ),
}


def effort_of(name: str) -> Effort:
    """Returns the preset of this name."""
    if name not in EFFORTS:
        raise UnknownName("effort", name, EFFORTS)
    return EFFORTS[name]
