"""The planner measures costs and sensitivities, allocates the budget, and refines the plan by measured divergence.

The search changes a few choices of the best plan at random, and then returns to the budget by greedy moves. Each plan
depends only on the seed and on the plans tried before it.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from attnrx.change.realization import realize
from attnrx.data import ImageData, ImageSet, require_labels, without_images_of
from attnrx.data.model_data import images_for
from attnrx.decide.planning.allocation import Frontier, Step, require_reachable
from attnrx.decide.planning.cost_table import CostTable, exact_cost_table
from attnrx.decide.planning.measured_costs import PlanTimer
from attnrx.decide.planning.sensitivity import Answers, Deviation, Sensitivities, measure_sensitivities, suits_bfloat16
from attnrx.decide.planning.space import TOKENS, Choices, Space, format_of
from attnrx.decide.planning.uniform import UniformCosts, UniformFrontier, UniformSpace
from attnrx.exporting import Baseline
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.effort import AXES, AXIS_WORDS, PlanSettings
from attnrx.nouns.plan import Plan, PredictedQuantity, TargetMet, limits_of
from attnrx.nouns.target import COSTS, DROP, RECALL, SIZE, Target
from attnrx.support.arguments import checked, instance
from attnrx.support.errors import InvalidInput, NoOpPrescription, NotSupported
from attnrx.support.progress import begin, details, phases, track
from attnrx.support.shapes import Tensor
from attnrx.vit.models import model_fingerprint, require_all_tokens
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.outputs import OutputKind, current_judgement

# The phases of planning, with their usual shares of the time in percent (`progress.Phases`).
PHASES = {"measuring costs": 30.0, "measuring sensitivities": 25.0, "searching plans": 40.0}
PHASES["predicting on other images"] = 5.0
# If a plan misses its latency target, the next attempt aims at RETRY_FACTOR times the target. A quick plan has few
# attempts to correct a miss, and its timings are short. So it aims at QUICK_FACTOR times the target, which leaves a
# margin for a second measurement.
RETRY_FACTOR, QUICK_FACTOR = 0.993, 0.98
# A plan may miss a latency target by less than a factor MISSED, because machines vary as much. Such a plan is returned
# if the plans that reach the target have much worse outputs. They must diverge by more than TOLERATED nats and by more
# than twice as much.
MISSED, TOLERATED = 1.05, 0.01
# A quick plan for a file is timed together with a plan at CHEAPER times its cost, because two files can be written at
# once. If the cost table errs by -4 to +7 %, one of the two is fast enough and close to the target. Plans for int8
# files of a ViT-Tiny were 2 to 8 % faster than predicted at batch size 1, and 5 % slower at 32 (Xeon, 2026-11-30).
CHEAPER = 0.945
# A timing is repeated if it differs from the prediction by more than this share.
DOUBTFUL = 0.08
# If no plan was fast enough, up to LAST_ATTEMPTS plans are adjusted to LAST_FACTOR times the corrected cost.
LAST_ATTEMPTS, LAST_FACTOR = 2, 0.97
# The largest share of the latency that a plan may aim at. A plan at a share of 1 would be the unchanged model.
LARGEST = 0.99
# Plans are measured on one batch first. A plan is measured on more images only if its divergence on this batch is at
# most HOPELESS times the best plan's.
HOPELESS = 1.2
# A search for latency also measures FEW_STAGES plans with one stage, as many with two, and as many with three.
FEW_STAGES = 5
# The first trials of a search start from at most EVEN even schedules of pruned patches. Later trials change the best
# plan in at most MOST_VARIED choices. Each draws several variations (`PlanSettings.variations`) in at most
# ATTEMPTS attempts, and measures only the variation with the lowest predicted divergence.
EVEN, MOST_VARIED, ATTEMPTS = 6, 3, 40
# A plan's outputs are kept in memory if the model has at most this many numbers per image. Dense models have more, e.g.
# one per pixel.
KEPT = 4096
# The number of bisection steps in the search for an allowed loss. It finds the cost to within 1 / 64.
HALVINGS = 6
# A plan for a file size is good enough if its file has at least this share of the target size.
NEARLY = 0.98


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
    """Chooses the ranks and tokens to prune, so that the model meets a budget and its outputs diverge least.

    A cost table holds the costs of all choices. For MACs and parameters, costs are computed. For latency, they are
    measured. The sensitivity of each choice, i.e. how much it changes the outputs, is measured separately, on the first
    of `images`. If sensitivities added up exactly, the optimum would be known (`Frontier`). They add up only
    approximately, so a search varies the best plan and measures the divergence of whole plans. All plans are measured
    on a part of `images`, and the best plans on all of them. The images are held in memory.

    The plan's predictions are measured on `others`, which influence no choice. You need labels only for an accuracy
    target. If `others` have no labels, the plan contains no prediction of the accuracy.

    Args:
        model: The model, without token pruning or merging.
        diagnosis: The diagnosis of the model. It must include moments if values or MLPs may be pruned.
        target: A target or its text, e.g. "macs=0.6x" or "faster=1.6". A speed is relative to your model as you would
            run it without attnrx.
        images: Images for choosing the plan. Images that are also among `others` are not used.
        others: Other images, for measuring the predictions.
        settings: The search space, the timing conditions, and how much is measured.

    Returns:
        The plan with its prescription and predictions.

    Raises:
        InvalidInput: The target is a recall, which is measured after the repair. Give it to `shrink` instead.
        FingerprintMismatch: The diagnosis belongs to another model.
        NotSupported: According to the cost table, no plan is cheap enough, or no plan reaches the target when it is
            timed.
        NoOpPrescription: The unchanged model meets the target, e.g. because attnrx's kernels are faster. Save it
            unchanged.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> images, others = torch.randn(32, 3, 32, 32), torch.randn(32, 3, 32, 32)  # to plan on, to predict on
        >>> model = rx.load(vit)
        >>> planned = rx.plan(model, rx.diagnose(model, images, moments=True), "macs=0.7x", images, others)
        >>> small = rx.realize(model, planned.prescription)
    """
    with phases(PHASES, (settings or PlanSettings()).log):
        found = plan_sharing(model, diagnosis, target, images, others, {}, settings=settings)
    if isinstance(found, TargetMet):
        raise NoOpPrescription(found.reason)
    return found


def plan_sharing(
    model: nn.Module,
    diagnosis: Diagnosis,
    target: Target | str,
    images: ImageData,
    others: ImageData,
    planners: dict[str, "Planner"],
    *,
    settings: PlanSettings | None = None,
    reference: nn.Module | None = None,
    baseline: Baseline | None = None,
) -> Plan | TargetMet:
    """Returns a plan, as `plan` does, or `TargetMet` if the unchanged model meets the target.

    All targets for the same kind of cost, e.g. latency, share one planner in the dictionary `planners`. If it is
    missing, it is created. Divergences are measured against the `reference`, by default the model. The model may also
    be a copy of the reference with a smaller decoder. Latencies are relative to the `baseline`, by default the model as
    it runs without attnrx. All other costs are relative to the model.

    Raises:
        InvalidInput: The target is a recall, which is measured after the repair.
    """
    target = Target.parse(target) if isinstance(target, str) else target
    if target.quantity == RECALL:
        raise InvalidInput(f"{target} is measured after the repair: give it to shrink, or plan for e.g. max-kl=0.001.")
    require_all_tokens(model, "plan for")
    diagnosis.require(model_fingerprint(model), "the model to plan for")
    settings = settings or PlanSettings()
    format_of(settings)  # an unknown format raises here, before the work
    plan_images, other_images = images_for(model, images, "images"), images_for(model, others, "others")
    # `distinct_images` are the images to plan on, without images that are also used for predictions.
    distinct_images = without_images_of(plan_images, other_images)
    if (count := len(plan_images) - len(distinct_images)) > 0:
        settings.log(f"{count:,} of {len(plan_images):,} images to plan on are among those to predict on: not used")
    if target.quantity == DROP:
        require_labels(distinct_images)
    cost = target.minimized  # the measurements depend on this cost, but not on the target's limit
    if cost not in planners and settings.portable:
        uniform = UniformSpace.of_class(model, diagnosis, settings)
        planners[cost] = UniformPlanner(uniform, settings, cost, distinct_images, reference, baseline)
    elif cost not in planners:
        space = Space.of(model, diagnosis, target, settings)
        planners[cost] = Planner(space, settings, cost, distinct_images, reference, baseline)
    return planners[cost].plan(target, other_images)


@dataclass(frozen=True)
class Trial:
    """One measured plan and its mean divergences. The search minimizes `softened` (see `Deviation`)."""

    step: Step
    divergence: float
    softened: float


BY_SOFTENED = attrgetter("softened")  # the key by which trials are compared


def varied(space: Space, choices: Choices, random: np.random.Generator) -> Choices:
    """Applies up to `MOST_VARIED` random changes to a plan.

    Each change either keeps more in one layer, or prunes more in one layer, or moves a stage.
    """
    for _ in range(1 + int(random.integers(MOST_VARIED))):
        # Changes may raise or lower the cost, because greedy moves meet the budget again afterwards.
        variations = list((space.relaxations, space.moves, space.shifts)[random.integers(3)](choices))
        if variations:
            choices = variations[int(random.integers(len(variations)))]
    return choices


class Planner:
    """Makes plans for one kind of cost, such as latency. All targets for this cost share the planner.

    The planner measures costs, sensitivities and deviations only once, and keeps the last timing of every plan.
    Deviations are measured against the `reference`, by default the model. The model may also be a copy of the reference
    with a smaller decoder. Sensitivities are measured against the model itself, because choices change this model.
    """

    def __init__(
        self,
        space: Space,
        settings: PlanSettings,
        minimized: str,
        images: ImageSet,
        reference: nn.Module | None = None,
        baseline: Baseline | None = None,
    ):
        self.space, self.settings, self.minimized = space, settings, minimized
        self.log, self.details = settings.log, details(settings.log)
        self.reference, self.images = reference or space.model, images
        self.timer = PlanTimer(space, settings, images, baseline)
        self.trials: tuple[Trial, ...] = ()  # the trials of the last search
        self._deviations: dict[tuple[int, Choices], Deviation] = {}  # by the number of images and the plan
        self._outputs: dict[Choices, list[Tensor]] = {}  # the outputs of plans, per batch, on the first images
        self._realized: dict[Choices, nn.Module] = {}  # only the last plan, which is measured on more images
        self._latencies: dict[Choices, dict[str, Any]] = {}  # see `PlanTimer.timings`

    # Outputs are computed only after the cost table, which shows whether a target is impossible.
    @cached_property
    def answers(self) -> Answers:
        """The reference's outputs on all images."""
        bfloat16 = self.settings.bfloat16 and suits_bfloat16(self.reference, self.images, self.log)
        return Answers.of(self.reference, self.images, self.settings.batch_size, bfloat16)

    @cached_property
    def trial_answers(self) -> Answers:
        """The reference's outputs on the first images, for the search. Only finalists are measured on all images."""
        return self.answers.first(self.settings.trial_images)

    @cached_property
    def cost_table(self) -> CostTable:
        begin("measuring costs")
        return self.timer.cost_table() if self.minimized == "latency" else exact_cost_table(self.space, self.minimized)

    @cached_property
    def sensitivities(self) -> Sensitivities:
        """The sensitivity of every single choice. For classes, it is half the variance of the change in the logits."""
        # This variance ranks plans better than a KL divergence on few images (docs/results/plan.md).
        begin("measuring sensitivities")
        answers = self.answers.exactly(self.settings.sensitivity_images)
        return measure_sensitivities(self.space, answers, self.settings)

    @cached_property
    def frontier(self) -> Frontier:
        """The optimal plans for every budget. The dynamic program is solved once for all budgets."""
        return Frontier(self.space, self.cost_table, self.sensitivities)

    def realized(self, choices: Choices) -> nn.Module:
        if choices not in self._realized:
            self._realized.clear()
            self._realized[choices] = realize(self.space.model, self.space.prescription(choices))
        return self._realized[choices]

    def deviation(self, choices: Choices, answers: Answers) -> Deviation:
        """Returns how far a plan's outputs deviate on the images in `answers`, the first of the planner's images."""
        key = len(answers), choices
        if key not in self._deviations:
            # A larger set begins with the same images, so earlier outputs are reused.
            outputs = self._outputs.get(choices, [])
            if len(outputs) < len(answers.batches):
                outputs = [*outputs, *answers.outputs_of(self.realized(choices), len(outputs))]
                if answers.outputs[0].numel() <= KEPT:
                    self._outputs[choices] = outputs
            self._deviations[key] = answers.deviation(outputs[: len(answers.batches)])
        return self._deviations[key]

    def trial(self, step: Step, answers: Answers) -> Trial:
        """Measures a plan on the images in `answers`, and returns it as a trial."""
        deviation = self.deviation(step.choices, answers)
        return Trial(step, deviation.mean, deviation.softened.mean().item())

    def latency(self, choices: Choices) -> dict[str, Any]:
        """Returns a plan's last timing, which becomes its promised speed. If a format is set, its file is timed."""
        if choices not in self._latencies:
            (self._latencies[choices],) = self.timer.timings([self.realized(choices)])
        return self._latencies[choices]

    def plan(self, target: Target, others: ImageSet) -> Plan | TargetMet:
        """Returns the plan for a target, with a reason for every choice, and predictions measured on other images.

        If the unchanged model meets the target, returns `TargetMet` instead.

        Raises:
            NotSupported: No plan meets the target.
        """
        best, latency = self.best(target), None
        if isinstance(best, TargetMet):
            return best
        choices, space = best.step.choices, self.space
        if self.minimized == "latency":
            latency = self.latency(choices)
        begin("predicting on other images")
        # The outputs on the other images are computed only after the search, so they take no memory during it.
        answers = Answers.of(self.reference, others, self.settings.batch_size)
        deviation = answers.measure(self.realized(choices))
        self._realized.clear()
        about = {
            "axes": list(space.axes),
            "reducer": None if space.reducer is None else str(space.reducer),
            "form": space.form,
            "outputs": self.answers.kind.name,
            **({} if current_judgement().divergence is None else {"divergence": self.answers.kind.distance}),
            "images": len(self.answers),
            "trial_images": len(self.trial_answers),
            "bfloat16": self.answers.bfloat16,
            "other_images": len(answers),
            "trials": [
                {"price": trial.step.cost, "divergence": trial.divergence, "softened": trial.softened}
                for trial in self.trials
            ],
            "torch": torch.__version__,
        }
        return Plan(
            space.prescription(choices),
            str(target),
            self.minimized,
            best.step.cost,
            expected_of(deviation, answers.kind),
            self._explained(choices),
            latency,
            about,
        )

    def best(self, target: Target) -> Trial | TargetMet:
        """Returns the best plan for a target.

        If the target is a latency or a file size, several plans are made, and each is corrected by the measurement of
        the previous one. If the target limits the loss, the best plan is the cheapest plan within this limit. If the
        unchanged model meets the target, returns `TargetMet` instead.

        Raises:
            NotSupported: No plan is cheap enough or keeps the loss within the limit, or measured latencies differ too
                much from the predictions.
        """
        self.trials = ()
        if target.quantity in COSTS:
            self._require_reachable(target.limit)
        self.frontier  # noqa: B018  (measures costs and sensitivities first, because they are phases of their own)
        begin("searching plans")
        if target.quantity == SIZE:
            return self._by_size(target)
        if target.quantity not in COSTS:
            return self._cheapest(target)
        return self._by_timing(target) if self.minimized == "latency" else self._searched(target.limit)

    def _require_reachable(self, limit: float) -> None:
        """Raises NotSupported, before sensitivities are measured, if every plan costs more than `limit`.

        For a speed target, also logs the unchanged model's speed and the largest possible speed.
        """
        is_speed = self.minimized == "latency"
        if is_speed:
            unchanged, title = self.cost_table.total(Choices.nothing(self.space.depth)), self.timer.baseline.title
            self.log(f"with nothing removed attnrx is {1 / unchanged:.2f}x as fast as {title}")
        least = require_reachable(self.space, self.cost_table, limit)
        if is_speed and least > 0:  # noise may make the cheapest plan's cost negative
            self.log(f"the fastest plan that is possible has {1 / least:.1f}x the speed")

    def _explained(self, choices: Choices) -> tuple[str, ...]:
        return explained(self.space, self.cost_table, self.sensitivities, choices)

    def _by_timing(self, target: Target) -> Trial | TargetMet:
        """Makes several plans. The measured latency of each plan corrects the limit for the next plan.

        Returns the best plan that is fast enough, or `TargetMet` if the unchanged model is fast enough.
        """
        # The cost table errs by a factor that depends on the plan. So each plan is made for a predicted cost and then
        # timed. The next plan is made for this cost times target / measured, as in a fixed-point iteration. Of all
        # plans that are fast enough, the plan with the lowest divergence is returned, which need not be the last.
        limit, unchanged = target.limit, self.frontier.nothing
        factor = QUICK_FACTOR if self.settings.adjusts else RETRY_FACTOR
        timings: list[tuple[Trial, float]] = []  # trial and measured share of the latency
        largest_ratio = limit * self.settings.max_ratio
        # Corrections never ask for more than plans can save. If the target itself does, `Frontier.at` raises.
        least = self.frontier.reachable
        # The unchanged model may already be fast enough, because attnrx's kernels and files may be faster than the
        # baseline, which is the model without attnrx.
        with_margin = max(limit * (QUICK_FACTOR if self.settings.adjusts else 1.0), min(limit, least))
        if unchanged <= with_margin:
            where = "in attnrx's kernels" if self.settings.to is None else f"as {self.settings.to}"
            return TargetMet.by_speed(1 / limit, 1 / unchanged, where, self.timer.baseline.title)
        # The second plan of a pair leaves the margin.
        allowed = limit if self._times_pairs else with_margin
        for attempt in track(range(self.settings.attempts + LAST_ATTEMPTS), "searching plans"):
            is_extra = attempt >= self.settings.attempts
            if is_extra and any(ratio <= limit * (MISSED if self.settings.adjusts else 1.0) for _, ratio in timings):
                break  # such a plan may be returned
            if (attempt > 1 and self.settings.adjusts) or is_extra:
                trials = [self._adjusted(allowed * (LAST_FACTOR if is_extra else 1.0), timings[-1][0])]
            elif attempt or self._times_pairs:
                trials = [self._searched(allowed)]
            else:  # the plan from `Frontier.at` corrects the predicted cost before a search
                trials = [self._best((self._first(allowed),))]
            if self._times_pairs:
                cheaper = self._adjusted(max(CHEAPER * trials[0].step.cost, least), trials[0])
                trials += [cheaper] * (cheaper.step.choices != trials[0].step.choices)
            timed = [*zip(trials, self._timed([trial.step for trial in trials]), strict=True)]
            timings += timed
            # The first attempt times the plan from `Frontier.at`, to measure the cost table's error before a search.
            searched = attempt or self._times_pairs or self.settings.trials < 2
            if searched and any(self.settings.min_ratio * limit <= ratio <= largest_ratio for _, ratio in timed):
                break
            if searched and allowed <= least and all(ratio > largest_ratio for _, ratio in timed):
                break  # even the fastest plan is too slow
            # The next limit corrects the plan's own predicted cost, which may be below the limit that it had.
            trial, ratio = min(timed, key=lambda each: abs(each[1] - limit))
            allowed = max(min(trial.step.cost * factor * limit / ratio, LARGEST * unchanged), least)
        enough = [timed for timed in timings if timed[1] <= largest_ratio]
        enough = enough or [timed for timed in timings if timed[1] <= limit]
        best = min(enough, key=lambda timed: timed[0].divergence, default=None)
        near = [timed for timed in timings if timed[1] <= MISSED * limit]
        if self.settings.adjusts and near:
            closest = min(near, key=lambda timed: timed[0].divergence)
            # A nearly fast enough plan is more useful than a fast enough plan with far worse outputs.
            if best is None or max(2 * closest[0].divergence, TOLERATED) < best[0].divergence:
                best = closest
                if best[1] > limit:
                    self.log(f"the target was missed: {1 / best[1]:.2f}x faster instead of {1 / limit:.2f}x")
        if best is None:
            speeds = [1 / ratio for _, ratio in timings]
            fastest, measured = max(speeds), ", ".join(f"{speed:.2f}x" for speed in speeds)
            less = f"at most faster={fastest - 0.01:.2f}" if fastest > 1.02 else "a share of the MACs, e.g. macs=0.7"
            raise NotSupported(
                f"{target} cannot be promised: plans for it were measured at {measured} the speed of the "
                f"original. Request {less}, or measure on an idle machine."
            )
        return best[0]

    @property
    def _times_pairs(self) -> bool:
        """Whether each attempt times two plans. Another process writes the second plan's file at the same time."""
        return self.settings.adjusts and self.settings.to is not None and self.settings.in_subprocess

    def _timed(self, steps: Sequence[Step]) -> list[float]:
        """Times plans or their files in turns with the baseline. Returns each latency divided by the baseline's."""
        models, ratios = [self.realized(step.choices) for step in steps], list[float]()
        for _ in range(2):  # every call times anew, because the machine may have been busy
            found = self.timer.timings(models)
            self._latencies |= {step.choices: timing for step, timing in zip(steps, found, strict=True)}
            ratios = [1 / timing["faster"] for timing in found]
            if all(abs(ratio / step.cost - 1) <= DOUBTFUL for step, ratio in zip(steps, ratios, strict=True)):
                break  # otherwise the table or this timing has an error
        what = "" if self.settings.to is None else f" as {self.settings.to}"
        for step, ratio in zip(steps, ratios, strict=True):
            self.details(f"measured {1 / ratio:.2f}x faster{what}, where {1 / step.cost:.2f}x was predicted")
        return ratios

    def _adjusted(self, limit: float, last: Trial) -> Trial:
        """Returns the best plan at this cost, among plans near the best trials and plans with few stages."""
        # Greedy moves start from plans that are already measured. So no new search is needed, and few plans are
        # measured at the new cost. Plans with few stages are added, because the trials may have been for a wrong cost.
        order = sorted(self.trials, key=BY_SOFTENED)
        starts = [last.step.choices, *(trial.step.choices for trial in order[: self.settings.finalists])]
        starts += self.frontier.few_stages(limit, 1)
        steps: dict[Choices, Step] = {}
        for start in dict.fromkeys(starts):  # in order, without repetitions
            with suppress(NotSupported):  # no plan near this one is cheap enough
                step = self.frontier.near(limit, start)
                steps[step.choices] = step
        if not steps:
            return self._first(limit)
        tried: list[Trial] = []
        for step in steps.values():
            tried.append(self.tried(step, min(tried, key=BY_SOFTENED, default=None)))
        return self._best(tried)

    def _first(self, limit: float) -> Trial:
        return self.tried(self.frontier.at(limit))

    def _searched(self, limit: float) -> Trial:
        """Searches for the best plan at a cost. Measures the plan from `Frontier.at` first, and then other plans."""
        trials, few = [self._first(limit)], ()
        if self.minimized == "latency":
            # Each stage takes time. But pruning many patches at once changes the outputs more than the sum of
            # sensitivities predicts. So plans with few stages are measured.
            few = self.frontier.few_stages(limit, FEW_STAGES)
        number = self.settings.trials + len(few) if self.settings.trials > 1 else 0
        starts = (*few, *self.space.even_schedules()[:EVEN]) if number else ()
        for _ in track(range(number), "searching plans"):
            step = self._proposed(limit, trials, starts)
            # A plan that is far worse than the best plan so far is measured on fewer images.
            trials.append(self.tried(step, min(trials, key=BY_SOFTENED)))
        self.trials = tuple(trials)
        return self._best(trials)

    def _proposed(self, limit: float, trials: Sequence[Trial], starts: Sequence[Choices]) -> Step:
        """Returns the next plan to measure: first a plan near each of the `starts`, then variations of the best plan.

        The first of the `trials` must be the plan from `Frontier.at`.
        """
        number = len(trials) - 1
        if number < len(starts):
            with suppress(NotSupported):  # no plan near this schedule is cheap enough
                return self.frontier.near(limit, starts[number])
            return trials[0].step
        random = np.random.default_rng((self.settings.seed, number))
        # The best plan so far may still be the plan from `Frontier.at`.
        measured, best = {trial.step.choices for trial in trials}, min(trials, key=BY_SOFTENED).step.choices
        steps: list[Step] = []
        for _ in range(ATTEMPTS):
            with suppress(NotSupported):  # the varied plan may not reach the budget
                step = self.frontier.near(limit, varied(self.space, best, random))
                steps += [step] * (step.choices not in measured)  # every plan is measured only once
            if len(steps) == self.settings.variations:
                break
        return min(steps, key=lambda step: step.sensitivity) if steps else self.frontier.near(limit, best)

    def tried(self, step: Step, best: Trial | None = None) -> Trial:
        """Measures a plan on one batch and, unless it is far worse than the best plan there, on all trial images."""
        few, about = self.answers.first(1), ""  # one batch
        trial = self.trial(step, few)
        least = trial if best is None else self.trial(best.step, few)
        if best is not None and trial.softened > HOPELESS * least.softened > 0 < least.divergence:
            # A batch may be easier or harder than all images. The best plan's ratio corrects for this difference.
            factors = best.divergence / least.divergence, best.softened / least.softened
            trial = replace(trial, divergence=trial.divergence * factors[0], softened=trial.softened * factors[1])
            about = f", by {len(few)} images"
        else:
            trial = self.trial(step, self.trial_answers)
        unit = f" {self.answers.kind.unit}".rstrip()
        cost = f"{100 * step.cost:.1f} % of the {self.minimized}"
        self.details(f"a plan of {cost}: divergence {trial.divergence:.3g}{unit}{about}")
        return trial

    def _best(self, trials: Sequence[Trial]) -> Trial:
        """Measures the best trials on all images, and returns the trial with the lowest divergence there."""
        # A dict by choices removes repetitions, because several trials may have the same plan.
        order = {trial.step.choices: trial for trial in sorted(trials, key=BY_SOFTENED)}
        first = list(order.values())[: self.settings.finalists]
        answers = self.answers
        measured = [self.trial(trial.step, answers) for trial in first]
        best = min(measured, key=lambda trial: trial.divergence)
        unit = f" {answers.kind.unit}".rstrip()
        tried = "the plan" if len(measured) == 1 else f"the best of {len(measured)} plans"
        self.details(f"{tried} on {len(answers)} images: divergence {best.divergence:.3g}{unit}")
        return best

    def _by_size(self, target: Target) -> Trial | TargetMet:
        """Makes several plans with a limit on the parameters. Each measured file size corrects the next limit.

        Returns the plan with the lowest divergence whose file is small enough. If the unchanged model's file is small
        enough, returns `TargetMet` instead.

        Raises:
            NotSupported: No plan's file is small enough.
        """
        # The file size is not proportional to a plan's share. Some parameters cannot be removed, and bytes per
        # parameter differ.
        whole, limit = self.timer.megabytes(self.space.model), target.limit
        what = "the weights" if self.settings.to is None else f"the file in {self.settings.to}"
        if whole <= limit:
            return TargetMet(f"{target} is met by the unchanged model, of {whole:.3g} MB.")
        share, least, found = limit / whole, self.frontier.reachable, list[tuple[Trial, float]]()
        for _ in range(self.settings.attempts):
            trial = self._searched(min(max(share, least), LARGEST))
            size = self.timer.megabytes(self.realized(trial.step.choices))
            self.details(f"{what} of this plan: {size:.3g} of {whole:.3g} MB")
            found.append((trial, size))
            if NEARLY * limit <= size <= limit or (size > limit and share <= least):
                break
            # `slope` is in megabytes per removed share of the parameters. The next plan aims slightly below the limit.
            slope = max(whole - size, 1e-9) / (1 - trial.step.cost)
            share = 1 - (whole - (1 + NEARLY) / 2 * limit) / slope
        fitting = [trial for trial, size in found if size <= limit]
        if not fitting:
            smallest = min(size for _, size in found)
            advice = "" if self.settings.to else " Files of 8 bits take a quarter: give to='int8', too."
            raise NotSupported(
                f"{target}: the smallest that {what} could be made is {smallest:.3g} of {whole:.3g} MB.{advice}"
            )
        return min(fitting, key=lambda trial: trial.divergence)

    def _cheapest(self, target: Target) -> Trial:
        """Finds the cheapest plan whose loss on the images is within the target, by bisection over the cost.

        Raises:
            NotSupported: No plan keeps the loss within the limit.
        """
        # The bisection uses only plans from `Frontier.at`, because each cost would need its own search. Plans at cost
        # `low` lose too much. `high` is the smallest cost so far with an allowed loss, and the final search uses this
        # cost.
        low, high, cheapest, least = 0.0, 1.0, None, inf
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            try:
                # `at` raises NotSupported if no plan is this cheap. The smallest possible cost is then higher.
                step = self.frontier.at(middle)
            except NotSupported:
                low = middle
                continue
            loss = self._loss(step, target)
            least = min(loss, least)
            if loss <= target.limit:
                high, cheapest = middle, step
            else:
                low = middle
        if cheapest is None:
            raise NotSupported(f"no plan keeps {target}: the least that one loses is {least:.3g}. Allow more.")
        found = self._searched(high)
        # The search minimizes the divergence, so its plan may lose more accuracy than the plan from `Frontier.at`.
        if self._loss(found.step, target) > target.limit:
            found = self.trial(cheapest, self.answers)
        return found

    def _loss(self, step: Step, target: Target) -> float:
        """Returns a plan's loss on the images, in the unit of the target (points of accuracy or mean divergence)."""
        deviation, cost = self.deviation(step.choices, self.answers), f"{100 * step.cost:.1f} % of the {self.minimized}"
        if target.quantity != DROP:
            self.details(f"a plan of {cost}: {self.answers.kind.distance} {deviation.mean:.3g}")
            return deviation.mean
        assert deviation.change is not None  # `plan` has required labels
        change = 100 * deviation.change.mean().item()
        self.details(f"a plan of {cost}: {change:+.1f} points of accuracy")
        return -change


