"""What is measured for plans of one kind of cost, everything once: single choices and whole plans."""

from functools import cached_property
from typing import Any

from torch import nn

from attnrx.change.realization import realize
from attnrx.data import ImageSet
from attnrx.decide.planning.allocation import Frontier, Step
from attnrx.decide.planning.cost_table import CostTable, exact_cost_table
from attnrx.decide.planning.plan_search import Trial, weights_of
from attnrx.decide.planning.plan_settings import PlanSettings
from attnrx.decide.planning.plan_timing import PlanTimer
from attnrx.decide.planning.reference_outputs import Answers, Deviation
from attnrx.decide.planning.sensitivity import Sensitivities, measure_sensitivities
from attnrx.decide.planning.space import Choices, Space
from attnrx.support.progress import begin
from attnrx.support.shapes import Tensor

# The most outputs of an image that are kept, per plan: not those of dense models, which are as many as pixels.
KEPT = 4096


class PlanMeasurements:
    """Costs and sensitivities of single choices, deviations and latencies of whole plans, and the optimal plans by the
    former. Targets of the same cost share them.
    """

    def __init__(self, space: Space, settings: PlanSettings, minimized: str, images: ImageSet):
        self.space, self.settings, self.minimized = space, settings, minimized
        self.images, self.fingerprint = images, images.fingerprint
        self.timer = PlanTimer(space, settings, images)
        self._deviations: dict[tuple[int, Choices], Deviation] = {}  # by the number of images and the plan
        self._outputs: dict[Choices, list[Tensor]] = {}  # of plans, per batch, on the first images
        self._latencies: dict[Choices, dict[str, Any]] = {}  # see `PlanTimer.of_model`
        self._last_frontier: tuple[dict[str, float], Frontier] | None = None  # with its knobs

    # After the cost table, by which an impossible target is known.
    @cached_property
    def answers(self) -> Answers:
        """The outputs of the original on all images."""
        return Answers.of(self.space.model, self.images, self.settings.batch_size)

    @cached_property
    def trial_answers(self) -> Answers:
        """Those on the first images: whole plans are many in a search, and only finalists are measured on all."""
        return self.answers.first(self.settings.trial_images)

    @cached_property
    def cost_table(self) -> CostTable:
        begin("measuring costs")
        return self.timer.cost_table() if self.minimized == "latency" else exact_cost_table(self.space, self.minimized)

    @cached_property
    def _single_choices(self) -> dict[str, Sensitivities]:
        begin("measuring sensitivities")
        answers = self.answers.exactly(self.settings.sensitivity_images)
        return measure_sensitivities(self.space, answers, self.settings)

    @property
    def sensitivities(self) -> Sensitivities:
        """Half the variance of the logits' change by single choices."""
        # It ranks plans better than the KL of few images (docs/results/plan.md).
        return self._single_choices["softened"]

    @property
    def divergences(self) -> Sensitivities:
        """The divergence by single choices."""
        return self._single_choices["divergence"]

    def frontier(self, knobs: dict[str, float]) -> Frontier:
        """Returns the optimal plans for all costs with the weights of these knobs; the last result is cached."""
        # The dynamic program is solved for all costs at once, and repeated calls at one cost after another have the
        # same knobs.
        if self._last_frontier is None or self._last_frontier[0] != knobs:
            weights = weights_of(self.space, knobs)
            self._last_frontier = knobs, Frontier(self.space, self.cost_table, self.sensitivities, weights)
        return self._last_frontier[1]

    def realized(self, choices: Choices) -> nn.Module:
        return realize(self.space.model, self.space.prescription(choices))

    def deviation(self, choices: Choices, answers: Answers | None = None) -> Deviation:
        """Returns the deviation of a plan on some of the images, by default on all."""
        answers = answers or self.answers
        key = len(answers), choices
        if key not in self._deviations:
            # More images are the first ones and others: what was measured is not computed again.
            outputs = self._outputs.get(choices, [])
            if len(outputs) < len(answers.batches):
                outputs = [*outputs, *answers.outputs_of(self.realized(choices), len(outputs))]
                if answers.outputs[0].numel() <= KEPT:
                    self._outputs[choices] = outputs
            self._deviations[key] = answers.deviation(outputs[: len(answers.batches)])
        return self._deviations[key]

    def trial(self, knobs: dict[str, float], step: Step, answers: Answers) -> Trial:
        """Measures a plan on some images and returns it as a trial."""
        deviation = self.deviation(step.choices, answers)
        return Trial(knobs, step, deviation.mean, deviation.softened.mean().item())

    def speed(self, choices: Choices) -> float:
        """Times a plan, as a file if a format is requested, and returns its speed relative to the library's model."""
        # Anew in every call: the machine may have been busy.
        model = self.realized(choices)
        if self.settings.to is not None:
            return self.timer.of_file(model)
        self._latencies[choices] = self.timer.of_model(model)
        return self._latencies[choices]["faster"]

    def latency(self, choices: Choices) -> dict[str, Any]:
        """Returns the last timing of a plan as a model in attnrx, which is what the plan promises."""
        if choices not in self._latencies:
            self._latencies[choices] = self.timer.of_model(self.realized(choices))
        return self._latencies[choices]

    def known_speed(self, choices: Choices) -> float | None:
        """Returns the last measured speed of a plan as a model in attnrx; None if it was not timed."""
        return self._latencies.get(choices, {}).get("faster")
