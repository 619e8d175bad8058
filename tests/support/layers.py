"""Attention layers of irregular shapes, and attention by its definition, which shares no code with the backends."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from attnrx.vit.attention import Attention, Backend
from attnrx.vit.spec import AttentionSpec


@dataclass(frozen=True)
class Case:
    """A layer, and images and tokens of its input; a dead layer has zero weights of query, key and value."""

    spec: AttentionSpec
    images: int = 3
    tokens: int = 11
    dead: bool = False

    def layer(self, backend: Backend, dtype: torch.dtype = torch.float64) -> Attention:
        layer = Attention(self.spec, backend).to(dtype).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
                if self.dead and not name.startswith("output"):
                    parameter.zero_()
        return layer

    def inputs(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        shape = (self.images, self.tokens, self.spec.width)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)

    def sizes(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Sizes of merged tokens from 0, for a pruned token, to 3; the first token is always there."""
        generator = torch.Generator().manual_seed(2)
        sizes = torch.randint(0, 4, (self.images, self.tokens), generator=generator).to(dtype)
        sizes[:, 0] = 1
        return sizes


def dense(ranks: tuple[int, ...], values: tuple[int, ...] | None = None, scale: float = 0.83) -> AttentionSpec:
    """Heads of up to four directions and features; the scale is not the default one, 1 / 2."""
    return AttentionSpec("dense", 7, 4, ranks, tuple(range(len(ranks))), scale, 4, value_ranks=values)


def svda(ranks: tuple[int, ...], norms: str, values: tuple[int, ...] | None = None) -> AttentionSpec:
    return replace(dense(ranks, values, 3.1), form="svda", norms=norms)


def mixed(blocks: tuple[int, ...], heads: int, values: tuple[int, ...] | None = None) -> AttentionSpec:
    return dense((4,) * heads, values).with_shared_directions(sum(blocks), blocks)


RAGGED, VALUES = (3, 0, 1, 4), (2, 4, 1, 3)
LAYERS: dict[str, Case] = {
    "full": Case(dense((4, 4, 4))),
    "narrow scores": Case(dense((2, 2, 2))),
    "narrow values": Case(dense((4, 4, 4), (2, 2, 2))),
    "ragged": Case(dense(RAGGED, VALUES)),
    "rank zero": Case(dense((0, 0))),
    "rank one": Case(dense((1, 1, 1), (4, 3, 4))),
    "no values": Case(dense((2, 3), (0, 2))),
    "one head": Case(dense((4,))),
    "one narrow head": Case(dense((3,), (1,), 0.3)),
    "no biases": Case(replace(dense(RAGGED, VALUES), biases=())),
    "some biases": Case(replace(dense(RAGGED), biases=("key", "output"))),
    "svda": Case(svda((4, 4, 4), "kept")),
    "svda, ragged": Case(svda(RAGGED, "kept", VALUES)),
    "svda, original norms": Case(svda(RAGGED, "original", VALUES)),
    "shared": Case(AttentionSpec("shared", 7, 4, (3,) * 3, (0, 1, 2), 0.83, 9, value_ranks=(1, 4, 2))),
    "shared, wide": Case(AttentionSpec("shared", 7, 4, (6, 6), (0, 1), 0.83, 9)),
    "mixed": Case(mixed((3, 0, 2, 1), 3, (1, 4, 2))),
    "mixed, equal values": Case(mixed((2, 3), 3)),
    "mixed, one block": Case(mixed((6,), 4, (3, 3, 0, 2))),
    "mixed, rank zero": Case(mixed((0, 0), 2)),
    "mixed, 1,025 tokens": Case(mixed((17, 4), 6), 1, 1025),
    "dead": Case(dense((4, 2, 0)), dead=True),
    "dead svda": Case(svda((4, 2), "kept"), dead=True),
    "1,025 tokens": Case(dense((2, 0, 4), (3, 1, 4)), 1, 1025),
    "1,040 tokens, svda": Case(svda((1,), "kept", (3,)), 1, 1040),
    "many images": Case(dense((2, 4), (4, 1)), 130, 9),
}


def by_definition(
    layer: Attention, tokens: torch.Tensor, among: torch.Tensor | None = None, sizes: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(scale * query @ strength @ key^T + log(sizes)) @ value, one head after the other."""
    spec, among = layer.spec, tokens if among is None else among
    scores, shared = layer.scores, spec.form in ("shared", "mixed")
    rows = (sum(spec.rows),) if shared else spec.rows
    query = F.linear(tokens, scores.query.weight, scores.query.bias).split(rows, -1)
    key = F.linear(among, scores.key.weight, scores.key.bias).split(rows, -1)
    value = F.linear(among, layer.value.weight, layer.value.bias).split(spec.value_dims, -1)
    strength = getattr(scores, "strength", torch.ones(sum(spec.ranks), dtype=tokens.dtype))
    if spec.blocks is not None:  # all directions of a block have one strength in a head
        strength = scores.get_parameter("mix").repeat_interleave(torch.tensor(spec.blocks, dtype=torch.long), 1)
    strengths = strength.unbind(0) if shared else strength.split(spec.ranks)
    outputs = []
    for head, rank in enumerate(spec.ranks):
        q, k = (side[0 if shared else head] for side in (query, key))
        if spec.norms != "none":
            q, k = (side / side.norm(dim=-1, keepdim=True).clamp(min=1e-30) for side in (q, k))
        logits = spec.scale * (q[..., :rank] * strengths[head]) @ k[..., :rank].transpose(1, 2)
        if sizes is not None:
            logits = logits + sizes.log()[:, None]
        outputs.append(torch.softmax(logits, -1) @ value[head])
    return F.linear(torch.cat(outputs, -1), layer.output.weight, layer.output.bias)
