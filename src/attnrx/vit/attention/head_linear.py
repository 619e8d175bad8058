"""Linear projections whose heads may have different numbers of rows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.support.modules import has_fixed_weights, is_recorded, kept, of_weights
from attnrx.support.shapes import Float, Tensor, TokenBatch
from attnrx.vit.kernels.native_products import linear_map, native_maps, runs_natively


class HeadLinear(nn.Module):
    """Projects tokens to `rows[h]` features for every head h.

    One weight matrix contains the rows of all heads, one head after another, without padding.
    """

    def __init__(self, width: int, rows: tuple[int, ...], bias: bool = True):
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.empty(sum(rows), width))
        self.bias = nn.Parameter(torch.zeros(sum(rows))) if bias else None
        if self.weight.numel():  # all heads may have rank 0, or be removed
            nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, tokens: TokenBatch) -> Float[Tensor, "batch tokens rows"]:
        return F.linear(tokens, self.weight, self.bias)

    def padded(
        self, tokens: TokenBatch, rows: tuple[int, ...], factor: float = 1.0
    ) -> Float[Tensor, "batch tokens rows"]:
        """Returns `rows[h]` features for every head h, multiplied by `factor`.

        If `rows[h]` is larger than the number of rows that head h stores, the added features are zero.
        """
        if rows == self.rows and factor == 1.0:
            return self(tokens)
        return linear_map(tokens, *of_weights(self, (rows, factor), lambda: self.spread(rows, factor)))

    def augmented(self) -> Float[Tensor, "rows augmented"]:
        """Returns the weight in float64 on the CPU, with the bias (or zeros) as an additional last column."""
        # With the bias as a column, decompositions treat it like one more entry of every direction (homogeneous
        # coordinates).
        bias = self.weight.new_zeros(self.weight.shape[0]) if self.bias is None else self.bias
        return torch.cat([self.weight, bias[:, None]], dim=1).detach().cpu().double()

    def spread(self, rows: tuple[int, ...], factor: float = 1.0) -> "WeightAndBias":
        """Returns the weight and bias, multiplied by `factor` and padded with zeros to `rows[h]` rows per head."""
        weight, bias = self.weight, self.bias
        if rows != self.rows:
            # One gather pads all heads, because every padding row reads the zero row that is appended at the end.
            index = padding_index(self.rows, rows, weight.device)
            weight = F.pad(weight, (0, 0, 0, 1)).index_select(0, index)
            bias = None if bias is None else F.pad(bias, (0, 1)).index_select(0, index)
        if factor == 1.0:
            return weight, bias
        return weight * factor, None if bias is None else bias * factor


WeightAndBias = tuple[Tensor, Tensor | None]

Side = tuple[HeadLinear, tuple[int, ...]]
"""A projection, and the number of rows to which each head is padded."""


class PackedWeights(NamedTuple):
    """The joint weight and bias of several projections. The projections' own weights are views of the joint weight.

    `parameters` lists the weight and bias of each projection in turn, and `addresses` lists their memory addresses.
    """

    parameters: tuple[Tensor | None, ...]
    addresses: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of_(cls, projections: Sequence[HeadLinear]) -> "PackedWeights | None":
        """Copies the weights of the projections into one joint weight, and turns the original weights into views of it.

        In-place changes to a projection therefore also change the joint weight. PyTorch's recurrent layers share memory
        in the same way (`flatten_parameters`).

        Returns None if the weights are on a CPU, differ in device or dtype, or are not plain parameters. Also returns
        None if a projection is an instance of a subclass, because a subclass may compute something different.
        """
        if any(type(side) is not HeadLinear for side in projections):
            return None
        parameters = parameters_of(projections)
        present = [parameter for parameter in parameters if parameter is not None]
        if any(type(each) is not nn.Parameter or each.is_cpu or each.is_inference() for each in present):
            return None
        if len({(each.device, each.dtype) for each in present}) != 1:
            return None
        weights, biases = [each.weight for each in projections], [each.bias for each in projections]
        rows, bias = [len(each) for each in weights], None
        with torch.inference_mode(mode=False), torch.no_grad():
            weight = torch.cat([*weights])
            for each, part in zip(weights, weight.split(rows), strict=True):
                each.data = part
            if any(each is not None for each in biases):
                # Some models have no bias for keys, but the joint product needs a bias for every row.
                pairs = zip(weights, biases, strict=True)
                bias = torch.cat([weight.new_zeros(len(each)) if own is None else own for each, own in pairs])
                for each, part in zip(biases, bias.split(rows), strict=True):
                    if each is not None:
                        each.data = part
        return cls(tuple(parameters), addresses_of(parameters), weight, bias)

    def last(self, parameters: Sequence[Tensor | None]) -> WeightAndBias | None:
        """Returns the part of the joint weight and bias that belongs to the last few (or all) projections.

        `parameters` lists the weights and biases of these projections (of any shape). Returns None if one of them was
        replaced or moved, because it then no longer shares memory with the joint weight.
        """
        # Identity is checked first. A parameter that was replaced for one call (torch.func.vmap) may have no address.
        start = len(self.parameters) - len(parameters)
        if tuple(map(id, parameters)) != tuple(map(id, self.parameters[start:])):
            return None
        if addresses_of(parameters) != self.addresses[start:]:
            return None
        if not start:
            return self.weight, self.bias
        first = sum(len(weight) for weight in self.parameters[:start:2] if weight is not None)
        return self.weight[first:], None if self.bias is None else self.bias[first:]


def addresses_of(parameters: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Returns the memory address of each parameter (of any shape), or 0 for None."""
    return tuple([0 if parameter is None else parameter.data_ptr() for parameter in parameters])


