"""Diagnoses a model: runs it on images, and computes diagnostics for each of its layers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.change.decompositions import activation_aware, output_pca, plain_svd, unit_losses
from attnrx.change.predictions import observe_images
from attnrx.data import MAX_IMAGES, ImageData
from attnrx.data.model_data import images_for
from attnrx.decide.diagnostics import CentredMoment, Diagnostic, Moments, Panel, effective_rank, suited_diagnostics
from attnrx.decide.rules.metrics import COHERENCE, coherence, directions_in
from attnrx.nouns.diagnosis import Computed, Diagnosis, HiddenDiagnosis, LayerDiagnosis, MapDiagnosis, MapDirections
from attnrx.support.arguments import COUNT, checked, optional
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.optional import installed_versions
from attnrx.support.records import to_dict
from attnrx.support.shapes import Float, Tensor
from attnrx.support.storage import require_finite_tensors
from attnrx.vit.attention import Attention, Observation, Positions
from attnrx.vit.models import family_of, model_fingerprint, observing_mlp, require_all_tokens, require_ordinary_weights
from attnrx.vit.models.boundary.verbs import verb


@checked(images=optional(COUNT))
@verb
def diagnose(
    model: nn.Module,
    data: ImageData,
    *,
    diagnostics: tuple[Diagnostic, ...] | None = None,
    moments: bool = False,
    images: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> Diagnosis:
    """Measures diagnostics of every layer and head of a model, in one pass over the images.

    By default, `suited_diagnostics` chooses the diagnostics. If `Moments` is among them, the MLPs' linear maps are
    measured, too. Your model keeps its weights, mode and backends. The memory that is needed does not grow with the
    number of images.

    Args:
        model: The model, without token pruning or merging.
        data: Images in any form that `data.image_set` reads, normalized for the model. Images on another scale cause a
            ScaleWarning, which is recorded in `about["notes"]`.
        diagnostics: The diagnostics to measure.
        moments: Whether to measure moments of values and MLPs even if the attention normalizes queries and keys. For
            attention without norms, they are always measured. Rules for vo, fc1 and fc2 need these moments, unless
            their metric is "weights".
        images: The largest number of images to use. None uses all, up to 50,000.
        batch_size: Images per forward pass.
        seed: The seed of every random draw, e.g. in random transforms.

    Returns:
        The spectra and readings of every layer and head.

    Raises:
        DataError: There are no images, they do not have the model's input shape, or they contain NaN or infinity.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> model = rx.load(vit)
        >>> diagnosis = rx.diagnose(model, torch.randn(64, 3, 32, 32))
        >>> diagnosis.layers[0].readings["effective_rank_mix"].shape  # one per head
        torch.Size([3])
    """
    require_all_tokens(model, "diagnose")
    require_ordinary_weights(model)
    # The weights are checked before the pass over the images. Afterwards, a NaN in the weights would only show as a
    # reading that is not finite.
    require_finite_tensors(model.state_dict(), "the model to diagnose")
    attention = family_of(model).attention(model)
    spectra = tuple(layer.spectrum() for layer in attention)
    chosen = suited_diagnostics(spectra, moments=moments) if diagnostics is None else diagnostics
    image_set = images_for(model, data, limit=images or MAX_IMAGES, seed=seed)
    shown = image_set if images is None else image_set.take(images)
    # The covariance of all hidden units is the largest table of a diagnosis, so it is measured only if it is needed.
    family, observe_mlp = family_of(model), any(isinstance(diagnostic, Moments) for diagnostic in chosen)
    panel, mlp = Panel(chosen, spectra), _MlpWatch(model, observe_mlp)
    with observing_mlp(model, family, mlp.observe), _receiving_positions(attention) as positions:

        def observe(index: int, observation: Observation) -> None:
            rotation = {}
            if index in positions:
                heads = attention[index].spec.heads
                rotation = {COHERENCE: coherence(observation.attention, positions[index], heads)}
            panel.observe(index, observation, **rotation)

        notes = [*shown.notes, *observe_images(model, shown, observe, "diagnose", "diagnosing", batch_size)]
    readings = panel.readings()  # first, because it raises for readings that are not finite
    layers = []
    for index, (layer, spectrum, measured) in enumerate(zip(attention, spectra, readings, strict=True)):
        diagnosed = LayerDiagnosis(spectrum, measured | layer.value_factors(), *mlp.diagnosed(index))
        layers.append(_with_mix(diagnosed) if observe_mlp else diagnosed)
    name = shown.fingerprint.rsplit(":", 2)[0]  # the fingerprint is name:images:hash
    about = {
        "family": family.name,
        "data": {"name": name, "images": len(shown), "fingerprint": shown.fingerprint},
        "seed": seed,
        "diagnostics": [to_dict(diagnostic) for diagnostic in chosen],
        "versions": installed_versions("attnrx", "torch"),
        **({"notes": notes} if notes else {}),
    }
    return Diagnosis(tuple(layers), model_fingerprint(model), about)


@contextmanager
def _receiving_positions(attention: Sequence[Attention]) -> Iterator[dict[int, Positions]]:
    """Inside the context, records the positions that each attention layer with RoPE receives, by the layer's index."""
    positions: dict[int, Positions] = {}

    # The rows of an observation are already rotated. Only the layer's arguments contain the rotation itself.
    def receive(index: int, layer: nn.Module, args: tuple[Any, ...]) -> None:
        positions[index] = args[2]

    with ExitStack() as hooks:
        for index, layer in enumerate(attention):
            if layer.spec.traits.rotates:
                hooks.enter_context(layer.register_forward_pre_hook(partial(receive, index)))
        yield positions


