"""How many images a second a model answers when tokens leave it: every method beside the original, round by round."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.config import from_dict, to_dict
from attnrx.costs import Conditions, Ratio, Timing, interleave
from attnrx.errors import InvalidInput
from attnrx.experiments.bench import answering_device
from attnrx.experiments.experiment import Experiment, Run, Say, in_silence
from attnrx.experiments.measures import Measure, plain_measure
from attnrx.experiments.pretrained_subject import outline_of
from attnrx.experiments.spot_experiment import SMALL, TINY, SmallOriginal
from attnrx.experiments.spot_methods import TokenMethod, token_price
from attnrx.models import build_model, family_of
from attnrx.shapes import Float, Tensor
from attnrx.storage import write_json
from attnrx.training import Reporter

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
    """Forward passes of one model with every method, and with all its tokens, taking turns on the same batch.

    Weights, predictors and images are drawn from the seed and nothing is trained: time depends on how many tokens
    leave, not on which. Without a `model`, it is the `small` one. The device is an accelerator if there is one.
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
        """What the model is called."""
        return self.subject

    def as_tiny(self) -> "SpeedExperiment":
        """The same on a tiny model."""
        return replace(self, tiny=True, batch_size=2, rounds=2)

    def run(self, folder: Path | str, *, reporter: Reporter | None = None, say: Say = in_silence) -> SpeedRun:
        """Times every method, or reads back what was timed."""
        folder = Path(folder)
        self.require(folder)
        if not (folder / "result.json").exists():
            say(f"{self.name}: {len(self.methods)} methods, {self.rounds} rounds")
            write_json(folder / "result.json", _measured(self))
            self.claim(folder)
        return SpeedRun.load(folder)

    def outline(self) -> nn.Module:
        """The shapes of the model that is priced, which a tiny run does not change."""
        if self.model is not None:
            return outline_of(self.model)
        with torch.device("meta"):
            return self.small.build()

    def timed(self) -> nn.Module:
        """The model that is timed, with random weights."""
        if self.tiny or self.model is None:
            return (TINY if self.tiny else self.small).build().eval()
        return build_model(self.model).eval()

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "SpeedExperiment":
        """Gives the experiment that `to_dict` described."""
        return from_dict(record, (cls, TokenMethod, SmallOriginal))


ALL_TOKENS = ""  # the original among the methods


def _measured(experiment: SpeedExperiment) -> dict[str, Any]:
    conditions = Conditions(device=str(answering_device()))
    with conditions.held():
        seconds = interleave(
            _passes(experiment, conditions),
            rounds=experiment.rounds,
            warmup=WARMUP,
            clock="cuda" if conditions.on_cuda else "wall",
        )
    outline, dense = experiment.outline(), seconds[ALL_TOKENS]
    rules = {
        method.name: {
            "paper": {name: plain_measure(value) for name, value in token_price(outline, method).items()},
            "speed": _speed(seconds[method.name], dense, experiment),
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
                f"medians of {experiment.rounds} rounds"
            ],
        },
        "rules": rules,
        "measured_with": {"device": conditions.device, "threads": threads, "torch": torch.__version__},
    }


def _passes(experiment: SpeedExperiment, conditions: Conditions) -> dict[str, Callable[[], Tensor]]:
    """Gives a forward pass of every method and of the original."""
    model = experiment.timed()
    shape = family_of(model).input_shape(model)
    generator = torch.Generator().manual_seed(experiment.seed)
    images = conditions.place_images(torch.randn(experiment.batch_size, *shape, generator=generator))
    found: dict[str, Callable[[], Tensor]] = {ALL_TOKENS: partial(conditions.place(model), images)}
    for method in experiment.methods:
        own = experiment.timed()
        method.attach_(own, experiment.seed)
        found[method.name] = partial(conditions.place(own), images)
    return found


def _speed(
    seconds: Float[Tensor, "rounds"], dense: Float[Tensor, "rounds"], experiment: SpeedExperiment
) -> dict[str, Measure]:
    """Images a second, and how many times as many as the original answers."""
    ratio = Ratio.of(dense, seconds, experiment.seed)
    return {
        "images": plain_measure(experiment.batch_size / Timing.of(seconds).median),
        "ratio": {"value": ratio.value, "low": ratio.low, "high": ratio.high},
    }
