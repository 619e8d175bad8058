"""The planner: cost table, sensitivities, optimal allocation, search, and measured predictions."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.data import ImageData, require_labels, without_images_of
from attnrx.data.model_data import images_for
from attnrx.decide.planning.allocation import Step, require_reachable
from attnrx.decide.planning.cost_table import CostTable
from attnrx.decide.planning.plan_measurements import PlanMeasurements
from attnrx.decide.planning.plan_search import BY_SOFTENED, Trial, refine_plan
from attnrx.decide.planning.plan_settings import DROP, PlanSettings, Target
from attnrx.decide.planning.reference_outputs import Answers, Deviation
from attnrx.decide.planning.sensitivity import Sensitivities
from attnrx.decide.planning.space import AXES, TOKENS, Choices, Space
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.plan import Plan, PredictedQuantity, limits_of
from attnrx.support.arguments import checked, instance
from attnrx.support.errors import InvalidInput, NotSupported, TargetMet
from attnrx.support.progress import begin, phases, track
from attnrx.vit.models import model_fingerprint, require_all_tokens
from attnrx.vit.models.verbs import verb
from attnrx.vit.outputs import OutputKind, current_judgement

# The phases of a plan and their usual shares of the time (`progress.Phases`).
PHASES = {"measuring costs": 30.0, "measuring sensitivities": 25.0, "searching plans": 40.0}
PHASES["predicting on other images"] = 5.0
# Every attempt of a plan for latency aims at RETRY_FACTOR times the target; where few attempts follow to correct a
# miss, and timings are short, at QUICK_FACTOR times, so that the result reaches the target when it is measured again.
RETRY_FACTOR, QUICK_FACTOR = 0.993, 0.98
# A plan that misses a target of latency by less, after all attempts, is returned if the ones that reach it diverge by
# more than TOLERATED nats and twice as far; machines vary by as much.
MISSED, TOLERATED = 1.05, 0.01
# A timing that differs from the prediction by a larger share is repeated.
DOUBTFUL = 0.08
# The largest share of the latency that is planned for: a plan for 1 would be the unchanged model.
LARGEST = 0.99
# A plan is measured on one batch first, and no further if its divergence there is so many times that of the best plan.
HOPELESS = 1.2
# The plans of one, two and three stages that a search for latency measures too, of each number.
FEW_STAGES = 5
# Bisection steps of the search for an accuracy drop: the cost is found to 1 / 64.
HALVINGS = 6


@checked(target=instance("a Target, or its text, e.g. 'macs=0.5x' or 'faster=1.6'", Target, str))
@verb
def plan(
    model: nn.Module,
    diagnosis: Diagnosis,
    target: Target | str,
    images: ImageData,
    others: ImageData,
    *,
    settings: PlanSettings | None = None,
) -> Plan:
    """Allocates one budget to ranks and tokens, minimizing the divergence of the outputs.

    The costs of all choices come from a cost table (closed form for MACs and parameters, measured for latency); their
    sensitivities are measured one at a time on the first of `images`. `Frontier` is optimal if sensitivities add up;
    because this is an approximation, a search then varies the best plan, by the measured divergence of
    whole plans: all on a part of `images`, the best on all of them. The images are held in memory. The predictions are
    measured on `others`, which are not used for any choice. Labels are needed for a target of accuracy only; without
    labels of `others` no change of accuracy is predicted.

    Args:
        model: The model.
        diagnosis: Its diagnosis, with moments for a plan of values and MLP.
        target: A target or its text, e.g. "latency=0.6x".
        images: The images that the plan is chosen on.
        others: Other images, which the predictions are measured on.
        settings: The search space, the conditions of timings, and how much is measured.

    Returns:
        The plan with its prescription and predictions.

    Raises:
        FingerprintMismatch: The diagnosis belongs to another model.
        NotSupported: No plan is cheap enough by the cost table, or the measured latency does not reach the target.
        TargetMet: The unchanged model meets the target.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> images, others = torch.randn(32, 3, 32, 32), torch.randn(32, 3, 32, 32)  # to plan on, to predict on
        >>> model = rx.load(vit)
        >>> planned = rx.plan(model, rx.diagnose(model, images, moments=True), "macs=0.7x", images, others)
        >>> small = rx.realize(model, planned.prescription)
    """
    with phases(PHASES, (settings or PlanSettings()).log):
        return plan_sharing(model, diagnosis, target, images, others, {}, settings=settings)


def plan_sharing(
    model: nn.Module,
    diagnosis: Diagnosis,
    target: Target | str,
    images: ImageData,
    others: ImageData,
    measured: dict[str, PlanMeasurements],
    *,
    settings: PlanSettings | None = None,
    reference: nn.Module | None = None,
) -> Plan:
    """Returns a plan as `plan` does, by what was `measured` for earlier targets of the same cost, and adds to it.

    All divergences and shares of costs are relative to the `reference`, by default the model, which may be a copy of it
    with a smaller decoder.
    """
    target = Target.parse(target) if isinstance(target, str) else target
    require_all_tokens(model, "plan for")
    diagnosis.require(model_fingerprint(model), "the model to plan for")
    settings = settings or PlanSettings()
    plan_images, other_images = images_for(model, images, "images"), images_for(model, others, "others")
    # Those that predictions are not measured on.
    distinct_images = without_images_of(plan_images, other_images)
    if (count := len(plan_images) - len(distinct_images)) > 0:
        settings.log(f"{count:,} of {len(plan_images):,} images to plan on are among those to predict on: not used")
    if target.quantity == DROP:
        require_labels(distinct_images)
    cost = target.minimized  # what is measured depends on it and not on its limit
    if cost not in measured:
        space = settings.space(model, diagnosis, target)
        measured[cost] = PlanMeasurements(space, settings, cost, distinct_images, reference)
    planner = Planner(measured[cost], settings, target)
    # Outputs of the original on the other images are computed after the plan: they need memory only then.
    best = planner.for_drop() if target.quantity == DROP else planner.for_cost(target.limit)
    begin("predicting on other images")
    return planner.finished(best, Answers.of(reference or model, other_images, settings.batch_size))


class Planner:
    """The search for the plan of one target, by measurements that targets of the same cost share."""

    def __init__(self, measurements: PlanMeasurements, settings: PlanSettings, target: Target):
        self.measurements, self.space = measurements, measurements.space
        self.settings, self.target, self.log = settings, target, settings.log
        self.trials: tuple[Trial, ...] = ()
        self.latency: dict[str, Any] | None = None  # of the plan that is returned

    def step(self, limit: float, start: Choices | None = None) -> Step:
        """Returns the optimal plan at a cost, or the greedy one from the plan `start`.

        Raises:
            TargetMet: The unchanged model meets the target.
        """
        frontier = self.measurements.frontier
        if start is not None:
            return frontier.near(limit, start)
        # For latency: the reference is the model in its own library, than which attnrx's kernels may be faster.
        if frontier.nothing <= limit:
            where = "in attnrx's kernels" if self.settings.to is None else f"as {self.settings.to}"
            raise TargetMet(
                f"{self.target} is met by the unchanged model {where}: its {self.target.minimized} is "
                f"{frontier.nothing:.3f} of that in its own library, so there is nothing to plan. Save it as it is "
                f"with rx.save, or request less than {frontier.nothing:.3f} (faster={1 / frontier.nothing:.2f})."
            )
        return frontier.at(limit)

    def for_cost(self, limit: float) -> Trial:
        """Returns the best plan at a cost; for latency, by repeated measurement.

        Raises:
            TargetMet: The unchanged model meets the target.
            NotSupported: The measured latencies of the plans are too far from the predicted ones for a promise.
        """
        require_reachable(self.space, self.measurements.cost_table, limit)
        return self._by_timing(limit) if self.target.minimized == "latency" else self._searched(limit)

    def _by_timing(self, limit: float) -> Trial:
        """Repeats planning with a target corrected by the measured latency, and returns the best plan that is fast
        enough.
        """
        # The cost table errs by a factor that depends on the plan. So a plan is made for a predicted cost and timed,
        # and the next one is made for that cost times target / measured, as in a fixed-point iteration. Of all plans
        # that are fast enough the one with the lowest divergence is returned, and not the last.
        largest = LARGEST * self.measurements.cost_table.total(Choices.nothing(self.space.depth))
        factor = QUICK_FACTOR if self.settings.adjusts else RETRY_FACTOR
        allowed = limit * (QUICK_FACTOR if self.settings.adjusts else 1.0)
        best, trial = None, None
        timings: list[tuple[Trial, float]] = []  # trial and measured share of the latency
        largest_ratio = limit * self.settings.max_ratio
        self.measurements.sensitivities  # noqa: B018  (measured first: they are a phase of their own)
        begin("searching plans")
        # A correction asks for no more than there is. The target itself does, and `Frontier.at` refuses it.
        least = self.measurements.frontier.reachable
        allowed = max(allowed, min(limit, least))
        for attempt in track(range(self.settings.attempts), "searching plans"):
            if trial is None:  # the plan of the closed form, to correct the cost before a search
                trial = self._best((self._first(allowed),))
            elif attempt > 1 and self.settings.adjusts:
                trial = self._adjusted(allowed, trial)
            else:
                trial = self._searched(allowed)
            ratio = self._timed(trial.step)
            timings.append((trial, ratio))
            if ratio <= largest_ratio and (best is None or trial.divergence < best[0].divergence):
                best = timings[-1]
            # The first attempt is the closed form: it measures the error of the cost table before a search is paid for.
            searched = attempt or self.settings.trials < 2
            if self.settings.min_ratio * limit <= ratio <= largest_ratio and searched:
                break
            if allowed <= least and ratio > largest_ratio and searched:
                break  # the fastest plan is not fast enough
            # From the predicted cost of the plan itself, which may be below the allowed one.
            allowed = max(min(trial.step.cost * factor * limit / ratio, largest), least)
        if best is None:
            best = min((timed for timed in timings if timed[1] <= limit), key=_divergence, default=None)
        near = [timed for timed in timings if timed[1] <= MISSED * limit]
        if self.settings.adjusts and near:
            closest = min(near, key=_divergence)
            # A plan that is fast enough but answers far worse is of less use than one that nearly is.
            if best is None or max(2 * closest[0].divergence, TOLERATED) < best[0].divergence:
                best = closest
                if best[1] > limit:
                    self.log(f"the target was missed: {1 / best[1]:.2f}x faster instead of {1 / limit:.2f}x")
        if best is None:
            speeds = [1 / ratio for _, ratio in timings]
            fastest, measured = max(speeds), ", ".join(f"{speed:.2f}x" for speed in speeds)
            less = f"at most faster={fastest - 0.01:.2f}" if fastest > 1.02 else "a share of the MACs, e.g. macs=0.7"
            raise NotSupported(
                f"{self.target} cannot be promised: plans for it were measured at {measured} the speed of the "
                f"original. Request {less}, or measure on an idle machine."
            )
        self.latency = self.measurements.latency(best[0].step.choices)
        return best[0]

    def _timed(self, step: Step) -> float:
        """Returns the measured latency of a plan as a share."""
        ratio = 1 / self.measurements.speed(step.choices)
        if abs(ratio / step.cost - 1) > DOUBTFUL:  # an error of the table, or of this timing
            ratio = 1 / self.measurements.speed(step.choices)
        what = "" if self.settings.to is None else f" as {self.settings.to}"
        self.log(f"measured {1 / ratio:.2f}x faster{what}, where {1 / step.cost:.2f}x was predicted")
        return ratio

    def _adjusted(self, limit: float, last: Trial) -> Trial:
        """Returns the best plan at this cost among those reached from the best trials, and those of few stages."""
        # Greedy moves from plans that are measured already: no search, and few plans to measure at the new cost. Those
        # of few stages, because the trials may be for a cost that was wrong.
        order = sorted(self.trials, key=BY_SOFTENED)
        starts = [last.step.choices, *(trial.step.choices for trial in order[: self.settings.finalists])]
        starts += self.measurements.frontier.few_stages(limit, 1)
        steps: dict[Choices, Step] = {}
        for start in dict.fromkeys(starts):  # without repetitions, in order
            with suppress(NotSupported):  # nothing near this plan is cheap enough
                step = self.step(limit, start)
                steps[step.choices] = step
        if not steps:
            return self._first(limit)
        tried: list[Trial] = []
        for step in steps.values():
            tried.append(self.tried(step, min(tried, key=BY_SOFTENED, default=None)))
        return self._best(tried)

    def _first(self, limit: float) -> Trial:
        return self.tried(self.step(limit))

    def _searched(self, limit: float) -> Trial:
        self.measurements.sensitivities  # noqa: B018  (measured first: they are a phase of their own)
        begin("searching plans")
        build, few = partial(self.step, limit), ()
        if self.target.minimized == "latency":
            # A stage takes time, and what many patches pruned at once change is more than the sum of sensitivities.
            few = self.measurements.frontier.few_stages(limit, FEW_STAGES)
        self.trials = refine_plan(self.space, self.settings, build, self.tried, self._first(limit), few)
        return self._best(self.trials)

    def tried(self, step: Step, best: Trial | None = None) -> Trial:
        """Measures a plan: on one batch, and if it is not far worse there than the best known plan, on the images of
        the trials.
        """
        found, about = self.measurements, ""
        few = found.answers.first(1)  # one batch
        trial = found.trial(step, few)
        least = trial if best is None else found.trial(best.step, few)
        if best is not None and trial.softened > HOPELESS * least.softened > 0 < least.divergence:
            # Few images have easier or harder ones among them, as they have for the best plan.
            factors = best.divergence / least.divergence, best.softened / least.softened
            trial = replace(trial, divergence=trial.divergence * factors[0], softened=trial.softened * factors[1])
            about = f", by {len(few)} images"
        else:
            trial = found.trial(step, found.trial_answers)
        unit = f" {found.answers.kind.unit}".rstrip()
        cost = f"{100 * step.cost:.1f} % of the {self.target.minimized}"
        self.log(f"a plan of {cost}: divergence {trial.divergence:.3g}{unit}{about}")
        return trial

    def _best(self, trials: Sequence[Trial]) -> Trial:
        """Returns the trial with the lowest divergence on all images among the finalists on fewer images."""
        # By choices, because several trials may have one plan.
        order = {trial.step.choices: trial for trial in sorted(trials, key=BY_SOFTENED)}
        first = list(order.values())[: self.settings.finalists]
        answers = self.measurements.answers
        measured = [self.measurements.trial(trial.step, answers) for trial in first]
        best = min(measured, key=lambda trial: trial.divergence)
        unit = f" {answers.kind.unit}".rstrip()
        tried = "the plan" if len(measured) == 1 else f"the best of {len(measured)} plans"
        self.log(f"{tried} on {len(answers)} images: divergence {best.divergence:.3g}{unit}")
        return best

    def for_drop(self) -> Trial:
        """Returns the cheapest plan whose drop on the images is within the limit, by bisection over the cost.

        Raises:
            NotSupported: No plan keeps the drop within the limit.
        """
        # Closed forms only: a search at every step would be repeated for every cost. `low` costs too little, `high` is
        # the smallest cost so far that keeps the accuracy, at which a search follows.
        low, high, cheapest = 0.0, 1.0, None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            try:
                # NotSupported: no plan is so cheap, so the smallest possible cost is above.
                step = self.step(middle)
            except NotSupported:
                low = middle
                continue
            if self._keeps_accuracy(step):
                high, cheapest = middle, step
            else:
                low = middle
        if cheapest is None:
            raise NotSupported(f"no plan keeps the drop within {self.target.limit:g} points; allow more.")
        found = self._searched(high)
        # The search is for the lowest divergence, and its plan may lose more accuracy than that of the closed form.
        if not self._keeps_accuracy(found.step):
            found = self.measurements.trial(cheapest, self.measurements.answers)
        return found

    def _keeps_accuracy(self, step: Step) -> bool:
        """Whether the accuracy of a plan on the images drops by no more than the target."""
        changes = self.measurements.deviation(step.choices).change
        assert changes is not None  # `plan` has required labels
        change = changes.mean().item()
        self.log(
            f"a plan of {100 * step.cost:.1f} % of the {self.target.minimized}: {100 * change:+.1f} points of accuracy"
        )
        return -100 * change <= self.target.limit

    def finished(self, best: Trial, others: Answers) -> Plan:
        """Builds the plan: measures its predictions on held-out images and explains its choices."""
        choices, space, found = best.step.choices, self.space, self.measurements
        begin("predicting on other images")
        deviation = others.measure(found.realized(choices))
        about = {
            "axes": list(space.axes),
            "reducer": None if space.reducer is None else str(space.reducer),
            "form": space.form,
            "outputs": found.answers.kind.name,
            **({} if current_judgement().divergence is None else {"divergence": found.answers.kind.distance}),
            "images": len(found.answers),
            "trial_images": len(found.trial_answers),
            "other_images": len(others),
            "trials": [
                {"price": trial.step.cost, "divergence": trial.divergence, "softened": trial.softened}
                for trial in self.trials
            ],
            "torch": torch.__version__,
        }
        return Plan(
            space.prescription(choices),
            str(self.target),
            self.target.minimized,
            best.step.cost,
            expected_of(deviation, others.kind),
            explained(space, found.cost_table, found.sensitivities, choices),
            self.latency,
            about,
        )


def _divergence(timed: tuple[Trial, float]) -> float:
    return timed[0].divergence


def expected_of(deviation: Deviation, outputs: OutputKind) -> dict[str, PredictedQuantity]:
    """Returns the predictions for other images.

    Raises:
        InvalidInput: There are fewer than two images.
    """
    measured = {"divergence": deviation.divergence, "agreement": deviation.agrees, "change": deviation.change}
    quantities = {name: values for name, values in measured.items() if values is not None}
    count = len(deviation.divergence)
    if count < 2:
        raise InvalidInput(f"{count} images to promise by: give at least two that the plan is not made on.")
    # A pseudo-count of one changed image: without any change the spread would be estimated as zero. A divergence of
    # `outputs.flip_divergence` is that of an image whose decision is in doubt.
    more = {"divergence": outputs.flip_divergence**2, "agreement": 1.0, "change": 1.0}
    spreads = {
        name: ((values - values.mean()).square().sum() + more[name]) / (count - 1)
        for name, values in quantities.items()
    }
    return {
        name: PredictedQuantity(float(values.mean()), float(spreads[name].sqrt()), count, limits_of(name, outputs))
        for name, values in quantities.items()
    }


def explained(space: Space, cost_table: CostTable, sensitivities: Sensitivities, choices: Choices) -> tuple[str, ...]:
    """Returns one line per choice: its savings given all other choices, and its sensitivity alone."""
    lines, total = [], cost_table.total(choices)
    nothing = Choices.nothing(space.depth)
    for layer in range(space.depth):
        for axis in AXES:
            value = choices.of(axis)[layer]
            if not value:
                continue
            what = f"{value} patches pruned" if axis == TOKENS else f"{axis} keep {space.levels[value]:g} of their rank"
            # Savings are given all other choices, because those of ranks depend on the tokens that remain.
            saved = 100 * (cost_table.total(choices.with_choice(axis, layer, 0)) - total)
            cost = sensitivities.total(nothing.with_choice(axis, layer, value))
            gain = f"saves {saved:.2f} % of the {cost_table.quantity}"
            lines.append(f"layer {layer + 1}: {what}; {gain}, sensitivity {cost:.2g}")
    return tuple(lines)