def _with_mix(layer: LayerDiagnosis) -> LayerDiagnosis:
    """Adds the reading effective_rank_mix [heads] to a layer, if a change of basis is possible for its scores.

    The reading is the effective rank of the attention scores, measured in "mix", the metric that plans use.
    """
    if layer.spectrum.heads:
        with suppress(NotSupported, InvalidInput):  # the directions must not be combined, or moments are not measured
            # A removed head has no rows, so its strength must be zero in every metric.
            strength = directions_in("mix", layer).strength * layer.spectrum.used.any(-1, keepdim=True)
            return replace(layer, readings={**layer.readings, "effective_rank_mix": effective_rank(strength)})
    return layer


class _MlpWatch:
    """Creates diagnoses of the linear maps and hidden units of MLPs. With `observed`, also collects second moments.

    For each map, the moment of either its inputs or its outputs is measured, whichever has fewer features. So memory
    holds only the smaller of the two square matrices.
    """

    def __init__(self, model: nn.Module, observed: bool):
        family = family_of(model)
        # One entry per layer, or () for a layer whose MLP is not a pair of linear maps.
        self.pairs = family.mlp(model) or [()] * len(family.attention(model))
        self.has_units = family.has_plain_units(model)
        self.weights = {
            (layer, which): linear.weight
            for layer, pair in enumerate(self.pairs if observed else ())
            for which, linear in enumerate(pair)
            if isinstance(linear, nn.Linear)
        }
        self.moments = {key: CentredMoment() for key in self.weights}
        self.hidden = {layer: CentredMoment() for layer, which in self.weights if which == 1}  # inputs of fc2

    def observe(self, layer: int, which: int, inputs: Tensor, outputs: Tensor) -> None:
        """Adds the inputs and outputs of one map to the moments."""
        if (layer, which) in self.moments:
            side = outputs if _is_narrowing(self.weights[layer, which]) else inputs
            self.moments[layer, which].add(side.flatten(0, -2))
            if which == 1:
                self.hidden[layer].add(inputs.flatten(0, -2))

    def diagnosed(self, layer: int) -> tuple[tuple[MapDiagnosis | None, ...], HiddenDiagnosis | None]:
        """Returns diagnoses of a layer's two maps and its hidden units, with None for a map that has two factors."""
        pair, hidden = self.pairs[layer], None
        matrices = [linear for linear in pair if isinstance(linear, nn.Linear)]
        if self.has_units and len(matrices) == 2:
            # The moment is removed from `self.hidden` to free memory, because the diagnosis holds a covariance of the
            # same size: 134 MB for 4,096 units.
            hidden = _hidden_diagnosis(matrices[0], matrices[1], self.hidden.pop(layer, None))
        return tuple(self._map(layer, which, linear) for which, linear in enumerate(pair)), hidden

    def _map(self, layer: int, which: int, linear: nn.Module) -> MapDiagnosis | None:
        if not isinstance(linear, nn.Linear):
            return None
        # The weights are copied, because directions are computed on first use. You may train the model before that.
        weight = linear.weight.detach().cpu().clone()
        bias = None if linear.bias is None else linear.bias.detach().cpu().clone()
        # The plain SVD needs no images, so every diagnosis includes it.
        functions = {"weights": partial(_singular_directions, weight, bias)}
        if (layer, which) in self.moments:
            functions["centered"] = partial(_measured_directions, self.moments[layer, which], weight, bias)
        return MapDiagnosis(linear.in_features, Computed(functions))


