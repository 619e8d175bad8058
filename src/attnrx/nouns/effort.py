"""The efforts "quick", "normal" and "thorough": how much one call measures and fits for a model.

`Effort.of` computes these numbers from the model's cost and its outputs. The table shows three models at 224 pixels,
and `tests/unit/test_effort.py` tests more:

    effort    model             diagnose   plan    fit  predict  verify  sensitivities  trials  repair  distill
    quick     ViT-Tiny               128    192    256       96   4,762             32      10     100
    quick     ViT-L                   32     96    256       96     256             16      10     100
    quick     ViT-S, decoder          32     48    128       48      94              8      10     100
    normal    ViT-Tiny               128    512  1,024       96  10,000             64      32     300        2
    normal    ViT-L                  128    512  1,024       96  10,000             64      32     300
    normal    ViT-S, decoder          64    128    512       48  10,000             16      32     300
    thorough  ViT-Tiny               128  1,024  3,072       96  10,000             96      48     500        2
    thorough  ViT-L                  128  1,024  3,072       96  10,000             96      48     500        2
    thorough  ViT-S, decoder          64    256  1,536       48  10,000             24      48     500        2

The columns from "diagnose" to "sensitivities" are numbers of images. If a dataset has fewer images, all of them are
used. The images for planning are among the images for fitting. "trials" is the number of plans that a search measures,
"repair" the Adam steps per block, and "distill" the epochs. An empty cell means that there is no distillation. A repair
also has a budget of multiply-accumulates, which leaves fewer images and steps for large models.
"""

from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any, NamedTuple

import torch
from torch import nn

from attnrx.support.arguments import (
    COUNT,
    NATURAL,
    NOT_NEGATIVE,
    SHARE,
    TEXT,
    checked,
    each,
    one_of,
    optional,
    require_fields,
    whole,
)
from attnrx.support.errors import InvalidInput, NotSupported, UnknownName
from attnrx.support.progress import Log, no_log
from attnrx.vit.costs import Conditions, LatencyProtocol
from attnrx.vit.costs.measured import CLOCKS
from attnrx.vit.maps import TOKENS
from attnrx.vit.models import family_of
from attnrx.vit.outputs import OutputKind
from attnrx.vit.tokens import parse_reducer

# The axes of a plan: the ranks of linear maps, at levels that are shares of the full rank, and the patches that stay.
RANKS = ("qk", "vo", "mlp")
AXES = (*RANKS, TOKENS)
AXIS_WORDS = {"qk": "query and key", "vo": "value and output", "mlp": "MLP", TOKENS: "tokens"}
# Levels are eighths of the full rank. For 64 directions, they are multiples of 8, which are efficient in GEMM kernels.
LEVELS = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
LEVEL_INDICES = each(whole(0, len(LEVELS) - 1), f"indices of levels from 0 to {len(LEVELS) - 1}", least=1)

# For a model with more than LARGE multiply-accumulates per image, a quick call diagnoses, plans and measures
# sensitivities on half of the images, but on at least MIN_SENSITIVITY_IMAGES. If the outputs are maps, the images for
# plans are not halved, because maps need few. For a model with more than HUGE (a ViT-L has 6e10), it diagnoses on a
# quarter of the images, and measures sensitivities in half of the layers. In both cases, plans are compared and
# repaired in bfloat16 if it is faster.
LARGE, HUGE, MIN_SENSITIVITY_IMAGES = 2.5e9, 4e10, 8
# A quick call verifies on as many images as VERIFICATION_MACS multiply-accumulates of the original allow, but on at
# least MIN_VERIFICATION_IMAGES. That is 4,800 images for a ViT-Tiny, and 340 for a ViT-B.
VERIFICATION_MACS, MIN_VERIFICATION_IMAGES = 6e12, 256
# Maps are outputs with a number per position. They vary less between images, so both limits are smaller for them. The
# mean error of a saliency map has an interval of +- 20 % on 128 images, and of +- 13 % on 324 (docs/results/dense.md).
MAP_VERIFICATION_MACS, MIN_VERIFICATION_MAPS = 7.5e11, 64
# The MACs per image of a ViT-S with a decoder, at 224 pixels. If a map model has more MACs, proportionally fewer images
# are used for its plan, and fewer steps to fit its decoder (`map_share`).
FULL_MAP_MACS = 8e9
# A repair within a budget uses at least this many images. A smaller budget leaves fewer steps, at least half of them.
MIN_REPAIR_IMAGES = 128

