"""Parity: the written file answers as the model does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attnrx.evidence import Finding, judged
from attnrx.shapes import Float, Tensor

# Where tokens leave, two that score alike to rounding may change places, and the image is answered otherwise.
MAY_DIFFER = 0.1


@dataclass(frozen=True)
class Parity:
    """Answers of the file beside those of the model, on the same images.

    `largest` is the largest difference of a logit, `share` the largest difference of an image's logits as a share of
    its largest logit, and `agreement` the share of images that are put into the same class; `differing` images are
    left out of the first two, because their tokens left otherwise.
    """

    images: int
    largest: float
    share: float
    agreement: float
    differing: int

    def findings(self, limit: float) -> tuple[Finding, ...]:
        """Says it as evidence, against a limit for `share`."""
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


def compare(
    model: Callable[[Tensor], Tensor],
    exported: Callable[[Tensor], Tensor],
    batches: Sequence[Float[Tensor, "_ channels height width"]],
    limit: float,
    prunes_tokens: bool,
) -> Parity:
    """Runs both on the batches; where tokens leave, one image in ten may be answered otherwise."""
    with torch.no_grad():
        ours = torch.cat([model(batch).double().cpu() for batch in batches])
        theirs = torch.cat([exported(batch).double().cpu() for batch in batches])
    difference = (ours - theirs).abs().amax(-1).nan_to_num(nan=float("inf"))
    shares = difference / ours.abs().amax(-1).clamp(min=torch.finfo(torch.float64).tiny)
    shares, order = shares.sort()
    difference = difference[order]
    allowed = int(MAY_DIFFER * len(shares)) if prunes_tokens else 0
    differing = min(allowed, int((shares > limit).sum()))
    last = len(shares) - differing - 1
    agreement = float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
    return Parity(len(shares), float(difference[: last + 1].max()), float(shares[last]), agreement, differing)
