"""Converts a library's attention module to attnrx attention, and writes attnrx attention back into such a module."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Tensor
from attnrx.vit.attention import Attention
from attnrx.vit.models.parts.mlp import set_parameter_, write_linear_
from attnrx.vit.models.parts.record import KEPT_HEADS
from attnrx.vit.models.parts.vit_parts import ViTParts
from attnrx.vit.models.working.adopted import (
    INTERLEAVED,
    PROJECTION_PATHS,
    Adapter,
    PairBias,
    PlainAttention,
    attention_from_projections,
    interleaved_rows,
)

# Parameters of attention modules with one vector per distance, in rows and in columns.
DISTANCES = ("rel_pos_h", "rel_pos_w")
# Attributes of attention modules for the number of heads, and for the number of features over all heads.
HEAD_COUNTS = {"num_heads", "num_attention_heads", "heads"}
HEAD_WIDTHS = {"attn_dim", "all_head_size"}


def distances_of(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Returns an attention module's relative position vectors for row and column distances, or None if it has none."""
    down, right = (getattr(module, name, None) for name in DISTANCES)
    return None if down is None or right is None else (down, right)


class AttentionConversion(ABC):
    """The base class with a family's methods that convert attention modules to attnrx attention and back.

    The conversion uses the projections that `parts` names, and the family's methods `traits` and `pair_bias`.
    """

    adapter_type: type[Adapter] = PlainAttention

    @abstractmethod
    def parts(self, source: nn.Module) -> ViTParts:
        """Returns the paths and properties of a model's parts."""

    def convert_attention(self, source: nn.Module, module: nn.Module) -> Attention:
        """Converts an attention module of the model `source` to attnrx attention with the same weights."""
        parts = self.parts(source)
        weights, biases = self.projected(source, module)
        kept_heads = vars(module).get(KEPT_HEADS)  # set only on modules that lost heads
        heads = self._num_heads(module, parts) if kept_heads is None else len(kept_heads)
        scale = getattr(module, parts.scale) if isinstance(parts.scale, str) else parts.scale
        scale = scale or (weights[0].shape[0] // heads) ** -0.5
        attention = attention_from_projections(
            weights, biases, heads, scale, distances=distances_of(module), **self.traits(source, module)
        )
        if kept_heads is not None:
            attention.spec = attention.scores.spec = replace(attention.spec, heads=kept_heads)
        return attention

    def write_attention_(self, source: nn.Module, module: nn.Module, adapter: Adapter) -> None:
        """Writes attnrx attention into an attention module of the model `source`.

        The module may have more heads than the attention. If the module can represent the attention, a later call of
        `convert_attention` returns the same attention.

        Raises:
            NotSupported: The module cannot store the weights.
        """
        attention, parts = adapter.attention, self.parts(source)
        spec, rotary = attention.spec, self.traits(source, module).get("rotary")
        if attention.spec.form not in ("dense", "rotary", "axial") or len({*spec.ranks, *spec.value_dims}) > 1:
            raise NotSupported("heads of other forms or sizes")
        sides = [attention.get_submodule(path) for path in PROJECTION_PATHS]
        weights: list[Any] = [side.weight for side in sides]
        biases: list[Any] = [side.bias for side in sides]
        if rotary == INTERLEAVED and spec.ranks:
            order = interleaved_rows(len(spec.heads), spec.ranks[0]).argsort()
            for side in (0, 1):
                weights[side] = weights[side][order.to(weights[side].device)]
                biases[side] = None if biases[side] is None else biases[side][order.to(weights[side].device)]
        self.write_projections_(source, module, weights, biases)
        if spec.window is not None:
            self._write_distances_(module, attention)
        for name, norm in attention.inner_norms.items():
            own = self.traits(source, module)["inner_norms"][name]
            for (path, target), parameter in zip(own.named_parameters(), norm.parameters(), strict=True):
                value = parameter
                if rotary == INTERLEAVED and name in ("query_norm", "key_norm"):
                    value = parameter[interleaved_rows(1, len(parameter)).argsort().to(parameter.device)]
                set_parameter_(own, path, value, target.requires_grad)
        bias: Any = self.pair_bias(module)
        if bias is not None and adapter.pair_bias is not None:
            own: Any = adapter.pair_bias
            bias, own = (each.source if isinstance(each, PairBias) else each for each in (bias, own))
            state = dict(own.named_parameters())
            for path, target in list(bias.named_parameters()):
                owner, _, name = path.rpartition(".")
                holder = bias.get_submodule(owner)
                # timm's tables are parameters of the attention module itself.
                holder = module if not owner and getattr(module, name, None) is target else holder
                set_parameter_(holder, name, state[path], target.requires_grad)
        if spec.heads != tuple(range(self._num_heads(module, parts))):
            self.keep_heads_(module, spec.heads, spec.head_dim)

    def _write_distances_(self, module: nn.Module, attention: Attention) -> None:
        """Writes relative position vectors into a library's attention module, in which all heads share them."""
        scores: Any = attention.scores
        for name, rows in zip(DISTANCES, (scores.down, scores.right), strict=True):
            tables = rows.detach().unflatten(0, (len(attention.spec.heads), -1))
            if not rows.is_meta and not torch.equal(tables, tables[:1].expand_as(tables)):
                raise NotSupported("heads with relative positions of their own")
            set_parameter_(module, name, tables[0].mT.contiguous(), getattr(module, name).requires_grad)

    def _num_heads(self, module: nn.Module, parts: ViTParts) -> int:
        """Returns an attention module's number of heads, from `parts` or from an attribute of the module."""
        name = "num_heads" if isinstance(module, nn.MultiheadAttention) else parts.num_heads
        return name if isinstance(name, int) else int(getattr(module, name))

    def keep_heads_(self, module: nn.Module, heads: tuple[int, ...], head_dim: int) -> None:
        """Sets an attention module's number of heads after pruning. The weights of `heads` must already be written."""
        vars(module)[KEPT_HEADS] = heads
        for part in module.modules():
            own = vars(part)
            for name in HEAD_COUNTS & own.keys():
                setattr(part, name, len(heads))
            for name in HEAD_WIDTHS & own.keys():
                setattr(part, name, len(heads) * head_dim)

    def write_projections_(
        self, source: nn.Module, module: nn.Module, weights: list[Tensor], biases: list[Tensor | None]
    ) -> None:
        """Writes the query, key, value and output projections into an attention module (the inverse of `projected`).

        Query, key and value weights have the shape [rows, width], and their biases [rows]. The output weight has the
        shape [width, rows], and its bias [width]. A bias may be None.

        Raises:
            NotSupported: The module has one bias for all projections, but only some projections have a bias.
        """
        part: Any = module
        if isinstance(module, nn.MultiheadAttention):
            if None in biases and any(bias is not None for bias in biases):
                raise NotSupported("biases of some projections alone")
            set_parameter_(module, "in_proj_weight", torch.cat(weights[:3]), part.in_proj_weight.requires_grad)
            if part.in_proj_bias is not None:
                joint = torch.cat([bias for bias in biases[:3] if bias is not None])
                set_parameter_(module, "in_proj_bias", joint, part.in_proj_bias.requires_grad)
            write_linear_(part.out_proj, weights[3], biases[3])
            return
        linears: list[Any] = [module.get_submodule(name) for name in self.parts(source).projections]
        if len(linears) == 2:
            fused = None if biases[0] is None else torch.cat([bias for bias in biases[:3] if bias is not None])
            write_linear_(linears[0], torch.cat(weights[:3]), fused)
            write_linear_(linears[1], weights[3], biases[3])
            return
        for linear, weight, bias in zip(linears, weights, biases, strict=True):
            write_linear_(linear, weight, bias)

    def projected(self, source: nn.Module, module: nn.Module) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns the weights and the biases of an attention module, each in the order query, key, value, output."""
        part: Any = module
        if isinstance(module, nn.MultiheadAttention):  # stores its fused projection as a parameter, not a module
            weights: list[Any] = [part.in_proj_weight, part.out_proj.weight]
            biases: list[Any] = [part.in_proj_bias, part.out_proj.bias]
        else:
            linears: list[Any] = [module.get_submodule(name) for name in self.parts(source).projections]
            weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        if len(weights) == 2:  # a fused projection, whose rows are first all queries, then all keys, then all values
            weights = [*weights[0].chunk(3), weights[1]]
            biases = [*([None] * 3 if biases[0] is None else biases[0].chunk(3)), biases[1]]
        return weights, biases

    def traits(self, source: nn.Module, module: nn.Module) -> dict[str, Any]:
        """Returns further arguments of `attention_from_projections`, e.g. `rotary` and `inner_norms`."""
        return {}

    def adapter(self, source: nn.Module, module: nn.Module, attention: Attention) -> Adapter:
        """Wraps `attention` in a module that can replace an attention module of the model `source`."""
        parts = self.parts(source)
        adapter = self.adapter_type(attention, parts.prefix_tokens, self.pair_bias(module))
        # nn.MultiheadAttention returns a pair even if no weights are requested.
        adapter.returns_weights = parts.returns_weights or isinstance(module, nn.MultiheadAttention)
        return adapter

    def pair_bias(self, module: nn.Module) -> nn.Module | None:
        """Returns the module that computes a token-pair bias, [1, heads, tokens, tokens], or None if there is none."""
        return None
