"""The check of the features of patches: their error, candidate against reference."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check
from attnrx.show.checks.comparison import Comparison
from attnrx.show.checks.statistics import mean_estimate
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.models import evaluating, family_of

PatchTable = Float[Tensor, "images patches features"]


@dataclass(frozen=True)
class Features(Check):
    """The error of the last features of all patches, candidate against reference.

    The relative squared error and the cosine of every patch, averaged over the patches of an image; intervals are over
    images. Pruned and merged patches are restored. `most_error` is a limit for the mean relative squared error.
    """

    name: ClassVar[str] = "features"
    on_request: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("layers",)
    most_error: float | None = None

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        errors, cosines = [], []
        with evaluating((comparison.reference, comparison.candidate)):
            for batch in comparison.data.batches(comparison.batch_size, device=comparison.device):
                base, other = (
                    patch_features(model, batch.images) for model in (comparison.reference, comparison.candidate)
                )
                # By patch, relative to its own norm, then the mean over the patches of an image: [batch].
                errors.append(((base - other).square().sum(-1) / base.square().sum(-1)).mean(1).cpu())
                cosines.append(torch.cosine_similarity(base, other, dim=-1).mean(1).cpu())
        n, seed, pair = len(comparison.data), comparison.seed, "of the features of a patch, candidate against reference"
        error, cosine = mean_estimate(torch.cat(errors), seed), mean_estimate(torch.cat(cosines), seed)
        claim, most = f"relative squared error {pair}", self.most_error
        return (
            self.finding("feature error", claim, error, n=n, limit=most, side="<=", seed=seed),
            self.finding("feature cosine", f"cosine {pair}", cosine, n=n, seed=seed),
        )


def patch_features(model: nn.Module, images: Float[Tensor, "batch channels height width"]) -> PatchTable:
    """Returns the features of all patches of a batch in float64, computed in the dtype of the model's weights."""
    return family_of(model).patch_features(model, images.to(next(model.parameters()).dtype)).double()