# A pass with this many multiply-accumulates takes about a second. Its time varies less than the time of a shorter pass.
LONG_PASS = 4e10
# The rounds of a final measurement. A batch with fewer than MIN_TIMED_IMAGES images gets proportionally more rounds. A
# pass with LONG_PASS multiply-accumulates gets fewer, and a pass with LONGER_PASS fewer still.
FINAL_ROUNDS, LONG_ROUNDS, LONGER_PASS, LONGER_ROUNDS = 32, 6, 10 * LONG_PASS, 3
# Plans that are adjusted to their latency are timed on a part of the batch, in ROUND_FACTOR times the rounds. The part
# has at least MIN_TIMED_IMAGES images (FEWEST_TIMED_IMAGES for large models). It is large enough for TIMED_MACS
# multiply-accumulates, because calling the operations dominates a smaller pass. Files do not run in chunks, so their
# part is large enough for TIMED_FILE_MACS.
MIN_TIMED_IMAGES, FEWEST_TIMED_IMAGES, TIMED_MACS, TIMED_FILE_MACS, ROUND_FACTOR = 8, 4, 1e10, 4e10, 4
# Warm-up rounds, whose times do not count.
WARMUP = 2
# A timing ends early once the error of its speeds is below a share: PRECISE for files, and NEARLY_PRECISE in quick
# calls. In PyTorch, only the timings of quick plans end early.
PRECISE, NEARLY_PRECISE = 0.02, 0.03
# Plans for small batches are timed in more rounds. For files, this factor limits the additional rounds.
MOST_OF_FILES = 4


