"""Realizes a decision about the values of a layer or its MLP: reduces the features in between."""

from collections.abc import Sequence

import torch
from torch import nn

from attnrx.change.realization.directions import copy_rows_
from attnrx.nouns.prescription import HiddenDecision, OutputDecision
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.attention import Attention
from attnrx.vit.kernels.packed_linear import PackedLinear
from attnrx.vit.models import Family, LowRankLinear
from attnrx.vit.spec import AttentionSpec


def value_features(spec: AttentionSpec, order: Sequence[int]) -> Int[Tensor, "features"]:
    """Returns the indices of the value features of these heads, in this order."""
    features = torch.arange(sum(spec.value_dims)).split(spec.value_dims)
    return torch.cat([torch.zeros(0, dtype=torch.long), *(features[head] for head in order)])


def copy_values_(target: Attention, source: Attention, order: Sequence[int]) -> None:
    """Copies the values and output columns of the kept heads into a layer of matching shape."""
    features = value_features(source.spec, order)
    copy_rows_(target.value, source.value, features)
    target.output.weight.copy_(source.output.weight[:, features])
    if target.output.bias is not None and source.output.bias is not None:
        target.output.bias.copy_(source.output.bias)


def compress_values_(target: Attention, source: Attention, values: OutputDecision, order: Sequence[int]) -> None:
    """Writes the reduced values of `source` into a layer of matching shape, its heads in this order."""
    value, output, bias = reduced(source, values)
    # `reduced` has the heads in the order of `source`.
    head_features = torch.arange(sum(values.ranks)).split(values.ranks)
    features = torch.cat([torch.zeros(0, dtype=torch.long), *(head_features[head] for head in order)])
    _write_(target, value[features], output[:, features], bias)


def mask_values_(attention: Attention, values: OutputDecision) -> None:
    """Writes the reduced values into the first features of every head, and zeros into the rest; keeps every shape.

    Raises:
        InvalidInput: The output projection has no bias.
    """
    value, output, bias = reduced(attention, values)
    spec = attention.spec
    if attention.output.bias is None:
        raise InvalidInput(
            "the output projection of this layer has no bias that could absorb that of the values, so a mask cannot "
            "keep every shape; realize the prescription by='compress'."
        )
    # The first features of every head: reduced directions are combinations of all of them, and belong to none.
    starts = torch.tensor([0, *spec.value_dims]).cumsum(0).tolist()
    indices = torch.cat([start + torch.arange(rank) for start, rank in zip(starts, values.ranks, strict=False)])
    rows = value.new_zeros(sum(spec.value_dims), value.shape[1])
    columns = output.new_zeros(output.shape[0], sum(spec.value_dims))
    rows[indices], columns[:, indices] = value, output
    _write_(attention, rows, columns, bias)


def reduced(
    attention: Attention, values: OutputDecision
) -> tuple[Float[Tensor, "kept width"], Float[Tensor, "width kept"], Float[Tensor, "width"]]:
    """Returns the reduced value rows, output columns and output bias, in float64.

    The rows of the softmax sum to one, so a constant in the values adds a constant to the output. With o = attention @
    x + value bias, the bias of the output projection therefore absorbs all constants of decode @ encode @ (o - center)
    + center.
    """
    spec = attention.spec
    # In float64, as the factors are: the rounding of the weights' own precision happens once, when they are written.
    stored = attention.value.augmented()
    parts = [stored[value_features(spec, [head])] for head in range(len(spec.heads))]
    encodes = values.encode.double().split(values.ranks)
    # Rows of `encode` are padded to the largest head. [ranks[head], width + 1] each, with the bias as last column.
    rows = [encode[:, : block.shape[0]] @ block for encode, block in zip(encodes, parts, strict=True)]
    augmented = torch.cat([stored.new_zeros(0, stored.shape[1]), *rows])
    weight = attention.output.weight.detach().cpu().double()
    # `decode` and `center` are padded to the widest head, and the weight is not.
    present = _present_features(spec.value_dims, len(values.center))
    decode, center = values.decode.double()[present], values.center.double()[present]
    output = weight @ decode
    own_bias = attention.output.bias
    bias = weight.new_zeros(weight.shape[0]) if own_bias is None else own_bias.detach().cpu().double()
    # encode @ center by head: a row of `encode` is nonzero on its own head only.
    by_head = zip(encodes, center.split(spec.value_dims), strict=True)
    encoded_centers = torch.cat([encode[:, : len(mean)] @ mean for encode, mean in by_head])
    bias = bias + weight @ center + output @ (augmented[:, -1] - encoded_centers)
    return augmented[:, :-1], output, bias