class UniformPlanner(Planner):
    """Makes plans for portable models. For every number of heads, it tries the widest MLPs within the budget."""

    space: UniformSpace

    @cached_property
    def cost_table(self) -> Any:
        begin("measuring costs")
        if self.minimized == "latency":
            return UniformCosts.timed(self.space, self.timer, self.images)
        return UniformCosts(self.space, self.minimized)

    @cached_property
    def frontier(self) -> Any:
        return UniformFrontier(self.space, self.cost_table)

    def realized(self, choices: Any) -> nn.Module:
        if choices not in self._realized:
            self._realized.clear()
            self._realized[choices] = self.space.realized(choices, self.images)
        return self._realized[choices]

    def _require_reachable(self, limit: float) -> None:
        self.frontier.at(limit)

    def _explained(self, choices: Any) -> tuple[str, ...]:
        now, full = choices, self.space.unchanged
        words = (f"{now.hidden} of {full.hidden} hidden units", f"{now.heads} of {full.heads} heads")
        return (f"every layer: {' and '.join(words)}, which {self.space.stock.family.library} creates by itself",)

    def _adjusted(self, limit: float, last: Trial) -> Trial:
        return self._searched(limit)

    def _searched(self, limit: float) -> Trial:
        trials: list[Trial] = []
        for step in track(self.frontier.steps(limit), "searching plans"):
            trials.append(self.tried(step, min(trials, key=BY_SOFTENED, default=None)))
        self.trials = tuple(trials)
        return self._best(trials)


