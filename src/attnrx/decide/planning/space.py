"""The search space of a plan: for every layer, the ranks of qk, vo and MLP, and how many patches to prune before it."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import numpy as np
from torch import nn

from attnrx.change.realization.realizing import require_fewer_tokens
from attnrx.decide.rules import Rule, by_layer, in_metric, parse_rule, prescribe_maps, rewritten
from attnrx.exporting import Format, parse_format
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.effort import AXES, AXIS_WORDS, LEVELS, RANKS, PlanSettings
from attnrx.nouns.prescription import Prescription, TokenPrescription
from attnrx.nouns.runtime import RUNTIMES, Runtime
from attnrx.nouns.target import Target
from attnrx.support.display import Displayed
from attnrx.support.errors import InvalidRule, MissingMoments, NoOpPrescription, NotSupported
from attnrx.support.modules import copy_module
from attnrx.vit.maps import HIDDEN, LINEAR_MAPS, TOKENS
from attnrx.vit.models import attach_tokens_, family_of, hidden_units
from attnrx.vit.spec import Spectrum
from attnrx.vit.tokens import Reducer, Shape, TokenLayout, TokenPolicy, Ward, parse_reducer

Count = TypeVar("Count", int, np.ndarray)  # one number of patches, or many

# The steps by which a move may raise the number of pruned patches. A stage has a fixed cost, so there are large steps.
JUMPS = (1, 2, 4, 8, 16)
# The number of pruned patches changes in steps of STEP. Images with few patches have smaller steps, so that every stage
# has at least two numbers to choose from.
STEP = 4
# The `relevance` of the reducer `ward` if the outputs come from a class token. Of 0, 0.1, 0.2 and 0.3, this value had
# the smallest divergence for the ImageNet ViT-Tiny with two policies (docs/results/plan.md).
RELEVANCE = 0.3


def format_of(settings: PlanSettings) -> Format | None:
    """Returns the file format in the settings, or None if no format is set.

    Raises:
        UnknownName: There is no format with this name.
    """
    return None if settings.to is None else parse_format(settings.to)


def runtime_of(model: nn.Module, settings: PlanSettings) -> Runtime:
    """Returns the properties of the runtime in which the planned model will run (a row of `nouns.runtime`).

    If the settings name a file format, its runtime is used. Otherwise, the runtime is CUDA if the model or the timings
    are on a CUDA device. If not, it is eager or compiled PyTorch.
    """
    conditions, form = settings.conditions, format_of(settings)
    on_cuda = conditions.on_cuda or next(model.parameters()).device.type == "cuda"
    if on_cuda and (form is None or form.on_cuda):
        return RUNTIMES["cuda"]
    own = "compiled" if conditions.compiled else "eager"
    return RUNTIMES[own if form is None else form.place]


@dataclass(frozen=True)
class Choices:
    """One plan: each layer's levels of qk, vo and MLP (0 is the full rank), and the number of pruned patches."""

    qk: tuple[int, ...]
    vo: tuple[int, ...]
    mlp: tuple[int, ...]
    num_pruned: tuple[int, ...]

    @classmethod
    def nothing(cls, depth: int) -> "Choices":
        """Returns the plan that changes nothing."""
        zeros = (0,) * depth
        return cls(zeros, zeros, zeros, zeros)

    def of(self, axis: str) -> tuple[int, ...]:
        """Returns every layer's level on a rank axis or, for the token axis, its number of pruned patches."""
        return self.num_pruned if axis == TOKENS else getattr(self, axis)

    def with_choice(self, axis: str, layer: int, value: int) -> "Choices":
        """Returns this plan with another level, or another number of pruned patches, in one layer."""
        values = self.of(axis)
        name = "num_pruned" if axis == TOKENS else axis
        return replace(self, **{name: (*values[:layer], value, *values[layer + 1 :])})

    @property
    def left(self) -> tuple[int, ...]:
        """The total number of patches pruned before each layer, by its own stage and all earlier stages."""
        return tuple(accumulate(self.num_pruned))


