"""Where the time of one compressed layer goes, and how much of the ideal speed-up its bare products allow.

    python benchmarks/roofline.py timm:vit_tiny_patch16_224 --ranks 32 --values 32 --mlp 96 --batches 1 8 --threads 1

Every matrix product and every other operation of a layer is run alone, at the shapes of the original and of the
compressed layer, as is the whole layer; all take turns in one run. The sum over the operations is the roofline: what a
layer would take if nothing but them took any time. `ideal` is the inverse of the share of the MACs, `at most` the ratio
of the two rooflines, `reached` the ratio of the two whole layers. Weights are random: times do not depend on them.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.support.storage import write_json
from attnrx.vit.attention import Attention, backend_of
from attnrx.vit.costs import Conditions, device_name, interleave
from attnrx.vit.models import LowRankLinear, build_model, family_of
from attnrx.vit.spec import AttentionSpec


@dataclass(frozen=True)
class Shape:
    """One layer: its attention, the ranks of its MLP's two maps (None: one matrix), and what it is run on."""

    spec: AttentionSpec
    hidden: int
    mlp: int | None
    batch: int
    tokens: int

    def operations(self) -> dict[str, tuple[int, Callable[[], object]]]:
        """Returns by name the MACs of every operation (0 without matrix products) and a function that runs it."""
        spec, rows = self.spec, self.batch * self.tokens
        # One product for queries, keys and values, as the libraries have it.
        projected = 2 * sum(spec.ranks) + sum(spec.value_dims)
        operations = {
            "qkv": self._product(spec.width, projected),
            "output": self._product(sum(spec.value_dims), spec.width),
        }
        rank, value_dim, heads = max(spec.ranks), max(spec.value_dims), len(spec.heads)
        q, k = (torch.randn(self.batch, heads, self.tokens, rank) for _ in range(2))
        v = torch.randn(self.batch, heads, self.tokens, value_dim)
        # The fused kernels need one width of queries, keys and values; PyTorch is slow without them.
        attend = partial(F.scaled_dot_product_attention, q, k, v) if rank == value_dim else partial(_unfused, q, k, v)
        operations["attention"] = (self.batch * heads * self.tokens**2 * (rank + value_dim), attend)
        for name, sides in (("fc1", (spec.width, self.hidden)), ("fc2", (self.hidden, spec.width))):
            if self.mlp is None:
                operations[name] = self._product(*sides)
            else:
                operations[f"{name} first"] = self._product(sides[0], self.mlp)
                operations[f"{name} second"] = self._product(self.mlp, sides[1])
        hidden, wide = torch.randn(rows, self.hidden), torch.randn(rows, spec.width)
        norm = nn.LayerNorm(spec.width)
        operations["gelu"] = (0, partial(F.gelu, hidden))
        # Two norms and two residual sums per layer.
        operations["norms and sums"] = (0, lambda: (norm(wide), norm(wide), wide + wide, wide + wide))
        return operations

    def layer(self, backend: str) -> Callable[[], object]:
        """Returns a function that runs the whole layer, with the attention of attnrx."""
        attention = Attention(self.spec, backend_of(backend)).eval()
        first, second = self._map(self.spec.width, self.hidden), self._map(self.hidden, self.spec.width)
        norms = nn.LayerNorm(self.spec.width), nn.LayerNorm(self.spec.width)
        tokens = torch.randn(self.batch, self.tokens, self.spec.width)

        def run() -> torch.Tensor:
            between = tokens + attention(norms[0](tokens))
            return between + second(F.gelu(first(norms[1](between))))

        return run

    def _product(self, inputs: int, outputs: int) -> tuple[int, Callable[[], object]]:
        features = torch.randn(self.batch, self.tokens, inputs)
        run = partial(F.linear, features, torch.randn(outputs, inputs), torch.randn(outputs))
        return self.batch * self.tokens * inputs * outputs, run

    def _map(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(inputs, outputs) if self.mlp is None else LowRankLinear(inputs, outputs, self.mlp)


def _unfused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.softmax(query @ key.transpose(-1, -2), dim=-1) @ value


@dataclass(frozen=True)
class Operation:
    """One operation of a layer: the median of its seconds, and what it computes in a second."""

    name: str
    seconds: float
    gflops: float | None  # two per MAC


@dataclass(frozen=True)
class Roofline:
    """The operations of the original and of the compressed layer, and what follows from them."""

    batch: int
    original: tuple[Operation, ...]
    compressed: tuple[Operation, ...]
    ideal: float
    at_most: float
    reached: float

    def __str__(self) -> str:
        lines = [
            f"batch {self.batch}: ideal {self.ideal:.2f}x, at most {self.at_most:.2f}x, reached {self.reached:.2f}x"
        ]
        for name, operations in (("original", self.original), ("compressed", self.compressed)):
            total = sum(each.seconds for each in operations)
            lines.append(f"  {name}: {1000 * total:.3f} ms")
            for each in operations:
                rate = "" if each.gflops is None else f"{each.gflops:8.1f} GFLOP/s"
                lines.append(f"    {each.name:<16}{1000 * each.seconds:8.3f} ms {each.seconds / total:6.1%}{rate}")
        return "\n".join(lines)


def measure(original: Shape, compressed: Shape, backend: str, rounds: int, clock: str) -> Roofline:
    """Runs everything in turns."""
    shapes = {"original": original, "compressed": compressed}
    operations = {which: shape.operations() for which, shape in shapes.items()}
    runs = {f"{which}/{name}": run for which, of_shape in operations.items() for name, (_, run) in of_shape.items()}
    # The whole layers among their operations, so that all have the same load of the machine.
    runs |= {which: shape.layer(backend) for which, shape in shapes.items()}
    with torch.inference_mode():
        seconds_of = interleave(runs, rounds=rounds, warmup=3, clock=clock)
    timed_operations = {
        which: tuple(
            Operation(name, seconds, 2 * macs / seconds / 1e9 if macs else None)
            for name, (macs, _) in of_shape.items()
            for seconds in [float(seconds_of[f"{which}/{name}"].median())]
        )
        for which, of_shape in operations.items()
    }
    # Over the operations of a layer: the MACs that are timed here, not those of the whole model.
    macs = [sum(count for count, _ in operations[which].values()) for which in shapes]
    sums = [sum(each.seconds for each in timed_operations[which]) for which in shapes]
    reached = float((seconds_of["original"] / seconds_of["compressed"]).median())
    return Roofline(original.batch, *timed_operations.values(), macs[0] / macs[1], sums[0] / sums[1], reached)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name whose first layer is taken, e.g. timm:vit_tiny_patch16_224")
    parser.add_argument("--ranks", type=int, required=True, help="directions a head keeps")
    parser.add_argument("--values", type=int, help="features a head reads out (all)")
    parser.add_argument("--mlp", type=int, help="rank of both maps of the MLP (one matrix each)")
    parser.add_argument("--tokens", type=int, default=197)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="images at once")
    parser.add_argument("--backend", default="fused", help="what computes the attention")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a machine that is busy")
    parser.add_argument("--threads", type=int, help="CPU threads; all that torch takes if not given")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = parse(words)
    with torch.device("meta"):  # only its shapes
        model = build_model(arguments.model)
    family = family_of(model)
    full = family.attention(model)[0].spec
    # All layers of a plain ViT have one shape, so the first stands for the model.
    hidden = getattr(family.mlp(model)[0][0], "out_features")  # noqa: B009, a module's attributes have no types
    heads = (arguments.ranks,) * len(full.heads)
    value_dims = (arguments.values or full.head_dim,) * len(full.heads)
    smaller = AttentionSpec(
        "dense", full.width, full.head_dim, heads, full.heads, full.scale, full.original_rank, value_ranks=value_dims
    )
    rooflines = []
    with Conditions(threads=arguments.threads).held():
        for batch in arguments.batches:
            shapes = (
                Shape(full, hidden, None, batch, arguments.tokens),
                Shape(smaller, hidden, arguments.mlp, batch, arguments.tokens),
            )
            rooflines.append(measure(*shapes, arguments.backend, arguments.rounds, arguments.clock))
            print(rooflines[-1], flush=True)
        threads = torch.get_num_threads()
    if arguments.out:
        about = {
            "hardware": device_name("cpu"),
            "threads": threads,
            "torch": torch.__version__,
            "clock": arguments.clock,
        }
        record = {"benchmark": "roofline", "about": about, "results": [asdict(each) for each in rooflines]}
        print(f"written to {write_json(arguments.out, record)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
