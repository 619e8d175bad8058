"""Measures how often the 95 % intervals cover the truth, in seeded simulations with a known answer.

The first of three simulations tests intervals of means over images. The Kullback-Leibler divergences of images have
heavy tails. So the script draws them from lognormal distributions or mixtures of gamma distributions, or resamples a
real model's divergences. The second simulation tests intervals of latency ratios. It simulates rounds that are
correlated (AR(1) with the coefficient `phi`), drift and are sometimes disturbed. The ratio also differs between
processes. The script compares one process with four processes that each run a quarter of the rounds. The third
simulation measures how often a promised divergence holds if the true divergence equals it, and if it is twice as large.

python benchmarks/coverage.py
python benchmarks/coverage.py --weights WEIGHTS --data DATA --label-column imagenet1k_label   # also a real ViT-Tiny
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

import attnrx as rx
from attnrx.cli.options import add_data, splits_argument
from attnrx.nouns.evidence import FAILS, HOLDS, OUTCOMES, UNDECIDED
from attnrx.nouns.plan import PredictedQuantity, limits_of
from attnrx.show.checks.costs import judged_promise
from attnrx.show.checks.statistics import estimate, mean_estimate, resampled_means
from attnrx.vit.costs import ratio_of
from attnrx.vit.costs.measured import PROCESSES
from attnrx.vit.outputs import KINDS

LOGITS = KINDS["logits"]
Draw = Callable[[int, torch.Generator], Tensor]  # draws n divergences, one per image, with mean 1


def lognormal(spread: float) -> Draw:
    return lambda n, generator: torch.randn(n, generator=generator).double().mul(spread).sub(spread**2 / 2).exp()


def gammas(share: float, size: float) -> Draw:
    """Returns a sampler of a gamma (shape 1/2, mean 1) mixed with an exponential distribution of mean `size`.

    `share` is the probability of the exponential distribution. The samples are then scaled to mean 1.
    """

    def draw(n: int, generator: torch.Generator) -> Tensor:
        small = torch.randn(n, generator=generator).double().square()  # a gamma distribution of shape 1/2 and mean 1
        large = -size * torch.rand(n, generator=generator).double().clamp(min=1e-300).log()
        chosen = torch.rand(n, generator=generator) < share
        return torch.where(chosen, large, small) / (share * size + 1 - share)

    return draw


def resampled(values: Tensor) -> Draw:
    values = values.double() / values.double().mean()
    return lambda n, generator: values[torch.randint(len(values), (n,), generator=generator)]


DIVERGENCES: Mapping[str, Draw] = {
    "exponential": gammas(1.0, 1.0),
    "lognormal 1": lognormal(1.0),
    "lognormal 1.5": lognormal(1.5),
    "gammas, 20 % tenfold": gammas(0.2, 10.0),
    "gammas, 10 % 24-fold": gammas(0.1, 24.0),
}


def covers_mean(draw: Draw, n: int, repetitions: int) -> tuple[float, float]:
    """Returns the coverage of a mean's studentized interval and of its percentile interval, as shares."""
    generator, found = torch.Generator().manual_seed(0), torch.zeros(2)
    for seed in range(repetitions):
        values = draw(n, generator)
        percentiles = estimate(float(values.mean()), resampled_means(values[:, None], seed)[:, 0])
        found += torch.tensor([each.low <= 1 <= each.high for each in (mean_estimate(values, seed), percentiles)])
    studentized, plain = (found / repetitions).tolist()
    return studentized, plain


BETWEEN = 0.02  # standard deviation of log(latency ratio) between processes


