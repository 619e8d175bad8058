"""The search space of a plan: for every layer, the ranks of qk, vo and MLP, and the patches pruned before it."""

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

# By how many steps the number of pruned patches may grow. A stage has a fixed cost, so there are large increments, too.
JUMPS = (1, 2, 4, 8, 16)
# The step is STEP patches, or less for images with few patches, so that every stage has at least two numbers to choose
# from.
STEP = 4
# The relevance in `ward` if the outputs come from a class token. Of 0, 0.1, 0.2 and 0.3, this value had the smallest
# divergence for the ImageNet ViT-Tiny in two policies (docs/results/plan.md).
RELEVANCE = 0.3


def format_of(settings: PlanSettings) -> Format | None:
    """Returns the file format that the settings name, or None if they name none.

    Raises:
        UnknownName: There is no such format.
    """
    return None if settings.to is None else parse_format(settings.to)


def runtime_of(model: nn.Module, settings: PlanSettings) -> Runtime:
    """Returns the place where the result of a plan will run.

    The place is the runtime of the format, or else the device of the model or of the timing.
    """
    conditions, form = settings.conditions, format_of(settings)
    on_cuda = conditions.on_cuda or next(model.parameters()).device.type == "cuda"
    if on_cuda and (form is None or form.on_cuda):
        return RUNTIMES["cuda"]
    own = "compiled" if conditions.compiled else "eager"
    return RUNTIMES[own if form is None else form.place]


@dataclass(frozen=True)
class Choices:
    """One plan: for every layer, the level of each rank axis (0: full rank), and how many patches are pruned before."""

    qk: tuple[int, ...]
    vo: tuple[int, ...]
    mlp: tuple[int, ...]
    num_pruned: tuple[int, ...]

    @classmethod
    def nothing(cls, depth: int) -> "Choices":
        """Returns the plan without any compression."""
        zeros = (0,) * depth
        return cls(zeros, zeros, zeros, zeros)

    def of(self, axis: str) -> tuple[int, ...]:
        """Returns the level of a rank axis for every layer, or for tokens the number of pruned patches."""
        return self.num_pruned if axis == TOKENS else getattr(self, axis)

    def with_choice(self, axis: str, layer: int, value: int) -> "Choices":
        """Returns the plan with another level, or another number of pruned patches, in one layer."""
        values = self.of(axis)
        name = "num_pruned" if axis == TOKENS else axis
        return replace(self, **{name: (*values[:layer], value, *values[layer + 1 :])})

    @property
    def left(self) -> tuple[int, ...]:
        """The total number of patches that are pruned before each layer."""
        return tuple(accumulate(self.num_pruned))


