"""How a model is made of a prescription: what `attnrx realize` does and records, and `attnrx verify` does again."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn

# Of the calibration images so many refine: what every layer is fed is kept of each.
REFINED_ON = 96


def made(
    model: "nn.Module",
    prescription: "rx.Prescription",
    how: Mapping[str, Any],
    calibration: "rx.data.ImageSet | None" = None,
) -> "nn.Module":
    """Realizes a prescription in the way that was recorded, and refines its queries and keys where that says so."""
    found = rx.realize(model, prescription, by=how["by"], norms=how["norms"], calibration=calibration)
    steps = how.get("refine", 0)
    if not steps:
        return found
    if how["by"] != "compress" or calibration is None:
        raise InvalidInput(
            "--refine brings the rows of a compressed layer nearer to the original on images: give --by compress and "
            "--data NAME."
        )
    from attnrx.refinement import Refinement

    images = calibration.take(min(REFINED_ON, len(calibration)))
    return rx.refine(found, model, images, Refinement(steps)).model


def kind_of(how: Mapping[str, Any]) -> str | None:
    """Returns the realization in one word, if it is known."""
    if how.get("refine"):
        return "refined"
    return "mask" if how.get("by") == "mask" else how.get("norms")
