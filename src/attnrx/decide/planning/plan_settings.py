"""The settings of a plan, and the search space that they leave of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.change.exporting import parse_format
from attnrx.decide.planning.space import AXES, RANKS, TOKENS, Space, require_axes, step_for
from attnrx.decide.planning.target import Target
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.support.arguments import (
    BATCH,
    CALLBACK,
    COUNT,
    FLAG,
    NATURAL,
    SEED,
    TEXT,
    each,
    instance,
    one_of,
    optional,
    require_fields,
    whole,
)
from attnrx.support.errors import InvalidInput, InvalidRule, MissingMoments, NotSupported, UnknownName
from attnrx.support.progress import Log, no_log
from attnrx.vit.costs import Conditions, LatencyProtocol
from attnrx.vit.costs.latency import CLOCKS
from attnrx.vit.models import family_of
from attnrx.vit.tokens import Reducer, Ward, parse_reducer

# Levels are eighths of a head's directions; for latency, ranks are multiples of an eighth, for efficient kernels.
# On CUDA they are multiples of at most 8 for every target: products of half precision with other sizes are slow
# (docs/results/gpu.md: 0.43x to 0.78x of timm's speed in place of 0.80x to 1.00x, batches of 64 and 256).
CUDA_MULTIPLE = 8
EIGHTHS = 8
# The relevance of `ward` for outputs of a class token: of 0, 0.1, 0.2 and 0.3 the one of smallest divergence for the
# ImageNet ViT-Tiny in two policies (docs/results/plan.md).
RELEVANCE = 0.3
# Rounds before those that are counted.
WARMUP = 2
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


@dataclass(frozen=True)
class TimingSettings:
    """The batch size, the conditions and a clock of `costs.CLOCKS` for latency measurements.

    Blocks are timed at the levels `timed` (indices into `space.LEVELS`), for `rounds` rounds; the times of other levels
    are interpolated.

    `in_subprocess` measures in a new process that keeps freed memory (`subprocess_runner`), because the
    speed of memory allocation depends on the history of the process.
    """

    batch: int = 32
    conditions: Conditions = field(default_factory=Conditions)
    clock: str = "wall"
    rounds: int = EFFORTS["thorough"].rounds
    in_subprocess: bool = True
    timed: tuple[int, ...] = ALL_LEVELS

    def __post_init__(self):
        require_fields(
            self,
            batch=BATCH,
            conditions=instance("attnrx.costs.Conditions", Conditions),
            clock=one_of(*CLOCKS),
            rounds=whole(2),
            in_subprocess=FLAG,
            timed=each(whole(0, max(ALL_LEVELS)), f"indices of levels from 0 to {max(ALL_LEVELS)}", least=1),
        )

    def protocol(self, rounds: int) -> LatencyProtocol:
        """Returns the protocol for whole models."""
        return LatencyProtocol(self.conditions, rounds, min(WARMUP, rounds), self.clock, kernels=False)

    def images(self, space: Space) -> torch.Tensor:
        """Returns a batch of noise: latency depends on the number of images, not on their content."""
        shape = family_of(space.model).input_shape(space.model)
        return torch.randn(self.batch, *shape, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class PlanSettings:
    """The settings of a plan: axes, token reducer, search, timing and the amount of measurement.

    The search measures `trials` plans, by the `seed`; each is the one of lowest predicted divergence of some
    `variations`. With `storage`, a file or an Optuna URL, trials are stored under a name derived from the request: an
    interrupted search is resumed, and several machines can share it.

    Without `axes` they are all that the model has; those left out are logged with the reason. Without a `reducer` it is
    `ward`; with a relevance where the outputs are those of a class token.

    With `to`, a format of `attnrx.export`, a target of latency is that of the file in this format: the files of whole
    plans are timed, and the plan leaves to the runtime and the precision what they gain.

    `batch_size` is the batch size for measuring outputs; `log` is called with progress messages. `PlanSettings.of`
    makes the settings of a preset.
    """

    axes: tuple[str, ...] | None = None
    reducer: str | None = None
    trials: int = 32
    seed: int = 0
    storage: str | None = None
    variations: int = 8
    timing: TimingSettings = field(default_factory=TimingSettings)
    batch_size: int = 32
    log: Log = no_log
    effort: Effort = EFFORTS["thorough"]
    to: str | None = None

    def __post_init__(self):
        require_fields(
            self,
            axes=optional(each(TEXT, f"some of {', '.join(AXES)}")),
            reducer=optional(TEXT),
            trials=NATURAL,
            seed=SEED,
            storage=optional(TEXT),
            variations=COUNT,
            timing=instance("TimingSettings, e.g. attnrx.planning.TimingSettings(batch=32)", TimingSettings),
            batch_size=BATCH,
            log=CALLBACK,
            effort=instance("an Effort of attnrx.planning.plan_settings.EFFORTS", Effort),
            to=optional(TEXT),
        )
        # These raise before the work.
        if self.reducer is not None:
            parse_reducer(self.reducer)
        if self.axes is not None:
            require_axes(self.axes)
        if self.to is not None:
            parse_format(self.to)
        if self.storage is not None and "://" not in self.storage and not Path(self.storage).absolute().parent.is_dir():
            raise InvalidInput(f"storage={self.storage!r}: the folder of the file does not exist; make it, or omit it.")

    @classmethod
    def of(cls, effort: str, timing: TimingSettings | None = None, **changes: Any) -> "PlanSettings":
        """Returns the settings of a preset of `EFFORTS`: "quick", "normal" or "thorough"."""
        preset, timing = effort_of(effort), timing or TimingSettings()
        timing = replace(timing, rounds=preset.rounds, timed=preset.timed)
        return cls(
            timing=timing, effort=preset, **{"trials": preset.trials, "variations": preset.variations, **changes}
        )

    def space(self, model: nn.Module, diagnosis: Diagnosis, target: Target) -> Space:
        """Returns the search space; ranks vary between heads, except where heads are padded to the largest rank (for
        latency on CUDA) or cannot be reordered by their ranks (under a norm over the outputs of all heads). On CUDA,
        that of the model or of the timing, ranks are multiples of 8, of fewer in heads of fewer than 64 directions.

        Raises:
            NotSupported: The model lacks an axis that was named, or all of them.
        """
        # The multiple follows from the smallest head, so that every head has ranks at all levels. MACs and parameters
        # have no such steps, and every rank is allowed.
        is_latency = target.minimized == "latency"
        on_cuda = self.timing.conditions.on_cuda or next(model.parameters()).device.type == "cuda"
        specs = [layer.spec for layer in family_of(model).attention(model)]
        uniform = (is_latency and self.timing.conditions.on_cuda) or any(spec.fixes_values for spec in specs)
        form = "uniform_rank" if uniform else "total_rank"
        least = min(spec.head_dim for spec in specs)
        multiple = max(least // EIGHTHS, 1) if is_latency or on_cuda else 1
        multiple = min(multiple, CUDA_MULTIPLE) if on_cuda else multiple
        # All ranks: what is prescribed for one axis to find out whether the model has it is shared by the result.
        space, present, reasons = Space(model, diagnosis, None, RANKS, form, multiple), [], {}
        for axis in self.axes or AXES:
            try:
                if axis == TOKENS:
                    space = self._with_tokens(space)
                space.require_choices(axis)
                present.append(axis)
            except (NotSupported, InvalidRule) as error:
                # An axis that the model has, but the diagnosis did not measure, is not left out.
                if self._is_requested(axis) or isinstance(error, MissingMoments):
                    raise
                reasons[axis] = str(error)
        if not present:
            raise NotSupported(f"nothing of this model can be planned. {' '.join(reasons.values())}")
        for axis, reason in reasons.items():
            self.log(f"the plan is without {axis}: {reason}")
        return replace(space, axes=tuple(present), reducer=space.reducer if TOKENS in present else None)

    def _is_requested(self, axis: str) -> bool:
        return self.axes is not None or (axis == TOKENS and self.reducer is not None)

    def _with_tokens(self, space: Space) -> Space:
        """Returns the space with the axis of tokens; raises NotSupported if the model cannot prune or merge them."""
        patches = family_of(space.model).token_layout(space.model).patches
        return replace(space, axes=AXES, reducer=self._reducer(space.model), step=step_for(patches))

    def _reducer(self, model: nn.Module) -> Reducer:
        if self.reducer is not None:
            return parse_reducer(self.reducer)
        layout = family_of(model).token_layout(model)
        return Ward(relevance=RELEVANCE if layout.class_token and layout.pooled == "class" else 0.0)