def joint_product(
    tokens: TokenBatch, sides: Sequence[Side], packed: PackedWeights | None
) -> Float[Tensor, "batch tokens rows"] | None:
    """Returns the concatenated outputs of several projections of the same tokens, computed jointly.

    On a CPU, the C++ kernel computes all projections in one call. On other devices, one matrix product with the
    `packed` weights computes them. Returns None if the projections must be computed one by one, e.g. because gradients
    are recorded. Also returns None in exported graphs, because a joint product that is then split is slower there
    (docs/results/speed.md).
    """
    if is_recorded() or has_fixed_weights():
        return None
    # With few tokens, the Python overhead of this function takes as long as the arithmetic, so it creates few objects.
    parameters: list[Tensor | None] = []
    for side, _ in sides:
        parameters += (side.weight, side.bias)
        # A hook on a projection must see a call to this projection, and a subclass may compute something different.
        if side._forward_hooks or side._forward_pre_hooks or type(side) is not HeadLinear:
            return None
    if any(rows != side.rows for side, rows in sides):
        return None
    if packed is not None and (found := packed.last(parameters)) is not None:
        return F.linear(tokens, *found)
    weights = [side.weight for side, _ in sides]
    if not runs_natively(tokens, *weights):
        return None
    return native_maps(tokens, weights, [side.bias for side, _ in sides], [False] * len(sides), joined=True)


def parameters_of(projections: Sequence[HeadLinear]) -> list[Tensor | None]:
    return [parameter for side in projections for parameter in (side.weight, side.bias)]


class OutputProjection(nn.Module):
    """Projects the concatenated outputs of all heads to the output width. Head h outputs `value_dims[h]` features.

    The weight contains the columns of all heads, one head after another, without padding.
    """

    def __init__(self, value_dims: tuple[int, ...], width: int, bias: bool = True):
        super().__init__()
        self.value_dims = value_dims
        self.weight = nn.Parameter(torch.empty(width, sum(value_dims)))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        if self.weight.numel():
            nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, features: Float[Tensor, "batch tokens features"]) -> TokenBatch:
        return linear_map(features, self.weight, self.bias)

    def padded(self, features: Float[Tensor, "batch tokens features"], value_dims: tuple[int, ...]) -> TokenBatch:
        """Projects the outputs of heads that are padded to `value_dims[h]` features. The padding has no effect."""
        if value_dims == self.value_dims:
            return self(features)
        return linear_map(features, of_weights(self, value_dims, lambda: self.spread(value_dims)), self.bias)

    def spread(self, value_dims: tuple[int, ...]) -> Float[Tensor, "width features"]:
        """Returns the weight with additional zero columns, for heads that are padded to `value_dims[h]` features."""
        if value_dims == self.value_dims:
            return self.weight
        # Zero columns multiply the padded features, so the padding does not change the output.
        index = padding_index(self.value_dims, value_dims, self.weight.device)
        return F.pad(self.weight, (0, 1)).index_select(1, index)


@kept
def padding_index(rows: tuple[int, ...], padded: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns, for every row of the padded weight, the index of the same row in the stored weight.

    Padding rows get the index after the last stored row. Callers must append a row of zeros at this index.
    """
    zero, index, first = sum(rows), [], 0
    for num_rows, num_padded in zip(rows, padded, strict=True):
        index += [*range(first, first + num_rows), *([zero] * (num_padded - num_rows))]
        first += num_rows
    return torch.tensor(index, dtype=torch.long, device=device)
