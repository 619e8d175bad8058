"""Parity: comparison of the logits of an exported file with those of the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attnrx.evidence import Finding, judged
from attnrx.shapes import Float, Tensor

# The share of images whose logits may differ in models with token reduction: rounding may swap two tokens of nearly
# equal scores.
MAY_DIFFER = 0.1


@dataclass(frozen=True)
class Parity:
    """Differences between the logits of the file and of the model on the same images.

    `largest` is the largest difference of a logit, `share` the largest difference of an image's logits relative to its
    largest logit, and `agreement` the share of images with the same predicted class. The first two exclude `differing`
    images, for which other tokens were pruned.
    """

    images: int
    largest: float
    share: float
    agreement: float
    differing: int

    def findings(self, limit: float) -> tuple[Finding, ...]:
        """Returns the findings, with a limit for `share`."""
        details = {"quantity": "parity", "largest_difference": self.largest, "images_left_out": self.differing}
        claim = "largest difference of a logit, exported against eager, as a share of the largest logit"
        return (
            Finding(
                "parity", claim, self.share, **judged(self.share, limit, n=self.images, at_least=False), details=details
            ),
            Finding(
                "parity",
                "images that exported and eager put into the same class",
                100 * self.agreement,
                "%",
                n=self.images,
                details={"quantity": "agreement"},
            ),
        )


def compare_outputs(
    model: Callable[[Tensor], Tensor],
    exported: Callable[[Tensor], Tensor],
    batches: Sequence[Float[Tensor, "_ channels height width"]],
    limit: float,
    prunes_tokens: bool,
) -> Parity:
    """Runs both on the batches; with `prunes_tokens` up to the share MAY_DIFFER of the images is excluded."""
    with torch.no_grad():
        expected = torch.cat([model(batch).double().cpu() for batch in batches])
        found = torch.cat([exported(batch).double().cpu() for batch in batches])
    difference = (expected - found).abs().amax(-1).nan_to_num(nan=float("inf"))
    shares = difference / expected.abs().amax(-1).clamp(min=torch.finfo(torch.float64).tiny)
    shares, order = shares.sort()
    difference = difference[order]
    allowed = int(MAY_DIFFER * len(shares)) if prunes_tokens else 0
    differing = min(allowed, int((shares > limit).sum()))
    last = len(shares) - differing - 1
    agreement = float((expected.argmax(-1) == found.argmax(-1)).double().mean())
    return Parity(len(shares), float(difference[: last + 1].max()), float(shares[last]), agreement, differing)
