"""Diagnoses a model: runs it on images while diagnostics observe every layer."""

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
    """Measures diagnostics of a model in one pass over the images.

    By default the diagnostics are the `suited_diagnostics` of the model. If `Moments` is among them, the MLP maps are
    observed, too. Afterwards your model has the same weights, mode and backends as before. Memory does not grow with
    the number of images.

    Args:
        model: The model, without token pruning or merging.
        data: Images in any form that `data.image_set` reads, normalized for the model. Images on another scale cause a
            ScaleWarning, which is recorded in `about["notes"]`.
        diagnostics: The diagnostics to measure.
        moments: Whether to measure the moments of values and MLP for models with norms, too. Rules for vo, fc1 and fc2
            need them, unless their metric is weights. Models without norms always get these moments.
        images: The largest number of images to use.
        batch_size: Images per forward pass.
        seed: Seeds every random draw.

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
    # The weights are checked before the pass over the images. Afterwards, a NaN would only show as a reading that is
    # not finite.
    require_finite_tensors(model.state_dict(), "the model to diagnose")
    attention = family_of(model).attention(model)
    spectra = tuple(layer.spectrum() for layer in attention)
    chosen = suited_diagnostics(spectra, moments=moments) if diagnostics is None else diagnostics
    image_set = images_for(model, data, limit=images or MAX_IMAGES, seed=seed)
    shown = image_set if images is None else image_set.take(images)
    # The covariance of all hidden units is the largest table of a diagnosis, so it is observed only if it is needed.
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
    """Collects the positions that every layer with rotary attention receives in its last call inside the context."""
    positions: dict[int, Positions] = {}

    # The rows of an observation are rotated already. Only the layer's arguments contain the rotation.
    def receive(index: int, layer: nn.Module, args: tuple[Any, ...]) -> None:
        positions[index] = args[2]

    with ExitStack() as hooks:
        for index, layer in enumerate(attention):
            if layer.spec.traits.rotates:
                hooks.enter_context(layer.register_forward_pre_hook(partial(receive, index)))
        yield positions


def _with_mix(layer: LayerDiagnosis) -> LayerDiagnosis:
    """Adds effective_rank_mix [heads] to the readings of a layer whose directions can be rewritten.

    The reading is the effective rank of the scores in the metric that plans use.
    """
    if layer.spectrum.heads:
        with suppress(NotSupported, InvalidInput):  # the directions must not be combined, or moments are not measured
            # A removed head has no rows, so its strength must be zero in every metric.
            strength = directions_in("mix", layer).strength * layer.spectrum.used.any(-1, keepdim=True)
            return replace(layer, readings={**layer.readings, "effective_rank_mix": effective_rank(strength)})
    return layer


class _MlpWatch:
    """Moments of every MLP's two maps and hidden units, if they are `observed`, and the diagnoses made from them.

    For a map, either its inputs or its outputs are observed, whichever have fewer features. So only one square matrix
    is in memory.
    """

    def __init__(self, model: nn.Module, observed: bool):
        family = family_of(model)
        # One entry per layer. The entry is () if the layer's MLP is not a pair of linear maps.
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
        """Returns the diagnoses of a layer's maps and of its hidden units, or None where a map is not one matrix."""
        pair, hidden = self.pairs[layer], None
        matrices = [linear for linear in pair if isinstance(linear, nn.Linear)]
        if self.has_units and len(matrices) == 2:
            # The moment is removed from `self.hidden`, because it is as large as the covariance in the diagnosis: 134
            # MB for 4,096 units.
            hidden = _hidden_diagnosis(matrices[0], matrices[1], self.hidden.pop(layer, None))
        return tuple(self._map(layer, which, linear) for which, linear in enumerate(pair)), hidden

    def _map(self, layer: int, which: int, linear: nn.Module) -> MapDiagnosis | None:
        if not isinstance(linear, nn.Linear):
            return None
        # The weights are copied, because the directions are computed on first use, and you may train the model before.
        weight = linear.weight.detach().cpu().clone()
        bias = None if linear.bias is None else linear.bias.detach().cpu().clone()
        # The plain SVD needs no images, so every diagnosis has it.
        functions = {"weights": partial(_singular_directions, weight, bias)}
        if (layer, which) in self.moments:
            functions["centered"] = partial(_measured_directions, self.moments[layer, which], weight, bias)
        return MapDiagnosis(linear.in_features, Computed(functions))


def _singular_directions(
    weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, "outputs"] | None
) -> MapDirections:
    """Returns the left singular vectors of the weight, in its precision or float32: the truncated SVD of every rank.

    The center is the bias, so a decomposition does not change the bias.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    strength, directions = plain_svd(weight)
    center = weight.new_zeros(len(weight)) if bias is None else bias
    return MapDirections(strength, directions.to(dtype).contiguous(), center.to(dtype))


def _measured_directions(
    moment: CentredMoment, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, "outputs"] | None
) -> MapDirections:
    """Returns the output directions by descending strength, from the moment of the narrower side (`_is_narrowing`).

    The first r directions give the best map of rank r. The strength of a direction is the root mean square of the
    outputs along it, after their mean over all tokens is subtracted.
    """
    weight, mean = weight.double(), moment.mean.cpu().double()
    if _is_narrowing(weight):
        strength, directions = output_pca(weight, moment.covariance())
    else:
        strength, directions = activation_aware(weight, moment.covariance())
        mean = weight @ mean + (0.0 if bias is None else bias.double())
    return MapDirections(strength, directions.contiguous(), mean)


def _is_narrowing(weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Whether a map has fewer outputs than inputs, so that its outputs have the smaller moment."""
    return weight.shape[0] < weight.shape[1]


def _hidden_diagnosis(first: nn.Linear, second: nn.Linear, moment: CentredMoment | None) -> HiddenDiagnosis:
    """Returns the diagnosis of the hidden units between two linear maps.

    `moment` is the moment of the second map's inputs, or None if it was not measured.
    """
    weight = second.weight.detach().cpu().clone()  # not the model's own memory
    wide = weight.double()
    bias = wide.new_zeros(len(wide)) if second.bias is None else second.bias.detach().cpu().double().clone()
    after = wide.norm(dim=0)
    strength = {"weights": first.weight.detach().cpu().double().norm(dim=1) * after}
    if moment is None or not moment.rows:
        return HiddenDiagnosis(strength, weight, bias)
    covariance = moment.covariance()
    # The root mean square of a unit's contribution to the outputs, without its mean, because the bias can replace that.
    strength["activation"] = covariance.diagonal().clamp_min(0).sqrt() * after
    strength["centered"] = unit_losses(covariance, wide).sqrt()
    return HiddenDiagnosis(strength, weight, bias, covariance, moment.mean.cpu().double())