def _singular_directions(
    weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, "outputs"] | None
) -> MapDirections:
    """Returns the left singular directions of a weight (plain SVD), in the weight's precision but at least float32.

    The bias is subtracted from the outputs before they are projected, so a decomposition does not change the bias.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    strength, directions = plain_svd(weight)
    center = weight.new_zeros(len(weight)) if bias is None else bias
    return MapDirections(strength, directions.to(dtype).contiguous(), center.to(dtype))


def _measured_directions(
    moment: CentredMoment, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, "outputs"] | None
) -> MapDirections:
    """Returns a map's output directions by descending strength, computed from measured inputs or outputs.

    The moment was measured on the outputs if the map has fewer outputs than inputs, else on the inputs. The first r
    directions give the best map of rank r. A direction's strength is the root mean square of the outputs along it, with
    their mean over all tokens subtracted.
    """
    weight, mean = weight.double(), moment.mean.cpu().double()
    if _is_narrowing(weight):
        strength, directions = output_pca(weight, moment.covariance())
    else:
        strength, directions = activation_aware(weight, moment.covariance())
        mean = weight @ mean + (0.0 if bias is None else bias.double())
    return MapDirections(strength, directions.contiguous(), mean)


def _is_narrowing(weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Returns whether a map has fewer outputs than inputs, so that the moment of its outputs is the smaller matrix."""
    return weight.shape[0] < weight.shape[1]


def _hidden_diagnosis(first: nn.Linear, second: nn.Linear, moment: CentredMoment | None) -> HiddenDiagnosis:
    """Returns the diagnosis of the hidden units between an MLP's two linear maps.

    `moment` is the centred second moment of the second map's inputs, or None if it was not measured.
    """
    weight = second.weight.detach().cpu().clone()  # a copy, in case you train the model
    wide = weight.double()
    bias = wide.new_zeros(len(wide)) if second.bias is None else second.bias.detach().cpu().double().clone()
    after = wide.norm(dim=0)
    strength = {"weights": first.weight.detach().cpu().double().norm(dim=1) * after}
    if moment is None or not moment.rows:
        return HiddenDiagnosis(strength, weight, bias)
    covariance = moment.covariance()
    # The root mean square of each unit's contribution to the outputs. Means are left out, as the bias can replace them.
    strength["activation"] = covariance.diagonal().clamp_min(0).sqrt() * after
    strength["centered"] = unit_losses(covariance, wide).sqrt()
    return HiddenDiagnosis(strength, weight, bias, covariance, moment.mean.cpu().double())
