"""IrrAtt's two forms of attention in which heads share directions, and the C++ kernel that mixes blocks' score maps."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import of_weights
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.attention.backends import Bucket, BucketValues, HeadOutputs, Mixture, ScoreFactors
from attnrx.vit.attention.forms import Keys, Queries, ScoreForm, register_form
from attnrx.vit.kernels.compilation import address, define, kernel_threads, require_inference, required_library
from attnrx.vit.kernels.native_attention import described_heads, num_features, require_heads
from attnrx.vit.spec import AttentionSpec, FormTraits


class SharedForm(ScoreForm):
    """CP SlimAtt (IrrAtt, Eqs. 3-4): heads share directions, but each head has its own strengths (fusion matrix)."""

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        self.strength = nn.Parameter(torch.ones(len(spec.heads), *spec.rows))

    def rows(self, buckets: tuple[Bucket, ...]) -> tuple[int, ...]:
        """Returns the number of rows that all heads share, padded to the buckets' width (0 without directions)."""
        return (_shared_width(buckets),)

    def forward(self, query: Queries, key: Keys, buckets: tuple[Bucket, ...]) -> tuple[ScoreFactors, ...]:
        """Returns the shared rows and every head's strengths."""
        # The padding rows are already zero. The strengths are padded only to have the same shape.
        strength = F.pad(self.strength, (0, _shared_width(buckets) - self.strength.shape[1]))
        sides = query.unsqueeze(2), key.unsqueeze(2)
        return tuple(
            ScoreFactors(bucket, *sides, strength[bucket.heads], self.spec.scale) for bucket in buckets if bucket.rank
        )

    def strengths(self) -> Float[Tensor, "heads directions"]:
        return self.strength

    def set_strengths_(self, strengths: list[Float[Tensor, "_"]]) -> None:
        if strengths:
            self.strength.copy_(torch.stack(strengths))


class MixedForm(ScoreForm):
    """IrrAtt's attention (Eq. 6): shared directions form blocks, and every head mixes the score maps of the blocks.

    Mixed attention equals shared attention in which a head has the strength `mix[head, block]` for all directions of a
    block.
    """

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        self.mix = nn.Parameter(torch.eye(len(spec.heads), len(spec.rows)))

    def rows(self, buckets: tuple[Bucket, ...]) -> tuple[int, ...]:
        """Returns the number of rows of every block. The last block is padded, so that they sum to the bucket width."""
        # A zero row in the last block adds nothing to its score map, so the padding needs no extra block.
        blocks, width = self.spec.rows, _shared_width(buckets)
        return (*blocks[:-1], blocks[-1] + width - sum(blocks)) if width else blocks

    def forward(self, query: Queries, key: Keys, buckets: tuple[Bucket, ...]) -> tuple[ScoreFactors, ...]:
        """Returns the shared rows, and each head's weights both per block and per direction."""
        rows = self.rows(buckets)
        # Block weights and strengths describe the same scores. Fused kernels use the strengths per direction. Unfused
        # backends use the mixture of blocks.
        strength = of_weights(self, rows, lambda: self.mix[:, _block_index(rows, self.mix)])
        blocks, sides = BlockFactors(query, key, rows), (query.unsqueeze(2), key.unsqueeze(2))
        return tuple(
            ScoreFactors(
                bucket, *sides, strength[bucket.heads], self.spec.scale, BlockMixture(blocks, self.mix[bucket.heads])
            )
            for bucket in buckets
            if bucket.rank
        )

    def strengths(self) -> Float[Tensor, "heads directions"]:
        return self.mix[:, _block_index(self.spec.rows, self.mix)]

    def set_strengths_(self, strengths: list[Float[Tensor, "_"]]) -> None:
        """Sets one weight per head and block. Raises NotSupported for strengths that differ within a block."""
        blocks = torch.stack(strengths).split(self.spec.rows, dim=1)
        for block, strength in enumerate(blocks):
            if bool((strength != strength[:, :1]).any()):
                raise NotSupported(
                    "heads of mixed attention have one strength per block of directions, and this prescription gives "
                    f"those of block {block} different ones, so it has no mask; realize it by='compress'."
                )
            if strength.shape[1]:
                self.mix[:, block] = strength[:, 0].to(self.mix.dtype)


def _shared_width(buckets: tuple[Bucket, ...]) -> int:
    return max((bucket.width for bucket in buckets if bucket.rank), default=0)


def _block_index(rows: tuple[int, ...], like: Tensor) -> Int[Tensor, "directions"]:
    return torch.tensor([block for block, rank in enumerate(rows) for _ in range(rank)], device=like.device)


@dataclass
class BlockFactors:
    """Queries and keys in the directions that all heads share, divided into blocks of `ranks[b]` directions.

    All buckets use the same instance.
    """

    query: Float[Tensor, "batch queries directions"]
    key: Float[Tensor, "batch keys directions"]
    ranks: tuple[int, ...]
    # Not a cached_property, because compilers cannot trace its lock in Python 3.11.
    _maps: Tensor | None = None

    def maps(self) -> Float[Tensor, "batch blocks queries keys"]:
        """Returns the score map of every block, query @ key^T, which is computed once and then stored."""
        if self._maps is None:
            # Blocks have different ranks, so there is one product per block. An empty block's product is zero.
            sides = (side.split_with_sizes(self.ranks, -1) for side in (self.query, self.key))
            self._maps = torch.stack([query @ key.transpose(1, 2) for query, key in zip(*sides, strict=True)], 1)
        return self._maps


