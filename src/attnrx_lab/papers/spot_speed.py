"""Throughput of a model with pruned tokens: every method and the original, round by round."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.support.progress import Log
from attnrx.vit.costs import Conditions, LatencyComparison, LatencyProtocol, compare_latencies
from attnrx.vit.models import build_model, family_of
from attnrx_lab.papers.experiment import Experiment, Measure, evaluation_device, plain_measures
from attnrx_lab.papers.spot import ORIGINALS, TINY, TokenMethod, outline_for, token_price

WARMUP = 2  # rounds that do not count


@dataclass(frozen=True)
class SpeedExperiment(Experiment):
    """Forward passes of one model with every method, and of the reference implementation, in turns on the same batch.

    Weights, predictors and images are drawn from the seed and nothing is trained: the latency depends on the number of
    pruned tokens, not on which. Without a `model`, it is the subject's small one. The device is an accelerator if there
    is one.
    """

    kind: ClassVar[str] = "spot-speed"
    knobs: ClassVar[tuple[str, ...]] = ("model", "batch_size")

    subject: str
    model: str | None
    methods: tuple[TokenMethod, ...]
    seed: int = 0
    batch_size: int = 128
    rounds: int = 20
    tiny: bool = False

    def as_tiny(self) -> "SpeedExperiment":
        return replace(self, tiny=True, batch_size=2, rounds=2)

    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Times every method in turns with the original."""
        self.claim(folder)
        log(f"{self.name}: {len(self.methods)} methods, {self.rounds} rounds")
        model = self._model()
        family = family_of(model)
        generator = torch.Generator().manual_seed(self.seed)
        images = torch.randn(self.batch_size, *family.input_shape(model), generator=generator)
        conditions = Conditions(device=str(evaluation_device()))
        protocol = LatencyProtocol(conditions, rounds=self.rounds, warmup=WARMUP)
        candidates = {method.name: self._model(method) for method in self.methods}
        latencies = compare_latencies(candidates, family.library_model(model), images, protocol)
        outline = outline_for(self.model, self.subject)
        rules = {
            method.name: {
                "paper": plain_measures(token_price(outline, method)),
                "speed": _speed(latencies[method.name]),
            }
            for method in self.methods
        }
        note = (
            f"timed on {conditions.hardware} ({torch.get_num_threads()} threads), batches of {self.batch_size} in "
            f"float32, medians of {self.rounds} rounds, beside the model as its own library runs it"
        )
        return {"data": {"name": "random pixels", "notes": [note]}, "rules": rules}

    def _model(self, method: TokenMethod | None = None) -> nn.Module:
        """Returns the model with random weights, with the tokens of a method."""
        if self.tiny:
            model = TINY.build()
        else:
            model = ORIGINALS[self.subject].build() if self.model is None else build_model(self.model)
        if method is not None:
            method.attach_(model, self.seed)
        return model.eval()


def _speed(latency: LatencyComparison) -> dict[str, Measure]:
    """Returns images per second, and the ratio to the original's."""
    return {
        **plain_measures({"images": latency.batch / latency.candidate.median}),
        "ratio": asdict(latency.faster),  # of the latencies, and so of the throughputs
    }
