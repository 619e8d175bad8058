"""Plans for portable models, in which all layers have the same MLP width and the same number of heads.

The library's own class requires these equal sizes. MACs and parameters are computed in closed form. Latency is assumed
to be a linear function of the MACs, fitted to two timed models. For every number of heads, the best plan has the
largest width within the budget. A search therefore compares only one plan per number of heads. As in every plan, each
layer selects its own units and heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from torch import nn

from attnrx.change.realization import compressed_spec, realize
from attnrx.change.realization.following import narrow_
from attnrx.data import ImageSet
from attnrx.decide.planning.allocation import Step
from attnrx.decide.planning.measured_costs import PlanTimer
from attnrx.decide.planning.space import Space, runtime_of
from attnrx.decide.rules import TotalRank, prescribe_maps
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.effort import PlanSettings
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import InvalidRule, MissingMoments, NotSupported
from attnrx.vit.maps import HEADS, HIDDEN
from attnrx.vit.models import family_of, hidden_units, stock_form, working_copy
from attnrx.vit.models.boundary.stock import Stock
from attnrx.vit.spec import AttentionSpec


@dataclass(frozen=True)
class Sizes:
    """One portable plan: the number of hidden units in every MLP, and the number of heads in every layer."""

    hidden: int
    heads: int


@dataclass(frozen=True, eq=False, repr=False)
class UniformSpace(Space):
    """All sizes in which the library's class can create the model. MLP widths are multiples of `multiple`."""

    form: str = "uniform"

    @classmethod
    def of_class(cls, model: nn.Module, diagnosis: Diagnosis, settings: PlanSettings) -> "UniformSpace":
        """Returns the space of portable plans for a model.

        Raises:
            NotSupported: The library's class has no argument for the MLP width, or no width below the model's own is a
                multiple of the required number.
        """
        space = cls(model, diagnosis, None, (HIDDEN,), multiple=width_multiple(model, settings))
        require_portable(model, settings, space.stock)
        if space.stock.heads > 1 and space.stock.arguments(space.stock.hidden, space.stock.heads - 1) is not None:
            try:
                space.head_specs(space.stock.heads - 1)
                return replace(space, axes=(HEADS, HIDDEN))
            except MissingMoments:
                raise
            except (NotSupported, InvalidRule) as error:
                settings.log(f"the plan is without heads: {error}")
        return space

    @cached_property
    def stock(self) -> Stock:
        return Stock(self.model)

    @property
    def unchanged(self) -> Sizes:
        return Sizes(self.stock.hidden, self.stock.heads)

    @property
    def numbers_of_heads(self) -> tuple[int, ...]:
        """The possible numbers of heads, from the model's own number down."""
        heads = range(self.stock.heads, 0, -1)
        return tuple(heads) if HEADS in self.axes else tuple(heads)[:1]

    @property
    def widths(self) -> tuple[int, ...]:
        """The possible numbers of hidden units, from the model's own number down."""
        return self.stock.hidden, *smaller_widths(self.stock, self.multiple)

    def rules(self, sizes: Sizes) -> dict[str, TotalRank]:
        """Returns rules that keep the strongest hidden units and heads of every layer. `sizes` states how many."""
        pairs = ((HEADS, sizes.heads, self.stock.heads), (HIDDEN, sizes.hidden, self.stock.hidden))
        return {name: TotalRank(count) for name, count, full in pairs if count < full}

    def prescription(self, choices: Any) -> Prescription:
        found = prescribe_maps(self.diagnosis, cast(Mapping[str, Any], self.rules(choices)))
        return replace(found, about={**found.about, "portable": True})

    def head_specs(self, heads: int) -> tuple[AttentionSpec, ...]:
        """Returns the spec of every layer's attention after it is reduced to this number of heads."""
        specs = family_of(self.model).specs(self.model)
        if heads == self.stock.heads:
            return specs
        found = prescribe_maps(self.diagnosis, {HEADS: TotalRank(heads)}, refit=False)
        return tuple(compressed_spec(spec, layer) for spec, layer in zip(specs, found.layers, strict=True))

    def realized(self, sizes: Sizes, images: ImageSet) -> nn.Module:
        """Returns the plan's model. MLPs outside the blocks that must have the same width are narrowed, too."""
        model = realize(self.model, self.prescription(sizes))
        follow_(model, self.stock, images)
        return model