@dataclass(frozen=True)
class BlockMixture(Mixture):
    """The weights with which the heads of one bucket mix the score maps of the blocks."""

    blocks: BlockFactors
    weights: Float[Tensor, "heads blocks"]

    def scores(self, scale: float) -> Float[Tensor, "batch heads queries keys"]:
        """Returns the scores of the heads: scale * sum_b weights[h, b] maps[b]."""
        maps = self.blocks.maps()
        # One product [heads, blocks] @ [batch, blocks, queries * keys] mixes all maps. The scale multiplies the small
        # matrix instead of the maps.
        mixed = (self.weights.to(maps.dtype) * scale) @ maps.flatten(2)
        return mixed.unflatten(2, maps.shape[2:])

    def native_outputs(
        self, mixtures: Sequence[Any], scale: float, values: BucketValues, sizes: Float[Tensor, "batch keys"] | None
    ) -> HeadOutputs:
        mix = scale * torch.cat([mixture.weights for mixture in mixtures])
        return native_mixed_attention(self.blocks.query, self.blocks.key, values, self.blocks.ranks, mix, sizes)


def native_mixed_attention(
    query: Float[Tensor, "batch queries directions"],
    key: Float[Tensor, "batch keys directions"],
    values: Sequence[Float[Tensor, "batch _ keys _"]],
    ranks: Sequence[int],
    mix: Float[Tensor, "heads blocks"],
    sizes: Float[Tensor, "batch keys"] | None,
) -> Float[Tensor, "batch queries features"]:
    """Computes the same outputs as `native_attention`, for heads that mix the score maps of blocks.

    The score map of head h is sum_b mix[h, b] query_b @ key_b^T. The directions are divided into blocks in order, and
    block b has `ranks[b]` directions. Each block's score map is computed only once for all heads.
    """
    require_inference((query, key, *values, mix, sizes))
    token_sizes = None if sizes is None else sizes.float()
    weights = mix.float().contiguous()
    return _NATIVE_MIXED_ATTENTION(query, key, list(values), ranks, weights, token_sizes)


def _mixed_attention(
    query: Tensor, key: Tensor, values: list[Tensor], ranks: Sequence[int], mix: Tensor, sizes: Tensor | None
) -> Tensor:
    library = required_library()
    if (query.ndim, key.ndim, mix.ndim) != (3, 3, 2) or any(value.ndim != 4 for value in values) or not values:
        raise InvalidInput(
            "give queries and keys [batch, tokens, directions], values [batch, heads, tokens, features], at least one, "
            "and the mixture [heads, blocks]."
        )
    # Every head has the queries and keys of all directions, as views with stride 0 over the heads.
    queries, keys = ([side[:, None].expand(-1, value.shape[1], -1, -1) for value in values] for side in (query, key))
    require_heads(queries, keys, values, sizes)
    output = _empty_mixed(query, key, values)
    batch, tokens, _ = output.shape
    fits = mix.shape == (sum(value.shape[1] for value in values), len(ranks)) and min(ranks, default=0) >= 0
    if not fits or sum(ranks) != query.shape[2] or mix.dtype != torch.float32:
        raise InvalidInput(
            f"blocks of {list(ranks)} directions and a {mix.dtype} mix of {list(mix.shape)} do not fit "
            f"{query.shape[2]} directions and {sum(value.shape[1] for value in values)} heads in float32."
        )
    if not key.shape[1]:  # there are no keys
        return output.zero_()
    numbers, heads, _buffers = described_heads(queries, keys, values, output)
    sizes, mix = None if sizes is None else sizes.contiguous(), mix.contiguous()
    if library.attnrx_mixed_attention(
        numbers, heads, (ctypes.c_int64 * len(ranks))(*ranks), mix.data_ptr(), len(ranks), batch, tokens, key.shape[1],
        address(sizes), kernel_threads(),
    ):  # fmt: skip
        raise MemoryError("attention found no memory for the keys and values of one image.")
    return output


def _empty_mixed(query: Tensor, key: object, values: list[Tensor], *_: object) -> Tensor:
    return query.new_empty(*query.shape[:2], num_features(value.shape for value in values))


def _mixed_operations(
    query: torch.Size, key: torch.Size, values: list[torch.Size], ranks: object, mix: torch.Size, *_: object, **__: Any
) -> int:
    """Counts the operations that compute the blocks' score maps, mix them for every head, and sum the values."""
    return 2 * query[0] * query[1] * key[1] * (query[2] + mix[0] * mix[1] + num_features(values))


_NATIVE_MIXED_ATTENTION = define(
    "native_mixed_attention(Tensor query, Tensor key, Tensor[] values, int[] ranks, Tensor mix, Tensor? sizes)"
    " -> Tensor",
    _mixed_attention, _empty_mixed, _mixed_operations,
)  # fmt: skip

register_form("shared", SharedForm, FormTraits(has_strengths=True, shares_directions=True, norms=("none",)))
register_form(
    "mixed", MixedForm, FormTraits(has_strengths=False, shares_directions=True, norms=("none",), mixes_blocks=True)
)