@dataclass(frozen=True, eq=False, repr=False)
class Space(Displayed):
    """The search space: all plans for one model.

    `form` names the rule that prescribes every level. "total_rank" keeps the strongest directions of all heads
    together, so heads get different ranks. "uniform_rank" gives all heads the same rank. For the same MACs,
    "uniform_rank" changes the outputs more than "total_rank", but is faster if kernels pad all heads to the largest
    rank. Ranks are multiples of `multiple`. Hidden widths are multiples of `width_multiple`.

    The total number of pruned patches is `offset` plus a multiple of `step`. For latency, `offset` is chosen so that
    the number of remaining tokens is a multiple of `step`, which suits kernels. A plan has at most `most_stages`
    stages. None means no limit.
    """

    model: nn.Module
    diagnosis: Diagnosis
    reducer: Reducer | None
    axes: tuple[str, ...] = AXES
    form: str = "total_rank"
    multiple: int = 1
    width_multiple: int = 1
    step: int = STEP
    offset: int = 0
    most_stages: int | None = None
    levels: tuple[float, ...] = LEVELS
    _pieces: dict[tuple[str, int], Prescription | None] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, model: nn.Module, diagnosis: Diagnosis, target: Target, settings: PlanSettings) -> "Space":
        """Returns the search space for a target.

        The runtime in which the model will run (a row of `nouns.runtime`) determines the axes, the steps, and whether
        all heads get equal ranks. Heads also get equal ranks if a norm runs over the outputs of all heads, because such
        heads cannot be reordered.

        Raises:
            NotSupported: The settings name an axis that the model lacks, or no part of the model can be pruned.
        """
        is_latency, runtime = target.minimized == "latency", runtime_of(model, settings)
        family = family_of(model)
        specs, units = family.specs(model), hidden_units(family.mlp(model))
        uniform = runtime.equal_heads or any(spec.fixes_values for spec in specs)
        # MACs and parameters allow every rank and width, because they do not rise in steps. If the runtime is known,
        # its steps are used for them, too.
        is_stepped = is_latency or runtime is not RUNTIMES["eager"]
        # The space begins with all rank axes. Prescribing an axis shows whether the model has it. These prescriptions
        # are kept for the result. The smallest head and MLP set the steps, so that all layers have every level.
        space, present, reasons = (
            cls(
                model,
                diagnosis,
                None,
                RANKS,
                form="uniform_rank" if uniform else "total_rank",
                multiple=runtime.rank_step(min(spec.head_dim for spec in specs)) if is_stepped else 1,
                width_multiple=runtime.width_step(min(units, default=0)) if is_stepped else 1,
                most_stages=runtime.most_stages,
            ),
            list[str](),
            dict[str, str](),
        )
        for axis in settings.axes or runtime.axes:
            try:
                if axis == TOKENS:
                    layout = family_of(model).token_layout(model)
                    # Dense outputs of models with a class token diverge less with this relevance, too
                    # (docs/results/dense.md).
                    relevance = RELEVANCE if layout.class_token and layout.pooled == "class" else 0.0
                    reducer = Ward(relevance=relevance) if settings.reducer is None else parse_reducer(settings.reducer)
                    step = max(1, min(STEP, layout.patches // 4))
                    offset = layout.tokens % step if is_latency else 0
                    space = replace(space, axes=AXES, reducer=reducer, step=step, offset=offset)
                space.require_choices(axis)
                if axis == TOKENS and space.reducer is not None:
                    pruned = copy_module(model)
                    attach_tokens_(pruned, family_of(pruned), TokenPolicy(space.reducer, (2,), (0.5,)))
                    require_fewer_tokens(pruned)
                present.append(axis)
            except (NotSupported, InvalidRule) as error:
                # If only the diagnosis lacks measurements, the axis is not silently left out. An error says what to do.
                is_requested = settings.axes is not None or (axis == TOKENS and settings.reducer is not None)
                if is_requested or isinstance(error, MissingMoments):
                    raise
                reasons[axis] = str(error)
        if not present:
            raise NotSupported(f"nothing of this model can be planned. {' '.join(reasons.values())}")
        for axis, reason in reasons.items():
            settings.log(f"the plan is without {AXIS_WORDS[axis]}: {reason}")
        return replace(space, axes=tuple(present), reducer=space.reducer if TOKENS in present else None)

    def require_choices(self, axis: str) -> None:
        """Raises NotSupported or InvalidRule if the model has nothing to remove on an axis."""
        if axis == TOKENS:
            if self.depth < 2 or not self.at_once(self.patches):
                raise NotSupported(
                    f"patches are pruned before the second layer or a later one, at most half of them at once; this "
                    f"model has {self.depth} layers and {self.patches} patches. Omit tokens."
                )
        elif not self.available(axis):
            raise NotSupported(f"no level of {axis} removes anything of this model's {axis}. Omit {axis}.")

    @cached_property
    def shape(self) -> Shape:
        """The model's shape, as the token reducer needs it."""
        family = family_of(self.model)
        if TOKENS in self.axes:
            return family.token_shape(self.model)
        # No token is pruned, so all tokens are treated like prefix tokens. Models whose tokens cannot be pruned, e.g.
        # with attention pooling, have no token layout.
        tokens = family.costs(self.model).layers[0].tokens
        specs = family.specs(self.model)
        return Shape(specs[0].width, len(specs[0].heads), TokenLayout(tokens, 0, False, "class"), depth=len(specs))

    @cached_property
    def depth(self) -> int:
        """The number of layers in the model."""
        return len(family_of(self.model).attention(self.model))

    @property
    def patches(self) -> int:
        """The number of patches that can be pruned, or 0 without the token axis."""
        return self.shape.layout.patches

    @property
    def merges_in_layers(self) -> bool:
        """Whether tokens are merged inside every layer, so that all patches come back after it."""
        return TOKENS in self.axes and self.shape.layout.in_layers

    @property
    def metric(self) -> str | None:
        """The metric for qk, which is "mix", or None if a layer must keep its own directions in their own order.

        Layers with norms, or with heads that share directions, must keep their own directions.
        """
        has_own_order = any(layer.spectrum.has_own_order for layer in self.diagnosis.layers)
        return None if has_own_order else "mix"

    @cached_property
    def mlp_maps(self) -> tuple[str, ...]:
        """The names of the maps that the axis "mlp" prunes.

        If the moments of the hidden units were measured, the axis prunes hidden units. Otherwise, it lowers the ranks
        of both linear maps.
        """
        measured = all(
            layer.hidden is not None and layer.hidden.covariance is not None for layer in self.diagnosis.layers
        )
        # Hidden units are better. Removing them makes both maps smaller, but a low rank adds a second factor to each.
        return (HIDDEN,) if measured else LINEAR_MAPS

    @cached_property
    def spectra(self) -> tuple[Spectrum, ...]:
        """The spectrum of every layer's score directions, in the metric for qk."""
        diagnosis = self.diagnosis if self.metric is None else rewritten(self.diagnosis, self.metric)[0]
        return tuple(layer.spectrum for layer in diagnosis.layers)

    def available(self, axis: str) -> tuple[int, ...]:
        """Returns the levels of an axis that remove something. All layers have the same levels."""
        if axis not in self.axes:
            return ()
        return tuple(level for level in range(1, len(self.levels)) if self.piece(axis, level) is not None)

    def measured(self, axis: str, levels: Iterable[int]) -> tuple[int, ...]:
        """Returns which of these `levels` are available, or a middle available level if none of them is."""
        available = self.available(axis)
        return tuple(level for level in levels if level in available) or available[len(available) // 2 :][:1]

    def piece(self, axis: str, level: int) -> Prescription | None:
        """Returns the prescription for one level of one axis in all layers, or None if this level changes nothing.

        The prescription is cached. It contains no refitted weights (see `refit` in `prescribe_maps`).
        """
        key = (axis, level)
        if key not in self._pieces:
            try:
                self._pieces[key] = self._prescribed({axis: self.rule(axis, level)}, refit=False)
            except NoOpPrescription:
                self._pieces[key] = None
        return self._pieces[key]

    def uniform(self, axis: str, level: int) -> Choices:
        """Returns the plan that uses one level of one axis in all layers."""
        return replace(Choices.nothing(self.depth), **{axis: (level,) * self.depth})

    def rule(self, axis: str, level: int) -> Rule:
        """Returns the rule that prescribes a level of an axis."""
        multiple = self.width_multiple if axis == "mlp" and self.mlp_maps == (HIDDEN,) else self.multiple
        return parse_rule(f"{self.form}:{self.levels[level]!r},multiple={multiple}")

    def policy(self, choices: Choices) -> TokenPolicy | None:
        """Returns the plan's token policy, or None if the plan prunes no patches."""
        # Layers count from 0 in a plan, and from 1 in a policy. A policy's shares are the patches that remain after a
        # stage, relative to all patches of the image.
        stages = [layer for layer, count in enumerate(choices.num_pruned) if count]
        if not stages or self.reducer is None:
            return None
        left = choices.left
        keep = tuple((self.patches - left[layer]) / self.patches for layer in stages)
        return TokenPolicy(self.reducer, tuple(layer + 1 for layer in stages), keep)

    def prescription(self, choices: Choices) -> Prescription:
        """Returns the prescription that a plan stands for."""
        rules = {
            # Level 0 becomes the rule for full rank, which changes nothing in its layer.
            axis: by_layer([self.rule(axis, level) for level in choices.of(axis)])
            for axis in RANKS
            if any(choices.of(axis))
        }
        return self._prescribed(rules, self.policy(choices))

    def _prescribed(
        self, rules: Mapping[str, Rule], policy: TokenPolicy | None = None, refit: bool = True
    ) -> Prescription:
        tokens = None if policy is None else TokenPrescription(policy)
        by_map = {name: rule for axis, rule in rules.items() for name in (self.mlp_maps if axis == "mlp" else (axis,))}
        # The metric sorts directions by their effect on the scores for the data, which weights do not show.
        if "qk" in by_map and self.metric is not None:
            by_map["qk"] = in_metric(by_map["qk"], self.metric)
        return prescribe_maps(self.diagnosis, {**by_map, TOKENS: tokens}, refit)

    def even_schedules(self) -> tuple[Choices, ...]:
        """Returns plans that only prune tokens, the same number before every layer but the first.

        The plans that prune the most patches come first. If the number of stages is limited, each plan has at most that
        many stages, spread over the layers.
        """
        if TOKENS not in self.axes or self.depth < 2:
            return ()
        # No stage precedes the first layer, and together stages prune at most all patches. `_fitted` limits late
        # stages, which have few patches left.
        layers = self.spread(self.most_stages)
        largest = self.patches // len(layers) // self.step * self.step
        return tuple(self.even_schedule(layers, count) for count in range(largest, 0, -self.step))

    def even_schedule(self, layers: Collection[int], count: int) -> Choices:
        """Returns the plan that prunes `count` patches, or as many as possible, before each of these layers."""
        num_pruned = tuple(count * (layer in layers) for layer in range(self.depth))
        return self._fitted(replace(Choices.nothing(self.depth), num_pruned=num_pruned))

    def relaxations(self, choices: Choices, step: int | None = None) -> Iterator[Choices]:
        """Yields every plan that keeps more in one layer by one change: a higher rank, or fewer pruned patches.

        `step` is the step between the numbers of pruned patches, by default the space's own step.
        """
        for axis in AXES:
            for layer, now in enumerate(choices.of(axis)):
                values = range(0, now, step or self.step) if axis == TOKENS else (0, *self.available(axis))
                yield from (choices.with_choice(axis, layer, value) for value in values if value < now)

    def moves(self, choices: Choices) -> Iterator[Choices]:
        """Yields every plan that keeps less in one layer by one change: a lower rank, or more pruned patches."""
        for axis in RANKS:
            levels = self.available(axis)
            for layer, now in enumerate(choices.of(axis)):
                yield from (choices.with_choice(axis, layer, level) for level in levels if level > now)
        if TOKENS not in self.axes:
            return
        for layer in range(1, self.depth):
            if not choices.num_pruned[layer] and not self._has_room(choices):
                continue
            # Jumps that `_fitted` would shorten are omitted, because they would repeat smaller moves.
            rest = (self.offset - choices.left[layer]) % self.step
            for more in (self.step * jump + rest for jump in ((0, *JUMPS) if rest else JUMPS)):
                count = choices.num_pruned[layer] + more
                fitted = self._fitted(choices.with_choice(TOKENS, layer, count))
                if fitted.num_pruned[layer] == count:
                    yield fitted

    def shifts(self, choices: Choices) -> Iterator[Choices]:
        """Yields every plan in which one stage moves by one layer and prunes as many patches there as before."""
        for layer, count in enumerate(choices.num_pruned):
            for other in (layer - 1, layer + 1):
                if count and 0 < other < self.depth and not choices.num_pruned[other]:
                    yield choices.with_choice(TOKENS, layer, 0).with_choice(TOKENS, other, count)

    def _has_room(self, choices: Choices) -> bool:
        """Whether the plan may have one more stage."""
        return self.most_stages is None or sum(map(bool, choices.num_pruned)) < self.most_stages

    def spread(self, stages: int | None) -> tuple[int, ...]:
        """Returns the layers for `stages` stages, spread evenly over the depth. None means all layers but the first."""
        # A set removes repetitions, because two layers may coincide in a shallow model.
        parts = min(stages or self.depth, self.depth - 1) + 1
        return tuple(sorted({max(self.depth * part // parts, 1) for part in range(1, parts)}))

    def _fitted(self, choices: Choices) -> Choices:
        """Returns the plan with every stage limited to pruning at most half of its input patches."""
        # Stages are limited from the first to the last, because each one changes the input of later stages.
        present, num_pruned = self.patches, []
        for count in choices.num_pruned:
            num_pruned.append(min(count, self.at_once(present)))
            present -= num_pruned[-1]
        return replace(choices, num_pruned=tuple(num_pruned))

    def at_once(self, present: Count) -> Count:
        """Returns the most patches that one stage may prune: half its input, rounded down to a multiple of `step`."""
        return present // 2 // self.step * self.step
