"""Baselines that factor linear maps: SVD, ASVD, FWSVD and SVD-LLM."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import floor

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.change.decompositions import Directions, Weight, break_even_rank, checked_gram, output_basis, plain_svd
from attnrx.data import ImageSet
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import evaluating
from attnrx.support.shapes import Float, ImageBatch, Tensor
from attnrx.vit.attention import Eager, using
from attnrx.vit.attention.head_linear import HeadLinear, OutputProjection
from attnrx.vit.costs import ModelCosts, PartCosts
from attnrx.vit.models import LowRankLinear, family_of
from attnrx_lab.baselines.compressor import ModelCompressor

# The smallest scale, as a share of the largest scale. It keeps the scale of features that are always zero invertible.
SMALLEST_SCALE = 1e-6

Bias = Float[Tensor, "outputs"] | None


@dataclass(frozen=True)
class LowRank:
    """The map x -> second @ (first @ x) + bias that replaces x -> weight @ x + bias, in float64.

    Directions are the rank-one terms of the weight. They are sorted by descending `strength`, which is their
    contribution to the weight in the method's metric. Truncation to a lower rank therefore keeps the first directions.
    `strength` always lists all min(outputs, inputs) values, even after truncation. The squared error of a truncation,
    in the metric, is therefore the sum of the squared strengths beyond the rank. Directions without energy have
    strength 0. The bias is unchanged.
    """

    first: Float[Tensor, "rank inputs"]
    second: Float[Tensor, "outputs rank"]
    strength: Float[Tensor, "most"]
    bias: Bias = None

    @classmethod
    def of(cls, weight: Weight, bias: Bias, found: Directions) -> "LowRank":
        """Returns the low-rank map that projects the outputs of `weight` onto the directions in `found`."""
        strength, directions = found
        return cls(directions @ weight.detach().double(), directions.mT, strength, bias)

    @property
    def rank(self) -> int:
        return self.first.shape[0]

    @property
    def weight(self) -> Float[Tensor, "outputs inputs"]:
        return self.second @ self.first

    def truncated(self, rank: int) -> "LowRank":
        """Returns the map that keeps only the first `rank` directions."""
        return LowRank(self.first[:rank], self.second[:, :rank], self.strength, self.bias)


def svd(weight: Weight, bias: Bias = None) -> LowRank:
    """Factors W by its singular value decomposition."""
    return LowRank.of(weight, bias, plain_svd(weight))


def asvd(weight: Weight, bias: Bias, magnitude: Float[Tensor, "inputs"], alpha: float = 0.5) -> LowRank:
    """Factors W by the SVD of W S, where S = diag(magnitude^alpha) scales the inputs by a power of their magnitude.

    This function implements activation-aware SVD (Yuan et al., 2023, arXiv 2312.05821). Truncated to rank r, the result
    W' minimizes |(W - W') S| over all matrices of rank r. `magnitude` is the mean of |x| per input feature over
    calibration data. `alpha=0` gives the plain SVD.
    """
    weight = weight.detach().double()
    return _scaled_inputs(weight, bias, _scales(magnitude).pow(alpha))


def fwsvd(weight: Weight, bias: Bias, fisher: Float[Tensor, "outputs inputs"], *, side: str = "inputs") -> LowRank:
    """Factors W by an SVD after scaling its inputs or outputs by the square root of their Fisher information.

    This function implements Fisher-weighted SVD (Hsu et al., 2022, arXiv 2207.00112). The paper writes a layer as
    x W + b, so the rows of its matrix [inputs, outputs] belong to the inputs. The paper sums the Fisher information of
    each row, and D is the diagonal matrix of the square roots of these sums. The default `side="inputs"` does the same
    for PyTorch's weight [outputs, inputs]. It sums over the outputs and factors W D. `side="outputs"` sums the rows of
    the weight as PyTorch stores it, and factors D W. Truncated to a rank, the result W' minimizes |(W - W') D|, or
    |D (W - W')| for "outputs".
    """
    weight = weight.detach().double()
    scale = _scales(fisher.sum(0 if side == "inputs" else 1)).sqrt()
    if side == "inputs":
        return _scaled_inputs(weight, bias, scale)
    # The outputs of W are the inputs of W^T. So factor W^T, then transpose and swap its two factors.
    mirrored = _scaled_inputs(weight.mT, None, scale)
    return LowRank(mirrored.second.mT, mirrored.first.mT, mirrored.strength, bias)


def svd_llm(weight: Weight, bias: Bias, moment: Float[Tensor, "inputs inputs"]) -> LowRank:
    """Factors W by the SVD of W S, where S S^T = M is the Cholesky factorization of the inputs' moment M = E[x x^T].

    This function implements SVD-LLM (Wang et al., 2024, arXiv 2403.07378). The method multiplies the right factor of
    the SVD by S^-1. For a positive definite M, the result equals the optimum that attnrx's `activation_aware` finds. If
    M is singular, a ridge of 1e-12 times its trace is added to it. `activation_aware` needs no such ridge. Raises
    InvalidInput for a moment that is zero, not finite or not symmetric.
    """
    weight = weight.detach().double()
    moment = checked_gram(moment)
    factor, failed = torch.linalg.cholesky_ex(moment)
    if int(failed):
        ridge = 1e-12 * moment.trace() * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
        factor, failed = torch.linalg.cholesky_ex(moment + ridge)
    if int(failed):
        raise InvalidInput("the moment of the inputs is zero or has negative eigenvalues; give E[x x^T] of real data.")
    left, strength, right = torch.linalg.svd(weight @ factor, full_matrices=False)
    # A triangular solve computes diag(s) V^T S^-1 without inverting S.
    first = torch.linalg.solve_triangular(factor, strength[:, None] * right, upper=False, left=False)
    return LowRank(first, left, strength, bias)


def _scaled_inputs(weight: Tensor, bias: Tensor | None, scale: Tensor) -> LowRank:
    # In this basis the left factor of the SVD is square, so the map of full rank is the original map.
    basis, inner = output_basis(weight)
    turn, strength, _ = torch.linalg.svd(inner * scale, full_matrices=False)
    # U^T W equals diag(s) V^T S^-1 without the division, so full rank is exact for any scale.
    return LowRank(turn.mT @ inner, basis @ turn, strength, bias)


def _scales(values: Tensor) -> Tensor:
    values = values.detach().double()
    largest = values.max()
    return torch.ones_like(values) if bool(largest == 0) else values.clamp_min(SMALLEST_SCALE * largest)


ATTENTION_MAPS, MLP_MAPS = ("query", "key", "value", "output"), ("fc1", "fc2")
PARTS = {  # for every map, the part of a layer's costs that contains it
    "query": "query_key",
    "key": "query_key",
    "value": "value_output",
    "output": "value_output",
    "fc1": "mlp",
    "fc2": "mlp",
}
MAPS = tuple(PARTS)

MapAddress = tuple[int, str]
"""The index of a layer, and the name of one of its maps."""

Ranks = Mapping[MapAddress, int]


class FactoredHeads(HeadLinear):
    """A projection to all heads, factored into two linear layers with `rank` features between them."""

    def __init__(self, source: HeadLinear, rank: int):
        # The inherited weight, [rows, rank], is the second factor, because padding adds rows to the heads.
        super().__init__(rank, source.rows, source.bias is not None)
        self.first = nn.Linear(source.weight.shape[1], rank, bias=False)

    def forward(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens rows"]:
        return super().forward(self.first(tokens))

    def padded(
        self, tokens: Float[Tensor, "batch tokens width"], rows: tuple[int, ...], factor: float = 1.0
    ) -> Float[Tensor, "batch tokens rows"]:
        """Applies both linear layers. The rows of the second layer are padded to `rows` and scaled by `factor`."""
        if rows == self.rows and factor == 1.0:
            return self(tokens)
        return super().padded(self.first(tokens), rows, factor)


class FactoredOutputProjection(OutputProjection):
    """An output projection, factored into two linear layers with `rank` features between them."""

    def __init__(self, source: OutputProjection, rank: int):
        # The inherited weight, [rank, features], is the first factor, because padding adds columns to the heads.
        super().__init__(source.value_dims, rank, bias=False)
        self.second = nn.Linear(rank, source.weight.shape[0], bias=source.bias is not None)

    def forward(self, features: Float[Tensor, "batch tokens features"]) -> Float[Tensor, "batch tokens width"]:
        return self.second(F.linear(features, self.weight))

    def padded(
        self, features: Float[Tensor, "batch tokens features"], value_dims: tuple[int, ...]
    ) -> Float[Tensor, "batch tokens width"]:
        """Applies both linear layers. The columns of the first layer are padded to the heads' `value_dims`."""
        return self(features) if value_dims == self.value_dims else self.second(super().padded(features, value_dims))


def map_addresses(model: nn.Module) -> tuple[MapAddress, ...]:
    """Returns the layer and the name of every linear map. MLPs are included only if they have exactly two such maps.

    Raises:
        NotSupported: A map is already factored.
    """
    family = family_of(model)
    names = MAPS if family.mlp(model) else ATTENTION_MAPS
    addresses = tuple((layer, name) for layer in range(len(family.attention(model))) for name in names)
    for address in addresses:
        if not isinstance(linear_at(model, address), HeadLinear | OutputProjection | nn.Linear):
            where = f"{address[1]} of layer {address[0] + 1}"
            raise NotSupported(f"{where} is written as two maps already; give the original.")
    return addresses


def linear_at(model: nn.Module, address: MapAddress) -> nn.Module:
    """Returns the module at an address, which has a weight [outputs, inputs] and a bias (or None)."""
    layer, name = address
    if name in MLP_MAPS:
        return family_of(model).mlp(model)[layer][MLP_MAPS.index(name)]
    return getattr(_owner(model, layer, name), name)


def weights_at(model: nn.Module, address: MapAddress) -> tuple[Float[Tensor, "outputs inputs"], Tensor | None]:
    """Returns the weight and the bias of the linear map at an address, in float64 on the CPU."""
    linear = linear_at(model, address)
    bias = linear.bias
    weight = linear.get_parameter("weight").detach().cpu().double()
    return weight, bias.detach().cpu().double() if isinstance(bias, Tensor) else None


def with_factors(model: nn.Module, factors: Mapping[MapAddress, LowRank]) -> nn.Module:
    changed = copy.deepcopy(model)
    for address, low_rank in factors.items():
        _replace_(changed, address, low_rank)
    return changed


def factored_model_costs(model: nn.Module, ranks: Ranks) -> ModelCosts:
    """Returns the model's costs after factoring maps to these ranks. The attention products cost the same as before."""
    costs = family_of(model).costs(model)
    layers = list(costs.layers)
    for (index, name), rank in ranks.items():
        outputs, inputs = linear_at(model, (index, name)).get_parameter("weight").shape
        change = rank * (outputs + inputs) - outputs * inputs  # negative if factoring saves, because the bias stays
        part, layer = PARTS[name], layers[index]
        after = getattr(layer, part) + PartCosts(change, layer.tokens * change)
        layers[index] = replace(layer, **{part: after})
    return replace(costs, layers=tuple(layers))


def _owner(model: nn.Module, layer: int, name: str) -> nn.Module:
    attention = family_of(model).attention(model)[layer]
    return attention.scores if name in ("query", "key") else attention


def _replace_(model: nn.Module, address: MapAddress, low_rank: LowRank) -> None:
    (layer, name), rank = address, low_rank.rank
    linear = linear_at(model, address)
    # `names` are the parameters of the first matrix, the second matrix and the bias.
    if isinstance(linear, HeadLinear):
        new, names = FactoredHeads(linear, rank), ("first.weight", "weight", "bias")
    elif isinstance(linear, OutputProjection):
        new, names = FactoredOutputProjection(linear, rank), ("weight", "second.weight", "second.bias")
    else:
        outputs, inputs = linear.get_parameter("weight").shape
        new = LowRankLinear(inputs, outputs, rank, linear.bias is not None)
        names = ("first.weight", "second.weight", "second.bias")
    tensors = (low_rank.first, low_rank.second, low_rank.bias)
    new.load_state_dict({key: tensor for key, tensor in zip(names, tensors, strict=True) if tensor is not None})
    new = new.to(linear.get_parameter("weight")).train(linear.training)
    if name in MLP_MAPS:
        family_of(model).set_mlp_(model, layer, MLP_MAPS.index(name), new)
    else:
        setattr(_owner(model, layer, name), name, new)


@dataclass(frozen=True)
class InputMoments:
    """Moments of a linear map's inputs x over all tokens of all images: the mean of |x|, and E[x x^T]."""

    magnitude: Float[Tensor, "inputs"]
    moment: Float[Tensor, "inputs inputs"]


class MapStatistics:
    """Input moments and Fisher information of a model's linear maps, measured on calibration images when needed."""

    def __init__(self, model: nn.Module, images: ImageSet, batch_size: int = 32):
        self.model, self.images, self.batch_size = model, images, batch_size
        self.map_addresses = map_addresses(model)

    def moments(self, address: MapAddress) -> InputMoments:
        return self._moments[address]

    def fisher(self, address: MapAddress) -> Float[Tensor, "outputs inputs"]:
        """Returns the empirical Fisher information of a weight, which is its mean squared gradient over images.

        The function differentiates -log p(y | image), where y = argmax p is the model's own prediction. So the
        dataset's labels are not used.
        """
        return self._fisher[address]

    @cached_property
    def _moments(self) -> dict[MapAddress, InputMoments]:
        sums: dict[MapAddress, tuple[Tensor, Tensor, int]] = {}

        def take(address: MapAddress, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            inputs = arguments[0].detach().flatten(0, -2).double()  # float64, because the sums run over many tokens
            magnitude, moment, rows = sums.get(address, (0, 0, 0))
            sums[address] = magnitude + inputs.abs().sum(0), moment + inputs.mT @ inputs, rows + len(inputs)

        layers, weight = family_of(self.model).attention(self.model), next(self.model.parameters())
        with ExitStack() as hooks:
            for address in self.map_addresses:
                hook = linear_at(self.model, address).register_forward_pre_hook(partial(take, address))
                hooks.callback(hook.remove)
            # The eager backend does not pad, so it calls every projection as a module and the hooks run.
            with evaluating([self.model]), using(layers, [Eager()] * len(layers)):
                for batch in self.images.batches(self.batch_size, device=weight.device):
                    self.model(batch.images.to(weight.dtype))
        return {
            address: InputMoments(magnitude.cpu() / rows, moment.cpu() / rows)
            for address, (magnitude, moment, rows) in sums.items()
        }

    @cached_property
    def _fisher(self) -> dict[MapAddress, Tensor]:
        def loss(model: nn.Module, image: ImageBatch, _: int) -> Tensor:
            # FWSVD uses the true labels here. We use the predicted classes, because baselines get no labels.
            logits = model(image)
            return F.cross_entropy(logits, logits.argmax(-1))

        return mean_squared_gradients(self.model, self.map_addresses, self.images, loss)


def mean_squared_gradients(
    model: nn.Module,
    addresses: Sequence[MapAddress],
    images: ImageSet,
    loss: Callable[[nn.Module, ImageBatch, int], Float[Tensor, ""]],
) -> dict[MapAddress, Float[Tensor, "outputs inputs"]]:
    """Returns the squared gradients of the weights at `addresses`, averaged over images, in float64 on the CPU.

    `loss` receives a copy of the model, one image [1, channels, height, width] and the image's index.
    """
    # Gradients are computed in a copy, and only for the weights at `addresses`.
    model = copy.deepcopy(model).eval().requires_grad_(False)
    weights = [linear_at(model, address).get_parameter("weight").requires_grad_() for address in addresses]
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    # Images run one at a time, because the square of a batch's summed gradient is not the sum of squares.
    for number, batch in enumerate(images.batches(1, device=weights[0].device)):
        gradients = torch.autograd.grad(loss(model, batch.images.to(weights[0].dtype), number), weights)
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient.double().square()
    return {address: total.cpu() / len(images) for address, total in zip(addresses, sums, strict=True)}


Factor = Callable[[nn.Module, MapAddress, MapStatistics], LowRank]

# `svd` finds the nearest map in the Frobenius norm. `asvd` scales the inputs by the root of their mean magnitude, and
# omits the paper's search for each layer's rank. `fwsvd` weights the inputs by the Fisher information of their weights,
# as the paper prints it for x W. `svd_llm` whitens the inputs, and omits the paper's updates of the following layers.
FACTORS: Mapping[str, Factor] = {
    "svd": lambda model, at, data: svd(*weights_at(model, at)),
    "asvd": lambda model, at, data: asvd(*weights_at(model, at), data.moments(at).magnitude),
    "fwsvd": lambda model, at, data: fwsvd(*weights_at(model, at), data.fisher(at), side="inputs"),
    "svd_llm": lambda model, at, data: svd_llm(*weights_at(model, at), data.moments(at).moment),
}


class FactoringBaseline(ModelCompressor):
    """Factors all linear maps of the blocks. Each map keeps the same share of its own MACs.

    For a share s, the rank is floor(s * outputs * inputs / (outputs + inputs)), but at least 1. The papers define their
    compression ratio in the same way. The heads keep their sizes, so the attention products cost the same as before.
    """

    def __init__(self, model: nn.Module, kind: str, statistics: MapStatistics):
        self.model, self.factor, self.statistics = model, FACTORS[kind], statistics
        self.map_addresses = map_addresses(model)
        # A cache of full-rank factors. All methods order their directions, so every share truncates the same factors.
        self._full_rank: dict[MapAddress, LowRank] = {}

    def costs(self, share: float) -> ModelCosts:
        return factored_model_costs(self.model, self.ranks(share))

    def make(self, share: float) -> nn.Module:
        ranks = self.ranks(share)
        return with_factors(
            self.model, {address: self.factors_at(address).truncated(rank) for address, rank in ranks.items()}
        )

    def ranks(self, share: float) -> dict[MapAddress, int]:
        shapes = {at: linear_at(self.model, at).get_parameter("weight").shape for at in self.map_addresses}
        return {at: max(1, floor(share * break_even_rank(*shape))) for at, shape in shapes.items()}

    def factors_at(self, address: MapAddress) -> LowRank:
        if address not in self._full_rank:
            self._full_rank[address] = self.factor(self.model, address, self.statistics)
        return self._full_rank[address]
