"""The settings of a plan, and the search space that they leave of a model."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from attnrx.change.exporting import parse_format
from attnrx.decide.planning.effort import EFFORTS, Effort, effort_of
from attnrx.decide.planning.measured_costs import TimingSettings
from attnrx.decide.planning.space import AXES, RANKS, TOKENS, Space, require_axes, step_for
from attnrx.decide.planning.target import Target
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.support.arguments import (
    BATCH,
    CALLBACK,
    COUNT,
    NATURAL,
    SEED,
    TEXT,
    each,
    instance,
    optional,
    require_fields,
)
from attnrx.support.errors import InvalidInput, InvalidRule, MissingMoments, NotSupported
from attnrx.support.progress import Log, no_log
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
            effort=instance("an Effort of attnrx.planning.effort.EFFORTS", Effort),
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
