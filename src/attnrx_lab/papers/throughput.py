"""The throughput experiment (SPOT, Figure 7), which measures images per second with several token reducers."""

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from attnrx.support.progress import Log
from attnrx.vit.costs import Conditions, LatencyProtocol, compare_latencies
from attnrx.vit.models import build_model, family_of, model_fingerprint
from attnrx_lab.papers.experiment import Experiment, Measure, evaluation_device, plain_measures
from attnrx_lab.papers.sources import outline_of
from attnrx_lab.papers.spot import TINY, TokenMethod, token_price


@dataclass(frozen=True)
class ThroughputExperiment(Experiment):
    """Times the forward passes of one model per method on the same batch of noise images. The models take turns.

    The models have random weights. Weights decide which tokens are pruned but not how many, so they do not change the
    amount of computation. `faster` is the original model's time divided by the pruned model's time.
    """

    kind: ClassVar[str] = "spot-throughput"
    knobs: ClassVar[tuple[str, ...]] = ("batch_size", "rounds", "precision")
    chosen: ClassVar[tuple[str, ...]] = knobs

    subject: str
    model: str
    methods: tuple[TokenMethod, ...]
    seed: int = 0
    batch_size: int = 256
    rounds: int = 30
    precision: Literal["bf16", "fp32"] = "fp32"
    tiny: bool = False

    def as_tiny(self) -> "ThroughputExperiment":
        return replace(self, tiny=True, batch_size=2, rounds=2)

    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Times all models."""
        original = (TINY.build() if self.tiny else build_model(self.model, seed=self.seed)).eval()
        self.claim(folder)
        device = evaluation_device()
        candidates: dict[str, nn.Module] = {}
        for method in self.methods:
            candidates[method.name] = copy.deepcopy(original)
            method.attach_(candidates[method.name], self.seed)
            candidates[method.name].eval().to(device)
        log(f"{self.name}: {len(candidates)} models for {self.rounds} rounds of {self.batch_size} images")
        images = torch.randn(self.batch_size, *family_of(original).input_shape(original)).to(device)
        conditions = Conditions(device.type, "bfloat16" if self.precision == "bf16" else "float32")
        protocol = LatencyProtocol(conditions, self.rounds)
        found = compare_latencies(candidates, copy.deepcopy(original).to(device), images, protocol)
        rules: dict[str, Any] = {}
        for method in self.methods:
            speed = found[method.name]
            faster: Measure = {"value": speed.faster.value, "low": speed.faster.low, "high": speed.faster.high}
            measured = {**plain_measures({"throughput": self.batch_size / speed.candidate.median}), "faster": faster}
            price = plain_measures(token_price(outline_of(self.model), method))
            rules[method.name] = {"paper": price, "measured": measured}
        one = next(iter(found.values()))
        note = (
            f"{one.hardware}, torch {one.torch_version}, {one.conditions.precision}, batches of {one.batch}, "
            f"{one.threads} threads, {one.clock} clock, {one.rounds} rounds; random weights and noise"
        )
        return {
            "data": {"name": "noise", "images": None, "notes": [note]},
            "model": {"fingerprint": model_fingerprint(original)},
            "rules": rules,
        }
