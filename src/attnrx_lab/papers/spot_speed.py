"""Throughput of a model with pruned tokens: every method and the original, round by round."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.costs import Conditions, LatencyComparison, LatencyProtocol, compare_latencies
from attnrx.errors import InvalidInput
from attnrx.models import build_model, family_of
from attnrx.progress import Log, no_log
from attnrx.serialization.config import from_dict, to_dict
from attnrx.serialization.storage import write_json
from attnrx.training import Reporter
from attnrx_lab.papers.evidence_bench import answering_device
from attnrx_lab.papers.experiment import Experiment, Run
from attnrx_lab.papers.measures import Measure, plain_measure
from attnrx_lab.papers.pretrained_subject import outline_of
from attnrx_lab.papers.spot_experiment import SMALL, TINY, SmallOriginal
from attnrx_lab.papers.spot_methods import TokenMethod, token_price

WARMUP = 2  # rounds that do not count


@dataclass(frozen=True)
class SpeedRun(Run):
    """A finished run of the speed experiment."""

    kind: ClassVar[str] = "attnrx spot speed run"

    @property
    def experiment(self) -> "SpeedExperiment":
        """The settings of the run."""
        return SpeedExperiment.from_dict(self.record["settings"])


@dataclass(frozen=True)
class SpeedExperiment(Experiment):
    """Forward passes of one model with every method, and of the reference implementation, in turns on the same batch.

    Weights, predictors and images are drawn from the seed and nothing is trained: the latency depends on the number of
    pruned tokens, not on which. Without a `model`, it is the `small` one. The device is an accelerator if there is one.
    """

    kind: ClassVar[str] = "spot-speed"
    run_type: ClassVar[type[Run]] = SpeedRun
    told_when_tiny: ClassVar[str] = (
        "the times are those of a tiny model: they show that the recipe runs, and nothing else; GFLOPS are exact"
    )
    knobs: ClassVar[Mapping[str, str]] = {
        "model": "the model {own} instead of {protocol}",
        "batch_size": "batches of {own} images instead of {protocol}",
    }

    subject: str
    model: str | None
    methods: tuple[TokenMethod, ...]
    dataset: str = "none"
    seed: int = 0
    batch_size: int = 128
    rounds: int = 20
    small: SmallOriginal = SMALL
    tiny: bool = False

    def __post_init__(self):
        if not self.methods or self.batch_size < 1 or self.rounds < 2:
            raise InvalidInput(
                f"SpeedExperiment with {len(self.methods)} methods, batch_size={self.batch_size}, "
                f"rounds={self.rounds}: give at least one method, one image and two rounds."
            )

    @property
    def scenario(self) -> str:
        """The name of the model."""
        return self.subject

    def as_tiny(self) -> "SpeedExperiment":
        """The same on a tiny model."""
        return replace(self, tiny=True, batch_size=2, rounds=2)

    def run(self, folder: Path | str, *, reporter: Reporter | None = None, log: Log = no_log) -> SpeedRun:
        """Times every method, or reads the stored times."""
        folder = Path(folder)
        self.require(folder)
        if not (folder / "result.json").exists():
            log(f"{self.name}: {len(self.methods)} methods, {self.rounds} rounds")
            write_json(folder / "result.json", _measured(self))
            self.claim(folder)
        return SpeedRun.load(folder)

    def outline(self) -> nn.Module:
        """The shapes of the model whose costs are computed, which a tiny run does not change."""
        if self.model is not None:
            return outline_of(self.model)
        with torch.device("meta"):
            return self.small.build()

    def timed(self) -> nn.Module:
        """The timed model, with random weights."""
        if self.tiny or self.model is None:
            return (TINY if self.tiny else self.small).build().eval()
        return build_model(self.model).eval()

    def candidate(self, method: TokenMethod) -> nn.Module:
        """The model with the policy of a method."""
        model = self.timed()
        method.attach_(model, self.seed)
        return model

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "SpeedExperiment":
        """Returns the experiment that `to_dict` described."""
        return from_dict(record, (cls, TokenMethod, SmallOriginal))


def _measured(experiment: SpeedExperiment) -> dict[str, Any]:
    model, outline = experiment.timed(), experiment.outline()
    family = family_of(model)
    generator = torch.Generator().manual_seed(experiment.seed)
    images = torch.randn(experiment.batch_size, *family.input_shape(model), generator=generator)
    conditions = Conditions(device=str(answering_device()))
    protocol = LatencyProtocol(conditions, rounds=experiment.rounds, warmup=WARMUP, seed=experiment.seed)
    candidates = {method.name: experiment.candidate(method) for method in experiment.methods}
    timed = compare_latencies(candidates, family.library_model(model), images, protocol)
    rules = {
        method.name: {
            "paper": {name: plain_measure(value) for name, value in token_price(outline, method).items()},
            "speed": _speed(timed[method.name]),
        }
        for method in experiment.methods
    }
    threads = torch.get_num_threads()
    return {
        "kind": SpeedRun.kind,
        "schema": SpeedRun.schema,
        "settings": to_dict(experiment),
        "data": {
            "name": "random pixels",
            "notes": [
                f"timed on {conditions.hardware} ({threads} threads), batches of {experiment.batch_size} in float32, "
                f"medians of {experiment.rounds} rounds, beside the model as its own library runs it"
            ],
        },
        "rules": rules,
        "measured_with": {"device": conditions.device, "threads": threads, "torch": torch.__version__},
    }


def _speed(timed: LatencyComparison) -> dict[str, Measure]:
    """Returns images per second, and the ratio to the original's."""
    ratio = timed.ratio
    return {
        "images": plain_measure(timed.batch / timed.candidate.median),
        "ratio": {"value": 1 / ratio.value, "low": 1 / ratio.high, "high": 1 / ratio.low},
    }