def _present_features(value_dims: Sequence[int], padded: int) -> Int[Tensor, "features"]:
    """Returns the indices of the value features of all heads among `padded` ones, equally many for every head."""
    widest = padded // max(len(value_dims), 1)
    return torch.cat([torch.arange(0), *(head * widest + torch.arange(width) for head, width in enumerate(value_dims))])


def _write_(target: Attention, value: Tensor, output: Tensor, bias: Tensor) -> None:
    target.value.weight.copy_(value)
    target.output.weight.copy_(output)
    if target.value.bias is not None:
        target.value.bias.zero_()
    if target.output.bias is not None:
        target.output.bias.copy_(bias)


def compressed_linear(linear: nn.Linear, output: OutputDecision) -> LowRankLinear:
    """Returns the two factors of a map: y = W x + b becomes decode @ (encode @ W x) + a constant."""
    first, second, bias = _factors(linear, output)
    result = LowRankLinear(linear.in_features, linear.out_features, sum(output.ranks))
    result = result.to(linear.weight.device, linear.weight.dtype)
    result.first.weight.copy_(first)
    result.second.weight.copy_(second)
    result.second.bias.copy_(bias)
    return result.train(linear.training)


def mask_linear_(linear: nn.Linear, output: OutputDecision) -> None:
    """Writes the product of the two factors into the map.

    Raises:
        InvalidInput: The map has no bias.
    """
    first, second, bias = _factors(linear, output)
    if linear.bias is None:
        raise InvalidInput("a map without a bias cannot hold the mean of its reduced outputs; use by='compress'.")
    # Rounded once: a mask in the precision of the model differs from the two factors by rounding.
    linear.weight.copy_(second @ first)
    linear.bias.copy_(bias)


def realize_hidden_(family: Family, model: nn.Module, index: int, hidden: HiddenDecision, by: str) -> None:
    """Removes hidden units of one MLP, and refits its second linear map; by a mask with zeros in their place.

    Raises:
        NotSupported: The MLP has factored maps.
        InvalidInput: The decision belongs to an MLP of another shape, or a mask needs a bias that the second map lacks.
    """
    first, second = family.mlp(model)[index]
    if not (isinstance(first, nn.Linear) and isinstance(second, nn.Linear)):
        raise NotSupported(f"the MLP of layer {index} has factored maps; prescribe hidden on the original model.")
    keep = hidden.keep.to(first.weight.device)
    if len(keep) != first.out_features or len(hidden.bias) != second.out_features:
        raise InvalidInput(
            f"layers[{index}] of the prescription has {len(keep)} hidden units and {len(hidden.bias)} outputs, the "
            f"model {first.out_features} and {second.out_features}."
        )
    weight, bias = (part.to(second.weight.device, second.weight.dtype) for part in (hidden.weight, hidden.bias))
    # Units that are removed are still computed, and multiplied by zero columns: their activations do not matter.
    if by == "mask":
        if second.bias is None:
            raise InvalidInput("a second map without a bias cannot hold the mean of removed units; use by='compress'.")
        second.weight.zero_()
        second.weight[:, keep] = weight
        second.bias.copy_(bias)
        return
    # The first map loses rows; the second one is replaced by the refitted weight, which has the kept columns only.
    num_kept = int(keep.sum())
    small = (
        PackedLinear(first.in_features, num_kept, bias=first.bias is not None),
        PackedLinear(num_kept, second.out_features),
    )
    for which, (linear, original) in enumerate(zip(small, (first, second), strict=True)):
        linear.to(original.weight.device, original.weight.dtype).train(original.training)
        family.set_mlp_(model, index, which, linear)
    small[0].weight.copy_(first.weight[keep])
    if first.bias is not None:
        small[0].bias.copy_(first.bias[keep])
    small[1].weight.copy_(weight)
    small[1].bias.copy_(bias)


def _factors(linear: nn.Linear, output: OutputDecision) -> tuple[Tensor, Tensor, Tensor]:
    weight = linear.weight.detach().cpu().double()
    linear_bias = weight.new_zeros(weight.shape[0]) if linear.bias is None else linear.bias.detach().cpu().double()
    encode, decode, center = output.encode.double(), output.decode.double(), output.center.double()
    # y = W x + b in decode @ encode @ (y - center) + center, with the constants collected in one bias.
    return encode @ weight, decode, center + decode @ (encode @ (linear_bias - center))