@dataclass(frozen=True, eq=False, repr=False)
class Space(Displayed):
    """All plans for one model.

    `form` is the kind of rule that every level uses. "total_rank" allocates the layer's directions to its heads.
    "uniform_rank" gives all heads the same rank. It has the same MACs and a higher divergence, but is faster if heads
    are padded to the largest rank. Ranks are multiples of `multiple`, and hidden widths of `width_multiple`.

    The number of pruned patches is `offset` plus a multiple of `step`. For latency, the number of tokens can thus be a
    multiple of the kernels' vectors and tiles. A plan has at most `most_stages` stages, or any number if this is None.
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
        """Returns the search space of a plan.

        The space follows the row of the table `nouns.runtime` for the place where the model will run. Heads also get
        equal ranks if they cannot be reordered by rank, because a norm runs over the outputs of all heads.

        Raises:
            NotSupported: The model lacks an axis that was named, or all of them.
        """
        is_latency, runtime = target.minimized == "latency", runtime_of(model, settings)
        family = family_of(model)
        specs, units = family.specs(model), hidden_units(family.mlp(model))
        uniform = runtime.equal_heads or any(spec.fixes_values for spec in specs)
        # MACs and parameters do not rise in steps. They allow every rank and width, unless the place is known.
        is_stepped = is_latency or runtime is not RUNTIMES["eager"]
        # The space begins with all rank axes. To find out whether the model has an axis, this method prescribes it, and
        # the prescriptions are kept for the result. The smallest head and MLP decide, so that all have every level.
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
                    # Dense outputs of such models use it, too, and their divergence is smaller (docs/results/dense.md).
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
                # If only the diagnosis lacks the axis's measurements, an error says so, and the axis is not left out.
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
        """Raises NotSupported or InvalidRule if the model offers no choice on an axis."""
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
        """The shape of the model for the token reducer."""
        family = family_of(self.model)
        if TOKENS in self.axes:
            return family.token_shape(self.model)
        # No token is pruned, so all tokens are treated like the tokens before the patches. The family has no layout for
        # models whose tokens cannot be pruned, e.g. with attention pooling.
        tokens = family.costs(self.model).layers[0].tokens
        specs = family.specs(self.model)
        return Shape(specs[0].width, len(specs[0].heads), TokenLayout(tokens, 0, False, "class"), depth=len(specs))

    @cached_property
    def depth(self) -> int:
        """The number of layers of the model."""
        return len(family_of(self.model).attention(self.model))

    @property
    def patches(self) -> int:
        """The number of patches that can be pruned, or 0 without the axis of tokens."""
        return self.shape.layout.patches

    @property
    def metric(self) -> str | None:
        """The metric of qk: "mix", or None if a layer keeps its own directions in their own order.

        Such layers have norms over the model's directions, or heads that share directions.
        """
        has_own_order = any(layer.spectrum.has_own_order for layer in self.diagnosis.layers)
        return None if has_own_order else "mix"

    @cached_property
    def mlp_maps(self) -> tuple[str, ...]:
        """The maps of the axis "mlp": the hidden units if they were measured, else the ranks of both maps."""
        measured = all(
            layer.hidden is not None and layer.hidden.covariance is not None for layer in self.diagnosis.layers
        )
        # Removing a unit makes both maps smaller, but a low rank adds a second factor to each.
        return (HIDDEN,) if measured else LINEAR_MAPS

    @cached_property
    def spectra(self) -> tuple[Spectrum, ...]:
        """The spectra of the score directions in `metric`, per layer."""
        diagnosis = self.diagnosis if self.metric is None else rewritten(self.diagnosis, self.metric)[0]
        return tuple(layer.spectrum for layer in diagnosis.layers)

    def available(self, axis: str) -> tuple[int, ...]:
        """Returns the levels of an axis that remove something. They are the same for all layers."""
        if axis not in self.axes:
            return ()
        return tuple(level for level in range(1, len(self.levels)) if self.piece(axis, level) is not None)

    def measured(self, axis: str, levels: Iterable[int]) -> tuple[int, ...]:
        """Returns which of these `levels` are available. If none is, returns the middle available level, if any."""
        available = self.available(axis)
        return tuple(level for level in levels if level in available) or available[len(available) // 2 :][:1]

    def piece(self, axis: str, level: int) -> Prescription | None:
        """Returns the prescription for one level of one axis in all layers, or None if it changes nothing.

        The prescription is cached, and has no weights (`refit` in `prescribe_maps`).
        """
        key = (axis, level)
        if key not in self._pieces:
            try:
                self._pieces[key] = self._prescribed({axis: self.rule(axis, level)}, refit=False)
            except NoOpPrescription:
                self._pieces[key] = None
        return self._pieces[key]

    def uniform(self, axis: str, level: int) -> Choices:
        """Returns the plan with one level of one axis in all layers."""
        return replace(Choices.nothing(self.depth), **{axis: (level,) * self.depth})

    def rule(self, axis: str, level: int) -> Rule:
        """Returns the rule for a level of an axis."""
        multiple = self.width_multiple if axis == "mlp" and self.mlp_maps == (HIDDEN,) else self.multiple
        return parse_rule(f"{self.form}:{self.levels[level]!r},multiple={multiple}")

    def policy(self, choices: Choices) -> TokenPolicy | None:
        """Returns the token policy of a plan, or None if the plan prunes no patches."""
        # Layers count from 0 here, and from 1 in a policy. A share counts the image's patches that remain after a
        # stage.
        stages = [layer for layer, count in enumerate(choices.num_pruned) if count]
        if not stages or self.reducer is None:
            return None
        left = choices.left
        keep = tuple((self.patches - left[layer]) / self.patches for layer in stages)
        return TokenPolicy(self.reducer, tuple(layer + 1 for layer in stages), keep)

    def prescription(self, choices: Choices) -> Prescription:
        """Returns the prescription of a plan."""
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
        # In the metric of the data, directions are sorted by their effect on the scores, which weights do not show.
        if "qk" in by_map and self.metric is not None:
            by_map["qk"] = in_metric(by_map["qk"], self.metric)
        return prescribe_maps(self.diagnosis, {**by_map, TOKENS: tokens}, refit)

    def even_schedules(self) -> tuple[Choices, ...]:
        """Returns plans that only prune tokens, equally many before every layer but the first. The largest come first.

        If the number of stages is limited, they are spread over the layers.
        """
        if TOKENS not in self.axes or self.depth < 2:
            return ()
        # No stage precedes the first layer, and together stages prune at most all patches. `_fitted` limits late
        # stages, which have few patches left.
        layers = self.spread(self.most_stages)
        largest = self.patches // len(layers) // self.step * self.step
        return tuple(self.even_schedule(layers, count) for count in range(largest, 0, -self.step))

    def even_schedule(self, layers: Collection[int], count: int) -> Choices:
        """Returns the plan that prunes `count` patches before each of these layers, or as many as a stage may prune."""
        num_pruned = tuple(count * (layer in layers) for layer in range(self.depth))
        return self._fitted(replace(Choices.nothing(self.depth), num_pruned=num_pruned))

    def relaxations(self, choices: Choices, step: int | None = None) -> Iterator[Choices]:
        """Yields every plan with one change that keeps more: a higher rank, or fewer pruned patches, in one layer.

        The numbers of pruned patches are multiples of `step`, by default the space's step.
        """
        for axis in AXES:
            for layer, now in enumerate(choices.of(axis)):
                values = range(0, now, step or self.step) if axis == TOKENS else (0, *self.available(axis))
                yield from (choices.with_choice(axis, layer, value) for value in values if value < now)

    def moves(self, choices: Choices) -> Iterator[Choices]:
        """Yields every plan with one change that keeps less: a lower rank, or more pruned patches, in one layer."""
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
        """Yields every plan in which one stage moves to the layer before or after, and prunes as many patches."""
        for layer, count in enumerate(choices.num_pruned):
            for other in (layer - 1, layer + 1):
                if count and 0 < other < self.depth and not choices.num_pruned[other]:
                    yield choices.with_choice(TOKENS, layer, 0).with_choice(TOKENS, other, count)

    def _has_room(self, choices: Choices) -> bool:
        """Whether one more stage is allowed."""
        return self.most_stages is None or sum(map(bool, choices.num_pruned)) < self.most_stages

    def spread(self, stages: int | None) -> tuple[int, ...]:
        """Returns the layers for `stages` stages, at the ends of equal parts of the depth. None means all layers."""
        # The layers are a set, because two of them may coincide in a shallow model.
        parts = min(stages or self.depth, self.depth - 1) + 1
        return tuple(sorted({max(self.depth * part // parts, 1) for part in range(1, parts)}))

    def _fitted(self, choices: Choices) -> Choices:
        """Limits how many patches every stage prunes, to half of its input patches."""
        # The first stage comes first, because the patches that it prunes are missing at later stages.
        present, num_pruned = self.patches, []
        for count in choices.num_pruned:
            num_pruned.append(min(count, self.at_once(present)))
            present -= num_pruned[-1]
        return replace(choices, num_pruned=tuple(num_pruned))

    def at_once(self, present: Count) -> Count:
        """Returns the most patches that one stage may prune: half of its input, rounded down to a whole step."""
        return present // 2 // self.step * self.step
