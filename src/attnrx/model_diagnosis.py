"""Diagnosis of a model: one pass over images in which the diagnostics observe every layer."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.data import Batch, ImageData, ImageSet
from attnrx.diagnosis import Diagnosis, LayerDiagnosis, MapDiagnosis
from attnrx.diagnostics import (
    Diagnostic,
    MapWatch,
    Moments,
    Panel,
    PerturbationResponse,
    RelevanceWatch,
    singular_directions,
    suited_diagnostics,
)
from attnrx.diagnostics.spectral_shape import effective_rank
from attnrx.errors import DataError, InvalidInput
from attnrx.model_data import images_for
from attnrx.models import (
    InputValidation,
    evaluating,
    family_of,
    model_fingerprint,
    observing,
    observing_mlp,
    reduction_of,
    require_all_tokens,
    require_ordinary_weights,
)
from attnrx.rules.metrics import directions_in
from attnrx.serialization.config import to_dict
from attnrx.serialization.storage import require_finite_tensors
from attnrx.shapes import Bool, Float, Int, Tensor

SHOWN_METRICS = ("weights", "mix")
METRIC_NEEDS = {"weights": frozenset[str](), "mix": frozenset(("query_gram", "key_covariance", "key_softmax"))}


def diagnose(
    model: nn.Module,
    data: ImageData,
    *,
    diagnostics: tuple[Diagnostic, ...] | None = None,
    images: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> Diagnosis:
    """Measures the diagnostics (by default those `suited_diagnostics` to the model) in one pass over the images.

    `images` limits the number of images. With `Moments` among the diagnostics the MLP maps are observed too. Weights,
    mode and backends of the model are restored; memory does not grow with the number of images. The images are moved to
    the model's device and must be normalized for the model; otherwise a ScaleWarning is issued and recorded in
    `about["notes"]`.

    Raises:
        DataError: There are no images, they do not have the model's input shape, or they contain NaN or infinity.
    """
    require_all_tokens(model, "diagnose")
    require_ordinary_weights(model)
    require_finite_tensors(model.state_dict(), "the model to diagnose")
    attention = family_of(model).attention(model)
    spectra = tuple(layer.spectrum() for layer in attention)
    chosen = suited_diagnostics(spectra) if diagnostics is None else diagnostics
    image_set = images_for(model, data)
    shown = image_set if images is None else image_set.take(images)
    panel = Panel(chosen, spectra)
    to_perturb = panel.to_perturb(len(shown))
    observe_mlp = any(isinstance(diagnostic, Moments) for diagnostic in chosen)
    maps = _MapPanel(model, observe_mlp)
    forward_pass = _Pass(model, panel, to_perturb, seed)
    hooks = (
        observing_mlp(model, family_of(model), partial(maps.observe, forward_pass)) if observe_mlp else nullcontext()
    )
    with evaluating([model]), hooks:
        for batch in shown.batches(batch_size, device=next(model.parameters()).device):
            forward_pass.run(batch)
    if not forward_pass.images:
        raise DataError(f"the data {shown.fingerprint} gave no image; diagnose the model on at least one.")
    measured = panel.readings()  # first: it raises for readings that are not finite
    readings = [per_layer | layer.value_factors() for per_layer, layer in zip(measured, attention, strict=True)]
    layers = tuple(LayerDiagnosis(*each) for each in zip(spectra, readings, maps.read(), strict=True))
    if observe_mlp:
        layers = tuple(_with_metrics(layer) for layer in layers)
    notes = forward_pass.input_validation.notes()
    about = {
        "family": family_of(model).name,
        "data": {"name": _name(shown), "images": forward_pass.images, "fingerprint": shown.fingerprint},
        "perturbed_images": to_perturb,
        "seed": seed,
        "diagnostics": [to_dict(diagnostic) for diagnostic in chosen],
        "versions": {name: importlib.metadata.version(name) for name in ("attnrx", "torch")},
        **({"notes": notes} if notes else {}),
    }
    return Diagnosis(layers, model_fingerprint(model), about)


def diagnosis_or_spectra(given: Diagnosis | nn.Module, *rules: object) -> Diagnosis:
    """Returns the diagnosis, or for a model and no rules a diagnosis without readings."""
    if isinstance(given, Diagnosis):
        return given
    if any(rule is not None for rule in rules):
        raise InvalidInput(
            "prescribe was given a model, and rules need the readings of a diagnosis: diagnose the model on images and "
            "pass the diagnosis, or give a token policy alone."
        )
    return read_spectra(given)


def read_spectra(model: nn.Module) -> Diagnosis:
    """Returns a diagnosis without images: the spectra and no readings.

    This suffices for a prescription of tokens alone.
    """
    require_all_tokens(model, "prescribe for")
    require_ordinary_weights(model)
    require_finite_tensors(model.state_dict(), "the model")
    family = family_of(model)
    layers = tuple(LayerDiagnosis(layer.spectrum(), {}) for layer in family.attention(model))
    versions = {name: importlib.metadata.version(name) for name in ("attnrx", "torch")}
    return Diagnosis(layers, model_fingerprint(model), {"family": family.name, "data": None, "versions": versions})


def token_relevance(
    model: nn.Module, images: Float[Tensor, "images channels height width"]
) -> dict[str, Float[Tensor, "images layers patches"]]:
    """Returns the relevance of every patch by the attention of each layer, by source (see `RelevanceWatch`).

    The images must be normalized, and are run as one batch.
    """
    if reduction_of(model) is not None:
        raise InvalidInput(
            "this model prunes or merges tokens, so its layers have different patches; give the original."
        )
    family, weight = family_of(model), next(model.parameters())
    watch = RelevanceWatch(family.token_layout(model), len(family.attention(model)))
    with evaluating([model]), observing(model, family, watch.observe):
        model(images.to(weight.device, weight.dtype))
    return watch.relevance()


def patches_left(
    model: nn.Module, images: Float[Tensor, "images channels height width"]
) -> Bool[Tensor, "images stages patches"]:
    """Returns the patches kept after each stage of a model with token reduction; the images are run as one batch.

    A patch that others were merged into counts as kept; a patch merged into another or fused into a new token does not.
    """
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("this model has no token policy; attach one first.")
    weight, patches = next(model.parameters()), reduction.shape.layout.patches
    with evaluating([model]):
        model(images.to(weight.device, weight.dtype))
    if not reduction.run.trail:  # a policy that keeps every patch runs no stage
        return torch.ones(len(images), len(reduction.policy.layers), patches, dtype=torch.bool)
    return torch.stack([_kept_mask(indices, patches) for indices in reduction.run.trail], dim=1).cpu()


def _kept_mask(indices: Int[Tensor, "images kept"], patches: int) -> Bool[Tensor, "images patches"]:
    mask = torch.zeros(len(indices), patches + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter(1, indices.where(indices >= 0, patches), True)[:, :patches]


def _with_metrics(layer: LayerDiagnosis) -> LayerDiagnosis:
    """Adds the spectra of a layer without norms in the metrics of the weights and of the data.

    strength_METRIC [heads, directions] are the singular values of the scores in that metric, effective_rank_METRIC
    [heads] their effective ranks.
    """
    if layer.spectrum.has_norms or not layer.spectrum.heads or layer.spectrum.shared:
        return layer
    readings = dict(layer.readings)
    for metric in SHOWN_METRICS:
        if METRIC_NEEDS[metric] <= readings.keys():
            strength = directions_in(metric, layer).strength * (layer.spectrum.used.any(-1, keepdim=True))
            readings[f"strength_{metric}"] = strength
            readings[f"effective_rank_{metric}"] = effective_rank(strength)
    return replace(layer, readings=readings)


class _MapPanel:
    """The directions of the MLP maps, from their weights and, with `observe_data`, from their outputs on the data."""

    def __init__(self, model: nn.Module, observe_data: bool):
        family = family_of(model)
        self.linears = family.mlp(model)
        self.layers = len(family.attention(model))
        self.watches = {
            (layer, which): MapWatch(linear.in_features, linear.out_features)
            for layer, pair in enumerate(self.linears)
            for which, linear in enumerate(pair)
            if observe_data and isinstance(linear, nn.Linear)
        }

    def observe(self, forward_pass: "_Pass", layer: int, which: int, inputs: Tensor, outputs: Tensor) -> None:
        """Accumulates inputs and outputs of one map for the images that are not perturbed."""
        if (layer, which) in self.watches and forward_pass.num_halves:
            unperturbed = slice(len(inputs) // forward_pass.num_halves)
            self.watches[layer, which].observe(inputs[unperturbed], outputs[unperturbed])

    def read(self) -> list[tuple[MapDiagnosis | None, ...]]:
        """Returns the diagnoses of the maps per layer; () for models whose MLPs are not pairs of linear maps."""
        found: list[tuple[MapDiagnosis | None, ...]] = []
        for layer in range(self.layers):
            pair = self.linears[layer] if self.linears else ()
            found.append(tuple(self._read(layer, which, linear) for which, linear in enumerate(pair)))
        return found

    def _read(self, layer: int, which: int, linear: nn.Module) -> MapDiagnosis | None:
        if not isinstance(linear, nn.Linear):
            return None
        metrics = {"weights": singular_directions(linear.weight, linear.bias)}
        if (layer, which) in self.watches:
            metrics["centered"] = self.watches[layer, which].read(linear.weight, linear.bias)
        return MapDiagnosis(linear.in_features, metrics)


class _Pass:
    """One pass of a model over batches while a panel of diagnostics observes its layers."""

    def __init__(self, model: nn.Module, panel: Panel, to_perturb: int, seed: int):
        self.model, self.family, self.panel, self.seed = model, family_of(model), panel, seed
        self.input_validation = InputValidation(model, self.family, "diagnose")
        self.to_perturb = to_perturb
        self.images = 0
        self.num_halves = 0  # 1: a batch of original images, 2: its second half is perturbed, 0: no observed batch

    def run(self, batch: Batch) -> None:
        """Runs one batch; images to perturb run in one batch with their perturbed copies."""
        images = self.input_validation.take(batch.images)
        paired = min(len(images), max(0, self.to_perturb - self.images))
        half = -(-len(images) // 2)  # pairs of half a batch, which need no more memory than a batch
        if self.panel.perturbation is not None and paired:
            for part, labels in zip(images[:paired].split(half), batch.labels[:paired].split(half), strict=True):
                self._run_pairs(self.panel.perturbation, part, labels)
        if paired < len(images):
            with self._observed_halves(1), observing(self.model, self.family, self.panel.observe):
                self.model(images[paired:])
            self.images += len(images) - paired

    @contextmanager
    def _observed_halves(self, num_halves: int) -> Iterator[None]:
        self.num_halves = num_halves
        yield
        self.num_halves = 0

    def _run_pairs(self, perturbation: PerturbationResponse, images: Tensor, labels: Tensor) -> None:
        def slope(images: Tensor) -> Tensor:
            return _loss_slope(self.model, images, labels)

        changed = perturbation.perturb(images, self.images, self.seed, slope)
        with self._observed_halves(2), observing(self.model, self.family, self.panel.observe_pairs):
            self.model(torch.cat([images, changed]))
        self.images += len(images)


def _name(data: ImageSet) -> str:
    return data.fingerprint.rsplit(":", 2)[0]  # name:images:hash


def _loss_slope(
    model: nn.Module, images: Float[Tensor, "batch channels height width"], labels: Int[Tensor, "batch"]
) -> Float[Tensor, "batch channels height width"]:
    """Returns the gradient of each image's cross-entropy with respect to its pixels."""
    with torch.enable_grad():
        images = images.detach().requires_grad_()
        logits = model(images)
        # The predicted class replaces a missing label.
        loss = F.cross_entropy(logits, labels.where(labels >= 0, logits.argmax(-1)), reduction="sum")
        return torch.autograd.grad(loss, images)[0]
