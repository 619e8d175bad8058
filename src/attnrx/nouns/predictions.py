"""Predicted quantities of a plan, with their prediction intervals over other images."""

from dataclasses import dataclass
from math import inf

from attnrx.vit.outputs import Embeddings, OutputKind


@dataclass(frozen=True)
class PredictedQuantity:
    """The prediction of one quantity: mean and standard deviation over images, and the number of images.

    These images are not among those the plan was made on. `limits` is the range of the quantity (`limits_of`).
    """

    value: float
    spread: float
    images: int
    limits: tuple[float, float] = (-inf, inf)

    def interval(self, images: int) -> tuple[float, float]:
        """Returns the 95 % prediction interval of the mean over this many other images, within the limits."""
        # The variance of a difference of two means, of the images of the plan and of these; 1.96 for 95 %.
        half = 1.96 * self.spread * (1 / self.images + 1 / images) ** 0.5
        # The normal distribution continues beyond the range of the quantity, e.g. beyond an agreement of 100 %.
        least, most = self.limits
        return max(self.value - half, least), min(self.value + half, most)

    def to_record(self) -> dict[str, float]:
        """Returns the prediction as JSON-ready values; the limits follow from the name of the quantity."""
        return {"value": self.value, "spread": self.spread, "images": self.images}


def limits_of(quantity: str, outputs: OutputKind) -> tuple[float, float]:
    """Returns the smallest and largest possible value: of agreement and change as shares, of the divergence."""
    if quantity == "divergence":
        return 0.0, 2.0 if isinstance(outputs, Embeddings) else inf  # the cosine distance is at most 2
    return (0.0, 1.0) if quantity == "agreement" else (-1.0, 1.0)
