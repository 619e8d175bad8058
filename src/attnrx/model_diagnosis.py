"""The examination of a model: one pass over images while diagnostics watch every layer."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.config import to_dict
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
    suited,
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
from attnrx.shapes import Bool, Float, Int, Tensor
from attnrx.storage import require_finite

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
    """Reads every diagnostic (by default, those `suited` to the model) off a model in one pass over the images.

    `images` takes the first so many only. With `Moments` among the diagnostics the maps of the MLP are watched too. The
    model is only watched: its weights, mode and backends are afterwards what they were. Memory does not grow with
    the number of images. The images must be on the scale that the model was trained with: where they do not seem to
    be, a ScaleWarning says so, and `about["notes"]`. They are taken to the model's device.

    Raises:
        DataError: without images, and for images of another shape than the model reads, or with NaN or infinity.
    """
    require_all_tokens(model, "diagnose")
    require_ordinary_weights(model)
    require_finite(model.state_dict(), "the model to diagnose")
    attention = family_of(model).attention(model)
    spectra = tuple(layer.spectrum() for layer in attention)
    chosen = suited(spectra) if diagnostics is None else diagnostics
    whole = images_for(model, data)
    shown = whole if images is None else whole.take(images)
    panel = Panel(chosen, spectra)
    to_perturb = panel.to_perturb(len(shown))
    wanted = any(isinstance(diagnostic, Moments) for diagnostic in chosen)
    maps = _MapPanel(model, wanted)
    watched = _Pass(model, panel, to_perturb, seed)
    watching = observing_mlp(model, family_of(model), partial(maps.observe, watched)) if wanted else nullcontext()
    with evaluating([model]), watching:
        for batch in shown.batches(batch_size, device=next(model.parameters()).device):
            watched.show(batch)
    if not watched.images:
        raise DataError(f"the data {shown.fingerprint} gave no image; diagnose the model on at least one.")
    measured = panel.readings()  # first, as they are required to be finite
    readings = [own | layer.value_factors() for own, layer in zip(measured, attention, strict=True)]
    layers = tuple(LayerDiagnosis(*each) for each in zip(spectra, readings, maps.read(), strict=True))
    if wanted:
        layers = tuple(_with_metrics(layer) for layer in layers)
    notes = watched.intake.notes()
    about = {
        "family": family_of(model).name,
        "data": {"name": _name(shown), "images": watched.images, "fingerprint": shown.fingerprint},
        "perturbed_images": to_perturb,
        "seed": seed,
        "diagnostics": [to_dict(diagnostic) for diagnostic in chosen],
        "versions": {name: importlib.metadata.version(name) for name in ("attnrx", "torch")},
        **({"notes": notes} if notes else {}),
    }
    return Diagnosis(layers, model_fingerprint(model), about)


def diagnosis_or_spectra(given: Diagnosis | nn.Module, *rules: object) -> Diagnosis:
    """Returns the diagnosis, or one made without images where no rule needs readings."""
    if isinstance(given, Diagnosis):
        return given
    if any(rule is not None for rule in rules):
        raise InvalidInput(
            "prescribe was given a model, and rules go by what a diagnosis has read: diagnose the model on images and "
            "give that, or ask for tokens alone."
        )
    return read_spectra(given)


def read_spectra(model: nn.Module) -> Diagnosis:
    """Returns the diagnosis of a model that was shown no image: its spectra, without any reading.

    That is all that a prescription of tokens alone asks for.
    """
    require_all_tokens(model, "prescribe for")
    require_ordinary_weights(model)
    require_finite(model.state_dict(), "the model")
    family = family_of(model)
    layers = tuple(LayerDiagnosis(layer.spectrum(), {}) for layer in family.attention(model))
    versions = {name: importlib.metadata.version(name) for name in ("attnrx", "torch")}
    return Diagnosis(layers, model_fingerprint(model), {"family": family.name, "data": None, "versions": versions})


def token_relevance(
    model: nn.Module, images: Float[Tensor, "images channels height width"]
) -> dict[str, Float[Tensor, "images layers patches"]]:
    """Returns how much every patch matters by the attention of each layer, by each source (see `RelevanceWatch`).

    The images are normalized, and run as one batch.
    """
    if reduction_of(model) is not None:
        raise InvalidInput("tokens leave this model, so its layers see different patches; give the original.")
    family, weight = family_of(model), next(model.parameters())
    watch = RelevanceWatch(family.token_layout(model), len(family.attention(model)))
    with evaluating([model]), observing(model, family, watch.observe):
        model(images.to(weight.device, weight.dtype))
    return watch.relevance()


def patches_left(
    model: nn.Module, images: Float[Tensor, "images channels height width"]
) -> Bool[Tensor, "images stages patches"]:
    """Returns the patches that are left after each stage of a model whose tokens leave; the images run as one batch.

    A patch that others were merged into is left; one that was merged into another, or fused into a new token, is not.
    """
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("no token ever leaves this model; attach a policy to it first.")
    weight, patches = next(model.parameters()), reduction.shape.layout.patches
    with evaluating([model]):
        model(images.to(weight.device, weight.dtype))
    if not reduction.run.trail:  # a policy by which every patch stays runs no stage
        return torch.ones(len(images), len(reduction.policy.layers), patches, dtype=torch.bool)
    return torch.stack([_among(places, patches) for places in reduction.run.trail], dim=1).cpu()


def _among(places: Int[Tensor, "images left"], patches: int) -> Bool[Tensor, "images patches"]:
    there = torch.zeros(len(places), patches + 1, dtype=torch.bool, device=places.device)
    return there.scatter(1, places.where(places >= 0, patches), True)[:, :patches]


def _with_metrics(layer: LayerDiagnosis) -> LayerDiagnosis:
    """Adds what the directions of a form without norms look like on the weights and on the data.

    strength_METRIC [heads, directions] are the singular values of the scores in that metric, and
    effective_rank_METRIC [heads] how many directions their energy is spread over.
    """
    if layer.spectrum.norms != "none" or not layer.spectrum.heads or layer.spectrum.shared:
        return layer
    readings = dict(layer.readings)
    for metric in SHOWN_METRICS:
        if METRIC_NEEDS[metric] <= readings.keys():
            strength = directions_in(metric, layer).strength * (layer.spectrum.used.any(-1, keepdim=True))
            readings[f"strength_{metric}"] = strength
            readings[f"effective_rank_{metric}"] = effective_rank(strength)
    return replace(layer, readings=readings)


class _MapPanel:
    """The directions of the maps of every MLP, on their weights and, where they are watched, on the data."""

    def __init__(self, model: nn.Module, wanted: bool):
        family = family_of(model)
        self.linears = family.mlp(model)
        self.layers = len(family.attention(model))
        self.watches = {
            (layer, which): MapWatch(linear.in_features, linear.out_features)
            for layer, pair in enumerate(self.linears)
            for which, linear in enumerate(pair)
            if wanted and isinstance(linear, nn.Linear)
        }

    def observe(self, watched: "_Pass", layer: int, which: int, inputs: Tensor, outputs: Tensor) -> None:
        """Takes in what one map computed, of images that were not perturbed."""
        if (layer, which) in self.watches and watched.input_validation:
            whole = slice(len(inputs) // watched.input_validation)
            self.watches[layer, which].observe(inputs[whole], outputs[whole])

    def read(self) -> list[tuple[MapDiagnosis | None, ...]]:
        """Returns what was found, map by map; () for models whose MLPs are no pairs of maps."""
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
    """One pass of a model over batches while a panel of diagnostics watches its layers."""

    def __init__(self, model: nn.Module, panel: Panel, to_perturb: int, seed: int):
        self.model, self.family, self.panel, self.seed = model, family_of(model), panel, seed
        self.intake = InputValidation(model, self.family, "diagnose")
        self.to_perturb = to_perturb
        self.images = 0
        self.input_validation = 0  # 1: an ordinary batch runs, 2: one whose second half is perturbed, 0: neither

    def show(self, batch: Batch) -> None:
        """Runs one batch; images to perturb run beside their perturbed copies, so each costs one more image."""
        images = self.intake.take(batch.images)
        paired = min(len(images), max(0, self.to_perturb - self.images))
        half = -(-len(images) // 2)  # pairs of half a batch, which need no more memory than a batch
        if self.panel.perturbation is not None and paired:
            for part, labels in zip(images[:paired].split(half), batch.labels[:paired].split(half), strict=True):
                self._show_pairs(self.panel.perturbation, part, labels)
        if paired < len(images):
            with self._input_validation(1), observing(self.model, self.family, self.panel.observe):
                self.model(images[paired:])
            self.images += len(images) - paired

    @contextmanager
    def _input_validation(self, halves: int) -> Iterator[None]:
        self.input_validation = halves
        yield
        self.input_validation = 0

    def _show_pairs(self, perturbation: PerturbationResponse, images: Tensor, labels: Tensor) -> None:
        def slope(images: Tensor) -> Tensor:
            return _loss_slope(self.model, images, labels)

        changed = perturbation.perturb(images, self.images, self.seed, slope)
        with self._input_validation(2), observing(self.model, self.family, self.panel.observe_pairs):
            self.model(torch.cat([images, changed]))
        self.images += len(images)


def _name(data: ImageSet) -> str:
    return data.fingerprint.rsplit(":", 2)[0]  # name:images:hash


def _loss_slope(
    model: nn.Module, images: Float[Tensor, "batch channels height width"], labels: Int[Tensor, "batch"]
) -> Float[Tensor, "batch channels height width"]:
    """The gradient of each image's own cross-entropy with respect to its pixels."""
    with torch.enable_grad():
        images = images.detach().requires_grad_()
        logits = model(images)
        # Images without a label are taken to be what the model says they are.
        loss = F.cross_entropy(logits, labels.where(labels >= 0, logits.argmax(-1)), reduction="sum")
        return torch.autograd.grad(loss, images)[0]
