"""Measures the latency of a model that several methods compress, relative to the reference implementation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.data import ImageSet, from_tensors
from attnrx.data.model_data import normalization_of
from attnrx.decide.diagnosing import diagnose
from attnrx.exporting import Exported, ExportSubject, Format, bare_subject, write_exported
from attnrx.support.atomic_writes import scratch_folder
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log, no_log
from attnrx.support.records import to_dict
from attnrx.support.shapes import Tensor
from attnrx.support.storage import write_json
from attnrx.support.tables import markdown_table
from attnrx.vit.costs import LatencyComparison, LatencyProtocol, compare_latencies
from attnrx.vit.models import family_of
from attnrx_lab.comparison.methods import Method, MethodBench, points, require_points
from attnrx_lab.comparison.record import Unreached, kept_text

SPEED_COLUMNS = (
    "method",
    "kept",
    "batch",
    "threads",
    "MACs",
    "reference ms",
    "own ms",
    "speed-up",
    "ideal",
    "share of ideal",
)


@dataclass(frozen=True)
class Speed:
    """The latency of a compressed model at one share and batch size, relative to the reference implementation.

    `share` is None if the method has no adjustable share. `ideal` is the speed-up that would result if the time were
    proportional to the MACs.
    """

    method: str
    share: float | None
    macs_share: float
    latency: LatencyComparison

    @property
    def speedup(self) -> tuple[float, float, float]:
        """The median speed-up over the rounds, and the limits of its 95 % interval."""
        faster = self.latency.faster
        return faster.value, faster.low, faster.high

    @property
    def ideal(self) -> float:
        return 1 / self.macs_share

    @property
    def cells(self) -> tuple[str, ...]:
        latency, (value, low, high) = self.latency, self.speedup
        return (
            self.method,
            kept_text(self.share),
            str(latency.batch),
            str(latency.threads),
            f"{100 * self.macs_share:.1f} %",
            f"{1000 * latency.reference.median:.1f}",
            f"{1000 * latency.candidate.median:.1f}",
            f"{value:.2f}x [{low:.2f}, {high:.2f}]",
            f"{self.ideal:.2f}x",
            f"{100 * value / self.ideal:.0f} %",
        )


@dataclass(frozen=True)
class Speeds:
    """All speeds measured on one model, with the measurement settings."""

    speeds: tuple[Speed, ...]
    about: dict[str, Any]

    def save(self, path: Path | str) -> Path:
        records = [
            {**asdict(each), "speedup": each.speedup, "ideal": each.ideal, "of_ideal": each.speedup[0] / each.ideal}
            for each in self.speeds
        ]
        return write_json(path, {"kind": "attnrx speeds", "schema": 1, "about": self.about, "speeds": records})

    def to_markdown(self) -> str:
        """Returns a table with one line for every method and batch size."""
        return markdown_table(SPEED_COLUMNS, [each.cells for each in self.speeds])


@dataclass(frozen=True)
class Rates:
    """The timing settings: batch sizes, protocols, and the shares or MACs targets at which every method is applied.

    Every method is timed at every batch size under every protocol. `runtime` is an export format, or None to time the
    models in PyTorch. With an export format, the models and the reference implementation are exported at the precision
    of the first protocol, and the files are timed.
    """

    batches: tuple[int, ...]
    protocols: tuple[LatencyProtocol, ...]
    shares: tuple[float, ...] = ()
    macs: tuple[float, ...] = ()
    runtime: Format | None = None

    def __post_init__(self):
        if not self.batches or not self.protocols or min(self.batches) < 1:
            raise InvalidInput(f"batches={self.batches}, protocols={self.protocols}: give at least one of each.")


def noise_images(model: nn.Module, seed: int = 0, images: int = 8) -> ImageSet:
    """Returns noise images in the input format of a model."""
    channels, height, width = family_of(model).input_shape(model)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (images, channels, height, width), generator=generator, dtype=torch.uint8)
    # The images get the model's normalization, because `diagnose` would otherwise print a warning that users cannot
    # act on.
    return from_tensors("noise", pixels, torch.zeros(images, dtype=torch.long), normalization_of(model))


def noise_bench(model: nn.Module, seed: int = 0, images: int = 8) -> MethodBench:
    """Returns a `MethodBench` with noise instead of images, which is sufficient for measuring latency.

    Some methods choose ranks by energy or divergence, which depend on the images. On noise, such a method may choose
    other ranks than on real images, so its latency may differ too.
    """
    noise = noise_images(model, seed, images)
    # The diagnosis includes moments for every kind of model, because rules for values, heads and MLP need them.
    diagnosis = diagnose(model, noise, moments=True, batch_size=images, seed=seed)
    return MethodBench(model, diagnosis, noise, noise, seed, images)


def _images(bench: MethodBench, batch: int) -> Tensor:
    """Returns noise images to time the models on. Noise is sufficient, because latency does not depend on pixels.

    With fixed noise, token policies select the same patches every time.
    """
    shape = family_of(bench.model).input_shape(bench.model)
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))


def compare_speeds(
    bench: MethodBench, methods: Sequence[Method], rates: Rates, log: Log = no_log, out: Path | str | None = None
) -> Speeds:
    """Compresses the model with every method at every budget, and times the results against the reference.

    All models are timed in turns with the reference implementation, which is the library's own model. The uncompressed
    attnrx model is also timed, under the name "attnrx". After every batch size, all results so far are saved to `out`.

    Raises:
        InvalidInput: There is no share or MACs target, or one of them is not in (0, 1].
    """
    require_points(rates.shares, rates.macs)
    family = family_of(bench.model)
    before = family.costs(bench.model)
    entries: dict[str, tuple[str, float | None, float]] = {"attnrx": ("attnrx", 1.0, 1.0)}
    # The reference has an empty name, which no method has. Its weights are random, because times do not depend on them.
    models = {"attnrx": bench.model, "": family.library_model(bench.model)}
    for method in methods:
        compressor = bench.compressor(method)
        for point in points(method, compressor, before, rates.shares, rates.macs):
            if isinstance(point, Unreached):
                log(f"{point.method} {point.cells[2]}: left out")
                continue
            # Two targets with the same share have the same model, so this model is timed only once.
            share, key = point[0], f"{method.name} {point[0]}"
            entries[key] = (method.name, share if method.varies else None, compressor.costs(share).macs / before.macs)
            models[key] = compressor.make(share)
    runtime = None if rates.runtime is None else to_dict(rates.runtime)
    speeds = Speeds((), {**bench.describe(methods), "runtime": runtime})
    for latencies in timed(models, rates, bench):
        new_speeds = tuple(Speed(*entries[key], latency) for key, latency in latencies.items())
        speeds = replace(speeds, speeds=(*speeds.speeds, *new_speeds))
        for speed in new_speeds:
            log(f"{speed.method}, batch {speed.latency.batch}: {speed.cells[-3]}, ideal {speed.cells[-2]}")
        if out is not None:
            speeds.save(out)
    return speeds


def timed(models: Mapping[str, nn.Module], rates: Rates, bench: MethodBench) -> Iterator[dict[str, LatencyComparison]]:
    """Times the models in turns with the reference (key ""), and yields latencies for each protocol and batch size."""
    # All models are timed in one run, so that other load on the machine affects all of them.
    with _running_in(rates, models, bench) as running:
        reference = running.pop("")
        for protocol, batch in product(rates.protocols, rates.batches):
            yield compare_latencies(running, reference, _images(bench, batch), protocol)


@contextmanager
def _running_in(rates: Rates, models: Mapping[str, nn.Module], bench: MethodBench) -> Iterator[dict[str, nn.Module]]:
    """Yields the models or, if `rates` sets a runtime, their exported files. The files exist only inside the context.

    All models are exported in the same way, with a dynamic batch size. Each file is verified against its eager model.
    """
    form, precision = rates.runtime, rates.protocols[0].conditions.precision
    if form is None:
        yield dict(models)
        return
    # The bench's model provides an example input for models of unknown families, e.g. library models.
    subject = ExportSubject.of(bench.model, form, precision=precision, calibration=bench.calibration)
    with scratch_folder() as folder:
        yield {
            # Files are numbered, because a method's name may contain any characters.
            name: model  # already a file
            if isinstance(model, Exported)
            else write_exported(bare_subject(model, subject), folder / f"{index}{form.suffix}", form)
            for index, (name, model) in enumerate(models.items())
        }