@dataclass(frozen=True)
class PlanSettings:
    """What a plan may change, and how much is measured for it. The defaults are the effort "normal".

    `axes` lists what the plan may change. By default, these are all axes that the model has. If an axis is left out,
    the reason is logged. The default token `reducer` is `ward`. Its `relevance` is above 0 only if the outputs come
    from a class token. `to` is the text of a format for `attnrx.export`. A latency target then applies to the file in
    this format, and blocks and whole plans are timed in its runtime. A `portable` plan contains only changes that the
    library's own class supports. All MLPs get the same width, which is a multiple of `multiple` (by default the
    runtime's number, see `nouns.runtime`). Heads are removed only if the class has an argument for their number, and
    all layers then keep the same number. The plan's latency is measured in the library's own code.

    Latency is measured by the `protocol`. Forward passes of `batch` images are timed under the `conditions`, by `clock`
    (see `LatencyProtocol`). Blocks are timed for `rounds` rounds at `timed_levels` (indices into `LEVELS`). Between
    these levels, times are interpolated. Whole models are timed for `whole_rounds` rounds. With `in_subprocess`, the
    timings run in a new process that keeps freed memory (`subprocess_runner`), because memory allocation is faster or
    slower depending on what the process did before.

    First, every change is tried on its own, to measure the divergence that it causes (its sensitivity). This uses
    `sensitivity_images` images in every `layer_stride`-th layer. A change keeps one of the `probed_levels` of the ranks
    or prunes one of the `pruned_shares` of the patches. Sensitivities in between are interpolated. The search then
    measures `trials` whole plans on `trial_images` images. For each of these plans, it draws `variations` candidates
    and takes the candidate with the lowest predicted divergence. A plan that is far worse than the best plan on the
    first batch is measured only on that batch. The best `finalists` plans are measured on all images (`num_images` if
    you call `shrink`). With `bfloat16`, plans are compared in bfloat16 if this is faster and accurate enough.
    Sensitivities and predictions use the model's own precision.

    Planning for latency is repeated up to `attempts` times, until a plan's measured latency is between `min_ratio` and
    `max_ratio` times the target. The first attempt does not search. With `adjusts`, attempts after the second correct
    the cost without a new search. With `adjusts` and a file format, every attempt times two plans, and the first
    attempt already searches. If no plan was fast enough, a few more are adjusted.

    `seed` fixes every random draw. `batch_size` is the batch size for measuring outputs. `log` is called with progress
    messages.
    """

    example = "attnrx.planning.PlanSettings.preset('quick')"

    axes: tuple[str, ...] | None = None
    reducer: str | None = None
    to: str | None = None
    portable: bool = False
    multiple: int | None = None
    batch: int = 32
    conditions: Conditions = field(default_factory=Conditions)
    clock: str | None = None
    rounds: int = 5
    whole_rounds: int = 12
    timed_levels: tuple[int, ...] = (0, 2, 4)
    in_subprocess: bool = True
    num_images: int = 512
    sensitivity_images: int = 64
    probed_levels: tuple[int, ...] = (2, 4)
    pruned_shares: tuple[float, ...] = (1 / 24, 1 / 6, 1 / 2)
    layer_stride: int = 1
    trials: int = 32
    variations: int = 8
    trial_images: int = 96
    finalists: int = 4
    bfloat16: bool = False
    attempts: int = 3
    min_ratio: float = 0.98
    max_ratio: float = 1.0
    adjusts: bool = False
    seed: int = 0
    batch_size: int = 32
    log: Log = no_log

    def __post_init__(self):
        counts = ("num_images", "sensitivity_images", "layer_stride", "variations", "trial_images", "finalists")
        require_fields(
            self,
            axes=optional(each(TEXT, f"some of {', '.join(AXES)}")),
            clock=optional(one_of(*CLOCKS)),
            rounds=whole(2),
            whole_rounds=whole(2),
            timed_levels=LEVEL_INDICES,
            probed_levels=LEVEL_INDICES,
            pruned_shares=each(SHARE, "shares of the patches above 0, at most 1", least=1),
            trials=NATURAL,
            min_ratio=NOT_NEGATIVE,
            max_ratio=NOT_NEGATIVE,
            multiple=optional(COUNT),
            **dict.fromkeys((*counts, "attempts"), COUNT),
        )
        # These checks raise before any work is done.
        reducer = None if self.reducer is None else parse_reducer(self.reducer)
        if reducer is not None and reducer.untrained_reason is not None:
            raise NotSupported(
                f"{reducer} needs training, and planning trains nothing: {reducer.untrained_reason}. Use a reducer "
                "without training, e.g. ward, tome or class_attention."
            )
        if self.axes is not None and not (self.axes and {*self.axes} <= {*AXES}):
            raise UnknownName("axis of a plan", ", ".join(sorted({*self.axes} - {*AXES})) or "none", AXES)
        if self.portable and (self.axes is not None or self.reducer is not None):
            raise InvalidInput(
                "portable=True with axes or a reducer: a portable plan has hidden units, and heads where the library's "
                "class states their number. Leave the others out."
            )

    @classmethod
    @checked()
    def preset(cls, effort: str, **changes: Any) -> "PlanSettings":
        """Returns the settings of an effort, "quick", "normal" or "thorough", with some fields changed.

        Raises:
            UnknownName: There is no such effort.
            InvalidInput: A changed field has a wrong value.
        """
        if effort not in EFFORTS:
            raise UnknownName("effort", effort, EFFORTS)
        return replace(EFFORTS[effort].settings, **changes)

    def for_outputs(self, kind: OutputKind) -> "PlanSettings":
        """Returns the settings for this kind of outputs. Dense outputs need fewer images and a smaller batch size."""
        if kind.needed_images == 1:
            return self
        fewer = self.on_share(kind.needed_images)
        return replace(fewer, batch_size=min(self.batch_size, fewer.sensitivity_images))

    def on_share(self, share: float) -> "PlanSettings":
        """Returns the settings with all numbers of images multiplied by `share`, but at least 1."""
        names = ("num_images", "sensitivity_images", "trial_images")
        return replace(self, **{name: max(round(share * getattr(self, name)), 1) for name in names})

    @property
    def protocol(self) -> LatencyProtocol:
        """The protocol for timing blocks. Whole models are timed in the same way, in `whole_rounds` rounds."""
        enough = NEARLY_PRECISE if self.adjusts else None if self.to is None else PRECISE
        return LatencyProtocol(self.conditions, self.rounds, WARMUP, self.clock, enough=enough)

    def noise(self, model: nn.Module) -> torch.Tensor:
        """Returns a batch of noise for timings, [batch, *input shape]. Latency does not depend on the pixel values."""
        shape = family_of(model).input_shape(model)
        return torch.randn(self.batch, *shape, generator=torch.Generator().manual_seed(0))

    def while_planning(self, macs: float) -> "PlanSettings":
        """Returns the settings to use when timing the plans of a model that needs `macs` MACs per image.

        The result differs from `self` only if plans are adjusted on a CPU.
        """
        if not self.adjusts or self.conditions.on_cuda:
            return self
        # A large batch runs in chunks of a few images. Timing only a few images is faster, and the latency ratios agree
        # to a hundredth. On one thread, CPU time is the latency without the load of other processes.
        enough = ceil((TIMED_MACS if self.to is None else TIMED_FILE_MACS) / macs)
        fewest = FEWEST_TIMED_IMAGES if enough <= FEWEST_TIMED_IMAGES else MIN_TIMED_IMAGES
        batch, is_serial = min(self.batch, max(fewest, enough)), self.conditions.threads == 1
        clock = "cpu" if is_serial and self.protocol.resolved_clock == "wall" else self.clock
        # Every timed pass of a file follows other passes of the same file, so files need fewer rounds.
        more = min(max(fewest // batch, 1), MOST_OF_FILES if self.to else fewest)
        rounds, whole_rounds = self.rounds * more, self.whole_rounds * more
        return replace(self, batch=batch, clock=clock, rounds=rounds, whole_rounds=whole_rounds)


def final_rounds(batch: int, macs: float, of_files: bool = False) -> int:
    """Returns the number of rounds in a final latency measurement, for a batch and a model's MACs per image.

    Small batches get more rounds, and large models get fewer. With `of_files`, only very large models get fewer rounds,
    because timing a file ends as soon as its speed is precise.
    """
    if batch * macs >= LONGER_PASS:
        return LONGER_ROUNDS
    if batch * macs >= LONG_PASS and not of_files:
        return LONG_ROUNDS
    return FINAL_ROUNDS * max(MIN_TIMED_IMAGES // batch, 1)


def map_share(macs: float) -> float:
    """Returns the share of the usual images and steps to use for a model with dense outputs and `macs` per image."""
    return min(1.0, FULL_MAP_MACS / macs)


class RepairBudget(NamedTuple):
    """The steps of a repair, the images per step, and a limit on the multiply-accumulates of the whole repair."""

    steps: int
    images: int
    macs: float


class DecoderFit(NamedTuple):
    """The images and steps for fitting a smaller decoder."""

    images: int
    steps: int


@dataclass(frozen=True)
class Effort:
    """How much one call measures and fits. Numbers of images are upper limits, because a dataset may have fewer images.

    Attributes:
        name: "quick", "normal" or "thorough".
        settings: How plans are searched and timed.
        fitted_images: The number of images for fitting weights. They include the images for choosing the plan.
        repair: The budget for repairing a realized plan, or None for no repair.
        distill_epochs: The epochs of the distillation that follows, or 0 for no distillation.
        most_distilled: The MACs per image above which a model is not distilled.
        diagnosed_images: The number of images for the diagnosis.
        predicted_images: The number of images for measuring the predictions of a plan.
        calibrated_images: The maximum number of images for calibrating 8-bit files. Their format also has a limit.
        verified_images: The maximum number of images for verifying a result. An accuracy on 10,000 images has a
            standard error of at most 0.5 points.
        image_share: For dense outputs, the share of the images that a quick call uses to plan, fit and predict. None
            means all images.
        decoder_fits: The images and steps for fitting a smaller decoder, first before the plan and then after it.
        keep_index: Whether the smaller model's embeddings will be used to search an index of the original's.
    """

    name: str
    settings: PlanSettings
    fitted_images: int
    repair: RepairBudget | None
    distill_epochs: int = 0
    most_distilled: float = inf
    diagnosed_images: int = 128
    predicted_images: int = 96
    calibrated_images: int = 300
    verified_images: int = 10_000
    image_share: float | None = None
    decoder_fits: tuple[DecoderFit, DecoderFit] = (DecoderFit(64, 60), DecoderFit(128, 200))
    keep_index: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        kind: OutputKind,
        macs: float | None = None,
        settings: PlanSettings | None = None,
        keep_index: bool = False,
    ) -> "Effort":
        """Returns what a call measures and fits for one model.

        Args:
            name: The effort: "quick", "normal" or "thorough".
            kind: The kind of the model's outputs.
            macs: The model's MACs per image, at the size of the images, or None before the images are read. The MACs do
                not affect how many images are read.
            settings: The plan settings of the call, with the effort's numbers of images. By default, the effort's own
                settings.
            keep_index: Whether the smaller model's embeddings will be used to search an index of the original's.

        Raises:
            UnknownName: No such effort.
        """
        if name not in EFFORTS:
            raise UnknownName("effort", name, EFFORTS)
        effort = EFFORTS[name]._for_index() if keep_index else EFFORTS[name]
        settings = (settings or effort.settings).for_outputs(kind)
        # Maps need fewer images than logits for a mean of the same precision. The square root reduces the images for
        # fits and diagnoses less than the images for plans.
        precision = kind.needed_images**0.5
        effort = replace(
            effort,
            settings=settings,
            # A fit estimates many more numbers than a plan, so it uses at least as many images.
            fitted_images=max(round(precision * effort.fitted_images), settings.num_images),
            diagnosed_images=round(precision * effort.diagnosed_images),
            predicted_images=round(precision * effort.predicted_images),
        )
        if macs is None:
            return effort
        first, last = (fit._replace(steps=round(map_share(macs) * fit.steps)) for fit in effort.decoder_fits)
        distill_epochs = effort.distill_epochs if macs <= effort.most_distilled else 0
        effort = replace(effort, decoder_fits=(first, last), distill_epochs=distill_epochs)
        return effort._in_minutes(kind, macs) if name == "quick" else effort

    def _in_minutes(self, kind: OutputKind, macs: float) -> "Effort":
        """Returns the quick effort for a model with `macs` MACs per image. Large models use fewer images."""
        is_large, is_huge, is_map = macs > LARGE, macs > HUGE, kind.needed_images < 1
        budget, least = VERIFICATION_MACS, MIN_VERIFICATION_IMAGES
        if is_map:
            budget, least = MAP_VERIFICATION_MACS, MIN_VERIFICATION_MAPS
        # Larger maps have more positions, so results vary less between images, and fewer images suffice.
        share = map_share(macs) if is_map else 1.0
        settings = replace(self.settings.on_share(share), bfloat16=is_large)
        if is_huge:
            settings = replace(settings, layer_stride=2 * settings.layer_stride)
        if is_large and not is_map:  # poor plans are measured on one batch, so it is small
            settings = replace(settings.on_share(0.5), batch_size=settings.batch_size // 2)
        elif is_huge:
            settings = settings.on_share(0.5)
        elif is_large:
            fewer = max(settings.sensitivity_images // 2, MIN_SENSITIVITY_IMAGES)
            settings = replace(settings, sensitivity_images=min(fewer, settings.sensitivity_images))
        parts = 1 + is_large + 2 * is_huge
        return replace(
            self,
            settings=settings,
            diagnosed_images=max(round(share * self.diagnosed_images) // parts, 1),
            verified_images=min(max(round(budget / macs), least), self.verified_images),
            image_share=share**0.5 if is_map else None,
        )

    def _for_index(self) -> "Effort":
        """Returns the effort, with distillation, for a model that must find the same neighbours as the original."""
        return replace(
            self,
            keep_index=True,
            fitted_images=max(self.fitted_images, INDEX_IMAGES),
            predicted_images=max(self.predicted_images, INDEX_QUERIES),
            distill_epochs=INDEX_EPOCHS[self.name],
            most_distilled=MOST_QUICKLY_DISTILLED if self.name == "quick" else inf,
        )

    def with_smaller_decoder(self) -> "Effort":
        """Returns the effort for a plan with a smaller decoder. Fewer plans are measured, to save time."""
        # A search of ten plans gained 5 % in 53 CPU seconds, and fitting the decoder takes less time than that. Fitting
        # also gains more than a quick repair, in a quarter of the time.
        settings = replace(self.settings, trials=-(-self.settings.trials // 2))
        return replace(self, settings=settings, repair=None if self.name == "quick" else self.repair)


# For a model that will search an index of the original's embeddings, INDEX_IMAGES is the least number of images to fit
# it. INDEX_EPOCHS are the epochs of its distillation. A plan's recall is measured with INDEX_QUERIES queries. On 512
# queries, a share of 0.98 of 10 neighbours has a standard error of 0.3 points.
INDEX_IMAGES, INDEX_QUERIES = 1024, 512
INDEX_EPOCHS = {"quick": 2, "normal": 4, "thorough": 8}
MOST_QUICKLY_DISTILLED = 5e9  # MACs per image: a ViT-S has 4.6e9

EFFORTS: dict[str, Effort] = {
    "quick": Effort(
        "quick",
        PlanSettings(
            whole_rounds=4,
            timed_levels=(0, 4),
            num_images=192,
            sensitivity_images=32,
            probed_levels=(4,),  # half of the rank
            pruned_shares=(1 / 12, 1 / 3, 5 / 6),
            layer_stride=2,
            trials=10,
            variations=3,
            # With `trial_images=32` (96 for the better half), a ViT-Tiny at 60 % of the MACs reached 0.043 instead of
            # 0.038 nats on 500 test images. The search took 6 % less CPU time (one seed, 2026-11-26).
            trial_images=96,
            finalists=3,
            attempts=4,
            # A plan up to 7 % faster than the target is accepted, because an attempt takes a tenth of a call's time.
            min_ratio=0.93,
            max_ratio=0.99,
            # A new search measures many plans, but an adjustment of the cost measures only a few.
            adjusts=True,
        ),
        fitted_images=256,
        # NNCF takes 45 s for 256 images one by one, for the vendor's file of a ViT-Tiny. Half of them give the same KL.
        calibrated_images=128,
        # Repairing a ViT-Tiny on all images takes 2e12 MACs. Larger models get MIN_REPAIR_IMAGES and half of the steps.
        # With 512 images and four per step, the same divergence takes 1.6 times the CPU time (docs/results/plan.md).
        repair=RepairBudget(100, images=2, macs=3.5e12),
    ),
    "normal": Effort(
        "normal",
        PlanSettings(),
        fitted_images=1024,
        repair=RepairBudget(300, images=4, macs=1e14),
        # For a plan that is made for single images in eager PyTorch, distillation removes 14 % of the divergence, in
        # 131 s on two threads.
        distill_epochs=2,
        most_distilled=MOST_QUICKLY_DISTILLED,
    ),
    "thorough": Effort(
        "thorough",
        PlanSettings(
            rounds=7,
            whole_rounds=28,
            timed_levels=(0, 2, 4, 6),
            num_images=1024,
            sensitivity_images=96,
            pruned_shares=(1 / 24, 1 / 8, 1 / 3, 2 / 3, 11 / 12),
            trials=48,
            # On few images, chance selects the best of many plans.
            trial_images=128,
            finalists=6,
            attempts=4,
        ),
        # At 60 % of the parameters, these settings reach 0.376 nats. 1,024 images and 300 steps reach 0.420
        # (docs/results/plan.md). For a ViT-L, the budget's images keep seven copies of their tokens in memory, 12 GB.
        fitted_images=3072,
        repair=RepairBudget(500, images=4, macs=4e14),
        distill_epochs=2,
    ),
}
