"""Compares the costs and the quality of several compression methods for one model, on the same images."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path

import torch
from torch import nn

from attnrx.change.predictions import Predictions, predict
from attnrx.data import ImageSet, require_labels
from attnrx.show.checks.check import chance_notes
from attnrx.show.checks.statistics import chunks, mcnemar, mean_estimate, mean_share, paired_change, proportion
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.estimate import Estimate
from attnrx.support.progress import Log, no_log
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.costs import ModelCosts
from attnrx.vit.maps import TOKENS
from attnrx.vit.models import family_of
from attnrx.vit.outputs import Logits, output_kind_of
from attnrx.vit.tokens import parse_policy
from attnrx_lab.comparison.methods import (
    Method,
    MethodBench,
    ModelCompressor,
    TrainedModel,
    points,
    require_points,
    token_policy,
)
from attnrx_lab.comparison.record import Difference, MethodComparison, MethodTrial, Unreached

FLIPS = 9999  # random draws in a permutation test
# A method with a fixed cost, e.g. a trained model, is compared with methods whose MACs differ from its own by at most
# this share.
NEARLY_EQUAL = 0.02


@dataclass(frozen=True)
class ImageResults:
    """One method's results for every image: the KL divergence in nats, and whether the predicted class is correct.

    `budget` contains the requested share and the target share of the MACs, and at most one of them is set. Both are
    None if the method has no adjustable share. `macs` is the model's number of multiply-accumulates.
    """

    method: str
    budget: tuple[float | None, float | None]
    divergence: Float[Tensor, "images"]
    correct: Bool[Tensor, "images"]
    macs: float

    @property
    def is_fixed(self) -> bool:
        return self.budget == (None, None)

    def is_comparable(self, other: "ImageResults") -> bool:
        """Whether both have the same budget or, if only one method has a fixed cost, nearly equal MACs."""
        if self.is_fixed != other.is_fixed:
            return abs(self.macs / other.macs - 1) <= NEARLY_EQUAL
        return self.budget == other.budget


def compare_methods(
    bench: MethodBench,
    methods: Sequence[Method],
    shares: Iterable[float] = (),
    log: Log = no_log,
    out: Path | str | None = None,
    macs: Iterable[float] = (),
) -> MethodComparison:
    """Compresses the model with every method at every share, and measures the results.

    The comparison itself trains no weights, but a method may repair or distill its models. `shares` replace {share} in
    the rules. `macs` are target shares of the model's MACs. For each target, every method is also measured at the
    largest {share} whose model has no more MACs (`ModelCompressor.share_within`). If a method cannot reach a target,
    the comparison lists it under `unreached`. If nothing is pruned at a share, the original model is measured.

    All methods and the original are measured on the same images. Changes are paired by image, and intervals are 95 %
    bootstrap intervals over the images. Every pair of methods at the same budget is compared image by image
    (`Difference`). After every trial, all results so far are saved to `out`.

    Raises:
        InvalidInput: There is no method.
        NotSupported: A method has token reducers that need training.
    """
    shares, targets = tuple(shares), tuple(macs)
    require_points(shares, targets)
    require_comparable(bench.model, bench.test, methods)
    for method in methods:
        bench.compressor(method)  # raises for invalid methods before anything is measured
    original = _Original.measured(bench)
    kind, labels = original.predictions.kind, original.predictions.labels
    notes = chance_notes(original.accuracy, labels) if isinstance(kind, Logits) else []
    for note in notes:
        log(f"warning: {note}")
    about = {
        **bench.describe(methods),
        "outputs": kind.name,
        "data": bench.test.fingerprint,
        "images": len(labels),
        "notes": notes,
    }
    trials, results = MethodComparison((), original.accuracy, about), []
    for method in methods:
        compressor = bench.compressor(method)  # one at a time, because a baseline keeps its decompositions
        for point in points(method, compressor, original.costs, shares, targets):
            if isinstance(point, Unreached):
                trials = replace(trials, unreached=(*trials.unreached, point))
                log(" ".join((point.method, point.cells[2])))
            else:
                trial, result = original.trial(method, compressor, *point)
                results.append(result)
                # All differences are computed again, because Holm's correction depends on their number.
                differences = paired_differences(results, bench.seed)
                trials = replace(trials, trials=(*trials.trials, trial), differences=differences)
                log(", ".join(f"{name} {cell}" for name, cell in zip(trials.columns, trial.cells, strict=True)))
            if out is not None:
                trials.save(out)
    return trials


def require_comparable(model: nn.Module, test: ImageSet, methods: Sequence[Method]) -> None:
    """Checks everything that can be checked before the model is diagnosed.

    Raises:
        InvalidInput: There is no method, the model predicts no classes, the images have no labels, a token policy does
            not fit the model, or a trained model's inputs or outputs differ from the original's.
        NotSupported: A method has token reducers that need training.
    """
    if not methods:
        raise InvalidInput("a comparison needs at least one method; give NAME=RULES.")
    kind = output_kind_of(model)
    if not kind.has_decisions:
        raise InvalidInput(f"methods are compared by accuracy, and this model returns {kind.returns}.")
    require_labels(test)
    for method in methods:
        require_meaning(method)
        if method.folder is not None:
            TrainedModel(model, method.folder)
        elif method.baseline is None:
            token_policy(method.template, 1.0, model)


def require_meaning(method: Method) -> None:
    """Raises NotSupported if the method's token reducer needs training and the method has no distillation."""
    tokens = method.template.at(1.0).get(TOKENS) if method.has_rules else None
    if tokens is None or method.distilled:
        return
    reducer = parse_policy(tokens).reducer
    if reducer.untrained_reason is not None:
        raise NotSupported(
            f"the method {method.name} uses {reducer}, which needs training, and a comparison trains nothing: "
            f"{reducer.untrained_reason}. Train a model with it (attnrx train --tokens), or use a reducer without "
            "training, e.g. ward."
        )


