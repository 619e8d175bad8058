"""The C++ kernel of linear maps against PyTorch and oneDNN: the products of one block, and its MLP in one call.

    python benchmarks/products.py [--width 192 384] [--tokens 197 118 64] [--threads 1] [--rounds 60]

All sides take turns in every round. Printed are microseconds of the lower quartile of the rounds, float32.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

from attnrx.support.hardware import device_name
from attnrx.vit.costs import interleave
from attnrx.vit.kernels.native_products import native_maps


def product(tokens: int, inputs: int, outputs: int) -> dict[str, Callable[[], object]]:
    features, weight, bias = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    # The operator that torch.compile uses for frozen weights on a CPU, which have oneDNN's own layout.
    onednn = torch.ops.mkldnn._linear_pointwise.default
    return {
        "PyTorch": lambda: F.linear(features, weight, bias),
        "oneDNN, packed": lambda: onednn(features, reordered, bias, "none", [], ""),
        "attnrx": lambda: native_maps(features, (weight,), (bias,), (False,)),
    }


def mlp(tokens: int, width: int) -> dict[str, Callable[[], object]]:
    features, hidden = torch.randn(tokens, width), 4 * width
    weights, biases = (
        (torch.randn(hidden, width), torch.randn(width, hidden)),
        (torch.randn(hidden), torch.randn(width)),
    )
    onednn = torch.ops.mkldnn._linear_pointwise.default
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]

    def by_onednn() -> torch.Tensor:
        between = F.gelu(onednn(features, packed[0], biases[0], "none", [], ""))
        return onednn(between, packed[1], biases[1], "none", [], "")

    return {
        "PyTorch": lambda: F.linear(F.gelu(F.linear(features, weights[0], biases[0])), weights[1], biases[1]),
        "oneDNN, packed": by_onednn,
        "attnrx": lambda: native_maps(features, weights, biases, (True, False)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[192, 384])
    parser.add_argument("--tokens", type=int, nargs="+", default=[197, 118, 64])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{device_name('cpu')}, {arguments.threads} threads, torch {torch.__version__}\n")
    print("| width | tokens | map | PyTorch | oneDNN, packed | attnrx |\n|---|---|---|---|---|---|")
    with torch.inference_mode():
        for width in arguments.width:
            for tokens in arguments.tokens:
                # One product for queries, keys and values, as the layers run it.
                shapes = {"query, key, value": (width, 3 * width), "output": (width, width)}
                rows = {name: product(tokens, *shape) for name, shape in shapes.items()} | {"MLP": mlp(tokens, width)}
                for name, sides in rows.items():
                    seconds = interleave(sides, rounds=arguments.rounds, warmup=3, clock="wall")
                    # The lower quartile: other processes only add to a time, and the least is a single round.
                    cells = [f"{1e6 * float(times.quantile(0.25)):.0f}" for times in seconds.values()]
                    print("| " + " | ".join((str(width), str(tokens), name, *cells)) + " |")


if __name__ == "__main__":
    main()
