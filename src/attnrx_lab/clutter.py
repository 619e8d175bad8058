"""Tests token reducers on digits among clutter, a dataset in which the patches that matter are known."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from attnrx.data import ImageSet, load_data
from attnrx.nouns.evidence import Finding
from attnrx.show.checks import statistics
from attnrx.show.reports.samples import patches_left_by
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.models import reduction_of, token_run
from attnrx.vit.tokens import REDUCERS, TokenState
from attnrx.vit.tokens.reducer import PerPatch
from attnrx_lab.cluttered_digits import CLUTTERED, PLACEMENTS, object_patches
from attnrx_lab.tokens import Random, image_keys

LOOKED_AT = 512  # the number of test images whose remaining patches are counted
STAGES = {"first": 0, "last": -1}
LOWER_BITS = 0xFFFFFFFF  # the defined bits of an image key, whose higher bits are undefined


@dataclass(frozen=True)
class Oracle(Random):
    """Keeps the digit's patches first, then random patches, as an upper bound on what pruning reducers can achieve.

    The reducer recognizes images by a hash of their pixels, so neither the model nor the policy stores the digits'
    patches. For images that are not in the dataset, the selection is random.
    """

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        """Returns a random number in [0, 1) for every patch, plus 1 if the patch shows the digit."""
        chance, objects_of = super().relevance(state, predictor), _objects_by_key()
        assert state.image_keys is not None
        objects = [objects_of.get(key & LOWER_BITS) for key in state.image_keys.tolist()]
        # Random scores are below 1, so the digit's patches come before all others.
        added = [
            torch.zeros_like(one) if of_image is None else of_image.to(indices.device)[indices].to(one.dtype)
            for one, of_image, indices in zip(chance, objects, state.patch_indices, strict=True)
        ]
        return chance + torch.stack(added)


# The import registers the reducer, because policies name their reducer in a text such as `oracle:0.5@2,3,4`.
REDUCERS.register(Oracle)


@cache
def _objects_by_key() -> Mapping[int, Bool[Tensor, "patches"]]:
    """Returns a mask of the digit's patches for every image in the dataset, by the hash of the image's pixels."""
    splits, objects_of = load_data(CLUTTERED), {}
    for split in PLACEMENTS:
        objects = object_patches(split)
        for batch in getattr(splits, split).batches(256):
            keys = (image_keys(batch.images) & LOWER_BITS).tolist()
            objects_of.update(zip(keys, objects[batch.index], strict=True))
    return objects_of


def object_finding(
    model: nn.Module, images: ImageSet, objects: Bool[Tensor, "rows patches"], check: str, stage: str = "last"
) -> Finding:
    """Measures the share of the objects' patches that remain after the first or the last stage of token reduction.

    `objects` is a mask of the digit's patches, with a row for every image of the split. A patch that was merged or
    fused into another patch counts as lost.
    """
    images = images.take(min(LOOKED_AT, len(images)))
    shares = []
    for batch in images.batches(64):
        mask = objects[batch.index]  # loaders may return images in any order
        remaining = mask if reduction_of(model) is None else patches_left(model, batch.images)[:, STAGES[stage]]
        shares.append((remaining & mask).sum(1) / mask.sum(1))
    estimate = statistics.mean_estimate(torch.cat(shares).double(), seed=0).scaled(100.0)
    claim = f"share of the objects' patches that remain after the {stage} stage"
    details = {"quantity": "object patches", "stage": stage}
    return Finding(
        check, claim, estimate.value, "%", low=estimate.low, high=estimate.high, n=len(images), details=details
    )


def patches_left(
    model: nn.Module, images: Float[Tensor, "images channels height width"]
) -> Bool[Tensor, "images stages patches"]:
    """Returns a mask of the patches that remain after each stage of token reduction. The images run as one batch.

    A patch that was merged into another patch, or fused into a new token, counts as lost. The patch into which others
    were merged counts as kept.

    Raises:
        InvalidInput: The model has no token policy.
    """
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("this model has no token policy; attach one first.")
    weight = next(model.parameters())
    return patches_left_by(reduction, token_run(model, images.to(weight.device, weight.dtype)), len(images))