@dataclass(frozen=True, eq=False)
class _Original:
    """The original model's results on the test images. Every trial is compared with them."""

    bench: MethodBench
    costs: ModelCosts
    predictions: Predictions

    @classmethod
    def measured(cls, bench: MethodBench) -> "_Original":
        model = bench.model
        return cls(bench, family_of(model).costs(model), predict({"original": model}, bench.test, bench.batch_size))

    @cached_property
    def correct(self) -> Bool[Tensor, "images"]:
        return self.predictions.correct("original")

    @property
    def accuracy(self) -> Estimate:
        return _percent(self.correct)

    def trial(
        self, method: Method, compressor: ModelCompressor, share: float, target: float | None
    ) -> tuple[MethodTrial, ImageResults]:
        """Makes and measures the model of one method at one share."""
        started = time.perf_counter()
        candidate, costs = compressor.make(share), compressor.costs(share)
        seconds = time.perf_counter() - started
        measured = predict({"candidate": candidate}, self.bench.test, self.bench.batch_size)
        found = replace(self.predictions, outputs={**self.predictions.outputs, **measured.outputs})
        macs, seed = costs.macs, self.bench.seed
        divergence, correct = found.divergence("original", "candidate"), found.correct("candidate")
        requested_share = share if method.varies else None
        trial = MethodTrial(
            method=method.name,
            share=requested_share,
            params=costs.params,
            macs=macs,
            params_share=costs.params / self.costs.params,
            macs_share=macs / self.costs.macs,
            accuracy=_percent(correct),
            change=paired_change(self.correct, correct, seed).scaled(100.0),
            agreement=mean_share(found.agreement("original", "candidate"), seed).scaled(100.0),
            divergence=mean_estimate(divergence, seed),
            n=len(found),
            seconds=seconds,
            target=target,
        )
        # Methods with the same MACs target have different shares. So the budget is only the target.
        budget = (requested_share if target is None else None, target)
        return trial, ImageResults(method.name, budget, divergence, correct, macs)


def _percent(hits: Bool[Tensor, "images"]) -> Estimate:
    return proportion(int(hits.sum()), len(hits)).scaled(100.0)


def paired_differences(results: Sequence[ImageResults], seed: int) -> tuple[Difference, ...]:
    """Compares every pair of methods that were measured at the same budget, in the order of the results."""
    differences = []
    for first, second in combinations(results, 2):
        if not first.is_comparable(second):
            continue
        change = second.divergence - first.divergence
        lost, gained = int((first.correct & ~second.correct).sum()), int((~first.correct & second.correct).sum())
        differences.append(
            Difference(
                first.method,
                second.method,
                *(second if first.is_fixed else first).budget,
                divergence=mean_estimate(change, seed),
                divergence_p=sign_flip_test(change, seed),
                accuracy=paired_change(first.correct, second.correct, seed).scaled(100.0),
                accuracy_p=mcnemar(lost, gained),
                n=len(change),
            )
        )
    # Divergence and accuracy are separate families of tests, so each family has its own correction.
    divergence_p = holm([difference.divergence_p for difference in differences])
    accuracy_p = holm([difference.accuracy_p for difference in differences])
    return tuple(
        replace(difference, divergence_p=of_divergence, accuracy_p=of_accuracy)
        for difference, of_divergence, of_accuracy in zip(differences, divergence_p, accuracy_p, strict=True)
    )


def sign_flip_test(differences: Float[Tensor, "images"], seed: int) -> float:
    """Returns the two-sided p-value of a paired sign-flip permutation test. The null hypothesis is a mean of 0.

    Under the null hypothesis the two methods are exchangeable on every image, so the sign of each difference is random.
    The test draws `FLIPS` random sets of signs. The observed signs count as one more set, so p is at least
    1 / (FLIPS + 1).
    """
    values = differences.double().cpu()
    observed = values.sum().abs() * (1 - 1e-12)  # a tolerance, because rounding may make a set without swaps smaller
    generator = torch.Generator().manual_seed(seed)
    num_extreme = 0
    for rows in chunks(FLIPS, len(values)):  # the signs are [rows, images]
        signs = 2 * torch.randint(2, (rows, len(values)), generator=generator).double() - 1
        num_extreme += int(((signs @ values).abs() >= observed).sum())
    return (1 + num_extreme) / (1 + FLIPS)


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Returns the p-values corrected by Holm's step-down method (1979), in the order of `p_values`."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    # Corrected p-values must not decrease, because after a test that is not rejected no later test is rejected.
    corrected, largest = [0.0] * len(p_values), 0.0
    for position, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - position) * p_values[index]))
        corrected[index] = largest
    return tuple(corrected)
