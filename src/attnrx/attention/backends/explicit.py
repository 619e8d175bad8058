"""Attention written out for inference: every head at its own rank, nothing padded, one map at a time in the cache."""

from collections.abc import Callable, Sequence

import torch

from attnrx.attention.backends.backend import Backend, mean_of
from attnrx.attention.context import AttentionContext
from attnrx.attention.factors import Bucket, ScoreFactors, exact_buckets, padded_buckets
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec
from attnrx.tokens import CACHED

# Written out, attention has to come to this share of the arithmetic of the padded one at most, or it is not faster.
NARROW = 0.875
# With so few tokens, those of all images together, what every operation costs to start weighs more than arithmetic.
FEW_TOKENS = 1024


class Explicit(Backend):
    """Scores, softmax and read-out as three steps, which take queries and values of any two widths.

    The fused kernels of PyTorch want one width for both on a CPU. Below it this does less arithmetic, at the price of
    a map that is written and read once; in parts that fit the cache that is little. `sizes` gives how often every token
    counts, or None where each counts once.
    """

    takes_few_queries = True

    def __init__(self, sizes: Callable[[], Float[Tensor, "batch keys"] | None] | None = None):
        self.sizes = sizes

    def buckets(self, spec: AttentionSpec, context: AttentionContext) -> tuple[Bucket, ...]:
        """Groups only neighbours of equal shape; with few tokens all heads, at the largest rank."""
        if context.has_fewer_than(FEW_TOKENS):
            most = max(spec.ranks, default=0)
            return padded_buckets(spec.ranks, most, most)
        return exact_buckets(spec.ranks, self.reads(spec, context))

    def reads(self, spec: AttentionSpec, context: AttentionContext) -> tuple[int, ...]:
        """Pads nothing, unless all heads must stay together: shared directions, or few tokens."""
        fused_qkv = spec.form == "shared" or context.has_fewer_than(FEW_TOKENS)
        return (max(spec.reads),) * len(spec.heads) if fused_qkv else spec.reads

    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads keys reads"]) -> Tensor:
        """Computes scores, attention and the read-out."""
        query, key = factors.folded()
        return unfused(query, key, value, factors.scale)

    def __call__(
        self,
        buckets: tuple[Bucket, ...],
        factors: tuple[ScoreFactors, ...],
        values: Sequence[Float[Tensor, "batch _ keys _"]],
    ) -> Float[Tensor, "batch queries features"]:
        """Returns what all heads read out, side by side."""
        sizes = None if self.sizes is None else self.sizes()
        if sizes is not None or fits_in_chunks(values[0]):
            return chunked_forward(buckets, factors, values, sizes)
        return super().__call__(buckets, factors, values)


def unfused(
    query: Float[Tensor, "batch heads queries width"],
    key: Float[Tensor, "batch heads keys width"],
    value: Float[Tensor, "batch heads keys reads"],
    scale: float,
) -> Float[Tensor, "batch heads queries reads"]:
    """Returns softmax(scale * query @ key^T) @ value."""
    return torch.softmax((query * scale) @ key.transpose(-1, -2), dim=-1) @ value


def worth_writing_out(spec: AttentionSpec, context: AttentionContext, narrow: float = NARROW) -> bool:
    """Whether attention written out in parts is faster than a fused kernel, which pads: where it is narrow enough.

    Several threads would wait for each other at every product, where a fused kernel gives each of them images.
    """
    alone = context.free_on_cpu and context.threads == 1
    if not alone or spec.norms == "original" or not any(spec.ranks):
        return False
    heads = [(rank, own) for rank, own in zip(spec.ranks, spec.reads, strict=True) if rank]
    most = tuple(map(max, zip(*heads, strict=True)))
    if context.has_fewer_than(FEW_TOKENS):
        heads, narrow = [most], NARROW
    return sum(map(sum, heads)) <= narrow * 2 * max(most) * len(heads)


