"""Attention forms: modules that compute score factors from tokens and their positions."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.modules import has_fixed_weights, kept, of_weights
from attnrx.support.registry import Registry
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.attention.backends import Bucket, GridScores, ScoreFactors
from attnrx.vit.attention.head_linear import HeadLinear
from attnrx.vit.kernels.native_attention import RotationTable
from attnrx.vit.spec import COMPRESSIONS, FORMS, AttentionSpec, Compression, FormTraits

Queries = Float[Tensor, "batch queries rows"]
Keys = Float[Tensor, "batch keys rows"]
Kept = Int[Tensor, "batch kept"] | None
"""The index of every token in its image or window, or None if no token was pruned or merged."""


@dataclass(frozen=True, eq=False)
class Positions:
    """Rotary positions and relative position biases for the tokens of one layer.

    `cos` and `sin` are the cosines and sines of the rotation angles of every patch, with one angle per frequency of the
    original head. Their head axis has size 1 if all heads share the angles. The first `prefix` tokens are not patches
    (e.g. the class token) and are not rotated. `bias` is added to the scores of all pairs of tokens, including the
    prefix. The first axis of `cos`, `sin` and `bias` has size 1 if all images share the values.
    """

    prefix: int
    cos: Float[Tensor, "_ patches heads pairs"] | None = None
    sin: Float[Tensor, "_ patches heads pairs"] | None = None
    bias: Float[Tensor, "_ _ tokens tokens"] | None = None

    def of_patches(self, indices: Int[Tensor, "images kept"] | None) -> "Positions":
        """Returns the positions of the patches that remain in the layer.

        `indices` contains the indices of the remaining patches, or is None if all patches remain. The index -1 marks a
        token that is not a patch. Such a token is not rotated and has no bias.
        """
        if indices is None:
            return self
        # `gather` does not accept -1. Tokens with this index first get the entries of patch 0, and these are then
        # overwritten.
        added, safe = indices < 0, indices.clamp_min(0)
        cos = sin = bias = None
        if self.cos is not None and self.sin is not None:
            # Tokens with the index -1 are rotated by zero (cos 1, sin 0). Both tables are [images, kept, heads, pairs].
            cos = _gathered(self.cos, safe).masked_fill(added[..., None, None], 1.0)
            sin = _gathered(self.sin, safe).masked_fill(added[..., None, None], 0.0)
        if self.bias is not None:
            # `bias` covers all tokens, but `indices` only patches, so the indices of the prefix tokens are added.
            first = torch.arange(self.prefix, device=indices.device).expand(indices.shape[0], -1)
            tokens = torch.cat([first, self.prefix + safe], dim=1)
            images, heads, count = indices.shape[0], *self.bias.shape[1:3]
            # Selects the queries, [images, heads, kept, tokens], and then the keys, [images, heads, kept, kept].
            rows = tokens[:, None, :, None].expand(-1, heads, -1, count)
            bias = self.bias.expand(images, -1, -1, -1).gather(2, rows)
            bias = bias.gather(3, tokens[:, None, None, :].expand(-1, heads, tokens.shape[1], -1))
            absent = F.pad(added, (self.prefix, 0))
            bias = bias.masked_fill(absent[:, None, :, None] | absent[:, None, None, :], 0.0)
        return replace(self, cos=cos, sin=sin, bias=bias)

    def of_first(self, count: int) -> "Positions":
        """Returns a copy in which the rotations cover only the first `count` tokens."""
        if self.cos is None or self.sin is None:
            return self
        patches = max(count - self.prefix, 0)
        return replace(self, cos=self.cos[:, :patches], sin=self.sin[:, :patches])


def _gathered(table: Float[Tensor, "_ patches heads pairs"], indices: Int[Tensor, "images kept"]) -> Tensor:
    if table.shape[0] == 1:  # one table for all images can be indexed without expanding the index
        return table[0][indices]
    return table.gather(1, indices[..., None, None].expand(-1, -1, *table.shape[2:]))


class ScoreForm(nn.Module, ABC):
    """Base class of attention forms, which contains the query and key projections of a layer.

    A subclass computes the score factors from the projected queries and keys.
    """

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.spec = spec
        self.query = HeadLinear(spec.width, spec.rows, spec.has_bias("query"))
        self.key = HeadLinear(spec.width, spec.rows, spec.has_bias("key"))

    @property
    def query_factor(self) -> float:
        """The factor by which queries are multiplied in the projection.

        If queries are already multiplied by `spec.scale`, the scores are not multiplied by it again.
        """
        return 1.0

    @abstractmethod
    def forward(self, query: Queries, key: Keys, buckets: tuple[Bucket, ...]) -> tuple[ScoreFactors, ...]:
        """Returns the score factors of every bucket (group of heads) whose rank is above 0, in the buckets' order.

        `query` and `key` are the outputs of the two projections, padded to `self.rows(buckets)` rows per head.
        """

    def at_places(self, factors: tuple[ScoreFactors, ...], kept: Kept) -> tuple[ScoreFactors, ...]:
        """Returns the score factors, with scores for the positions of tokens added if the form has any."""
        return factors

    def at_positions(
        self, features: Float[Tensor, "batch tokens rows"], rows: tuple[int, ...], positions: Positions | None
    ) -> Float[Tensor, "batch tokens rows"]:
        """Rotates `features` by the tokens' rotary positions. They are queries or keys, with `rows[h]` rows for head h.

        Forms without rotations return `features` unchanged.
        """
        return features

    def strengths(self) -> Tensor:
        """Returns one strength per stored direction, head by head in storage order."""
        return torch.ones(sum(self.spec.ranks))

    @abstractmethod
    def set_strengths_(self, strengths: list[Float[Tensor, "_"]]) -> None:
        """Sets the strengths. The list contains one tensor per head, in storage order."""

    def rows(self, buckets: tuple[Bucket, ...]) -> tuple[int, ...]:
        """Returns how many query and key rows each head has after padding (or each owner of shared directions)."""
        per_bucket = zip(buckets, self.rows_by_bucket(buckets), strict=True)
        return tuple(rows for bucket, rows in per_bucket for _ in range(bucket.start, bucket.stop))

    def parts(self, query: Queries, key: Keys, buckets: tuple[Bucket, ...]) -> list[tuple[Bucket, Tensor, Tensor]]:
        """Returns every bucket whose rank is above 0, each with its part of the query and its part of the key."""
        rows = self.rows_by_bucket(buckets)
        sides = in_buckets(query, rows, buckets), in_buckets(key, rows, buckets)
        return [part for part in zip(buckets, *sides, strict=True) if part[0].rank]

    def rows_by_bucket(self, buckets: tuple[Bucket, ...]) -> list[int]:
        """Returns the number of projected rows per head, for every bucket."""
        return [bucket.rank for bucket in buckets]


class DenseForm(ScoreForm):
    """Plain dot products of query and key rows, as in a standard ViT."""

    @property
    def query_factor(self) -> float:
        # If weights are constant, the scale is folded into them and needs no operation. A norm of the queries would
        # cancel a folded scale.
        return self.spec.scale if has_fixed_weights() and not self.spec.fixes_scores else 1.0

    def forward(self, query: Queries, key: Keys, buckets: tuple[Bucket, ...]) -> tuple[ScoreFactors, ...]:
        """Returns score factors that contain each bucket's queries and keys, padded with zeros to its width."""
        scale = self.spec.scale / self.query_factor
        return tuple(
            ScoreFactors(bucket, _wide(q, bucket), _wide(k, bucket), None, scale)
            for bucket, q, k in self.parts(query, key, buckets)
        )

    def set_strengths_(self, strengths: list[Float[Tensor, "_"]]) -> None:
        """Multiplies the query weights by the strengths, because this form stores no strengths."""
        factors = torch.cat([torch.zeros(0), *strengths])
        if not torch.equal(factors, torch.ones_like(factors)):
            self.query.weight.mul_(factors.to(self.query.weight)[:, None])
            if self.query.bias is not None:
                self.query.bias.mul_(factors.to(self.query.bias))


