"""What is measured for plans of one kind of cost, everything once: single choices, whole plans and their speed."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from attnrx.change.exporting import ExportSubject, precision_for, write_exported
from attnrx.change.realization import realize
from attnrx.data import ImageSet
from attnrx.decide.planning.allocation import Frontier, Step
from attnrx.decide.planning.cost_table import CostTable, corrected, exact_cost_table
from attnrx.decide.planning.measured_costs import LONG, cached_cost_table, measured_cost_table
from attnrx.decide.planning.plan_search import Trial
from attnrx.decide.planning.plan_settings import PlanSettings
from attnrx.decide.planning.reference_outputs import Answers, Deviation
from attnrx.decide.planning.sensitivity import Sensitivities, measure_sensitivities
from attnrx.decide.planning.space import Choices, Space
from attnrx.support.progress import begin
from attnrx.support.shapes import Tensor
from attnrx.support.subprocess_runner import run_in_subprocess
from attnrx.vit.costs import Conditions, LatencyProtocol, compare_latencies, compare_latency
from attnrx.vit.costs.measured import PROCESSES
from attnrx.vit.models import family_of

# Plans that are adjusted to their latency are timed on a part of the batch, in ROUND_FACTOR times the rounds: at least
# MIN_IMAGES images (of large models FEWEST), and as many as take MIN_MACS multiply-accumulates, because below that
# calls of operations dominate; of files, which do not run in chunks, as many as take FILE_MACS.
MIN_IMAGES, FEWEST, MIN_MACS, FILE_MACS, ROUND_FACTOR = 8, 4, 1e10, 4e10, 4
# The rounds of a final measurement, as many times more as a batch is smaller than MIN_IMAGES; fewer for a pass of
# LONG multiply-accumulates, about a second, which varies less, and for one of LONGER.
ROUNDS, LONG_ROUNDS, LONGER, LONGER_ROUNDS = 32, 6, 10 * LONG, 3


def rounds_of(batch: int, model: nn.Module) -> int:
    """Returns the rounds of a final latency measurement, more for few images, and fewer for a large model."""
    macs = batch * family_of(model).costs(model).macs
    if macs >= LONG:
        return LONGER_ROUNDS if macs >= LONGER else LONG_ROUNDS
    return ROUNDS * max(MIN_IMAGES // batch, 1)


def final_protocol(conditions: Conditions, batch: int, model: nn.Module) -> LatencyProtocol:
    """Returns the protocol of results: whole batches, wall clock, several processes."""
    return LatencyProtocol(conditions, rounds_of(batch, model), warmup=2, processes=PROCESSES)


class PlanTimer:
    """Times whole plans, as models in attnrx or, with a format, as files that are calibrated on `images`."""

    def __init__(self, space: Space, requested: PlanSettings, images: ImageSet):
        self.space, self.requested, self.images, self.log = space, requested, images, requested.log

    @cached_property
    def settings(self) -> PlanSettings:
        """The settings while planning: the requested ones, unless plans are adjusted on a CPU."""
        requested = self.requested
        if not requested.adjusts or requested.conditions.on_cuda:
            return requested
        # A large batch runs in chunks of a few images, which give the same ratios, to a hundredth, in less time. On
        # one thread the CPU time is the latency, without the load of other processes.
        least = MIN_MACS if requested.form is None else FILE_MACS
        enough = ceil(least / family_of(self.space.model).costs(self.space.model).macs)
        fewest = FEWEST if enough <= FEWEST else MIN_IMAGES
        batch, is_serial = min(requested.batch, max(fewest, enough)), requested.conditions.threads == 1
        clock = "cpu" if is_serial and requested.protocol.resolved_clock == "wall" else requested.clock
        more = max(fewest // batch, 1)
        rounds, whole_rounds = requested.rounds * more, requested.whole_rounds * more
        return replace(requested, batch=batch, clock=clock, rounds=rounds, whole_rounds=whole_rounds)

    @cached_property
    def library_model(self) -> nn.Module:
        """The reference of latency: the model with the attention of its own library."""
        return family_of(self.space.model).library_model(self.space.model)

    def cost_table(self) -> CostTable:
        """Returns the latency of blocks by rank and number of tokens, from the cache or measured."""

        def measure() -> CostTable:
            space, settings = self.space, self.settings
            arguments = space, settings.protocol, settings.noise(space.model), settings.timed_levels, settings.form
            # In a process of their own, as whole models: after the blocks were timed in it, these were slower. The
            # runtime of a format is used in this process, because it allocates its memory itself.
            forked = settings.in_subprocess and settings.form is None
            blocks = run_in_subprocess(measured_cost_table, *arguments, in_subprocess=forked, on_line=self.log)
            return corrected(blocks, space, partial(self.latency_shares, rounds=settings.whole_rounds))

        return cached_cost_table(self.space, self.settings, measure)

    def of_model(self, model: nn.Module) -> dict[str, Any]:
        """Returns the speed of a model relative to the library's, with its interval and the conditions."""
        settings = self.settings
        if settings.batch < self.requested.batch <= MIN_IMAGES:
            # A part of so few images is another case: decoders and chunks gave 1.53x at 4 images, and 1.58x at 8.
            settings = replace(settings, batch=self.requested.batch)
        # Shorter rounds cost less, so there are more of them: their median is more precise.
        rounds = settings.whole_rounds * (ROUND_FACTOR if settings is not self.requested else 1)
        protocol = replace(settings.protocol, rounds=rounds)
        if settings.adjusts and settings.batch * family_of(self.space.model).costs(self.space.model).macs >= LONG:
            protocol = replace(protocol, rounds=max(rounds // 3, 2), warmup=1)
        sides = model, self.library_model, settings.noise(self.space.model), protocol
        speed = run_in_subprocess(compare_latency, *sides, in_subprocess=settings.in_subprocess, on_line=self.log)
        return {
            "faster": speed.faster.value,
            "low": speed.faster.low,
            "high": speed.faster.high,
            "batch": self.requested.batch,
            "timed_batch": settings.batch,
            "threads": speed.threads,
            "hardware": speed.hardware,
            "precision": settings.conditions.precision,
            "graphs": settings.conditions.graphs,
            "clock": self.requested.protocol.resolved_clock,
            "rounds": speed.rounds,
            "in_subprocess": settings.in_subprocess,
            "torch": speed.torch_version,
        }

    def of_file(self, model: nn.Module) -> float:
        """Returns how much faster the file of a model is than that of the unchanged one."""
        # Not than the library's model, whose time in one process varies by a fifth with the memory that is retained.
        models, settings = {"unchanged": self.space.model, "file": model}, self.settings
        return file_speeds(models, settings, self.images, ROUND_FACTOR * settings.whole_rounds)["file"]

    def latency_shares(self, models: Mapping[str, nn.Module], rounds: int) -> dict[str, float]:
        """Returns the latency of models, or of their files, as shares of that of the library's model, in turns."""
        settings = self.settings
        if settings.form is not None:
            speeds = file_speeds(models, settings, self.images, rounds, self.library_model)
            return {name: 1 / speed for name, speed in speeds.items()}
        sides = models, self.library_model, settings.noise(self.space.model), replace(settings.protocol, rounds=rounds)
        timed = run_in_subprocess(compare_latencies, *sides, in_subprocess=settings.in_subprocess, on_line=self.log)
        return {name: 1 / comparison.faster.value for name, comparison in timed.items()}


def file_speeds(
    models: Mapping[str, nn.Module],
    settings: PlanSettings,
    images: ImageSet,
    rounds: int,
    reference: nn.Module | None = None,
    are_compared: bool = False,
) -> dict[str, float]:
    """Returns how much faster the files of models are, in the format of the settings and calibrated on `images`: than
    a reference, without one those of all but the first than that of the first; all are timed in turns.

    The outputs of the files are compared with those of the models, as of a result, if `are_compared`.

    Raises:
        NotSupported: A model cannot be written in the format, or the outputs of a file differ.
    """
    form = settings.form
    assert form is not None
    settings.log(f"timing files of {settings.to}: {', '.join(models)}")
    calibration = images.take(min(form.wanted, len(images)))
    # In this process, because the runtime of a file allocates its memory itself, and reads the file while it is timed.
    with TemporaryDirectory() as folder:
        files = {
            name: write_exported(
                ExportSubject.of(model, form, precision=precision_for(model, form), calibration=calibration),
                Path(folder) / f"{index}{form.suffix}",
                form,
                are_compared,
            )
            for index, (name, model) in enumerate(models.items())
        }
        first, noise = next(iter(models)), settings.noise(next(iter(models.values())))
        against = files.pop(first) if reference is None else reference
        speeds = compare_latencies(files, against, noise, replace(settings.protocol, rounds=rounds))
    return {name: speed.faster.value for name, speed in speeds.items()}


# The most outputs of an image that are kept, per plan: not those of dense models, which are as many as pixels.
KEPT = 4096


class PlanMeasurements:
    """Costs and sensitivities of single choices, deviations and latencies of whole plans, and the optimal plans by the
    former. Targets of the same cost share them.

    Deviations are those from the `reference`, by default the model of the space, which may be a copy of it with a
    smaller decoder. Sensitivities are about that model, which the choices change.
    """

    def __init__(
        self,
        space: Space,
        settings: PlanSettings,
        minimized: str,
        images: ImageSet,
        reference: nn.Module | None = None,
    ):
        self.space, self.settings, self.minimized = space, settings, minimized
        self.reference, self.images = reference or space.model, images
        self.timer = PlanTimer(space, settings, images)
        self._deviations: dict[tuple[int, Choices], Deviation] = {}  # by the number of images and the plan
        self._outputs: dict[Choices, list[Tensor]] = {}  # of plans, per batch, on the first images
        self._latencies: dict[Choices, dict[str, Any]] = {}  # see `PlanTimer.of_model`

    # After the cost table, by which an impossible target is known.
    @cached_property
    def answers(self) -> Answers:
        """The outputs of the reference on all images."""
        return Answers.of(self.reference, self.images, self.settings.batch_size)

    @cached_property
    def trial_answers(self) -> Answers:
        """Those on the first images: whole plans are many in a search, and only finalists are measured on all."""
        return self.answers.first(self.settings.trial_images)

    @cached_property
    def cost_table(self) -> CostTable:
        begin("measuring costs")
        return self.timer.cost_table() if self.minimized == "latency" else exact_cost_table(self.space, self.minimized)

    @cached_property
    def sensitivities(self) -> Sensitivities:
        """Half the variance of the logits' change by single choices."""
        # It ranks plans better than the KL of few images (docs/results/plan.md).
        begin("measuring sensitivities")
        answers = self.answers.exactly(self.settings.sensitivity_images)
        if self.reference is not self.space.model:
            answers = replace(answers, outputs=torch.cat(answers.outputs_of(self.space.model)))
        return measure_sensitivities(self.space, answers, self.settings)

    @cached_property
    def frontier(self) -> Frontier:
        """The optimal plans: the dynamic program is solved once for all costs."""
        return Frontier(self.space, self.cost_table, self.sensitivities)

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

    def trial(self, step: Step, answers: Answers) -> Trial:
        """Measures a plan on some images and returns it as a trial."""
        deviation = self.deviation(step.choices, answers)
        return Trial(step, deviation.mean, deviation.softened.mean().item())

    def speed(self, choices: Choices) -> float:
        """Times a plan, as a file if a format is requested, and returns its speed relative to the library's model."""
        # Anew in every call: the machine may have been busy.
        model = self.realized(choices)
        if self.settings.to is not None:
            return self.timer.of_file(model) / self.frontier.nothing
        self._latencies[choices] = self.timer.of_model(model)
        return self._latencies[choices]["faster"]

    def latency(self, choices: Choices) -> dict[str, Any]:
        """Returns the last timing of a plan as a model in attnrx, which is what the plan promises."""
        if choices not in self._latencies:
            self._latencies[choices] = self.timer.of_model(self.realized(choices))
        return self._latencies[choices]