def smaller_widths(stock: Stock, multiple: int) -> tuple[int, ...]:
    """Returns the possible widths below the model's own, largest first."""
    return tuple(range((stock.hidden - 1) // multiple * multiple, 0, -multiple))


def width_multiple(model: nn.Module, settings: PlanSettings) -> int:
    """Returns the number whose multiples a portable plan may use as MLP widths, by default the runtime's number."""
    return settings.multiple or runtime_of(model, settings).width_multiple


def require_portable(model: nn.Module, settings: PlanSettings, stock: Stock | None = None) -> None:
    """Raises NotSupported, with advice, if the model's library cannot create the model at a smaller width."""
    stock, multiple = stock or Stock(model), width_multiple(model, settings)
    widths = smaller_widths(stock, multiple)
    if not widths:
        raise NotSupported(
            f"{stock.name} has {stock.hidden} hidden units, and no smaller multiple of {multiple}: give a smaller "
            "multiple, e.g. multiple=1."
        )
    if any(second.bias is None for _, second in stock.family.mlp(stock.model)):
        raise NotSupported(
            f"{stock.name} cannot be portable: its MLPs have no bias at their end, which keeps the mean of removed "
            "units. Leave portable out."
        )
    # Some classes accept only whole ratios of width to model width, so such widths are tried after the middle one.
    tried = [widths[len(widths) // 2], *(width for width in widths if width % stock.width == 0)]
    held = next((width for width in tried if stock.arguments(width, stock.heads) is not None), 0)
    if held:
        stock.require_parts(held, stock.heads)
    else:
        raise NotSupported(
            f"{stock.name} cannot be portable: no argument of its class in {stock.family.library} gives its MLPs "
            f"{' or '.join(map(str, tried))} in place of {stock.hidden} units. Leave portable out: the result then "
            "needs attnrx to be loaded."
        )


def follow_(model: nn.Module, stock: Stock, images: ImageSet) -> None:
    """Narrows MLPs outside the blocks, in place, if the library gives them the same width as the MLPs in the blocks."""
    family = family_of(model)
    hidden, heads = hidden_units(family.mlp(model))[0], len(family.specs(model)[0].heads)
    if pairs := stock.followers(hidden, heads):
        narrow_(model, pairs, hidden, images)


def portable_form(model: nn.Module, original: nn.Module, images: ImageSet) -> nn.Module:
    """Narrows the remaining MLPs of a realized plan's model, and returns a working copy made by the library's class.

    Raises:
        NotSupported: The library's class cannot create this model.
    """
    follow_(model, Stock(original), images)
    return working_copy(stock_form(model))


@dataclass(frozen=True, eq=False)
class UniformCosts:
    """The cost of every plan, as a share of the original's cost.

    For latency, a plan's cost is `base` plus `slope` times its share of the MACs. Otherwise, it is the plan's share of
    the `quantity`.
    """

    space: UniformSpace
    quantity: str
    base: float = 0.0
    slope: float = 1.0

    @classmethod
    def timed(cls, space: UniformSpace, timer: PlanTimer, images: ImageSet) -> "UniformCosts":
        """Times the unchanged model and a model of middle width, and returns the costs for latency."""
        exact, heads = cls(space, "latency"), space.stock.heads
        plans = (Sizes(width, heads) for width in middle_first(space.widths[1:]))
        middle = next(filter(exact.holds, plans))
        models = {"unchanged": space.model, "middle": space.realized(middle, images)}
        shares = timer.latency_shares(models, rounds=timer.settings.whole_rounds)
        slope = max(shares["unchanged"] - shares["middle"], 0.0) / (1 - exact.total(middle))
        return replace(exact, base=shares["unchanged"] - slope, slope=slope)

    @cached_property
    def _lines(self) -> dict[int, tuple[float, float]]:
        return {}

    def holds(self, sizes: Sizes) -> bool:
        """Whether the library's class can create a model of these sizes."""
        return self.space.stock.arguments(sizes.hidden, sizes.heads) is not None

    def total(self, sizes: Any) -> float:
        """Returns a plan's cost share."""
        full = self.space.stock.hidden
        if sizes.heads not in self._lines:
            # For a fixed number of heads, the cost is a straight line in the width.
            specs = self.space.head_specs(sizes.heads)
            wide, narrow = (self._share(specs, units) for units in (full, full - 1))
            self._lines[sizes.heads] = wide, wide - narrow
        wide, slope = self._lines[sizes.heads]
        return self.base + self.slope * (wide - slope * (full - sizes.hidden))

    def _share(self, specs: tuple[AttentionSpec, ...], units: int) -> float:
        family, model = family_of(self.space.model), self.space.model
        name = "macs" if self.quantity == "latency" else self.quantity
        costs = family.costs(model, specs, hidden=(units,) * self.space.depth)
        return getattr(costs, name) / getattr(family.costs(model), name)


def middle_first(values: tuple[int, ...]) -> list[int]:
    """Returns the values sorted by their distance from the middle of the tuple, nearest first."""
    middle = len(values) // 2
    return [values[index] for index in sorted(range(len(values)), key=lambda index: abs(index - middle))]


@dataclass(frozen=True, eq=False)
class UniformFrontier:
    """Finds the plan with the largest width within a budget, for every number of heads."""

    space: UniformSpace
    costs: UniformCosts

    def at(self, limit: float, heads: int | None = None) -> Step:
        """Returns the widest plan within the limit, with `heads` heads or, by default, with as many as possible.

        Raises:
            NotSupported: No plan is cheap enough.
        """
        numbers = [heads] if heads else self.space.numbers_of_heads
        for number in numbers:
            for width in self.space.widths:
                sizes = Sizes(width, number)
                if sizes != self.space.unchanged and self.costs.total(sizes) <= limit and self.costs.holds(sizes):
                    return Step(cast(Any, sizes), self.costs.total(sizes), 0.0)
        least, quantity = self.cheapest, self.costs.quantity
        much = f"faster={1 / limit:.3g}" if quantity == "latency" else f"{quantity}={limit:g}"
        raise NotSupported(
            f"{much} is out of reach: portable models keep at least {least:.3f} of the {quantity}. Request less, or "
            "leave portable out."
        )

    def steps(self, limit: float) -> list[Step]:
        """Returns the widest plan within the limit, for every number of heads that has such a plan."""
        found = []
        for heads in self.space.numbers_of_heads:
            try:
                found.append(self.at(limit, heads))
            except NotSupported:
                continue
        return found

    @cached_property
    def cheapest(self) -> float:
        """The smallest cost share of any plan."""
        numbers, widths = self.space.numbers_of_heads[::-1], self.space.widths[::-1]
        plans = (Sizes(width, heads) for heads in numbers for width in widths)
        return self.costs.total(next(filter(self.costs.holds, plans)))

    @property
    def reachable(self) -> float:
        return self.cheapest

    @cached_property
    def nothing(self) -> float:
        """The cost share of the unchanged model."""
        return self.costs.total(self.space.unchanged)
