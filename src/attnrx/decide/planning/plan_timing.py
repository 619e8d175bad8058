"""The speed of whole plans, as models in attnrx or as files of another format, relative to the library's model."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from attnrx.change.exporting import export, precision_for
from attnrx.data import ImageSet
from attnrx.decide.planning.cost_table import CostTable
from attnrx.decide.planning.measured_costs import cached_cost_table, timed_cost_table
from attnrx.decide.planning.plan_settings import PlanSettings
from attnrx.decide.planning.space import Space
from attnrx.support.subprocess_runner import call_in_subprocess_if
from attnrx.vit.costs import Conditions, LatencyProtocol, compare_latencies, compare_latency
from attnrx.vit.costs.latency import PROCESSES
from attnrx.vit.models import family_of

# Plans that are adjusted to their latency are timed on a part of the batch, in ROUND_FACTOR times the rounds: at least
# MIN_IMAGES images (of large models FEWEST), and as many as take MIN_MACS multiply-accumulates, because below that
# calls of operations dominate; of files, which do not run in chunks, as many as take FILE_MACS.
MIN_IMAGES, FEWEST, MIN_MACS, FILE_MACS, ROUND_FACTOR = 8, 4, 1e10, 4e10, 4
# The rounds of a final measurement, as many times more as a batch is smaller than MIN_IMAGES; half of them for a pass
# of LONG multiply-accumulates, about a second, which varies less.
ROUNDS, LONG = 32, 4e10


def rounds_of(batch: int, macs: float = 0.0) -> int:
    """Returns the rounds of a final latency measurement, more for few images, and fewer for many MACs per image."""
    return ROUNDS // 2 if batch * macs >= LONG else ROUNDS * max(MIN_IMAGES // batch, 1)


def final_protocol(conditions: Conditions, batch: int) -> LatencyProtocol:
    """Returns the protocol of results: whole batches, wall clock, several processes."""
    return LatencyProtocol(conditions, rounds_of(batch), warmup=2, kernels=False, processes=PROCESSES)


def final_speeds(
    models: Mapping[str, nn.Module], original: nn.Module, reference: nn.Module, settings: PlanSettings
) -> dict[str, float]:
    """Returns how much faster models are than the `reference`, the original's library model, timed in turns.

    In this process, because the runtime of a file allocates its memory itself.
    """
    protocol = replace(final_protocol(settings.conditions, settings.batch), processes=1)
    speeds = compare_latencies(models, reference, settings.noise(original), protocol)
    return {name: speed.faster.value for name, speed in speeds.items()}


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
            shares = partial(self.latency_shares, rounds=self.settings.whole_rounds)
            return timed_cost_table(self.space, self.settings, shares)

        return cached_cost_table(self.space, self.settings, measure)

    def of_model(self, model: nn.Module) -> dict[str, Any]:
        """Returns the speed of a model relative to the library's, with its interval and the conditions."""
        settings = self.settings
        # Shorter rounds cost less, so there are more of them: their median is more precise.
        rounds = settings.whole_rounds * (ROUND_FACTOR if settings is not self.requested else 1)
        sides = model, self.library_model, settings.noise(self.space.model), replace(settings.protocol, rounds=rounds)
        speed = call_in_subprocess_if(compare_latency, *sides, in_subprocess=settings.in_subprocess, on_line=self.log)
        return {
            "faster": speed.faster.value,
            "low": speed.faster.low,
            "high": speed.faster.high,
            "batch": self.requested.batch,
            "timed_batch": settings.batch,
            "threads": speed.threads,
            "hardware": speed.hardware,
            "precision": settings.conditions.precision,
            "clock": self.requested.protocol.resolved_clock,
            "rounds": speed.rounds,
            "in_subprocess": settings.in_subprocess,
            "torch": speed.torch_version,
        }

    def of_file(self, model: nn.Module) -> float:
        """Returns how much faster the file of a model is than the library's model."""
        return 1 / self.latency_shares({"file": model}, ROUND_FACTOR * self.settings.whole_rounds)["file"]

    def latency_shares(self, models: Mapping[str, nn.Module], rounds: int) -> dict[str, float]:
        """Returns the latency of models, or of their files, as shares of that of the library's model, in turns."""
        settings = self.settings
        if settings.form is not None:
            speeds = file_speeds(models, self.space.model, settings, self.images, rounds)
            return {name: 1 / speed for name, speed in speeds.items()}
        sides = models, self.library_model, settings.noise(self.space.model), replace(settings.protocol, rounds=rounds)
        timed = call_in_subprocess_if(compare_latencies, *sides, in_subprocess=settings.in_subprocess, on_line=self.log)
        return {name: 1 / comparison.faster.value for name, comparison in timed.items()}


def file_speeds(
    models: Mapping[str, nn.Module], original: nn.Module, settings: PlanSettings, images: ImageSet, rounds: int
) -> dict[str, float]:
    """Returns how much faster than the library's model of the `original` the files of models are, in the format of the
    settings, calibrated on `images`; all are timed in turns.
    """
    form = settings.form
    assert form is not None
    settings.log(f"timing files of {settings.to}: {', '.join(models)}")
    calibration = images.take(min(form.wanted, len(images)))
    # In this process, because the runtime of a file allocates its memory itself, and reads the file while it is timed.
    with TemporaryDirectory() as folder:
        files = {
            name: export(
                model,
                Path(folder) / f"{index}{form.suffix}",
                to=form,
                precision=precision_for(model, form),
                calibration=calibration,
            )
            for index, (name, model) in enumerate(models.items())
        }
        reference = family_of(original).library_model(original)
        protocol = replace(settings.protocol, rounds=rounds)
        speeds = compare_latencies(files, reference, settings.noise(original), protocol)
    return {name: speed.faster.value for name, speed in speeds.items()}