class RotaryForm(DenseForm):
    """Dot products of queries and keys with rotary positions (RoPE, Su et al., 2021).

    Pairs of rows are rotated by an angle that depends on the token's position. A pair (a, b) becomes (a cos - b sin,
    b cos + a sin). The scores then depend only on relative positions. Each head stores its unrotated rows first, and
    then its pairs.
    """

    def at_positions(
        self, features: Float[Tensor, "batch tokens rows"], rows: tuple[int, ...], positions: Positions | None
    ) -> Float[Tensor, "batch tokens rows"]:
        cos, sin, prefix = required_rotation(positions)
        # Indexing replaces a loop over the pairs of every head. Each row is multiplied by its cosine. Then its partner,
        # multiplied by the signed sine, is added. Rows that are not rotated use an appended column with cosine 1 and
        # sine 0.
        heads, pairs = cos.shape[2:]
        column, partner, sign = rotation_index(self.spec, rows, heads, pairs, features.device)
        first, rest = features[:, : min(prefix, features.shape[1])], features[:, prefix:]
        if not rest.shape[1]:  # the last layer may compute only prefix tokens, which are not rotated
            return features
        cos, sin = (side.flatten(2).to(features.dtype) for side in (cos, sin))
        cos = F.pad(cos, (0, 1), value=1.0)[..., column]
        sin = F.pad(sin, (0, 1))[..., column] * sign.to(features.dtype)
        return torch.cat([first, rest * cos + rest[..., partner] * sin], dim=1)

    def rotation_table(self, positions: Positions | None) -> RotationTable:
        """Returns the cosines and sines of the kept pairs in float32, in the format of the C++ kernel."""
        cos, sin, prefix = required_rotation(positions)
        spec, (heads, frequencies) = self.spec, cos.shape[2:]
        pairs = spec.pairs or ()
        counts = [len(head_pairs) for head_pairs in pairs]
        stills = [rank - 2 * count for rank, count in zip(spec.ranks, counts, strict=True)]
        sides = [side.flatten(2).float().contiguous() for side in (cos, sin)]
        if heads == 1 and all(head_pairs == tuple(range(frequencies)) for head_pairs in pairs):
            columns = [0] * len(pairs)  # in an uncompressed layer, all heads use the whole table
        else:
            # The kernel needs consecutive columns, so the columns of each head's kept pairs are copied side by side.
            index = pair_columns(spec, heads, frequencies, sides[0].device)
            sides = [side.index_select(2, index) for side in sides]
            columns = [0, *itertools.accumulate(counts)][: len(counts)]
        return RotationTable(sides[0], sides[1], [*columns, *counts, *stills, prefix])


