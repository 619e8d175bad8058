"""Making a plan: prices and damages, the closed form, the search, and a measured promise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from attnrx.costs import LatencyComparison, compare_latencies
from attnrx.data import ImageData, ImageSet, require_labels
from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput, NoOpPrescription, NotSupported
from attnrx.model_data import images_for
from attnrx.models import family_of, require_all_tokens
from attnrx.planning.allocation import Frontier, Step, filled
from attnrx.planning.cost_correction import corrected
from attnrx.planning.cost_table import CostTable, exact_cost_table
from attnrx.planning.measured_costs import TimingSettings, measured_cost_table
from attnrx.planning.plan import Expected, Plan, Point
from attnrx.planning.plan_search import Search, Trial, knobs_of, refine_plan, weights_of
from attnrx.planning.reference_outputs import Answers, Deviation
from attnrx.planning.sensitivity import Sensitivities, measure_sensitivities
from attnrx.planning.space import AXES, RANKS, TOKENS, Choices, Space
from attnrx.planning.target import DROP, Target
from attnrx.progress import Log
from attnrx.realization import realize
from attnrx.subprocess_runner import call_in_subprocess_if
from attnrx.tokens import Reducer, parse_reducer

# A plan for the clock is made again until the clock agrees, so often. Between NEAR and all of the target is near
# enough; CARE is aimed at.
ATTEMPTS, NEAR, CARE = 4, 0.98, 0.993
# Every choice alone is measured on so many images, since there are many choices, every plan that is tried on more, by
# what varies little from image to image; and so many that did best on all, by what is promised.
FOR_SENSITIVITIES, FOR_TRIALS, FINALISTS = 96, 128, 6
# Levels are eighths of a head's directions; for the clock ranks are multiples of one, which kernels like.
EIGHTHS = 8
# Plans of the front, from the whole model to the target.
FRONT = 5
# Halvings of the share in which a drop is sought.
HALVINGS = 6


def silent(quantities: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class PlanSettings:
    """What a plan may use: its axes, the reducer of the tokens, how it is searched for, and what is timed.

    `batch_size` is how many images are answered at once; `log` takes progress messages.
    """

    axes: tuple[str, ...] = AXES
    reducer: str = "ward"
    search: Search = field(default_factory=Search)
    timing: TimingSettings = field(default_factory=TimingSettings)
    batch_size: int = 32
    log: Log = silent

    def space(self, model: nn.Module, diagnosis: Diagnosis, target: Target) -> Space:
        """Returns all plans: every head at its own rank, unless a clock on CUDA counts, where heads are padded."""
        reducer: Reducer | None = parse_reducer(self.reducer) if TOKENS in self.axes else None
        clocked = target.spend == "latency"
        form = "uniform_rank" if clocked and self.timing.conditions.on_cuda else "total_rank"
        least = min(layer.spec.head_dim for layer in family_of(model).attention(model))
        return Space(model, diagnosis, reducer, self.axes, form, multiple=max(least // EIGHTHS, 1) if clocked else 1)


def plan(
    model: nn.Module,
    diagnosis: Diagnosis,
    target: Target | str,
    images: ImageData,
    others: ImageData,
    *,
    settings: PlanSettings | None = None,
) -> Plan:
    """Shares one budget out over ranks and tokens, for the least divergence of the answers.

    What every choice costs comes from tables (closed form for MACs and parameters, the clock for latency), what it
    does to the answers is measured on the first of `images`, each alone. The closed form is the best of all plans if
    damages add up (`Frontier`); because they do not quite, a search then weighs them and varies the best plan, by the
    divergence of whole plans: all on some of `images`, those that did best there on all, which are kept in memory
    meanwhile. What is promised is measured on `others`, which nothing was chosen by. Labels are needed for a target of
    accuracy only; where `others` have none, no change of accuracy is promised.

    Raises:
        NotSupported: No plan is cheap enough by the prices, or the clock does not show what they say.
        NoOpPrescription: The model as it is meets the target.
    """
    sought = Target.parse(target) if isinstance(target, str) else target
    require_all_tokens(model, "plan for")
    settings = settings or PlanSettings()
    own, unseen = images_for(model, images, "images"), images_for(model, others, "others")
    if sought.of == DROP:
        require_labels(own)
    made = Planner(settings.space(model, diagnosis, sought), settings, sought, own)
    best, most = made.for_drop() if sought.of == DROP else made.for_cost(sought.most)
    return made.finished(best, most, Answers.of(model, unseen, settings.batch_size))


class Planner:
    """All that is known while one plan is made."""

    def __init__(self, space: Space, settings: PlanSettings, target: Target, images: ImageSet):
        self.space, self.settings, self.target, self.log = space, settings, target, settings.log
        self.answers = Answers.of(space.model, images, settings.batch_size)
        self.fewer = self.answers.first(FOR_TRIALS)
        self.timed: dict[str, Any] | None = None
        self.trials: tuple[Trial, ...] = ()
        self.known: dict[tuple[int, Choices], Deviation] = {}
        self.solved: tuple[dict[str, float], Frontier] | None = None

    @cached_property
    def cost_table(self) -> CostTable:
        if self.target.spend != "latency":
            return exact_cost_table(self.space, self.target.spend)
        timing = self.settings.timing
        tell = partial(print, flush=True) if timing.in_subprocess else self.log
        cost_table = call_in_subprocess_if(
            measured_cost_table, self.space, timing, tell, in_subprocess=timing.in_subprocess, on_line=self.log
        )
        return corrected(cost_table, self.space, self._shares)

    @cached_property
    def alone(self) -> dict[str, Sensitivities]:
        return measure_sensitivities(self.space, self.answers.first(FOR_SENSITIVITIES), self.log)

    @property
    def sensitivities(self) -> Sensitivities:
        return self.alone["softened"]

    @cached_property
    def first(self) -> dict[str, float]:
        """Where the search begins: how much the damages of an axis count, by those of the others, when they add up."""
        return dict.fromkeys(knobs_of(self.space), 0.0)

    def frontier(self, knobs: dict[str, float]) -> Frontier:
        """Returns the best plans at all prices, by the damages as some knobs weigh them; the last is kept."""
        if self.solved is None or self.solved[0] != knobs:
            self.solved = (
                knobs,
                Frontier(self.space, self.cost_table, self.sensitivities, weights_of(self.space, knobs)),
            )
        return self.solved[1]

    def step(self, most: float, knobs: dict[str, float], start: Choices | None = None) -> Step:
        """Returns the best plan at some knobs, or one that comes to the price from another plan."""
        if start is not None:
            return filled(self.space, self.cost_table, self.sensitivities, most, weights_of(self.space, knobs), start)
        frontier = self.frontier(knobs)
        if frontier.nothing <= most:
            raise NoOpPrescription(
                f"{self.target} is met by the unchanged model, whose {self.cost_table.of} is {frontier.nothing:.3f} of "
                "the original's: there is nothing to plan. Request a lower target."
            )
        return frontier.at(most)

    def realized(self, choices: Choices) -> nn.Module:
        return realize(self.space.model, self.space.prescription(choices))

    def measured(self, choices: Choices, answers: Answers) -> Deviation:
        """Measures a plan on some images, once."""
        key = len(answers), choices
        if key not in self.known:
            self.known[key] = answers.measure(self.realized(choices))
        return self.known[key]

    def for_cost(self, most: float) -> tuple[Trial, float]:
        """Finds the best plan at a cost; where the clock decides, until the clock agrees."""
        return self._by_timing(most) if self.target.spend == "latency" else (self._searched(most), most)

    def _by_timing(self, most: float) -> tuple[Trial, float]:
        """Asks for as much less, or more, as measured, and keeps the best plan that it finds fast enough.

        By how much the prices are off where such plans are, the closed form alone tells before anything is searched.
        """
        allowed, ratios, kept = most, [], None
        for attempt in range(ATTEMPTS):
            trial = self._searched(allowed) if attempt else self._best((self._first(allowed),))
            timed = self._clocked(trial)
            ratios.append(timed["ratio"])
            self.log(f"measured {ratios[-1]:.3f} where {trial.step.cost:.3f} was predicted")
            if ratios[-1] <= most and (kept is None or trial.divergence < kept[0].divergence):
                kept = trial, allowed, timed
            if NEAR * most <= ratios[-1] <= most and (attempt or self.settings.search.trials < 2):
                break
            allowed = trial.step.cost * CARE * most / ratios[-1]
        if kept is None:
            raise NotSupported(
                f"{self.target} cannot be promised: of plans priced at about {most:.3f} was measured "
                f"{', '.join(f'{ratio:.3f}' for ratio in ratios)} of the original's latency. Measure on a machine that "
                "does nothing else, or ask for less."
            )
        self.timed = kept[2]
        return kept[0], kept[1]

    def _first(self, most: float) -> Trial:
        budget = _Budget(self, most)
        return budget.tried(self.first, budget.step(self.first))

    def _searched(self, most: float) -> Trial:
        requested = (
            f"{self.target} {most:.6f} {self.space.diagnosis.fingerprint} {self.space.axes} {self.settings.reducer} "
            f"{len(self.fewer)}"
        )
        self.trials = refine_plan(self.space, self.settings.search, requested, _Budget(self, most), self._first(most))
        return self._best(self.trials)

    def _best(self, trials: Sequence[Trial]) -> Trial:
        """Returns the plan that does best on all images, of those that did best on fewer."""
        order = {trial.step.choices: trial for trial in sorted(trials, key=lambda trial: trial.softened)}
        first = list(order.values())[:FINALISTS]
        found = [self.tried(trial.knobs, trial.step, self.answers) for trial in first]
        best = min(found, key=lambda trial: trial.divergence)
        self.log(f"the best of {len(found)} on {len(self.answers)} images: {best.divergence:.4f} nats")
        return best

    def tried(self, knobs: dict[str, float], step: Step, answers: Answers) -> Trial:
        """Measures a plan as a trial of a search."""
        found = self.measured(step.choices, answers)
        return Trial(knobs, step, found.mean, found.softened.mean().item())

    def _clocked(self, trial: Trial) -> dict[str, Any]:
        """Times a plan beside the model as its library ships it."""
        timing, found = (
            self.settings.timing,
            self._beside_library_model({"plan": self.realized(trial.step.choices)})["plan"],
        )
        return {
            "ratio": found.ratio.value,
            "low": found.ratio.low,
            "high": found.ratio.high,
            "batch": timing.batch,
            "threads": found.threads,
            "hardware": found.hardware,
            "precision": timing.conditions.precision,
            "clock": found.clock,
            "rounds": found.rounds,
            "in_subprocess": timing.in_subprocess,
            "torch": found.torch_version,
        }

    def _shares(self, models: Mapping[str, nn.Module]) -> dict[str, float]:
        return {name: found.ratio.value for name, found in self._beside_library_model(models).items()}

    def _beside_library_model(self, models: Mapping[str, nn.Module]) -> dict[str, LatencyComparison]:
        timing, library_model = self.settings.timing, family_of(self.space.model).library_model(self.space.model)
        sides = models, library_model, timing.images(self.space), timing.protocol
        return call_in_subprocess_if(compare_latencies, *sides, in_subprocess=timing.in_subprocess, on_line=self.log)

    def for_drop(self) -> tuple[Trial, float]:
        """Finds the cheapest plan whose drop on the images is within the limit, by halving what is allowed."""
        low, high, found = 0.0, 1.0, None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            try:
                step = self.step(middle, self.first)
            except NotSupported:
                low = middle
                continue
            found_change = self.measured(step.choices, self.answers).change
            assert found_change is not None  # `plan` has required labels
            change = found_change.mean().item()
            self.log(f"plan at {step.cost:.3f}: {100 * change:+.1f} points")
            if -100 * change <= self.target.most:
                high, found = middle, step
            else:
                low = middle
        if found is None:
            raise NotSupported(f"no plan keeps the drop within {self.target.most:g} points; allow more.")
        return self._searched(high), high

    def finished(self, best: Trial, most: float, others: Answers) -> Plan:
        """Measures what is promised on images that nothing was chosen by, and tells why."""
        choices, space = best.step.choices, self.space
        deviation = others.measure(self.realized(choices))
        if self.target.of == DROP and self.target.spend == "latency":
            self.timed = self._clocked(best)
        about = {
            "axes": list(space.axes),
            "reducer": self.settings.reducer if TOKENS in space.axes else None,
            "form": space.form,
            "images": len(self.answers),
            "trial_images": len(self.fewer),
            "other_images": len(others),
            "knobs": best.knobs,
            "trials": [
                {
                    "knobs": trial.knobs,
                    "price": trial.step.cost,
                    "divergence": trial.divergence,
                    "softened": trial.softened,
                }
                for trial in self.trials
            ],
            "torch": torch.__version__,
        }
        return Plan(
            space.prescription(choices),
            str(self.target),
            self.target.spend,
            best.step.cost,
            expected_of(deviation),
            explained(space, self.cost_table, self.alone["divergence"], choices),
            self._front(best, most),
            self.timed,
            about,
        )

    def _front(self, best: Trial, most: float) -> tuple[Point, ...]:
        """Plans between the original and the target, at the knobs of the best one, measured on the images."""
        frontier = self.frontier(best.knobs)
        shares = [1 - (1 - most) * part / FRONT for part in range(1, FRONT)]
        found = dict.fromkeys(frontier.at(share) for share in shares if share < frontier.nothing)
        alone, even = self.alone["divergence"], weights_of(self.space, {})
        return tuple(
            Point(step.cost, alone.total(step.choices, even), self.measured(step.choices, self.answers).mean)
            for step in (*found, best.step)
        )


class _Budget:
    """Makes plans at one cost, and measures each once."""

    def __init__(self, making: Planner, most: float):
        self.making, self.most = making, most

    def step(self, knobs: dict[str, float], start: Choices | None = None) -> Step:
        return self.making.step(self.most, knobs, start)

    def tried(self, knobs: dict[str, float], step: Step) -> Trial:
        found = self.making.tried(knobs, step, self.making.fewer)
        self.making.log(f"plan at {step.cost:.3f}: {found.divergence:.4f} nats, softened {found.softened:.4f}")
        return found


def expected_of(deviation: Deviation) -> dict[str, Expected]:
    """Returns what may be expected of other images."""
    quantities = {"divergence": deviation.divergence, "agreement": deviation.agrees}
    if deviation.change is not None:
        quantities["change"] = deviation.change
    count = len(deviation.divergence)
    if count < 2:
        raise InvalidInput(f"{count} images to promise by: give at least two that the plan is not made on.")
    # That no image of a few changed is no proof that none will: one more is counted that did.
    more = {"divergence": 0.0, "agreement": 1.0, "change": 1.0}
    spreads = {name: ((own - own.mean()).square().sum() + more[name]) / (count - 1) for name, own in quantities.items()}
    return {name: Expected(float(own.mean()), float(spreads[name].sqrt()), count) for name, own in quantities.items()}


def explained(space: Space, cost_table: CostTable, sensitivities: Sensitivities, choices: Choices) -> tuple[str, ...]:
    """Says of every choice what it saves, all others being made, and what it costs alone."""
    lines, whole = [], cost_table.total(choices)
    nothing = Choices.nothing(space.depth)
    even = weights_of(space, {})
    for layer in range(space.depth):
        for axis in (*RANKS, TOKENS):
            own = _of(choices, axis)[layer]
            if not own:
                continue
            back = choices.with_num_pruned(layer, 0) if axis == TOKENS else choices.with_level(axis, layer, 0)
            alone = nothing.with_num_pruned(layer, own) if axis == TOKENS else nothing.with_level(axis, layer, own)
            what = f"{own} patches leave" if axis == TOKENS else f"{axis} keep {space.levels[own]:g} of their rank"
            saved, cost = 100 * (cost_table.total(back) - whole), sensitivities.total(alone, even)
            lines.append(
                f"layer {layer + 1}: {what}; saves {saved:.2f} % of the {cost_table.of}, alone {cost:.2g} nats"
            )
    return tuple(lines)


def _of(choices: Choices, axis: str) -> Sequence[int]:
    return choices.num_pruned if axis == TOKENS else getattr(choices, axis)
