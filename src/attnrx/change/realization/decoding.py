"""Makes the decoder of a dense-prediction model smaller, and fits it to the original's output maps.

Here, the decoder is everything in the model except the Vision Transformer. Such decoders are sequences of convolutions,
and account for a fifth or more of the model's cost. Their channels are removed like the hidden units of an MLP.
The channels to remove are chosen greedily, from second moments of the activations. A least-squares fit of the next
layer then compensates for the removed channels.

After the removal, all weights outside the Vision Transformer are fitted together to the original's outputs. For this
fit, the Vision Transformer runs only once per image, so each step costs only a pass through the small decoder. The fit
also corrects some of the errors that merged tokens and smaller layers cause.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import nn

from attnrx.change.decompositions import compensated, gram, unit_losses
from attnrx.change.predictions import predict
from attnrx.change.realization.distillation import HELD_OUT, descend_, improve_
from attnrx.data import ImageSet
from attnrx.nouns.effort import DecoderFit
from attnrx.support.modules import copy_module, evaluating, rows_of
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.models import ModuleCall, family_of, observing_calls
from attnrx.vit.models.boundary.whole import keep_units_around_, pairs_around
from attnrx.vit.models.libraries.adopted_family import weights_around
from attnrx.vit.models.parts.mlp import Pair
from attnrx.vit.models.users.units import input_weight, units_last
from attnrx.vit.models.working.adopted import Adopted
from attnrx.vit.outputs import Map, output_kind_of

# The share of channels to keep. With at least MANY channels, the kept number is a multiple of STEP, which fills the
# vector registers in convolutions. A decoder of transposed convolutions then needs 28 % of the time
# (docs/results/dense.md).
KEPT, STEP, MANY = 0.375, 16, 64
# The decoder stays unchanged if removing channels would save less than LEAST_SAVED of the model's MACs. It also stays
# unchanged if the fitted decoder diverges by more than TOLERATED.
LEAST_SAVED, TOLERATED = 0.05, 0.02
# Images per step, and about how many rows of a batch are added to a moment matrix.
BATCH, ROWS = 8, 4096
# The learning rate is relative to the root mean square of each tensor. For a saliency model, 4e-3 was better than 1e-3.
LEARNING_RATE = 4e-3
RIDGE = 1e-3
# The methods through which the code around a Vision Transformer may call it.
METHODS = ("forward", "forward_features", "forward_intermediates", "get_intermediate_layers")


@dataclass
class _Batch:
    """Images, the Vision Transformer's output for them, and the whole model's target outputs (one row per image)."""

    images: Tensor
    features: Any
    targets: Float[Tensor, "images numbers"]


def smaller_decoder(
    model: nn.Module, images: ImageSet, budget: DecoderFit, seed: int = 0
) -> tuple[Adopted, float] | None:
    """Returns a copy of a dense-prediction model with a smaller decoder, and the copy's mean divergence from the model.

    The divergence is measured on images that the copy was not fitted to. The function returns None if the decoder has
    no channels to remove, if removing them saves little, or if the copy diverges too much.
    """
    images = images.take(min(budget.images, len(images)))
    if not isinstance(model, Adopted) or not isinstance(output_kind_of(model), Map):
        return None
    pairs = pairs_around(model)
    if not pairs:
        return None
    small = copy_module(model)
    with evaluating((model, small)):
        batches = _batches(model, images)
        if len(batches) < 2:
            return None
        for pair in pairs:
            _remove_(small, pair, batches)
    before, after = (family_of(each).costs(each).macs for each in (model, small))
    if after > (1 - LEAST_SAVED) * before:
        return None
    _, divergence = _fit_(small, batches, budget.steps, seed)
    return (small, divergence) if divergence <= TOLERATED else None


def fit_decoder(
    model: nn.Module, original: nn.Module, images: ImageSet, budget: DecoderFit, seed: int = 0
) -> tuple[nn.Module, str]:
    """Fits a model's decoder, i.e. all weights outside the Vision Transformer, to the original's outputs.

    Returns a fitted copy, and a line of text that reports the divergence before and after.
    """
    assert isinstance(model, Adopted)
    fitted, images = copy_module(model), images.take(min(budget.images, len(images)))
    targets = predict({"original": original}, images, task="outputs of the original").outputs["original"]
    with evaluating((fitted,)):
        batches = _batches(fitted, images, targets)
    if not batches:
        return model, "the decoder is not fitted: the Vision Transformer inside was not called once per image"
    before, after = _fit_(fitted, batches, budget.steps, seed)
    return fitted, f"decoder fitted: divergence {before:.3g} to {after:.3g} on images it was not fitted to"


def _batches(model: Adopted, images: ImageSet, targets: Float[Tensor, "images numbers"] | None = None) -> list[_Batch]:
    """Runs the model, and returns batches with the recorded Vision Transformer outputs and the target outputs.

    Without `targets`, the model's own outputs are the targets. Returns [] unless the model calls its Vision Transformer
    exactly once per batch.
    """
    weight, found, done = next(model.parameters()), [], 0
    outputs: list[Any] = []

    def keep(call: Callable[[], Any]) -> Any:
        outputs.append(call())
        return outputs[-1]

    for batch in images.batches(BATCH, device=weight.device):
        pixels = batch.images.to(weight.dtype)
        outputs.clear()
        # `answer` is used, because the model itself would compute a large batch in chunks, with one call per chunk.
        with model.forward_pass(), _calls_replaced(model, keep):
            rows = rows_of(model.answer(pixels))
        if len(outputs) != 1:
            return []
        if targets is not None:
            rows = targets[done : done + len(pixels)].to(rows)
        done += len(pixels)
        found.append(_Batch(pixels, outputs[0], rows))
    return found


@contextmanager
def _calls_replaced(model: Adopted, function: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Inside the context, the inner Vision Transformer returns `function(call)`. `call()` computes its usual output."""
    trunk, depth = model.trunk, 0

    def replaced(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth:  # another of these methods makes this call
            return method(*args, **kwargs)
        depth += 1
        try:
            return function(partial(method, *args, **kwargs))
        finally:
            depth -= 1

    before = {name: vars(trunk)[name] for name in METHODS if name in vars(trunk)}
    vars(trunk).update({name: partial(replaced, getattr(trunk, name)) for name in METHODS if hasattr(trunk, name)})
    try:
        yield
    finally:
        for name in METHODS:
            vars(trunk).pop(name, None)
        vars(trunk).update(before)


def _outputs(model: Adopted, batch: _Batch) -> Float[Tensor, "images numbers"]:
    """Returns the model's outputs, computed from the recorded Vision Transformer outputs of a batch."""
    with _calls_replaced(model, lambda _: batch.features):
        return rows_of(model.answer(batch.images))


def _remove_(model: Adopted, pair: Pair, batches: list[_Batch]) -> None:
    """Removes channels between two linear maps, in place. Refits the second map on the batches, to compensate."""
    second = model.source.get_submodule(pair.second)
    weight = input_weight(second).flatten(1).T
    moment = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64)

    def add(call: ModuleCall) -> None:
        rows = units_last(second, call.tokens).flatten(0, -2)
        rows = rows[:: max(len(rows) // ROWS, 1)].double().cpu()
        moment.add_(gram(rows) / len(rows))

    with observing_calls((second,), add):
        for batch in batches:
            _outputs(model, batch)
    # The moments are not centred, because no bias can replace a constant. Zero padding gives a constant another effect
    # at the border of a map than inside.
    weight, moment = weight.double().cpu(), moment / len(batches)
    losses = unit_losses(moment, weight, RIDGE)
    keep, step = torch.zeros(len(losses), dtype=torch.bool), STEP if len(losses) >= MANY else 1
    keep[losses.topk(max(ceil(KEPT * len(losses) / step) * step, 1)).indices] = True
    new = compensated(moment, weight, keep, RIDGE)
    keep_units_around_(model, pair, keep)
    kept = input_weight(second)
    kept.copy_(new.T.reshape(kept.shape))


def _fit_(model: Adopted, batches: list[_Batch], steps: int, seed: int) -> tuple[float, float]:
    """Fits all weights outside the Vision Transformer in place. Returns the mean divergence before and after the fit.

    One batch in eight is held out to measure the divergence. A fit that does not lower the divergence is undone.
    """
    kind = output_kind_of(model)
    held_out = batches[::HELD_OUT]
    fitted = [batch for index, batch in enumerate(batches) if index % HELD_OUT] or batches
    weights = nn.ParameterList(weights_around(model))
    before = _divergence(model, held_out)
    if not len(weights):
        return before, before

    def error(generator: torch.Generator) -> Float[Tensor, ""]:
        batch = fitted[int(torch.randint(len(fitted), (1,), generator=generator))]
        return kind.softened(batch.targets, _outputs(model, batch)).mean()

    with evaluating((model,)):
        fit_ = partial(descend_, weights, error, steps, LEARNING_RATE, seed)
        return before, improve_(weights, before, partial(_divergence, model, held_out), fit_)


def _divergence(model: Adopted, batches: list[_Batch]) -> float:
    with evaluating((model,)):
        rows = torch.cat([_outputs(model, batch) for batch in batches])
        targets = torch.cat([batch.targets for batch in batches])
        return float(output_kind_of(model).divergence(targets, rows).mean())