def fits_in_chunks(value: Tensor) -> bool:
    """Whether buffers may be written again and again: on a CPU, where neither gradients nor a graph are recorded."""
    return value.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def chunked_forward(
    buckets: tuple[Bucket, ...],
    factors: tuple[ScoreFactors, ...],
    values: Sequence[Float[Tensor, "batch _ keys _"]],
    sizes: Float[Tensor, "batch keys"] | None = None,
) -> Float[Tensor, "batch queries features"]:
    """Returns what all heads read out, side by side: as many images at once as have maps that fit the cache.

    The maps of all heads lie in one buffer, whatever the ranks of the heads, and one softmax takes them all; what is
    read out is written in the order in which the output projection reads it, so that nothing is moved afterwards. A key
    counts as often as its size says, if sizes are given, and one of size 0 does not.
    """
    first = values[0]
    queries = factors[0].query.shape[1] if factors else first.shape[2]
    widths = [own.shape[1] * own.shape[3] for own in values]
    output = first.new_empty(len(first), queries, sum(widths))
    left, sides = iter(factors), []
    for bucket, own, part in zip(buckets, values, output.split(widths, -1), strict=True):
        read = part.unflatten(2, (own.shape[1], -1)).transpose(1, 2)
        if bucket.rank:
            query, key = next(left).folded()
            sides.append((query, key.transpose(2, 3), own, read))
        else:
            read.copy_(_mean(own, sizes).expand_as(read))
    if sides:
        _mix(sides, factors[0].scale, None if sizes is None else sizes.to(first.dtype).log()[:, None, None])
    return output


def _mean(value: Float[Tensor, "batch heads keys reads"], sizes: Float[Tensor, "batch keys"] | None) -> Tensor:
    if sizes is None:
        return mean_of(value)
    shares = (sizes / sizes.sum(-1, keepdim=True)).to(value.dtype)
    return shares[:, None, None] @ value


def _mix(
    sides: Sequence[Sequence[Float[Tensor, "batch _ _ _"]]], scale: float, added: Float[Tensor, "batch 1 1 keys"] | None
) -> None:
    """Mixes values into outputs; of every bucket there are queries, keys, values and outputs, all heads first.

    `added` are the logarithms of the sizes, which are added to the scores.
    """
    (batch, _, queries, _), keys = sides[0][0].shape, sides[0][1].shape[3]
    heads = [query.shape[1] for query, *_ in sides]
    size = 2 * sum(heads) * queries * keys * sides[0][0].element_size()
    fused_qkv = min(max(CACHED // max(size, 1), 1), batch)
    buffer = sides[0][0].new_empty(fused_qkv, sum(heads), queries, keys)
    # One product takes all heads of an image, or one head of all images that are there at once: the fewest products.
    across = [0 if fused_qkv <= count else 1 for count in heads]
    pieces = [[_pieces(side, fused_qkv, way) for side in own] for own, way in zip(sides, across, strict=True)]
    counts = [min(fused_qkv, batch - start) for start in range(0, batch, fused_qkv)]
    maps = {
        count: [part.unbind(way) for part, way in zip(buffer[:count].split(heads, 1), across, strict=True)]
        for count in set(counts)
    }
    start = buffer.new_zeros(batch, 1, 1, 1) if added is None else added
    starts = {way: _pieces(start, fused_qkv, way) for way in set(across)}
    beta = 0 if added is None else 1
    for number, count in enumerate(counts):
        for (query, key, _, _), scores, way in zip(pieces, maps[count], across, strict=True):
            for place, (q, k, own) in enumerate(zip(query[number], key[number], scores, strict=True)):
                first = starts[way][number][0 if way else place]
                torch.baddbmm(first, q, k, beta=beta, alpha=scale, out=own)
        torch.softmax(buffer[:count], dim=-1, out=buffer[:count])
        for (_, _, value, output), attention in zip(pieces, maps[count], strict=True):
            for own, v, out in zip(attention, value[number], output[number], strict=True):
                torch.bmm(own, v, out=out)


def _pieces(side: Float[Tensor, "batch heads _ _"], fused_qkv: int, across: int) -> list[tuple[Tensor, ...]]:
    """Returns every image of so many at once, or every head of them, as one product after another takes them."""
    if across:
        return [images.unbind(1) for images in side.split(fused_qkv)]
    images = side.unbind(0)
    return [images[start : start + fused_qkv] for start in range(0, len(images), fused_qkv)]
