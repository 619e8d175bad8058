"""Calibration statistics of baselines: input moments of every linear map, and the empirical Fisher information."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.attention import Eager, using
from attnrx.data import ImageSet
from attnrx.errors import DataError
from attnrx.models import evaluating, family_of
from attnrx.shapes import Float, Tensor
from attnrx_lab.baselines.maps import MapAddress, linear_at

# Maps with the same inputs share the statistics of this one.
SAME_INPUTS = {"query": "value", "key": "value"}


@dataclass(frozen=True)
class InputMoments:
    """The inputs x of one map over all tokens of all images: the mean of |x|, and E[x x^T]."""

    magnitude: Float[Tensor, "inputs"]
    moment: Float[Tensor, "inputs inputs"]


class MapStatistics:
    """The statistics of some maps of a model on calibration images, each kind measured on first use."""

    def __init__(self, model: nn.Module, map_addresses: Sequence[MapAddress], images: ImageSet, batch_size: int = 32):
        self.model, self.map_addresses, self.images, self.batch_size = model, tuple(map_addresses), images, batch_size

    def moments(self, address: MapAddress) -> InputMoments:
        return self._moments[_watched(address)]

    def fisher(self, address: MapAddress) -> Float[Tensor, "outputs inputs"]:
        """Returns the empirical Fisher information of one map's weight: the mean over images of its squared gradient.

        The gradient is that of -log p(y | image) with the model's own answer y = argmax p for a label, so no label of
        the dataset is used.
        """
        return self._fisher[address]

    @cached_property
    def _moments(self) -> dict[MapAddress, InputMoments]:
        sums: dict[MapAddress, list[Tensor]] = {}
        rows: dict[MapAddress, int] = {}

        def take(address: MapAddress, _: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs = given[0].detach().flatten(0, -2).double()
            found = [inputs.abs().sum(0), inputs.mT @ inputs]
            before = sums.get(address)
            sums[address] = found if before is None else [a + b for a, b in zip(before, found, strict=True)]
            rows[address] = rows.get(address, 0) + len(inputs)

        watched = dict.fromkeys(_watched(address) for address in self.map_addresses)
        handles = [
            linear_at(self.model, address).register_forward_pre_hook(partial(take, address)) for address in watched
        ]
        layers = family_of(self.model).attention(self.model)
        try:
            # The eager backend pads nothing, so every projection is called as a module and its hooks run.
            with evaluating([self.model]), using(layers, [Eager()] * len(layers)):
                weight = next(self.model.parameters())
                for batch in self.images.batches(self.batch_size, device=weight.device):
                    self.model(batch.images.to(weight.dtype))
        finally:
            for handle in handles:
                handle.remove()
        if not sums:
            raise DataError(f"{self.images.fingerprint} gave no image to calibrate on; give at least one.")
        return {
            address: InputMoments(*(total.cpu() / rows[address] for total in found)) for address, found in sums.items()
        }

    @cached_property
    def _fisher(self) -> dict[MapAddress, Tensor]:
        model = copy.deepcopy(self.model).eval().requires_grad_(False)
        weights = [linear_at(model, address).get_parameter("weight").requires_grad_() for address in self.map_addresses]
        sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
        count = 0
        for batch in self.images.batches(1, device=weights[0].device):
            logits = model(batch.images.to(weights[0].dtype))
            loss = F.cross_entropy(logits, logits.argmax(-1))
            for total, gradient in zip(sums, torch.autograd.grad(loss, weights), strict=True):
                total += gradient.double().square()
            count += 1
        if not count:
            raise DataError(f"{self.images.fingerprint} gave no image to calibrate on; give at least one.")
        return {address: total.cpu() / count for address, total in zip(self.map_addresses, sums, strict=True)}


def _watched(address: MapAddress) -> MapAddress:
    layer, name = address
    return layer, SAME_INPUTS.get(name, name)
