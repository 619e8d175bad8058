r"""The latency of one layer of attention: fused, unfused and in the C++ kernel, by the ranks of its heads, on a CPU.

    python benchmarks/unfused.py timm:vit_tiny_patch16_224 --ranks 64,64,64 56,32,32 48,40,32 --tokens 197 133 91
    python benchmarks/unfused.py timm:deit_small_patch16_224 --ranks 64,64,64,64,64,64 shared:192 \
        mixed:32,32,32,32,32,32 --batch 8 --alone

`shared:R` are R directions that all heads share, `mixed:R,R,...` those of blocks whose score maps are mixed. With
`--alone` the projections are left out: what remains are the scores, the softmax and the products with the values, whose
dimensions per head are `--values`.

All take turns in one run; `fused` pads heads to one width, `unfused` and `native` run every head at its own. With
`--sizes` attention weights every token by its size, as after merging. Weights are random: times do not depend on them.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from attnrx.vit.attention import (
    Attention,
    AttentionCapture,
    AttentionContext,
    Backend,
    Eager,
    Fused,
    Native,
    ScoreFactors,
)
from attnrx.vit.attention.forms import in_buckets
from attnrx.vit.costs import Conditions, device_name, interleave
from attnrx.vit.models import build_model, family_of
from attnrx.vit.spec import AttentionSpec


class PaddedSized(AttentionCapture):
    """PyTorch's fused kernel over tokens of different sizes, also where another backend is faster."""

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        # The class itself may select a faster backend, which is timed here on its own.
        return self

    def attend(self, factors: ScoreFactors, value: torch.Tensor) -> torch.Tensor:
        # exp(score + log size) = size * exp(score): a token of size s counts as s tokens.
        (query, key), sizes = factors.folded(), self.sizes()
        assert sizes is not None
        added = sizes.log()[:, None, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=added, scale=factors.scale)


def main() -> None:
    """Times, and prints a table: medians in ms, and shares of the first row's in the fused kernel with quartiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", nargs="+", required=True, help="ranks of all heads; those of the original first")
    parser.add_argument("--tokens", nargs="+", type=int, default=[197])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--values", type=int, help="value dimensions of every head; those of the original if omitted")
    parser.add_argument("--alone", action="store_true", help="without the projections")
    arguments = parser.parse_args()
    model = build_model(arguments.model, seed=0)
    spec, conditions = family_of(model).attention(model)[0].spec, Conditions(threads=arguments.threads)
    kind = "tokens of different sizes" if arguments.sizes else "tokens of one size"
    print(
        f"{device_name('cpu')}, torch {torch.__version__}, batch {arguments.batch}, {arguments.threads} threads, {kind}"
    )
    if arguments.values is not None:
        spec = replace(spec, value_ranks=(arguments.values,) * len(spec.heads))
    specs = {text: _compressed(spec, text) for text in arguments.ranks}
    for count in arguments.tokens:
        tokens = torch.randn(arguments.batch, count, spec.width, generator=torch.Generator().manual_seed(0))
        # Merged tokens of one to three patches.
        sizes = torch.randint(1, 4, tokens.shape[:2], generator=torch.Generator().manual_seed(0)).float()
        backends: dict[str, Backend] = {
            "fused": PaddedSized(lambda sizes=sizes: sizes, _ignore, ()) if arguments.sizes else Fused(),
            "unfused": Eager((lambda sizes=sizes: sizes) if arguments.sizes else None),
            "native": Native((lambda sizes=sizes: sizes) if arguments.sizes else None),
        }
        pairs = {f"{text} {name}": (text, backend) for text in specs for name, backend in backends.items()}
        with torch.inference_mode(), conditions.held():
            layers = {name: Attention(specs[text], backend).eval() for name, (text, backend) in pairs.items()}
            # `partial(layer, tokens)` runs the whole layer.
            make = _without_projections if arguments.alone else partial
            runs = {name: make(layer, tokens) for name, layer in layers.items()}
            seconds = interleave(runs, rounds=arguments.rounds, warmup=3, clock="wall")
        first = next(iter(seconds.values()))  # the original in the fused kernel
        for name, times in seconds.items():
            low, middle, high = (times / first).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=times.dtype)).tolist()
            print(f"{count} tokens, {name}: {1e3 * float(times.median()):.2f} ms, {middle:.3f} [{low:.3f}, {high:.3f}]")


def _compressed(spec: AttentionSpec, text: str) -> AttentionSpec:
    form, _, ranks = text.rpartition(":")  # no form: heads with directions of their own
    head_ranks = tuple(map(int, ranks.split(",")))
    if not form:
        return replace(spec, ranks=head_ranks)
    return spec.with_shared_directions(sum(head_ranks), head_ranks if form == "mixed" else None)


def _without_projections(layer: Attention, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    plan = layer.plan(tokens)
    # Queries, keys and values are projected once, outside of what is timed.
    value = in_buckets(layer.value.padded(tokens, plan.value_dims), plan.widths, plan.buckets)
    values = [part.transpose(1, 2) for part in value]
    query, key = (side.padded(tokens, plan.rows) for side in (layer.scores.query, layer.scores.key))
    return partial(plan.backend, plan.buckets, layer.scores(query, key, plan.buckets), values)


def _ignore(captured: object) -> None:
    """Ignores the captured attention, of which none is requested."""


if __name__ == "__main__":
    main()
