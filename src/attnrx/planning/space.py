"""What a plan may choose: in every layer the ranks of qk, vo and the MLP, and the patches that leave before it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput, NoOpPrescription, NotSupported, UnknownName
from attnrx.models import family_of, shape_of
from attnrx.prescription import LINEAR_MAPS, TOKENS, Prescription, TokenPrescription
from attnrx.rules import Rule, by_layer, in_metric, parse_rule, prescribe, rewritten
from attnrx.spectrum import Spectrum
from attnrx.tokens import Reducer, Shape, TokenPolicy

RANKS = ("qk", "vo", "mlp")

AXES = (*RANKS, TOKENS)

# Eighths of what there is: of 64 directions multiples of 8, which the kernels like.
LEVELS = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)


# How many steps more patches may leave at once: a stage costs something however few leave.
JUMPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Choices:
    """One plan: for every layer the level of each kind of rank (0: everything stays), and the patches that leave
    before it.
    """

    qk: tuple[int, ...]
    vo: tuple[int, ...]
    mlp: tuple[int, ...]
    num_pruned: tuple[int, ...]

    @classmethod
    def nothing(cls, depth: int) -> "Choices":
        """Leaves everything as it is."""
        whole = (0,) * depth
        return cls(whole, whole, whole, whole)

    def with_level(self, axis: str, layer: int, level: int) -> "Choices":
        """Changes one level."""
        own: tuple[int, ...] = getattr(self, axis)
        return replace(self, **{axis: (*own[:layer], level, *own[layer + 1 :])})

    def with_num_pruned(self, layer: int, count: int) -> "Choices":
        """Changes how many patches leave before a layer."""
        return replace(self, num_pruned=(*self.num_pruned[:layer], count, *self.num_pruned[layer + 1 :]))

    @property
    def left(self) -> tuple[int, ...]:
        """How many patches fewer than the image has each layer sees."""
        total, found = 0, []
        for count in self.num_pruned:
            total += count
            found.append(total)
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Space:
    """All plans for one model.

    `form` is the rule that a level is put into: "total_rank" deals the layer's directions out to its heads, which costs
    the same MACs as "uniform_rank", the same rank for all heads, and does less damage; where heads are padded to the
    largest rank, only the second is faster. Ranks are multiples of `multiple`.
    """

    model: nn.Module
    diagnosis: Diagnosis
    reducer: Reducer | None
    axes: tuple[str, ...] = AXES
    form: str = "total_rank"
    multiple: int = 1
    step: int = 4
    levels: tuple[float, ...] = LEVELS
    _pieces: dict[tuple[str, int], Prescription | None] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        unknown = [axis for axis in self.axes if axis not in AXES]
        if unknown or not self.axes:
            raise UnknownName("axis of a plan", ", ".join(unknown) or "none", AXES)
        if TOKENS in self.axes and self.reducer is None:
            raise InvalidInput("a plan over tokens needs a reducer, e.g. ward; give one, or leave the axis out.")
        if self.reducer is not None and self.reducer.learned:
            raise NotSupported(
                f"{self.reducer} learns which tokens leave, and nothing is trained while a plan is made; plan with a "
                "reducer that does without, e.g. ward, tome or class_attention."
            )

    @cached_property
    def shape(self) -> Shape:
        """What the reducer must know of the model."""
        return shape_of(self.model, family_of(self.model))

    @cached_property
    def depth(self) -> int:
        """Layers of the model."""
        return len(family_of(self.model).attention(self.model))

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return self.shape.layout.patches

    @property
    def metric(self) -> str | None:
        """The metric of the scores: that of the data where they have no norms, which fix the directions."""
        normed = any(layer.spectrum.norms != "none" for layer in self.diagnosis.layers)
        return None if normed else "mix"

    @cached_property
    def spectra(self) -> tuple[Spectrum, ...]:
        """The score directions that levels are about, layer by layer."""
        diagnosis = self.diagnosis if self.metric is None else rewritten(self.diagnosis, self.metric)[0]
        return tuple(layer.spectrum for layer in diagnosis.layers)

    def available(self, axis: str) -> tuple[int, ...]:
        """Returns the levels of an axis that change anything, in every layer the same."""
        if axis not in self.axes:
            return ()
        return tuple(level for level in range(1, len(self.levels)) if self.piece(axis, level) is not None)

    def piece(self, axis: str, level: int) -> Prescription | None:
        """Prescribes one level of one axis for all layers; None where that would change nothing."""
        key = (axis, level)
        if key not in self._pieces:
            try:
                self._pieces[key] = self._prescribed({axis: self.rule(level)})
            except NoOpPrescription:
                self._pieces[key] = None
        return self._pieces[key]

    def rule(self, level: int) -> Rule:
        """The rule of a level."""
        return parse_rule(f"{self.form}:{self.levels[level]!r},multiple={self.multiple}")

    def policy(self, choices: Choices) -> TokenPolicy | None:
        """Returns the policy that lets the chosen patches leave; None where none do."""
        stages = [layer for layer, count in enumerate(choices.num_pruned) if count]
        if not stages or self.reducer is None:
            return None
        left = choices.left
        keep = tuple((self.patches - left[layer]) / self.patches for layer in stages)
        return TokenPolicy(self.reducer, tuple(layer + 1 for layer in stages), keep)

    def prescription(self, choices: Choices) -> Prescription:
        """Prescribes what was chosen."""
        rules = {
            axis: by_layer([self.rule(level) for level in getattr(choices, axis)])
            for axis in RANKS
            if any(getattr(choices, axis))
        }
        return self._prescribed(rules, self.policy(choices))

    def _prescribed(self, rules: Mapping[str, Rule], policy: TokenPolicy | None = None) -> Prescription:
        tokens = None if policy is None else TokenPrescription.of(policy)
        by_map = {name: rule for axis, rule in rules.items() for name in (LINEAR_MAPS if axis == "mlp" else (axis,))}
        if "qk" in by_map and self.metric is not None:
            by_map["qk"] = in_metric(by_map["qk"], self.metric)
        return prescribe(self.diagnosis, {**by_map, TOKENS: tokens})

    def ways_back(self, choices: Choices) -> Iterator[Choices]:
        """Returns every plan that takes a little back: one higher level somewhere, or fewer patches before a layer."""
        for axis in RANKS:
            levels, own = (0, *self.available(axis)), getattr(choices, axis)
            for layer, now in enumerate(own):
                yield from (choices.with_level(axis, layer, level) for level in levels if level < now)
        for layer, count in enumerate(choices.num_pruned):
            yield from (choices.with_num_pruned(layer, less) for less in range(0, count, self.step))

    def moves(self, choices: Choices) -> Iterator[Choices]:
        """Returns every plan that lets a little more go: one lower level somewhere, or more patches before a layer."""
        for axis in RANKS:
            levels, own = self.available(axis), getattr(choices, axis)
            for layer, now in enumerate(own):
                yield from (choices.with_level(axis, layer, level) for level in levels if level > now)
        if TOKENS not in self.axes:
            return
        for layer in range(1, self.depth):
            for more in (self.step * jump for jump in JUMPS):
                count = choices.num_pruned[layer] + more
                fitted = self._fitted(choices.with_num_pruned(layer, count))
                if fitted.num_pruned[layer] == count:
                    yield fitted

    def _fitted(self, choices: Choices) -> Choices:
        """Lets half of what is there leave at every stage at most: where more leave early, fewer can later."""
        present, num_pruned = self.patches, []
        for count in choices.num_pruned:
            num_pruned.append(min(count, self.at_once(present)))
            present -= num_pruned[-1]
        return replace(choices, num_pruned=tuple(num_pruned))

    def at_once(self, present: int) -> int:
        """Returns how many patches may leave at one stage, in steps: half of those that are there."""
        return present // 2 // self.step * self.step
