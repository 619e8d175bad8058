"""Times a compressed SVDA model against the original, and shows how much time the saved MACs really save.

    python benchmarks/latency.py --ranks 48 32 16 --batches 1 64 256 --precisions float32 bfloat16 --out latency.json

Both models are timed in turns, in one run. A speed is the original's time divided by the candidate's time, as the
median over rounds with a 95 % interval. Weights are random, because latency does not depend on them. `uniform` ranks
are the same in every head. `ragged` ranks spread around the same mean, like the ranks that an energy rule chooses.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from attnrx.support.storage import write_json
from attnrx.vit.costs import (
    Conditions,
    LatencyComparison,
    LatencyProtocol,
    MemoryComparison,
    compare_latency,
    compare_memory,
)
from attnrx_lab.vision_transformer import VisionTransformer, ViTConfig, initialize_, named_config

HEADER = (
    f"{'ranks':<14}{'batch':>6} {'precision':<10}{'mode':<9}{'original ms':>12}{'candidate ms':>13}"
    f"{'speed (95 %)':>22}{'MAC ratio':>11}{'memory':>8}"
)


@dataclass(frozen=True)
class Result:
    """The ratio of the MACs, and the measured ratios of time and memory."""

    rank: int
    pattern: str
    macs_ratio: float
    latency: LatencyComparison
    memory: MemoryComparison

    def __str__(self) -> str:
        latency, faster = self.latency, self.latency.faster
        mode = "compiled" if latency.conditions.compiled else "eager"
        return (
            f"{f'{self.rank} {self.pattern}':<14}{latency.batch:>6} {latency.conditions.precision:<10}{mode:<9}"
            f"{1000 * latency.reference.median:>12.2f}{1000 * latency.candidate.median:>13.2f}"
            f"{f'{faster.value:.3f}x [{faster.low:.3f}, {faster.high:.3f}]':>22}"
            f"{self.macs_ratio:>11.3f}{self.memory.ratio:>8.3f}"
        )


def compressed(config: ViTConfig, rank: int, pattern: str) -> ViTConfig:
    """Returns the configuration with `rank` directions per head, exactly or on average. The ranks of heads descend."""
    full = config.attention[0]
    heads = len(full.heads)
    # Ranks are evenly spaced around the mean, so the mean and the MACs stay the same. They go at most half of the way
    # to rank 0 and to the full rank. So every head has directions, and no head has more than before.
    reach = min(rank, full.original_rank - rank) // 2 if pattern == "ragged" else 0
    ranks = tuple(rank + round(reach * (1 - 2 * head / max(heads - 1, 1))) for head in range(heads))
    return replace(config, attention=tuple(spec.with_ranks(ranks, spec.heads, spec.norms) for spec in config.attention))


def settings(arguments: argparse.Namespace) -> Iterator[tuple[int, str, int, LatencyProtocol]]:
    """Yields every requested combination."""
    for mode in arguments.modes:
        for precision in arguments.precisions:
            conditions = Conditions(arguments.device, precision, arguments.threads, mode == "compiled")
            protocol = LatencyProtocol(conditions, rounds=arguments.rounds, clock=arguments.clock)
            for batch in arguments.batches:
                for rank in arguments.ranks:
                    for pattern in arguments.patterns:
                        yield rank, pattern, batch, protocol


def measure(config: ViTConfig, rank: int, pattern: str, batch: int, protocol: LatencyProtocol) -> Result:
    """Compares the smaller model's MACs, time and memory with the original's."""
    smaller = compressed(config, rank, pattern)
    # Both models are built from scratch, because only shapes matter, and the configuration determines the shapes.
    original, candidate = (initialize_(VisionTransformer(shape), seed=0) for shape in (config, smaller))
    images = torch.randn(batch, config.channels, config.image_size, config.image_size)
    return Result(
        rank,
        pattern,
        smaller.costs().macs / config.costs().macs,  # the measured ratios are compared with this
        compare_latency(candidate, original, images, protocol),
        compare_memory(candidate, original, images, protocol.conditions),
    )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="cifar10", help="configuration, e.g. cifar10 or food101")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 48, 32, 16], help="directions a head")
    parser.add_argument("--patterns", nargs="+", default=["uniform"], choices=["uniform", "ragged"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64], help="images at once")
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--modes", nargs="+", default=["eager"], choices=["eager", "compiled"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clock", choices=["wall", "cpu", "cuda"], help="cpu: for a machine that is busy")
    parser.add_argument("--threads", type=int, help="CPU threads; all that torch takes if not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = parse(words)
    config = named_config("svda", arguments.scenario)
    results = []
    print(HEADER)
    for setting in settings(arguments):
        results.append(measure(config, *setting))
        print(results[-1], flush=True)
    if arguments.out:
        record = {"benchmark": "latency", "results": [asdict(result) for result in results]}
        print(f"written to {write_json(arguments.out, record)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
