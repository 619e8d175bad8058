"""The examination of a model: one pass over images while diagnostics watch every layer."""

import importlib.metadata

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.config import to_dict
from attnrx.data import Batch, ImageSet
from attnrx.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.diagnostics import Diagnostic, Panel, PerturbationResponse, standard
from attnrx.errors import DataError, InvalidInput
from attnrx.models import evaluating, family_of, model_fingerprint, observing
from attnrx.shapes import Float, Int, Tensor
from attnrx.storage import require_finite


def diagnose(
    model: nn.Module,
    data: ImageSet,
    *,
    diagnostics: tuple[Diagnostic, ...] | None = None,
    images: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> Diagnosis:
    """Reads every diagnostic (`standard()` unless told) off a model in one pass over the images, or the first `images`.

    The model is only watched: its weights, mode and backends are afterwards what they were. Memory does not grow with
    the number of images. The images must be on the scale that the model was trained with; they are taken to its device.
    """
    if not isinstance(data, ImageSet):
        raise InvalidInput(
            f"diagnose(data={type(data).__name__}): give one split of a dataset, e.g. load_data('cifar10').validation."
        )
    require_finite(model.state_dict(), "the model to diagnose")
    chosen = standard() if diagnostics is None else diagnostics
    spectra = tuple(layer.spectrum() for layer in family_of(model).attention(model))
    shown = data if images is None else data.take(images)
    panel = Panel(chosen, spectra)
    to_perturb = panel.to_perturb(len(shown))
    watched = _Pass(model, panel, to_perturb, seed)
    with evaluating([model]):
        for batch in shown.batches(batch_size, device=next(model.parameters()).device):
            watched.show(batch)
    if not watched.images:
        raise DataError(f"the data {data.fingerprint} gave no image; diagnose the model on at least one.")
    layers = tuple(LayerDiagnosis(*each) for each in zip(spectra, panel.readings(), strict=True))
    about = {
        "family": family_of(model).name,
        "data": {"name": _name(shown), "images": watched.images, "fingerprint": shown.fingerprint},
        "perturbed_images": to_perturb,
        "seed": seed,
        "diagnostics": [to_dict(diagnostic) for diagnostic in chosen],
        "versions": {name: importlib.metadata.version(name) for name in ("attnrx", "torch")},
    }
    return Diagnosis(layers, model_fingerprint(model), about)


class _Pass:
    """One pass of a model over batches while a panel of diagnostics watches its layers."""

    def __init__(self, model: nn.Module, panel: Panel, to_perturb: int, seed: int):
        self.model, self.family, self.panel, self.seed = model, family_of(model), panel, seed
        self.dtype = next(model.parameters()).dtype
        self.to_perturb = to_perturb
        self.images = 0

    def show(self, batch: Batch) -> None:
        """Runs one batch; images to perturb run beside their perturbed copies, so each costs one more image."""
        images = batch.images.to(self.dtype)
        paired = min(len(images), max(0, self.to_perturb - self.images))
        half = -(-len(images) // 2)  # pairs of half a batch, which need no more memory than a batch
        if self.panel.perturbation is not None and paired:
            for part, labels in zip(images[:paired].split(half), batch.labels[:paired].split(half), strict=True):
                self._show_pairs(self.panel.perturbation, part, labels)
        if paired < len(images):
            with observing(self.model, self.family, self.panel.observe):
                self.model(images[paired:])
            self.images += len(images) - paired

    def _show_pairs(self, perturbation: PerturbationResponse, images: Tensor, labels: Tensor) -> None:
        def slope(images: Tensor) -> Tensor:
            return _loss_slope(self.model, images, labels)

        changed = perturbation.perturb(images, self.images, self.seed, slope)
        with observing(self.model, self.family, self.panel.observe_pairs):
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
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        return torch.autograd.grad(loss, images)[0]