class AxialForm(DenseForm):
    """Dot products of queries and keys, plus relative position scores per axis, as in ViTDet and SAM.

    In MViTv2 (Li et al., 2022), score[i, j] = scale query[i] . key[j] + query[i] . (down[y_i - y_j] +
    right[x_i - x_j]). Token i is in row y_i and column x_i of the window. The parameters `down` and `right` have one
    column for every distance, starting with the most negative distance, and one row for every stored query row. So each
    head has its own position vectors, which shrink with the head when directions are removed.
    """

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        height, width = self.window
        self.down = nn.Parameter(torch.zeros(sum(spec.rows), 2 * height - 1))
        self.right = nn.Parameter(torch.zeros(sum(spec.rows), 2 * width - 1))

    @property
    def window(self) -> tuple[int, int]:
        """The number of token rows and token columns in a window."""
        assert self.spec.window is not None  # every spec of this form has a window
        return self.spec.window

    @property
    def query_factor(self) -> float:
        return 1.0  # the position vectors are multiplied by the unscaled query

    def at_places(self, factors: tuple[ScoreFactors, ...], kept: Kept) -> tuple[ScoreFactors, ...]:
        """Returns the score factors with relative position scores, which are in their `grid`.

        Raises:
            InvalidInput: The number of tokens differs from the size of the window.
        """
        tokens, expected = factors[0].query.shape[1] if factors else 0, math.prod(self.window)
        if factors and kept is None and tokens != expected:
            raise InvalidInput(
                f"{tokens} tokens in a layer with relative positions in a window of {self.window}: create the model "
                "for the size of these images."
            )
        grid = self._whole_grid if kept is None else partial(self._grid_at, kept=kept)
        return tuple(replace(part, grid=grid(part)) for part in factors)

    def _whole_grid(self, part: ScoreFactors) -> GridScores:
        query = part.query.unflatten(1, self.window)  # [batch, rows, columns, heads, features]
        features = query.shape[-1]
        down, right = (
            of_weights(self, (axis, part.bucket), partial(self._vectors, table, part.bucket, features))
            for axis, table in enumerate((self.down, self.right))
        )
        rows = torch.einsum("byxhr,hryk->bhyxk", query, down)
        columns = torch.einsum("byxhr,hrxk->bhyxk", query, right)
        return GridScores(rows.flatten(2, 3), columns.flatten(2, 3))

    def _grid_at(self, part: ScoreFactors, kept: Int[Tensor, "batch kept"]) -> GridScores:
        """Returns the relative position scores of the tokens that remain in a window."""
        # A query is multiplied by the vectors of all distances, and then the distances to its own row and column are
        # selected. Selecting vectors for every query would need far more memory.
        scores = []
        for table, size, place in zip(
            (self.down, self.right), self.window, (kept // self.window[1], kept % self.window[1]), strict=True
        ):
            vectors = self._by_head(table, part.bucket, part.query.shape[-1])
            products = torch.einsum("bthr,hrd->bhtd", part.query, vectors)
            distances = place[:, None, :, None] - torch.arange(size, device=table.device) + (size - 1)
            scores.append(products.gather(3, distances.expand(-1, products.shape[1], -1, -1)))
        return GridScores(scores[0], scores[1], kept)

    def _by_head(
        self, table: Float[Tensor, "rows distances"], bucket: Bucket, features: int
    ) -> Float[Tensor, "heads features distances"]:
        """Returns each head's position vectors for all distances, padded to `features` features."""
        parts = table.split(self.spec.rows)[bucket.heads]
        return torch.stack([F.pad(part, (0, 0, 0, features - len(part))) for part in parts])

    def _vectors(
        self, table: Float[Tensor, "rows distances"], bucket: Bucket, features: int
    ) -> Float[Tensor, "heads features lines lines"]:
        """Returns each head's position vectors for all pairs of query and key lines, padded to `features` features.

        For the table `down`, a line is a row of the window. For the table `right`, a line is a column.
        """
        padded = self._by_head(table, bucket, features)
        size = (table.shape[1] + 1) // 2
        lines = torch.arange(size, device=table.device)
        return padded[:, :, lines[:, None] - lines + size - 1]


@kept
def pair_columns(spec: AttentionSpec, heads: int, frequencies: int, device: torch.device) -> Int[Tensor, "pairs"]:
    """Returns, for every kept pair, the column of its angle in the table that `rotation_index` describes."""
    index = [
        (head if heads > 1 else 0) * frequencies + pair
        for head, head_pairs in zip(spec.heads, spec.pairs or (), strict=True)
        for pair in head_pairs
    ]
    return torch.tensor(index, dtype=torch.long, device=device)


def _wide(rows: Tensor, bucket: Bucket) -> Tensor:
    return rows if bucket.rank == bucket.width else F.pad(rows, (0, bucket.width - bucket.rank))


def in_buckets(
    features: Float[Tensor, "batch tokens rows"], rows: Sequence[int], buckets: tuple[Bucket, ...]
) -> list[Float[Tensor, "batch tokens _ _"]]:
    """Splits projected features by bucket. In bucket i, every head has `rows[i]` features.

    Each part has the shape [batch, tokens, heads, rows].
    """
    if len(buckets) == 1:  # the usual case, which needs no split
        return [features.view(*features.shape[:2], buckets[0].stop - buckets[0].start, rows[0])]
    shapes = [(bucket.stop - bucket.start, count) for bucket, count in zip(buckets, rows, strict=True)]
    parts = features.split([owners * count for owners, count in shapes], dim=-1)
    return [part.view(*part.shape[:2], *shape) for part, shape in zip(parts, shapes, strict=True)]


def required_rotation(positions: Positions | None) -> tuple[Tensor, Tensor, int]:
    """Returns the cosines, the sines and the prefix length of `positions`.

    Raises:
        InvalidInput: The positions contain no rotations.
    """
    if positions is None or positions.cos is None or positions.sin is None:
        raise InvalidInput("a layer of the rotary form was called without the rotations of its tokens.")
    return positions.cos, positions.sin, positions.prefix


@kept
def rotation_index(
    spec: AttentionSpec, rows: tuple[int, ...], heads: int, frequencies: int, device: torch.device
) -> tuple[Int[Tensor, "rows"], Int[Tensor, "rows"], Int[Tensor, "rows"]]:
    """Returns three values for every projected row: the column of its angle, its partner row, and the sign of its sine.

    The angles of all heads are in a table with `heads` x `frequencies` columns. `heads` is 1 if all heads share the
    angles. Rows that are not rotated use an additional column after the last one. `rows` contains the number of rows of
    every head after padding.
    """
    # A head stores its rows in this order: rows that are not rotated, real parts of the pairs, imaginary parts,
    # padding. A real part a becomes a cos - b sin, and an imaginary part b becomes b cos + a sin. So the two rows of a
    # pair are partners, and only the real part has a negative sine. All other rows are their own partner.
    column, partner, sign = [], [], []
    start = 0
    for rank, num_rows, head, pairs in zip(spec.ranks, rows, spec.heads, spec.pairs or (), strict=True):
        still, count = rank - 2 * len(pairs), len(pairs)
        base = (head if heads > 1 else 0) * frequencies
        angles = [base + pair for pair in pairs]
        column += [heads * frequencies] * still + 2 * angles + [heads * frequencies] * (num_rows - rank)
        first_real = start + still
        partner += [
            *range(start, first_real),
            *range(first_real + count, first_real + 2 * count),
            *range(first_real, first_real + count),
            *range(start + rank, start + num_rows),
        ]
        sign += [1] * still + [-1] * count + [1] * (count + num_rows - rank)
        start += num_rows
    return torch.tensor(column, device=device), torch.tensor(partner, device=device), torch.tensor(sign, device=device)


def row_pairs(spec: AttentionSpec) -> Int[Tensor, "heads directions"]:
    """Returns the index of the frequency that rotates each row. Unrotated rows and padding get -1."""
    frequencies = torch.full((len(spec.ranks), max((*spec.ranks, 1))), -1)
    for row, rank, pairs in zip(frequencies, spec.ranks, spec.pairs or (), strict=True):
        row[rank - 2 * len(pairs) : rank] = torch.tensor(2 * pairs, dtype=torch.long)  # real, then imaginary parts
    return frequencies


SCORES = Registry[type[ScoreForm]](
    "form of attention", named={"dense": DenseForm, "rotary": RotaryForm, "axial": AxialForm}
)


def register_form(
    name: str, kind: type[ScoreForm], traits: FormTraits, compressions: Mapping[str, Compression] | None = None
) -> None:
    """Registers an attention form under a name.

    Args:
        name: The form's name in specs and in saved files.
        kind: The class that computes the scores.
        traits: The properties of the form that other modules need, e.g. to count its costs.
        compressions: Additional methods to compress layers of this form. Each key is the NAME that users pass in
            `realize(by=NAME)`. The exact method needs no entry.
    """
    SCORES.register(kind, name)
    FORMS.register(traits, name)
    for by, compression in (compressions or {}).items():
        COMPRESSIONS.register(compression, by)


def form_of(spec: AttentionSpec) -> ScoreForm:
    """Returns a new score module for a layer with this spec. Its weights are random."""
    return SCORES[spec.form](spec)
