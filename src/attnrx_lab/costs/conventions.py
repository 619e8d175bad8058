"""Counts operations by the conventions of IrrAtt and SPOT, to reproduce the numbers in these papers.

The counting rules were inferred from IrrAtt's Table 1, and reproduce 53 of its 54 cells. They count the matrix products
in the patch embedding, the layers and the classifier. A LayerNorm counts five operations per feature, as in common FLOP
counters. A fused multiply-add counts as one FLOP. The strengths of directions count as parameters, but not as
operations. In contrast, `ModelCosts.macs` follows the convention of SVDA (A.6).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnrx.vit.costs import LayerCosts, ModelCosts, PartCosts, linear_costs
from attnrx.vit.models import family_of
from attnrx.vit.models.boundary.working_copy import working_copy
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import Shape, TokenPolicy

NORM_MACS = 5  # per feature of a LayerNorm

# The parts of a layer that belong to its attention (MHSA).
ATTENTION = ("query_key", "scores", "diagonal", "fusion", "value_output", "read_out")
# The norms of pooled tokens in transformers models.
POOLED_NORMS = ("head.layernorm", "pooler.layernorm", "classifier.layernorm")


@dataclass(frozen=True)
class Price:
    """A model's cost per image in IrrAtt's convention, split into parts, with the attention MACs of every layer."""

    parts: Mapping[str, PartCosts]
    attention_macs: tuple[int, ...]

    @property
    def params(self) -> int:
        return sum(part.params for part in self.parts.values())

    @property
    def macs(self) -> int:
        return sum(part.macs for part in self.parts.values())

    @property
    def mhsa_macs_per_layer(self) -> int | list[int]:
        """The attention MACs of every layer. If all layers have equal MACs, the result is a single number."""
        macs = list(self.attention_macs)
        return macs[0] if len(set(macs)) == 1 else macs

    def percent_of(self, original: "Price") -> dict[str, float]:
        """Returns the parameters, MACs and attention MACs in percent of the original's (compression ratios, CR)."""
        attention, original_attention = sum(self.attention_macs), sum(original.attention_macs)
        return {
            "params_percent": 100 * self.params / max(original.params, 1),
            "macs_percent": 100 * self.macs / max(original.macs, 1),
            "mhsa_percent": 100 * attention / max(original_attention, 1),
        }


def priced(costs: ModelCosts, outer_norms: int | None = None, predictor_norms: int = 0) -> Price:
    """Returns the cost of a model in IrrAtt's convention, split into parts that add up to the total.

    `outer_norms` is the number of features that the norms outside the layers normalize for one image (see
    `outer_norm_features`). None means that the model has one such norm, which runs on all tokens. `predictor_norms` is
    the number of features that the norms inside the token predictors normalize (see `predictor_norm_features`).
    """
    if outer_norms is None:
        outer_norms = costs.layers[-1].tokens * costs.layers[-1].spec.width if costs.layers else 0
    layers = [_layer_parts(layer) for layer in costs.layers]
    parts = costs.parts
    for name in layers[0] if layers else ():
        parts[name] = sum((layer[name] for layer in layers), start=PartCosts())
    parts["predictors"] += PartCosts(0, NORM_MACS * predictor_norms)
    parts["classifier"] += PartCosts(0, costs.classifier_macs + NORM_MACS * outer_norms)
    return Price(parts, tuple(sum(layer[name].macs for name in ATTENTION) for layer in layers))


def _layer_parts(layer: LayerCosts) -> dict[str, PartCosts]:
    norms = layer.layer_norms + PartCosts(0, NORM_MACS * layer_norm_features(layer))
    return {**layer.parts, "diagonal": PartCosts(layer.diagonal.params), "layer_norms": norms}


def layer_norm_features(layer: LayerCosts) -> int:
    """Returns how many features a layer's two norms and the norms inside its attention normalize for one image."""
    spec = layer.spec
    inner = {"query_norm": spec.ranks, "key_norm": spec.ranks, "output_norm": spec.value_dims}
    return layer.tokens * (2 * spec.width + sum(sum(inner[name]) for name in spec.inner_norms))


