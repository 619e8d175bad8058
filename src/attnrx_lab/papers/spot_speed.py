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
from attnrx.progress import Log
from attnrx.training import Reporter
from attnrx_lab.papers.experiment import (
    Experiment,
    Measure,
    evaluation_device,
    measured_with,
    plain_measure,
    plain_measures,
)
from attnrx_lab.papers.sources import outline_of
from attnrx_lab.papers.spot import SMALL, TINY, SmallOriginal, TokenMethod, token_price

WARMUP = 2  # rounds that do not count


@dataclass(frozen=True)
class SpeedExperiment(Experiment):
    """Forward passes of one model with every method, and of the reference implementation, in turns on the same batch.

    Weights, predictors and images are drawn from the seed and nothing is trained: the latency depends on the number of
    pruned tokens, not on which. Without a `model`, it is the `small` one. The device is an accelerator if there is one.
    """

    kind: ClassVar[str] = "spot-speed"
    format: ClassVar[str] = "attnrx spot speed run"
    parts: ClassVar[tuple[type, ...]] = (TokenMethod, SmallOriginal)
    tiny_note: ClassVar[str] = (
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

    def as_tiny(self) -> "SpeedExperiment":
        return replace(self, tiny=True, batch_size=2, rounds=2)

    def measured(self, folder: Path, reporter: Reporter | None, log: Log) -> dict[str, Any]:
        """Times every method in turns with the original."""
        self.claim(folder)
        log(f"{self.name}: {len(self.methods)} methods, {self.rounds} rounds")
        model = self._timed()
        family = family_of(model)
        generator = torch.Generator().manual_seed(self.seed)
        images = torch.randn(self.batch_size, *family.input_shape(model), generator=generator)
        conditions = Conditions(device=str(evaluation_device()))
        protocol = LatencyProtocol(conditions, rounds=self.rounds, warmup=WARMUP, seed=self.seed)
        candidates = {method.name: self._candidate(method) for method in self.methods}
        timed = compare_latencies(candidates, family.library_model(model), images, protocol)
        outline = self.small.outline() if self.model is None else outline_of(self.model)
        rules = {
            method.name: {
                "paper": plain_measures(token_price(outline, method)),
                "speed": _speed(timed[method.name]),
            }
            for method in self.methods
        }
        note = (
            f"timed on {conditions.hardware} ({torch.get_num_threads()} threads), batches of {self.batch_size} in "
            f"float32, medians of {self.rounds} rounds, beside the model as its own library runs it"
        )
        return {
            "data": {"name": "random pixels", "notes": [note]},
            "rules": rules,
            "measured_with": {**measured_with(), "torch": torch.__version__},
        }

    def _timed(self) -> nn.Module:
        """Returns the model with random weights."""
        if self.tiny or self.model is None:
            return (TINY if self.tiny else self.small).build().eval()
        return build_model(self.model).eval()

    def _candidate(self, method: TokenMethod) -> nn.Module:
        model = self._timed()
        method.attach_(model, self.seed)
        return model


def _speed(timed: LatencyComparison) -> dict[str, Measure]:
    """Returns images per second, and the ratio to the original's."""
    ratio = timed.ratio
    return {
        "images": plain_measure(timed.batch / timed.candidate.median),
        "ratio": {"value": 1 / ratio.value, "low": 1 / ratio.high, "high": 1 / ratio.low},
    }
