"""The fits of a realized model, in one order: repair, then the tokens, then distill; and their record.

A prescription records the settings of every fit, seeds included, so that a model and its matched controls are made
again by `realize_and_fit` from the record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from attnrx.change.realization.distillation import Distill, distill
from attnrx.change.realization.realizing import realize, realize_tokens_
from attnrx.change.realization.repair import Repair, repair
from attnrx.data import ImageData
from attnrx.data.model_data import images_for
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import InvalidInput
from attnrx.support.modules import copy_module
from attnrx.support.progress import Log, begin, no_log
from attnrx.support.records import fields_of
from attnrx.vit.maps import FITS, REALIZED_NORMS
from attnrx.vit.models import family_of, model_fingerprint
from attnrx.vit.models.verbs import verb

Fit = Repair | Distill
# The settings of every fit, and the field that counts its steps: the record has it under the name of the fit.
KINDS: Mapping[str, tuple[type[Any], str]] = dict(zip(FITS, ((Repair, "steps"), (Distill, "epochs")), strict=True))


def fits_of(steps: Mapping[str, int], seed: int) -> tuple[Fit, ...]:
    """Returns the fits of these steps by name, of which 0 is none, with their usual settings and one seed."""
    return tuple(kind(**{count: steps[name], "seed": seed}) for name, (kind, count) in KINDS.items() if steps.get(name))


def fits_record(*fits: Fit) -> dict[str, Any]:
    """Returns the steps of every fit by its name, and all other settings, seeds included, under "settings"."""
    record: dict[str, Any] = {"settings": {}}
    for settings in fits:
        name = _name_of(settings)
        # As JSON gives them back: a prescription equals the one that was saved.
        record["settings"][name] = fields_of(settings)
        record[name] = record["settings"][name].pop(KINDS[name][1])
    return record


@verb
def realize_and_fit(
    model: nn.Module,
    prescription: Prescription,
    images: ImageData | None = None,
    fits: Sequence[Fit] = (),
    by: str = "compress",
    norms: str = REALIZED_NORMS[0],
    log: Log = no_log,
) -> nn.Module:
    """Realizes a prescription as `realize` does, and fits the weights of the result to the model, without labels.

    Repair compares tokens one by one with those of the model, so it comes before tokens are pruned or merged;
    distillation takes such a model, and comes last.

    Args:
        model: The original.
        prescription: The prescription of the original.
        images: The images to calibrate on and to fit to.
        fits: The settings of the fits.
        by: "compress" or "mask"; weights of a mask are not fitted.
        norms: The norms of compressed SVDA layers.
        log: Receives the result of the distillation, and what the budget of a repair leaves.

    Raises:
        InvalidInput: Fits of a mask, or without images.
    """
    if not fits:
        return realize(model, prescription, by=by, norms=norms, calibration=images)
    if by != "compress" or images is None:
        requested = " and ".join(map(_name_of, fits))
        raise InvalidInput(
            f"{requested} with by={by!r} and {'no images' if images is None else 'images'}: the weights of "
            "compressed layers are fitted on images; give by='compress' and images (on the command line --by compress "
            "and --data NAME)."
        )
    images, ranks, tokens = images_for(model, images, "images"), replace(prescription, tokens=None), prescription.tokens
    if ranks.rules or tokens is None:
        realized = realize(model, ranks, norms=norms, calibration=images)
    else:  # no ranks to realize, only a copy to make
        prescription.require(model_fingerprint(model))
        realized = copy_module(model)
    for settings in (fit for fit in fits if isinstance(fit, Repair)):
        result = repair(realized, model, images, settings)
        for note in (each for each in result.notes if each not in images.notes):
            log(note)
        realized = result.model
    if tokens is not None:
        heads = family_of(model).token_shape(model).heads
        realize_tokens_(realized, family_of(realized), tokens, "compress", heads)
    for settings in (fit for fit in fits if isinstance(fit, Distill)):
        begin("distilling")
        result = distill(realized, model, images, settings)
        reached = f"{result.before[0]:.4f} to {result.after[0]:.4f} on images it was not fitted to"
        log(f"distilled at the rate {result.learning_rate}: {reached}")
        realized = result.model
    return realized


def _name_of(settings: Fit) -> str:
    return next(name for name, (kind, _) in KINDS.items() if isinstance(settings, kind))
