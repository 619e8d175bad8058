"""Attention of heads with different ranks in one launch, and the statistics of its maps, in Triton.

Queries and keys of all heads are concatenated in one row per token, unpadded: head h has the features from `starts[h]`
to `starts[h + 1]`; values likewise. A head of rank 0 has zero scores and attends uniformly. No map is stored: `forward`
keeps a running maximum and sum per row (online softmax), and `statistics` recomputes the scores from the row sums of
`forward`.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def scores_of(
    query, key, rows, columns, tokens, first, rank, scale, stride_q, stride_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Returns the scores of some rows and columns in units of log2, in steps of STEP features."""
    found = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for at in range(0, rank, STEP):
        own = at + tl.arange(0, STEP)
        q = tl.load(
            query + rows[:, None] * stride_q + first + own[None, :],
            mask=(rows[:, None] < tokens) & (own[None, :] < rank),
            other=0.0,
        )
        k = tl.load(
            key + columns[None, :] * stride_k + first + own[:, None],
            mask=(columns[None, :] < tokens) & (own[:, None] < rank),
            other=0.0,
        )
        found += tl.dot(q, k, input_precision="ieee")
    found = found * (scale * LOG2E)
    return tl.where(columns[None, :] < tokens, found, float("-inf"))


@triton.jit
def forward(
    query, key, value, output, log_sums, starts, value_starts, tokens, heads, scale,
    batch_q, stride_q, batch_k, stride_k, batch_v, stride_v, batch_o, stride_o,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """Writes the output of one head of one image for some rows, and the base-2 logarithm of their sums."""
    image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.load(starts + head)
    rank = tl.load(starts + head + 1) - first
    first_read = tl.load(value_starts + head)
    reads = tl.load(value_starts + head + 1) - first_read
    q, k = query + image.to(tl.int64) * batch_q, key + image.to(tl.int64) * batch_k
    v, out = value + image.to(tl.int64) * batch_v, output + image.to(tl.int64) * batch_o
    features = tl.arange(0, READS)
    largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    read = tl.zeros([ROWS, READS], dtype=tl.float32)
    for start in range(0, tokens, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        scores = scores_of(q, k, rows, columns, tokens, first, rank, scale, stride_q, stride_k, ROWS, COLUMNS, STEP)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        own = tl.load(
            v + columns[:, None] * stride_v + first_read + features[None, :],
            mask=(columns[:, None] < tokens) & (features[None, :] < reads),
            other=0.0,
        )
        read = read * shrink[:, None] + tl.dot(weights.to(own.dtype), own, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        largest = new_largest
    read = read / total[:, None]
    tl.store(
        out + rows[:, None] * stride_o + first_read + features[None, :],
        read.to(output.dtype.element_ty),
        mask=(rows[:, None] < tokens) & (features[None, :] < reads),
    )
    tl.store(log_sums + tl.program_id(1).to(tl.int64) * tokens + rows, largest + tl.log2(total), mask=rows < tokens)


@triton.jit
def row_statistics(
    query, key, log_sums, found, starts, tokens, heads, scale, prefix, batch_q, stride_q, batch_k, stride_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes for some rows: sum and sum of squares over the patches, and the attention to the first token."""
    image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.load(starts + head)
    rank = tl.load(starts + head + 1) - first
    q, k = query + image.to(tl.int64) * batch_q, key + image.to(tl.int64) * batch_k
    own = tl.program_id(1).to(tl.int64) * tokens
    sums = tl.load(log_sums + own + rows, mask=rows < tokens, other=0.0)
    total = tl.zeros([ROWS], dtype=tl.float32)
    squares = tl.zeros([ROWS], dtype=tl.float32)
    to_first = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, tokens, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        scores = scores_of(q, k, rows, columns, tokens, first, rank, scale, stride_q, stride_k, ROWS, COLUMNS, STEP)
        weights = tl.exp2(scores - sums[:, None])
        to_first += tl.sum(tl.where(columns[None, :] == 0, weights, 0.0), 1)
        weights = tl.where(columns[None, :] >= prefix, weights, 0.0)
        total += tl.sum(weights, 1)
        squares += tl.sum(weights * weights, 1)
    place = found + 3 * (own + rows)
    tl.store(place, total, mask=rows < tokens)
    tl.store(place + 1, squares, mask=rows < tokens)
    tl.store(place + 2, to_first, mask=rows < tokens)


@triton.jit
def column_statistics(
    query, key, log_sums, found, starts, tokens, heads, scale, prefix, batch_q, stride_q, batch_k, stride_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes for some columns: sum and sum of squares over the patches, and the attention from the first token."""
    image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(starts + head)
    rank = tl.load(starts + head + 1) - first
    q, k = query + image.to(tl.int64) * batch_q, key + image.to(tl.int64) * batch_k
    own = tl.program_id(1).to(tl.int64) * tokens
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    squares = tl.zeros([COLUMNS], dtype=tl.float32)
    from_first = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        sums = tl.load(log_sums + own + rows, mask=rows < tokens, other=0.0)
        scores = scores_of(q, k, rows, columns, tokens, first, rank, scale, stride_q, stride_k, ROWS, COLUMNS, STEP)
        weights = tl.where(rows[:, None] < tokens, tl.exp2(scores - sums[:, None]), 0.0)
        from_first += tl.sum(tl.where(rows[:, None] == 0, weights, 0.0), 0)
        weights = tl.where(rows[:, None] >= prefix, weights, 0.0)
        total += tl.sum(weights, 0)
        squares += tl.sum(weights * weights, 0)
    place = found + 3 * (own + columns)
    tl.store(place, total, mask=columns < tokens)
    tl.store(place + 1, squares, mask=columns < tokens)
    tl.store(place + 2, from_first, mask=columns < tokens)
