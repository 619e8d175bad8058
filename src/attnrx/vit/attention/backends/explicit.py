"""Unfused attention for inference: every head at its own rank, unpadded, in chunks whose maps fit the cache."""

from collections.abc import Callable, Sequence

import torch

from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention.backends.backend import Backend, mean_of, scores
from attnrx.vit.attention.factors import (
    AttentionContext,
    Bucket,
    HeadLayout,
    HeadOutputs,
    Mixture,
    ScoreFactors,
    ValueBatch,
    exact_buckets,
    padded_buckets,
)
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import CACHED, chunks_of, images_of

# Unfused attention is faster only if it needs at most this share of the padded arithmetic.
NARROW = 0.875
# With fewer tokens (of all images together) the launch overhead of every operation exceeds its arithmetic.
FEW_TOKENS = 1024


class Explicit(Backend):
    """Scores, softmax and weighted sum as three steps, with independent widths of queries and values.

    On a CPU, the fused kernels of PyTorch require equal widths. For narrower heads this backend does less arithmetic,
    at the cost of writing and reading the maps once, which is small in chunks that fit the cache. `sizes` returns the
    number of original tokens in every token, or None if each is 1.
    """

    takes_few_queries = True

    def __init__(self, sizes: Callable[[], Float[Tensor, "batch keys"] | None] | None = None):
        self.sizes = sizes

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Pads nothing, unless there are few tokens: then all heads are in one bucket."""
        if not context.has_fewer_than(FEW_TOKENS):
            return exact_buckets(spec.ranks, spec.value_dims), spec.value_dims
        rank = max(spec.ranks, default=0)
        return padded_buckets(spec.ranks, rank, rank), (max(spec.value_dims),) * len(spec.heads)

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        return torch.softmax(scores(factors), dim=-1) @ value

    def __call__(
        self,
        buckets: tuple[Bucket, ...],
        factors: tuple[ScoreFactors, ...],
        values: Sequence[Float[Tensor, "batch _ keys _"]],
    ) -> HeadOutputs:
        sizes = None if self.sizes is None else self.sizes()
        if sizes is not None or fits_in_chunks(values[0]):
            return chunked_attention(buckets, factors, values, sizes)
        return super().__call__(buckets, factors, values)


def unfused_is_faster(spec: AttentionSpec, context: AttentionContext, narrow: float = NARROW) -> bool:
    """Whether unfused attention in chunks is faster than a padded fused kernel: true for narrow heads, and where heads
    mix the maps of blocks, which a fused kernel does not.

    With several threads every product synchronizes them, while a fused kernel gives each thread its own images.
    """
    if spec.mixes_blocks:
        return context.free
    is_single_threaded = context.free_on_cpu and context.threads == 1
    # Maps with a bias are not computed in chunks (`_biased_attention`), so they do not stay in the cache.
    if not is_single_threaded or spec.keeps_original_norms or spec.pair_bias or not any(spec.ranks):
        return False
    # MACs per pair of tokens: a head needs rank + value dimension, in a fused kernel twice the largest width of all.
    heads = [(rank, value_dim) for rank, value_dim in zip(spec.ranks, spec.value_dims, strict=True) if rank]
    largest = tuple(map(max, zip(*heads, strict=True)))
    if context.has_fewer_than(FEW_TOKENS):  # `Explicit` then pads all heads to the largest one, too
        heads, narrow = [largest], NARROW
    return sum(map(sum, heads)) <= narrow * 2 * max(largest) * len(heads)


def fits_in_chunks(value: Tensor) -> bool:
    """Whether buffers may be reused for a value of any shape: on a CPU, while no gradients or graph are recorded."""
    return value.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def chunked_attention(
    buckets: tuple[Bucket, ...],
    factors: tuple[ScoreFactors, ...],
    values: Sequence[Float[Tensor, "batch _ keys _"]],
    sizes: Float[Tensor, "batch keys"] | None = None,
) -> HeadOutputs:
    """Returns the outputs of all heads, concatenated; computes as many images at once as have maps that fit the cache.

    The maps of all heads are in one buffer, for any ranks, and one softmax processes them; the outputs are
    written in the order of the output projection's inputs, so that no copy follows. Keys are weighted by `sizes`, if
    given; a key of size 0 has weight zero.
    """
    if factors and factors[0].bias is not None:
        return _biased_attention(factors, values, sizes)
    if factors and factors[0].mixture is not None:
        return mixed_attention(factors, values, sizes)
    first = values[0]
    queries = factors[0].query.shape[1] if factors else first.shape[2]
    widths = [value.shape[1] * value.shape[3] for value in values]
    output = first.new_empty(len(first), queries, sum(widths))  # the heads of a token side by side
    remaining_factors, sides = iter(factors), []
    for bucket, value, columns in zip(buckets, values, output.split(widths, -1), strict=True):
        # A view, [batch, heads, queries, width], into which the products write.
        head_outputs = columns.unflatten(2, (value.shape[1], -1)).transpose(1, 2)
        if bucket.rank:
            query, key = next(remaining_factors).folded()
            sides.append((query, key.transpose(2, 3), value, head_outputs))
        else:
            head_outputs.copy_(_mean(value, sizes).expand_as(head_outputs))
    if sides:
        # A size of 0 becomes the score -inf, so the key has weight zero.
        _mix(sides, factors[0].scale, None if sizes is None else sizes.to(first.dtype).log()[:, None, None])
    return output


def _biased_attention(
    factors: tuple[ScoreFactors, ...],
    values: Sequence[Float[Tensor, "batch _ keys _"]],
    sizes: Float[Tensor, "batch keys"] | None,
) -> HeadOutputs:
    """Returns what `chunked_attention` does for scores with a bias per pair, of which every head has directions."""
    added = None if sizes is None else sizes.to(values[0].dtype).log()[:, None, None]
    outputs = []
    for part, value in zip(factors, values, strict=True):
        logits = scores(part)
        attention = torch.softmax(logits if added is None else logits + added, dim=-1)
        outputs.append((attention @ value).transpose(1, 2).flatten(2))
    return torch.cat(outputs, dim=-1)


def mixed_attention(
    factors: tuple[ScoreFactors, ...],
    values: Sequence[Float[Tensor, "batch _ keys _"]],
    sizes: Float[Tensor, "batch keys"] | None = None,
) -> HeadOutputs:
    """Returns what `chunked_attention` does, for heads that mix the score maps of blocks (`ScoreFactors.mixture`)."""
    mixtures = [factor.mixture for factor in factors if factor.mixture is not None]
    blocks, outputs = mixtures[0].blocks, []
    maps = len(blocks.ranks) + sum(len(mixture.weights) for mixture in mixtures)  # of blocks and of heads, at once
    for part in chunks_of(values[0], maps, blocks.query.shape[1], blocks.key.shape[1]):
        images, head_outputs = images_of(part), []
        chunk = blocks.of_images(images)  # one instance for all buckets, which computes the maps of the blocks once
        added = None if sizes is None else sizes[images].to(chunk.query.dtype).log()[:, None, None]
        for mixture, value in zip(mixtures, values, strict=True):
            logits = Mixture(chunk, mixture.weights).scores(factors[0].scale)
            attention = torch.softmax(logits if added is None else logits + added, dim=-1)
            head_outputs.append((attention @ value[images]).transpose(1, 2).flatten(2))
        outputs.append(head_outputs[0] if len(head_outputs) == 1 else torch.cat(head_outputs, -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _mean(value: ValueBatch, sizes: Float[Tensor, "batch keys"] | None) -> Tensor:
    if sizes is None:
        return mean_of(value)
    # A head of rank 0 has equal scores, so only the sizes weight its keys.
    shares = (sizes / sizes.sum(-1, keepdim=True)).to(value.dtype)
    return shares[:, None, None] @ value


def _mix(
    sides: Sequence[Sequence[Float[Tensor, "batch _ _ _"]]], scale: float, added: Float[Tensor, "batch 1 1 keys"] | None
) -> None:
    """Writes softmax(scores) @ values into outputs; queries, keys, values and outputs are per bucket, heads first.

    `added` are the logarithms of the sizes, which are added to the scores.
    """
    # The maps of a few images, [chunk, heads, queries, keys], share one buffer that stays in the cache: products write
    # the scores of every bucket into it, one softmax in place processes all heads of all buckets, and products read it
    # again. Every view is created before the loop over the chunks, which then calls products only.
    (batch, _, queries, _), keys = sides[0][0].shape, sides[0][1].shape[3]
    heads = [query.shape[1] for query, *_ in sides]
    size = 2 * sum(heads) * queries * keys * sides[0][0].element_size()
    chunk = min(max(CACHED // max(size, 1), 1), batch)
    buffer = sides[0][0].new_empty(chunk, sum(heads), queries, keys)
    # One product takes all heads of an image, or one head of all images of the chunk: whichever gives fewer products.
    across = [0 if chunk <= count else 1 for count in heads]
    pieces = [[_pieces(side, chunk, way) for side in bucket] for bucket, way in zip(sides, across, strict=True)]
    # The last chunk may have fewer images, and needs views of its own.
    counts = [min(chunk, batch - start) for start in range(0, batch, chunk)]
    maps = {
        count: [part.unbind(way) for part, way in zip(buffer[:count].split(heads, 1), across, strict=True)]
        for count in set(counts)
    }
    start = buffer.new_zeros(batch, 1, 1, 1) if added is None else added
    starts = {way: _pieces(start, chunk, way) for way in set(across)}
    beta = 0 if added is None else 1  # with 0, baddbmm does not read its first argument
    for number, count in enumerate(counts):
        for (query, key, _, _), logits, way in zip(pieces, maps[count], across, strict=True):
            for index, (q, k, out) in enumerate(zip(query[number], key[number], logits, strict=True)):
                # `added` is by image and has one head: across the images it is the same for every head.
                first = starts[way][number][0 if way else index]
                torch.baddbmm(first, q, k, beta=beta, alpha=scale, out=out)
        torch.softmax(buffer[:count], dim=-1, out=buffer[:count])
        for (_, _, value, output), attention in zip(pieces, maps[count], strict=True):
            for weights, v, out in zip(attention, value[number], output[number], strict=True):
                torch.bmm(weights, v, out=out)


def _pieces(side: Float[Tensor, "batch heads _ _"], chunk: int, across: int) -> list[tuple[Tensor, ...]]:
    """Returns the slices that one matrix product takes: every image of a chunk, or every head of it."""
    if across:
        return [images.unbind(1) for images in side.split(chunk)]
    images = side.unbind(0)
    return [images[start : start + chunk] for start in range(0, len(images), chunk)]