def run_of(rounds: int, phi: float, between: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Simulates one run, and returns the seconds of two models in every round. The first takes 1.5 times as long.

    Both models drift together. Each model's times have correlated noise of 5 %, and 5 % of its rounds are disturbed.
    The times of the first model also differ between processes.
    """
    warm = 50  # rounds until the noise is stationary
    noise = torch.randn(2, warm + rounds, generator=generator).double() * (1 - phi**2) ** 0.5
    for index in range(1, warm + rounds):
        noise[:, index] += phi * noise[:, index - 1]
    steps = torch.randn(rounds, generator=generator).double() * 0.02
    drift = torch.linspace(0, 0.2, rounds).double() + steps.cumsum(0)
    disturbed = torch.rand(2, rounds, generator=generator) < 0.05
    delays = -0.5 * torch.rand(2, rounds, generator=generator).double().clamp(min=1e-300).log()
    logarithms = drift + 0.05 * noise[:, warm:] + disturbed * delays
    own = between * torch.randn(1, generator=generator).double()
    return 1.5 * (logarithms[0] + own).exp(), logarithms[1].exp()


def covers_ratio(
    rounds: int, phi: float, processes: int, repetitions: int, between: float = BETWEEN
) -> tuple[float, float]:
    """Returns how often the interval covers a latency ratio, and the interval's mean width relative to the ratio.

    The `rounds` are divided among the `processes`.
    """
    generator, covered, width = torch.Generator().manual_seed(0), 0, 0.0
    for _ in range(repetitions):
        runs = [run_of(rounds // processes, phi, between, generator) for _ in range(processes)]
        sides = [torch.stack(side) for side in zip(*runs, strict=True)]
        found = ratio_of(*sides)
        covered += found.low <= 1.5 <= found.high
        width += (found.high - found.low) / 1.5
    return covered / repetitions, width / repetitions


def kept_promises(draw: Draw, n: int, times: float, repetitions: int) -> dict[str, float]:
    """Returns how often each outcome of a promise occurs if the true divergence is `times` the promised divergence.

    The promise is measured on 96 images, as in `attnrx shrink`, and judged on `n` images.
    """
    generator = torch.Generator().manual_seed(0)
    outcomes: dict[str, float] = dict.fromkeys(OUTCOMES, 0.0)
    for seed in range(repetitions):
        planned = draw(96, generator)
        promised = PredictedQuantity(1.0, float(planned.std() / planned.mean()), 96, limits_of("divergence", LOGITS))
        found = times * draw(n, generator)
        outcomes[judged_promise("divergence", promised, found, seed)["outcome"]] += 1 / repetitions
    return outcomes


def real_divergences(arguments: argparse.Namespace) -> Tensor:
    """Returns the divergences between a real ViT-Tiny and a copy whose values keep three quarters of their ranks."""
    model = rx.load("timm:vit_tiny_patch16_224", weights=arguments.weights)
    splits = splits_argument(model, arguments)
    diagnosis = rx.diagnose(model, splits.train.take(64), moments=True)
    candidate, images = rx.realize(model, rx.prescribe(diagnosis, "vo=uniform_rank:48")), splits.test.take(500)
    with torch.no_grad():
        outputs = [
            torch.cat([each(batch.images) for batch in images.batches(32)]).double().log_softmax(-1)
            for each in (model, candidate)
        ]
    return (outputs[0].exp() * (outputs[0] - outputs[1])).sum(-1)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="of a real ViT-Tiny, whose divergences on the data are resampled too")
    add_data(parser, "whose test images are used", required=False)
    parser.add_argument("--repetitions", type=int, default=500)
    arguments = parser.parse_args(words)
    distributions = dict(DIVERGENCES)
    if arguments.weights is not None:
        distributions["a real ViT-Tiny"] = resampled(real_divergences(arguments))
    repetitions = arguments.repetitions
    print("| divergences | images | studentized | percentiles |\n|---|---|---|---|")
    for name, draw in distributions.items():
        for n in (20, 50, 100, 200):
            studentized, plain = covers_mean(draw, n, repetitions)
            print(f"| {name} | {n} | {studentized:.3f} | {plain:.3f} |", flush=True)
    print("\n| divergences | images | true divergence | the promise holds | undecided | fails |")
    print("|---|---|---|---|---|---|")
    for name, draw in distributions.items():
        for n, times in product((20, 50, 200), (1.0, 2.0)):
            found = kept_promises(draw, n, times, repetitions)
            shares = " | ".join(f"{found[outcome]:.3f}" for outcome in (HOLDS, UNDECIDED, FAILS))
            print(f"| {name} | {n} | {times:g} x | {shares} |", flush=True)
    print(f"\n| rounds | phi | coverage in one process | mean width | in {PROCESSES} processes | mean width |")
    print("|---|---|---|---|---|---|")
    for rounds, phi in product((16, 32, 50, 100), (0.0, 0.5, 0.8, 0.9)):
        cells = (covers_ratio(rounds, phi, processes, repetitions) for processes in (1, PROCESSES))
        shown = " | ".join(f"{covered:.3f} | {100 * width:.1f} %" for covered, width in cells)
        print(f"| {rounds} | {phi:g} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
