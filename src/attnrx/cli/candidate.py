"""Realization of a prescription with recorded settings, shared by `attnrx realize` and `attnrx verify`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn

# The number of calibration images for refinement, which holds the inputs of a layer for all of them in memory.
REFINED_ON = 96


def made(
    model: "nn.Module",
    prescription: "rx.Prescription",
    how: Mapping[str, Any],
    calibration: "rx.data.ImageSet | None" = None,
) -> "nn.Module":
    """Realizes a prescription with the recorded settings `how`, and refines its queries and keys if they request it."""
    found = rx.realize(model, prescription, by=how["by"], norms=how["norms"], calibration=calibration)
    steps = how.get("refine", 0)
    if not steps:
        return found
    if how["by"] != "compress" or calibration is None:
        raise InvalidInput(
            "--refine fits the query and key rows of compressed layers on images: give --by compress and --data NAME."
        )
    from attnrx.realization.refinement import Refinement

    images = calibration.take(min(REFINED_ON, len(calibration)))
    return rx.refine(found, model, images, Refinement(steps)).model


def kind_of(how: Mapping[str, Any]) -> str | None:
    """Returns the kind of realization in one word; None if it is unknown."""
    if how.get("refine"):
        return "refined"
    return "mask" if how.get("by") == "mask" else how.get("norms")
