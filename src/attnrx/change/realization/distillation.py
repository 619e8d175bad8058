"""Distillation: fits all weights of a compressed model together to the original's outputs, without labels.

Like `repair`, `distill` uses Adam with learning rates relative to the root mean square of each tensor, and returns a
`Fitted`.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, repeat

import torch
from torch import nn

from attnrx.change.predictions import outputs_of
from attnrx.data import ImageData, ImageSet
from attnrx.data.model_data import images_for
from attnrx.support.arguments import COUNT, RATE, SEED, checked, each, optional, require_fields, whole
from attnrx.support.errors import InvalidInput
from attnrx.support.modules import copy_module, evaluating, trainable
from attnrx.support.progress import track
from attnrx.support.rounding import rounded
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.models import InputValidation, family_of
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.outputs import Embeddings, output_kind_of

# One image in HELD_OUT is held out from a fit. The fit is kept only if it lowers the error on these images.
HELD_OUT = 8
# The reference's outputs on all images are kept for later passes if they are at most this many numbers (0.8 GB).
MAX_KEPT_NUMBERS = 2e8
# How many images set the ranges of activations with `bits=8`. The calibration of 8-bit files uses the same number.
RANGE_IMAGES = 256


@dataclass
class Fitted:
    """A fitted model with its errors before and after the fit, and notes on the images.

    `repair` stores one error per block in `before` and `after`. The error is the relative squared error of the block's
    output on held-out images, after the earlier blocks were repaired.

    `distill` stores one number: the divergence of the outputs on held-out images (`OutputKind.softened`). For logits,
    the divergence is half the variance, over the classes, of the difference between the two models' logits. For
    multi-label logits, it is an eighth of the sum of squared differences. For regression outputs, it is the squared
    error relative to the variance. For embeddings, it is half the squared distance relative to the squared norm.
    `learning_rate` is the rate that `distill` chose, or None if no rate lowered the divergence.
    """

    model: nn.Module
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    learning_rate: float | None = None


def improve_(module: nn.Module, before: float, error: Callable[[], float], fit_: Callable[[], None]) -> float:
    """Fits a module in place and returns its error. If the error is not lower than `before`, the fit is undone."""
    state = copy.deepcopy(module.state_dict())
    fit_()
    after = error()
    if after < before:  # false for NaN
        return after
    module.load_state_dict(state)
    return before


def descend_(
    module: nn.Module,
    error: Callable[[torch.Generator], Float[Tensor, ""]],
    steps: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Minimizes an error with Adam, over all parameters of a module. `error` chooses the images or tokens of each step.

    `learning_rate` is relative to the root mean square of each tensor, and decays to zero along a cosine. Frozen
    parameters are fitted, too, and are frozen again afterwards.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.numel()]
    # A step of Adam has the size of its learning rate, whatever the scale of the gradient. So every tensor's learning
    # rate is relative to the size of its entries.
    sizes = [float(row.detach().double().square().mean().sqrt().clamp_min(1e-12)) for row in parameters]
    generator = torch.Generator().manual_seed(seed)
    with trainable(module), torch.enable_grad():
        pairs = zip(parameters, sizes, strict=True)
        optimizer = torch.optim.Adam([{"params": [row], "lr": learning_rate * size} for row, size in pairs], fused=True)
        # The factor falls from 1 to 0 by half a cosine.
        cosine = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: (1 + math.cos(math.pi * (step / max(steps, 1)))) / 2
        )
        for _ in range(steps):
            optimizer.zero_grad()
            error(generator).backward(inputs=parameters)  # other parameters may contribute to the error
            optimizer.step()
            cosine.step()


@dataclass(frozen=True)
class Distill:
    """The settings of a distillation.

    `distill` makes `epochs` passes over the images, with `batch` images per step. It tries each of the `learning_rates`
    with Adam, and keeps the best result. The rates are relative to the root mean square of each tensor, and decay to
    zero along a cosine.

    With `directions`, the loss is the cosine distance between the two models' embeddings. Use `directions` if a search
    index holds embeddings of the reference, because a search ignores their lengths. With `bits=8`, the candidate
    computes its linear maps as an exported 8-bit file would (`EightBits`). Use `bits=8` for a model that you will
    export to 8 bits.
    """

    example = "attnrx.realization.distillation.Distill(epochs=2)"

    epochs: int = 2
    # 2e-4 is better for a model that lost little, and 1e-3 for a model that lost much
    # (docs/results/plan.md, "What does the last fit add?").
    learning_rates: tuple[float, ...] = (2e-4, 1e-3)
    batch: int = 64
    seed: int = 0
    directions: bool = False
    bits: int | None = None

    def __post_init__(self):
        rates = each(RATE, "learning rates between 0 and 1, e.g. (2e-4, 1e-3)", least=1)
        counts = {"epochs": COUNT, "batch": whole(HELD_OUT), "bits": optional(whole(8, 8))}
        require_fields(self, learning_rates=rates, seed=SEED, **counts)


@checked()
@verb
def distill(
    candidate: nn.Module, reference: nn.Module, calibration: ImageData, settings: Distill | None = None
) -> Fitted:
    """Returns a copy of the candidate whose outputs are fitted to the reference's, without labels.

    Adam fits all weights together, with tokens pruned and merged as in inference. `repair` works block by block and on
    all tokens, so it leaves errors that this fit can correct. The loss is the Kullback-Leibler divergence of the
    outputs, softened by a high temperature (Hinton et al., 2015, section 2.1). Every learning rate is tried from the
    same initial weights.

    One image in eight is held out from the fit. You get the weights with the smallest divergence on these images. If no
    rate helps, you get the candidate's own weights.

    Args:
        candidate: The compressed model. It is not changed.
        reference: The original model, whose outputs are the targets.
        calibration: Images to fit to, normalized for the model. Labels are not used.
        settings: Epochs, batch size and learning rates. None uses the defaults of `Distill`.

    Returns:
        The distilled copy, with the divergence before and after.

    Raises:
        InvalidInput: The models return outputs of different widths, there are too few images, or `directions` is set
            and the outputs are not embeddings.
        DataError: The images do not have the model's input shape, or contain NaN or infinity.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> images = torch.randn(64, 3, 32, 32)  # normalized as the model expects them
        >>> model = rx.load(vit)
        >>> small = rx.realize(model, rx.prescribe(model, "tokens=ward:0.7@2"))
        >>> small = rx.distill(small, model, images).model
    """
    knobs = settings or Distill()
    images = images_for(reference, calibration, "calibration", seed=knobs.seed)
    if len(images) < 2 * HELD_OUT:
        raise InvalidInput(f"distill was given {len(images)} images; give at least {2 * HELD_OUT}, better 2,000.")
    kind = output_kind_of(reference)
    if knobs.directions and not isinstance(kind, Embeddings):
        raise InvalidInput(
            f"Distill(directions=True) fits embeddings, and this model returns {kind.returns}: leave it out, or load "
            'the model with outputs="embedding".'
        )
    weight = next(candidate.parameters())
    # The fit runs in float32, because its steps are smaller than rounding in half precision.
    work = copy_module(candidate).to(torch.promote_types(weight.dtype, torch.float32))
    fit = _OutputFit(work, reference, images, knobs)
    validation, other = (InputValidation(reference, family_of(reference), "distill") for _ in range(2))
    with evaluating((work, reference)), trainable(work):
        if knobs.bits is not None:
            fit.calibrate(other, knobs.bits)
        before = after = fit.held_out(validation)  # a pass over all images
        notes = [*images.notes, *validation.notes()]
        start = best = copy.deepcopy(work.state_dict())
        learning_rate = None
        # Equal models differ by rounding, because its direction depends on where a buffer is in memory.
        rounding = (100 * torch.finfo(next(work.parameters()).dtype).eps) ** 2
        for rate in knobs.learning_rates if before > rounding else ():
            work.load_state_dict(start)
            descend_(work, fit.error, fit.steps, rate, knobs.seed)
            divergence = fit.held_out()
            if divergence < after:  # false for NaN
                best, after, learning_rate = copy.deepcopy(work.state_dict()), divergence, rate
        work.load_state_dict(best)
    return Fitted(work.to(weight.dtype), [before], [after], notes, learning_rate)


class _OutputFit:
    """Computes the error of a model's outputs, on the next training batch or on the held-out images."""

    def __init__(self, model: nn.Module, reference: nn.Module, images: ImageSet, knobs: Distill):
        self.reference, self.images, self.batch = reference, images, knobs.batch
        kind = output_kind_of(reference)
        self.distance = kind.divergence if knobs.directions else kind.softened
        self._answers = partial(outputs_of, model)
        batches = -(-len(images) // knobs.batch)
        self.steps = knobs.epochs * batches
        # The reference's outputs, by the number of the batch and whether they are on its held-out images.
        self._targets: dict[tuple[int, bool], Tensor] = {}
        # Images keep the order of the set, which alternates between the classes. So they are decoded once per epoch and
        # are never all in memory. A fit ends with a full pass, so the next fit begins with the first images again.
        rounds = chain.from_iterable(enumerate(self._batches()) for _ in repeat(None))
        self._next = iter(track(rounds, "distilling", self.steps * len(knobs.learning_rates)))

    def calibrate(self, validation: InputValidation, bits: int) -> None:
        """Makes later passes of the model use `bits` bits, as exported files do. The first images set the ranges."""
        batches = islice(self._batches(validation), -(-RANGE_IMAGES // self.batch))
        self._answers = rounded(self._answers, batches, bits)

    def error(self, generator: torch.Generator) -> Float[Tensor, ""]:
        """Returns the mean divergence on the next batch of training images."""
        number, pixels = next(self._next)
        return self.distance(*self._outputs((number, False), pixels[~_held_out(pixels)])).mean()

    def held_out(self, validation: InputValidation | None = None) -> float:
        """Returns the mean divergence on the held-out images. If `validation` is given, also checks all images."""
        with torch.no_grad():
            numbered = enumerate(self._batches(validation))
            held_out = (((number, True), pixels[_held_out(pixels)]) for number, pixels in numbered)
            parts = [self._outputs(key, pixels) for key, pixels in held_out if len(pixels)]
        # The distance is computed on all images together, because its scale may depend on all outputs.
        target, outputs = (torch.cat(rows) for rows in zip(*parts, strict=True))
        return float(self.distance(target, outputs).mean())

    def _batches(self, validation: InputValidation | None = None) -> Iterator[Tensor]:
        weight = next(self.reference.parameters())
        for batch in self.images.batches(self.batch, device=weight.device):
            yield batch.images.to(weight.dtype) if validation is None else validation.take(batch.images)

    def _outputs(self, key: tuple[int, bool], pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs of the reference and of the model for the part of a batch that `key` identifies."""
        target, outputs = self._target(key, pixels), self._answers(pixels)
        if outputs.shape != target.shape:
            raise InvalidInput(
                f"the candidate returns {outputs.shape[1]} numbers per image, the reference {target.shape[1]}; distill "
                "a model that was made from the reference."
            )
        return target, outputs

    def _target(self, key: tuple[int, bool], pixels: Tensor) -> Tensor:
        """Returns the reference's outputs for the part of a batch that `key` identifies, from a cache if possible."""
        if key in self._targets:
            return self._targets[key]
        with torch.no_grad():
            target = outputs_of(self.reference, pixels)
        if len(self.images) * target[0].numel() <= MAX_KEPT_NUMBERS:
            self._targets[key] = target
        return target


def _held_out(pixels: Tensor) -> Bool[Tensor, "images"]:
    # The last of every HELD_OUT images is held out. A short last batch may have no such image, but has images to fit.
    return torch.arange(len(pixels), device=pixels.device) % HELD_OUT == HELD_OUT - 1
