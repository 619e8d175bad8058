"""Attention of heads with different ranks in one launch, in Triton.

Queries and keys of all heads are concatenated in one row per token, unpadded: head h has the features from `starts[h]`
to `starts[h + 1]`; values likewise. A head of rank 0 has zero scores and attends uniformly. No map is stored: `forward`
keeps a running maximum and sum per row (online softmax).
"""

import triton
import triton.language as tl

# exp2 is an instruction of the device; exp is computed with it. "ieee" products do not round float32 to TF32.
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def scores_of(
    query, key, rows, columns, tokens, first, rank, scale, stride_q, stride_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Returns the scores of some rows and columns in units of log2, in steps of STEP features."""
    scores = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    # Steps of the head's own rank: unpadded heads differ in rank, and a rank of 0 leaves all scores at 0 (uniform).
    for at in range(0, rank, STEP):
        features = at + tl.arange(0, STEP)
        q = tl.load(
            query + rows[:, None] * stride_q + first + features[None, :],
            mask=(rows[:, None] < tokens) & (features[None, :] < rank),
            other=0.0,
        )
        k = tl.load(
            key + columns[None, :] * stride_k + first + features[:, None],
            mask=(columns[None, :] < tokens) & (features[:, None] < rank),
            other=0.0,
        )
        scores += tl.dot(q, k, input_precision="ieee")
    scores = scores * (scale * LOG2E)
    return tl.where(columns[None, :] < tokens, scores, float("-inf"))


@triton.jit
def forward(
    query, key, value, output, starts, value_starts, tokens, heads, scale,
    batch_q, stride_q, batch_k, stride_k, batch_v, stride_v, batch_o, stride_o,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Writes the output of one head of one image for some rows."""
    image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    # One program per tile of queries and head: it passes over all keys, and keeps only a tile of scores.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.load(starts + head)
    rank = tl.load(starts + head + 1) - first
    first_value = tl.load(value_starts + head)
    value_dim = tl.load(value_starts + head + 1) - first_value
    # In int64, because offsets of images can exceed 31 bits.
    q, k = query + image.to(tl.int64) * batch_q, key + image.to(tl.int64) * batch_k
    v, out = value + image.to(tl.int64) * batch_v, output + image.to(tl.int64) * batch_o
    features = tl.arange(0, VALUE_DIM)
    largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    weighted_sum = tl.zeros([ROWS, VALUE_DIM], dtype=tl.float32)
    for start in range(0, tokens, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        scores = scores_of(q, k, rows, columns, tokens, first, rank, scale, stride_q, stride_k, ROWS, COLUMNS, STEP)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        # The sums so far are relative to the old maximum; at the first tile exp2(-inf) = 0 discards the zeros.
        shrink = tl.exp2(largest - new_largest)
        values = tl.load(
            v + columns[:, None] * stride_v + first_value + features[None, :],
            mask=(columns[:, None] < tokens) & (features[None, :] < value_dim),
            other=0.0,
        )
        weighted_sum = weighted_sum * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        largest = new_largest
    weighted_sum = weighted_sum / total[:, None]
    tl.store(
        out + rows[:, None] * stride_o + first_value + features[None, :],
        weighted_sum.to(output.dtype.element_ty),
        mask=(rows[:, None] < tokens) & (features[None, :] < value_dim),
    )