def expected_of(deviation: Deviation, outputs: OutputKind) -> dict[str, PredictedQuantity]:
    """Returns predictions for other images: the mean of each quantity, and its standard deviation over the images.

    Raises:
        InvalidInput: There are fewer than two images.
    """
    measured = {"divergence": deviation.divergence, "agreement": deviation.agrees, "change": deviation.change}
    quantities = {name: values for name, values in measured.items() if values is not None}
    count = len(deviation.divergence)
    if count < 2:
        raise InvalidInput(f"{count} images to promise by: give at least two that the plan is not made on.")
    # One changed image is added as a pseudo-count. Without it, the estimated spread would be zero if nothing changed.
    # This image has the divergence `outputs.flip_divergence`, at which a decision may change.
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
    """Describes each choice in one line: what it saves while all other choices stay, and its own sensitivity."""
    lines, total = [], cost_table.total(choices)
    nothing = Choices.nothing(space.depth)
    for layer in range(space.depth):
        for axis in AXES:
            value = choices.of(axis)[layer]
            if not value:
                continue
            what = f"{value} patches pruned"
            if axis != TOKENS:
                what = f"{100 * space.levels[value]:g} % of the ranks of {AXIS_WORDS[axis]} kept"
            # Savings assume all other choices, because savings by ranks depend on the remaining tokens.
            saved = 100 * (cost_table.total(choices.with_choice(axis, layer, 0)) - total)
            cost = sensitivities.total(nothing.with_choice(axis, layer, value))
            gain = f"saves {saved:.2f} % of the {cost_table.quantity}"
            lines.append(f"layer {layer + 1}: {what}; {gain}, sensitivity {cost:.2g}")
    return tuple(lines)
