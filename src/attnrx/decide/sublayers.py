"""Measures linear maps in place of the sublayers of a model, for the map "depth"."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.change.decompositions.hidden_units import penalized
from attnrx.change.predictions import outputs_of, stored
from attnrx.data import ImageData, ImageSet
from attnrx.data.model_data import images_for
from attnrx.decide.diagnostics.redundancy import CentredMoment
from attnrx.decide.planning.sensitivity import resumed
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.support.arguments import ANY, BATCH, MODEL, checked, instance
from attnrx.support.errors import DataError, NotSupported
from attnrx.support.progress import track
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.maps import SUBLAYERS
from attnrx.vit.models import (
    Family,
    InputValidation,
    blocks_of,
    evaluating,
    family_of,
    linear_units,
    model_fingerprint,
    observing_calls,
    observing_mlp,
    recording_calls,
    replacing_forward,
    require_all_tokens,
)
from attnrx.vit.models.verbs import verb
from attnrx.vit.outputs import output_kind_of

# The penalty on the weights of a map, relative to the mean variance of its inputs, and the images on which the
# divergences are measured.
RIDGE, DIVERGENCE_IMAGES = 1e-3, 64

LinearMap = tuple[Float[Tensor, "width width"], Float[Tensor, "width"]]  # weight and bias


@checked(
    model=MODEL,
    diagnosis=instance("a Diagnosis, e.g. attnrx.diagnose(model, images)", Diagnosis),
    images=ANY,
    batch_size=BATCH,
)
@verb
def measure_sublayers(model: nn.Module, diagnosis: Diagnosis, images: ImageData, batch_size: int = 32) -> Diagnosis:
    """Adds to a diagnosis what the rules of "depth" need: for both sublayers of every layer, attention and MLP, the
    linear map of a token that best replaces it, and the divergence of the outputs with this map alone.

    The map is the least-squares fit of the sublayer's output on its normalized input, over the tokens of all images;
    that of an MLP has at most half of the rank. The readings are sublayer_weight [2, width, width], sublayer_bias
    [2, width], and sublayer_divergence [1, 2] on the first 64 images.

    Args:
        model: The model.
        diagnosis: Its diagnosis.
        images: Images, normalized for the model.
        batch_size: Images per forward pass.

    Returns:
        The diagnosis with the readings.

    Raises:
        FingerprintMismatch: The diagnosis belongs to another model.
        NotSupported: The MLPs are not two linear maps with only an activation between them.
        DataError: There are no images, or they do not fit the model.

    Examples:
        >>> model, images = rx.load("svda:digits"), torch.randn(64, 1, 16, 16)
        >>> diagnosis = rx.measure_sublayers(model, rx.diagnose(model, images), images)
        >>> smaller = rx.realize(model, rx.prescribe(diagnosis, "depth=total_rank:0.75"))
    """
    operation = "measure_sublayers"
    require_all_tokens(model, "measure the sublayers of")
    diagnosis.require(model_fingerprint(model), "the model whose sublayers are to be measured")
    if not family_of(model).mlps(model):
        raise NotSupported(
            "the MLPs of this model are not two linear maps with only an activation between them, so no linear map can "
            "replace them. Prescribe other maps than depth."
        )
    shown = images_for(model, images, "images")
    if not len(shown):
        raise DataError(f"{operation} was given no image; give some, e.g. splits.train.take(256).")
    maps = _fitted_maps(model, shown, batch_size, operation)
    divergences = _divergences(model, maps, shown.take(min(len(shown), DIVERGENCE_IMAGES)), batch_size, operation)
    layers = tuple(
        replace(
            layer,
            readings={
                **layer.readings,
                "sublayer_divergence": divergence,
                "sublayer_weight": torch.stack([weight for weight, _ in pair]).float(),
                "sublayer_bias": torch.stack([bias for _, bias in pair]).float(),
            },
        )
        for layer, divergence, pair in zip(diagnosis.layers, divergences, maps, strict=True)
    )
    return replace(diagnosis, layers=layers)


def _fitted_maps(model: nn.Module, images: ImageSet, batch_size: int, operation: str) -> list[tuple[LinearMap, ...]]:
    """Returns the maps in place of both SUBLAYERS of every layer, fitted in one pass over the images."""
    family, device = family_of(model), next(model.parameters()).device
    units: list[Any] = [first for first, _ in family.mlp(model)]
    moments = [tuple(CentredMoment() for _ in SUBLAYERS) for _ in units]
    validation = InputValidation(model, family, operation)

    def observe(layer: int, which: int, inputs: Tensor, outputs: Tensor) -> None:
        moments[layer][which].add(torch.cat([inputs, outputs], dim=-1).flatten(0, -2))

    with evaluating([model]), observing_sublayers(model, family, observe):
        for batch in track(images.batches(batch_size, device=device), operation, -(-len(images) // batch_size)):
            outputs_of(model, validation.take(batch.images))
    validation.notes()  # called for its warning
    maps = []
    for linear, (attention, mlp) in zip(units, moments, strict=True):
        width = linear.in_features
        maps.append((fitted_map(attention, width), fitted_map(mlp, linear_units(linear.out_features, width))))
    return maps


def _divergences(
    model: nn.Module, maps: Sequence[tuple[LinearMap, ...]], images: ImageSet, batch_size: int, operation: str
) -> Float[Tensor, "layers 1 sublayers"]:
    """Returns the mean divergence of the outputs with each of the maps alone, in one pass over the images."""
    family, kind, device = family_of(model), output_kind_of(model), next(model.parameters()).device
    sums = torch.zeros(len(maps), 1, len(SUBLAYERS), dtype=torch.float64)
    with evaluating([model]):
        for batch in track(images.batches(batch_size, device=device), operation, -(-len(images) // batch_size)):
            with recording_calls(blocks_of(model, family), lambda call: call) as calls:
                base = stored(outputs_of(model, batch.images))
            results = [call.output for call in calls]
            for layer, which in torch.cartesian_prod(torch.arange(len(maps)), torch.arange(len(SUBLAYERS))).tolist():
                # The layers before are not computed again.
                given = calls[layer].tokens_as_output
                with (
                    resumed(model, family, given, layer, results),
                    _replacing(model, family, layer, which, *maps[layer][which]),
                ):
                    other = stored(outputs_of(model, batch.images))
                sums[layer, 0, which] += kind.divergence(base, other).double().sum()
    return (sums / len(images)).clamp_min(torch.finfo(torch.float64).tiny)


@contextmanager
def observing_sublayers(
    model: nn.Module, family: Family, observe: Callable[[int, int, Tensor, Tensor], None]
) -> Iterator[None]:
    """Calls `observe(layer, which, inputs, outputs)` for both SUBLAYERS of every layer inside the context."""
    attention: dict[nn.Module, int] = {module: layer for layer, module in enumerate(family.attention(model))}
    given: dict[int, Tensor] = {}

    def observe_map(layer: int, which: int, inputs: Tensor, outputs: Tensor) -> None:
        if which == 0:
            given[layer] = inputs
        else:
            observe(layer, 1, given.pop(layer), outputs)

    with (
        observing_mlp(model, family, observe_map),
        observing_calls(attention, lambda call: observe(attention[call.module], 0, call.tokens, call.output)),
    ):
        yield


def fitted_map(moment: CentredMoment, rank: int) -> LinearMap:
    """Returns weight and bias of the linear map of a rank that best gives the second half of the features from the
    first one, by least squares with a penalty on the weights.
    """
    covariance, mean = moment.covariance(), moment.mean.cpu().double()
    width = len(mean) // 2
    inputs, joint = covariance[:width, :width], covariance[width:, :width]
    weight = torch.linalg.solve(penalized(inputs, RIDGE), joint.mT).mT
    if rank < width:  # reduced-rank regression: the principal directions of the predicted outputs
        leading = torch.linalg.eigh(weight @ inputs @ weight.mT).eigenvectors[:, -rank:]
        weight = leading @ (leading.mT @ weight)
    return weight, mean[width:] - weight @ mean[:width]


@contextmanager
def _replacing(
    model: nn.Module, family: Family, layer: int, which: int, weight: Tensor, bias: Tensor
) -> Iterator[None]:
    """Replaces one sublayer by a linear map inside the context."""
    first, second = family.mlp(model)[layer]
    like: Any = first
    held: list[Tensor] = []

    def linear(tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        return F.linear(tokens, weight.to(tokens), bias.to(tokens))

    def hold(units: int, tokens: Tensor) -> Tensor:
        held.append(tokens)
        return tokens.new_zeros(()).expand(*tokens.shape[:-1], units)

    with ExitStack() as stack:
        if which == 0:
            stack.enter_context(replacing_forward(family.attention(model)[layer], linear))
        else:
            stack.enter_context(replacing_forward(first, partial(hold, like.out_features)))
            stack.enter_context(replacing_forward(second, lambda _: linear(held.pop())))
        yield
