"""Counts the parameters and MACs of a model's modules, in closed form or in a forward pass."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from attnrx.support.modules import evaluating
from attnrx.support.shapes import ImageBatch
from attnrx.vit.costs import PartCosts
from attnrx.vit.costs.model_costs import counting
from attnrx.vit.models.parts.module_inputs import called
from attnrx.vit.models.parts.record import TOKENS


def num_params(module: nn.Module) -> int:
    """Returns the number of parameters of a module, without its token policy."""
    tokens = module._modules.get(TOKENS)
    others = 0 if tokens is None else num_params(tokens)
    return sum(parameter.numel() for parameter in module.parameters()) - others


def matrix_entries(module: nn.Module) -> int:
    """Returns the number of weights (without biases) in a module's linear maps, i.e. their MACs per token."""
    return sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))


def bias_macs(block: nn.Module) -> int:
    """Returns the MACs of the small MLPs in timm blocks that convert token distances to attention biases."""
    mlps = (part for part in block.modules() if hasattr(part, "rel_coords_log"))
    return sum(matrix_entries(part) * (part.rel_coords_log.numel() // 2) for part in mlps)  # type: ignore[operator, union-attr]


def classifier_macs(head: nn.Module, tokens: int) -> int:
    """Returns the MACs of a classifier on one token.

    A head with attention pooling also computes keys and values for all `tokens` tokens. Attention pooling uses one
    query, except in open_clip's AttentionalPooler, which may have several queries.
    """
    total, queries = matrix_entries(head), 1
    for part in head.modules():
        if type(part).__name__ == "AttentionalPooler":
            queries = len(part.query)  # type: ignore[arg-type]
        elif isinstance(part, nn.MultiheadAttention):
            # Query, key and value projections are parameters here, not Linear modules, so `matrix_entries` omits them.
            width, keys = part.embed_dim, part.kdim + part.vdim
            total += (2 * queries - 1) * width**2 + tokens * keys * width + 2 * queries * tokens * width
        elif type(part).__name__ == "AttentionPoolLatent":
            latent: Any = part  # one query
            # `matrix_entries` counts the key and value projections for one token, but they run on all tokens. The
            # second term adds both products of the attention.
            total += (tokens - 1) * latent.kv.weight.numel() + tokens * latent.kv.out_features
    return total


def mlp_costs(
    mlp: Sequence[nn.Module],
    tokens: int,
    maps: tuple[Any, ...],
    ranks: tuple[int | None, ...],
    hidden: int,
    gate: Any = None,
) -> PartCosts:
    """Returns the parameters and MACs that an MLP would have if its two linear `maps` had other sizes.

    If `maps` is (), the MLP's own costs are returned. `ranks` are the ranks of the two linear maps (None for a map that
    is not factored), and `hidden` is the number of features between them. In a gated MLP, `gate` is the linear map that
    computes the gate.
    """
    changed = []
    if maps:
        first, second = maps
        changed = [(first, ranks[0], first.in_features, hidden), (second, ranks[1], hidden, second.out_features)]
    if gate is not None:
        changed.append((gate, None, gate.in_features, hidden))
    # Only the costs of the maps are replaced. Other parts of the modules (e.g. a norm) are still counted.
    params, entries = sum(map(num_params, mlp)), sum(map(matrix_entries, mlp))
    for linear, rank, inputs, outputs in changed:
        new, before = inputs * outputs if rank is None else rank * (inputs + outputs), matrix_entries(linear)
        has_bias = num_params(linear) > before
        params += new + outputs * has_bias - num_params(linear)
        entries += new - before
    return PartCosts(params, tokens * entries)


def macs_by_part(model: nn.Module, images: ImageBatch) -> dict[str, int]:
    """Counts the MACs of every module in a forward pass, by the module's path ("" for the model itself)."""
    with evaluating((model,)), counting(model) as counter:
        called(model, images)
    # The counter starts every name with the class name. It counts two operations per MAC.
    counts, root = counter.get_flop_counts(), f"{type(model).__name__}."
    return {f"{name}.".removeprefix(root)[:-1]: sum(each.values()) // 2 for name, each in counts.items()}
