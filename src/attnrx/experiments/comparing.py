"""Several prescriptions on one model at the same shares: what each costs and what each loses, on the same images."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.checks.comparison import answer
from attnrx.checks.statistics import Estimate, mean_estimate, paired_change, proportion
from attnrx.costs import ModelCosts
from attnrx.data import ImageSet
from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput
from attnrx.experiments.bench import Say, in_silence
from attnrx.flow import prescribe, realize
from attnrx.models import evaluating, family_of
from attnrx.refinement import Refinement, refine
from attnrx.shapes import Float, Int, Tensor
from attnrx.storage import write_json

SHARE = "{share}"


@dataclass(frozen=True)
class Contender:
    """One way of compressing: the texts of its rules, in which {share} stands for the share that is kept.

    `refined` are the steps of a refinement of the queries and keys on the calibration images afterwards.
    """

    name: str
    rule: str | None = None
    metric: str | None = None
    values: str | None = None
    mlp: str | None = None
    refined: int = 0

    @classmethod
    def parse(cls, text: str) -> "Contender":
        """Reads NAME=RULE[@METRIC][+values=RULE][+mlp=RULE][+refine=STEPS], e.g. mix=total_rank:{share}."""
        name, equals, rest = text.partition("=")
        if not equals or not name or not rest:
            raise InvalidInput(f"the contender {text!r} is not NAME=RULE, e.g. mix=total_rank:{SHARE}.")
        parts: dict[str, str] = {}
        for part in rest.split("+"):
            kind, given, value = part.partition("=")
            if not given or kind not in ("values", "mlp", "refine"):
                kind, value = "rule", part
            if kind in parts or not value:
                raise InvalidInput(f"{part!r} in {text!r}: give one RULE, and after + values=, mlp= or refine= once.")
            parts[kind] = value
        rule, _, metric = parts.get("rule", "").partition("@")
        steps = parts.get("refine", "0")
        if not steps.isdigit():
            raise InvalidInput(f"refine={steps!r} in {text!r}: give a whole number of steps, e.g. 200.")
        return cls(name, rule or None, metric or None, parts.get("values"), parts.get("mlp"), int(steps))

    def at(self, share: float) -> dict[str, Any]:
        """Gives what `prescribe` is asked, for one share."""
        rules = {"rule": self.rule, "values": self.values, "mlp": self.mlp}
        told = {kind: None if text is None else text.replace(SHARE, repr(share)) for kind, text in rules.items()}
        return {**told, "metric": self.metric}

    @property
    def varies(self) -> bool:
        """Whether it depends on the share at all."""
        return any(text is not None and SHARE in text for text in (self.rule, self.values, self.mlp))


@dataclass(frozen=True)
class Trial:
    """What one contender costs and loses at one share: shares of the original, points, and nats an image."""

    contender: str
    share: float
    params: int
    macs: int
    params_share: float
    macs_share: float
    accuracy: Estimate
    change: Estimate
    agreement: Estimate
    divergence: Estimate
    n: int
    seconds: float

    @property
    def cells(self) -> tuple[str, ...]:
        """What a table shows."""
        return (
            self.contender,
            f"{100 * self.share:g} %",
            f"{self.accuracy.value:.1f} %",
            _spread(self.change, 1),
            f"{_spread(self.agreement, 1)} %",
            _spread(self.divergence, 3),
            f"{100 * self.macs_share:.1f} %",
            f"{100 * self.params_share:.1f} %",
        )


@dataclass(frozen=True)
class Trials:
    """All trials on one model, with the accuracy of the original and how everything was measured."""

    trials: tuple[Trial, ...]
    accuracy: Estimate
    about: dict[str, Any]

    def save(self, path: Path | str) -> Path:
        """Writes one JSON file."""
        record = {
            "kind": "attnrx comparison",
            "schema": 1,
            "accuracy": asdict(self.accuracy),
            "about": self.about,
            "trials": [asdict(trial) for trial in self.trials],
        }
        return write_json(path, record)

    def to_markdown(self) -> str:
        """Gives a table: one line per trial."""
        columns = ("contender", "kept", "top-1", "change", "agreement", "KL", "MACs", "parameters")
        lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        return "\n".join((*lines, *(f"| {' | '.join(trial.cells)} |" for trial in self.trials)))


def _spread(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


@dataclass(frozen=True)
class Bench:
    """A model, what was diagnosed of it, the images that it is refined on, and those that everything is measured on."""

    model: nn.Module
    diagnosis: Diagnosis
    calibration: ImageSet
    test: ImageSet
    seed: int = 0
    batch_size: int = 64


def compare_contenders(
    bench: Bench,
    contenders: Sequence[Contender],
    shares: Iterable[float],
    say: Say = in_silence,
    out: Path | str | None = None,
) -> Trials:
    """Prescribes, realizes and measures every contender at every share, without any fine-tuning.

    All are measured on the same images as the original, and changes are paired; intervals are 95 % bootstrap intervals
    over the images. What is known so far is saved to `out` after every trial.
    """
    shares = tuple(shares)
    if not contenders or not shares or any(not 0 < share <= 1 for share in shares):
        raise InvalidInput(f"{len(contenders)} contenders at the shares {shares}: give at least one, shares in (0, 1].")
    before = family_of(bench.model).costs(bench.model)
    logits, labels = _answers(bench.model, bench)
    correct = proportion(int((logits.argmax(-1) == labels).sum()), len(labels)).scaled(100.0)
    found = Trials((), correct, _about(bench, contenders, len(labels)))
    for contender in contenders:
        for share in shares if contender.varies else (1.0,):
            started = time.perf_counter()
            candidate = _made(bench, contender, share)
            seconds = time.perf_counter() - started
            measured = _trial(bench, before, candidate, (logits, labels))
            trial = Trial(contender.name, share, **measured, n=len(labels), seconds=seconds)
            found = replace(found, trials=(*found.trials, trial))
            if out is not None:
                found.save(out)
            say(
                f"{trial.contender} at {share:g}: top-1 {trial.accuracy.value:.1f} %, agreement "
                f"{trial.agreement.value:.1f} %, KL {trial.divergence.value:.3f}"
            )
    return found


def _about(bench: Bench, contenders: Sequence[Contender], images: int) -> dict[str, Any]:
    return {
        "diagnosis": dict(bench.diagnosis.about),
        "data": bench.test.fingerprint,
        "images": images,
        "seed": bench.seed,
        "contenders": [asdict(contender) for contender in contenders],
        "torch": torch.__version__,
    }


def _made(bench: Bench, contender: Contender, share: float) -> nn.Module:
    candidate = realize(bench.model, prescribe(bench.diagnosis, **contender.at(share)))
    if contender.refined:
        knobs = Refinement(steps=contender.refined, seed=bench.seed)
        candidate = refine(candidate, bench.model, bench.calibration, knobs).model
    return candidate


def _trial(bench: Bench, before: ModelCosts, candidate: nn.Module, original: tuple[Tensor, Tensor]) -> dict[str, Any]:
    logits, labels = original
    own, _ = _answers(candidate, bench)
    after = family_of(candidate).costs(candidate)
    right, still = logits.argmax(-1) == labels, own.argmax(-1) == labels
    agreeing = int((own.argmax(-1) == logits.argmax(-1)).sum())
    divergence = (logits.softmax(-1) * (logits.log_softmax(-1) - own.log_softmax(-1))).sum(-1)
    return {
        "params": after.params,
        "macs": after.macs,
        "params_share": after.params / before.params,
        "macs_share": after.macs / before.macs,
        "accuracy": proportion(int(still.sum()), len(labels)).scaled(100.0),
        "change": paired_change(right, still, bench.seed).scaled(100.0),
        "agreement": proportion(agreeing, len(labels)).scaled(100.0),
        "divergence": mean_estimate(divergence, bench.seed),
    }


def _answers(model: nn.Module, bench: Bench) -> tuple[Float[Tensor, "images classes"], Int[Tensor, "images"]]:
    logits, labels = [], []
    device = next(model.parameters()).device
    with evaluating([model]):
        for batch in bench.test.batches(bench.batch_size, device=device):
            logits.append(answer(model, batch.images).double().cpu())
            labels.append(batch.labels.cpu())
    return torch.cat(logits), torch.cat(labels)