def predictor_norm_features(policy: TokenPolicy, shape: Shape) -> int:
    """Returns how many features the norms inside a token policy's predictors normalize for one image."""
    layout = shape.layout
    tokens = policy.tokens(layout, policy.layers[-1])
    stages = zip(policy.layers, policy.counts(layout.patches), strict=True)
    with torch.device("meta"):  # takes no memory and draws no random numbers
        predictor = policy.reducer.predictor(shape)
    norms = [module for module in predictor.modules() if isinstance(module, nn.LayerNorm)]
    # A stage that prunes nothing runs no predictor.
    at_work = sum(tokens[layer - 2] - layout.prefix for layer, count in stages if count < layout.patches)
    return at_work * sum(math.prod(norm.normalized_shape) for norm in norms)


def outer_norm_features(model: nn.Module, costs: ModelCosts) -> int | None:
    """Returns how many features the norms outside a model's layers and inside its MLPs normalize for one image.

    The result is None for attnrx's own models, which have one norm outside the layers that runs on all tokens.
    """
    family: Any = family_of(model)
    if not isinstance(family, AdoptedFamily):
        return None
    adopted: Any = working_copy(model)
    source: Any = adopted.trunk
    tokens, positions = costs.tokens, family.positions(adopted)
    last, parts, blocks = family.last_norm(source), family.parts(source), family.blocks(source)
    inside = {module for block in blocks for module in block.modules()}
    total = sum(
        math.prod(getattr(part, "normalized_shape", (0,))) * count
        for block, count in zip(blocks, tokens, strict=True)
        for name in parts.mlp
        for part in block.get_submodule(name).modules()
    )
    queries = getattr(getattr(source, "attn_pool", None), "query", None)  # in open_clip's AttentionalPooler
    for name, module in source.named_modules():
        shape = getattr(module, "normalized_shape", None)
        if shape is None or module in inside:
            continue
        # Norms of pooled tokens run once per image. Norms of the patch embedding have no prefix tokens. The last norm
        # runs after tokens were pruned.
        if queries is not None and name in ("attn_pool.ln_q", "attn_pool.ln_k", "ln_post"):
            count = tokens[-1] if name == "attn_pool.ln_k" else len(queries)
        elif name == "fc_norm" or name.startswith("attn_pool.") or name.endswith(POOLED_NORMS):
            count = 1
        elif module is last and (type(source).__name__.startswith("CLIP") or hasattr(source, "final_ln_after_pool")):
            count = 1 if getattr(source, "final_ln_after_pool", True) else tokens[-1]
        elif name.startswith("patch_embed."):
            count = positions
        else:
            count = tokens[-1] if module is last else tokens[0]
        total += math.prod(shape) * count
    return total


def direction_costs(spec: AttentionSpec, tokens: int) -> PartCosts:
    """Returns the costs of one direction: its query and key weights, its strengths, and its share of the scores.

    In SVDA one direction has `2 (width + 1) + 1` parameters and `tokens (2 width + tokens + 1)` MACs. If the original
    norms are kept, the projections cannot shrink. Removing a direction then saves only its strength and its part of the
    scores. A direction that all heads share has a strength in every head, and is a part of every head's scores. A
    direction in a block has no strength, and is used only once, for the block's score map.
    """
    # The number of heads in which a direction has its own strength and scores.
    users = len(spec.heads) if spec.traits.shares_directions and not spec.traits.mixes_blocks else 1
    strength = PartCosts(users, tokens * users) if spec.traits.has_strengths else PartCosts()
    scores = PartCosts(0, tokens * tokens * users)
    if spec.keeps_original_norms:
        return scores + strength
    query, key = (linear_costs(spec.width, 1, tokens, bias=spec.has_bias(side)) for side in ("query", "key"))
    return query + key + scores + strength


def saved_shares(costs: ModelCosts, share: float) -> tuple[float, float]:
    """Returns the shares of the parameters and MACs that are saved by removing `share` of each layer's directions.

    The result is correct only if every head keeps at least one direction. It reproduces the savings in SVDA's Tables 1
    and 2. The savings are linear in the number of directions, so `share` may be a mean over models.
    """
    removed = [(share * layer.directions, direction_costs(layer.spec, layer.tokens)) for layer in costs.layers]
    params = sum(number * direction.params for number, direction in removed)
    macs = sum(number * direction.macs for number, direction in removed)
    return params / max(costs.params, 1), macs / max(costs.macs, 1)
