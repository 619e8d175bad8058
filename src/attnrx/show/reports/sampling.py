"""Samples for reports: the patches of a few images that are kept, and the maps that models return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from attnrx.data import ImageSet
from attnrx.data.model_data import normalization_of
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Bool, Float, ImageBatch, Int, Tensor
from attnrx.support.trees import tensors_of
from attnrx.vit.models import (
    TokenReduction,
    TokenRun,
    evaluating,
    family_of,
    reduction_of,
    token_run,
)
from attnrx.vit.tokens import TokenPolicy
from attnrx.vit.tokens.merging import Merging


@dataclass(frozen=True)
class TokenSamples:
    """Sample images in the unit range, and the patches kept by a token policy.

    `left` marks the patches kept after each stage of the `policy`; `tokens` is the number of tokens per layer, prefix
    tokens included. The patches form `grid` (rows, columns), row by row. For a token reducer that
    merges, `groups` holds the index of the patch whose token represents each patch after each stage. `labels` are the
    classes of the images.
    """

    images: Float[Tensor, "images channels height width"]
    left: Bool[Tensor, "images stages patches"]
    policy: TokenPolicy
    tokens: tuple[int, ...]
    grid: tuple[int, int]
    labels: tuple[str, ...] = ()
    groups: Int[Tensor, "images stages patches"] | None = None


def first_images(images: ImageSet, class_names: Sequence[str], count: int) -> tuple[ImageBatch, tuple[str, ...]]:
    """Returns the first images, at most `count`, with the names of their classes, which are empty without labels."""
    batch = next(iter(images.take(min(count, len(images))).batches(count)))
    # -1: without a label
    if batch.labels.ndim > 1 or batch.labels.is_floating_point() or int(batch.labels.min()) < 0:
        return batch.images, ()
    # Datasets without names number their classes.
    names = {label: f"class {name}" if name.isdigit() else name for label, name in enumerate(class_names)}
    return batch.images, tuple(names.get(label, f"class {label}") for label in map(int, batch.labels.tolist()))


def _in_unit_range(images: Tensor, model: nn.Module) -> Float[Tensor, "images channels height width"]:
    """Undoes the normalization of images and clips to [0, 1]."""
    return normalization_of(model).invert(images.cpu().float()).clamp(0, 1)


@dataclass(frozen=True)
class MapSamples:
    """Sample images in the unit range and the map that every model returns for them, [images, height, width], by name;
    the original is the first. Of several numbers per position it is the index of the largest. `labels` are the classes
    of the images.
    """

    images: Float[Tensor, "images channels height width"]
    maps: Mapping[str, Tensor]
    labels: tuple[str, ...] = ()


def sample_maps(
    models: Mapping[str, nn.Module],
    images: Float[Tensor, "images channels height width"],
    labels: tuple[str, ...] = (),
) -> MapSamples | None:
    """Returns the first maps among the outputs of models for a few images; None for outputs without any.

    Args:
        models: The models by name, the original first.
        images: Normalized images.
        labels: The classes of the images.
    """
    maps, original = {}, next(iter(models.values()))
    for name, model in models.items():
        weight = next(model.parameters())
        with torch.no_grad(), evaluating([model]):
            outputs = tensors_of(model(images.to(weight.device, weight.dtype)))
        # [images, height, width] or [images, channels, height, width], and not the tokens of patches.
        found = [each for each in outputs.values() if each.ndim in (3, 4) and min(each.shape[-2:]) > 1]
        if not found:
            return None
        values = found[0].float().cpu()
        if values.ndim == 4:
            values = values[:, 0] if values.shape[1] == 1 else values.argmax(1).float()
        maps[name] = values
    return MapSamples(_in_unit_range(images, original), maps, labels)


def sample_tokens(
    model: nn.Module,
    images: Float[Tensor, "images channels height width"],
    labels: tuple[str, ...] = (),
) -> TokenSamples:
    """Runs a model with token reduction on a few images, and returns the patches that are kept at every stage.

    Args:
        model: The model with a token policy.
        images: Normalized images.
        labels: The classes of the images.

    Returns:
        The samples for `ReportContent.tokens`.

    Raises:
        InvalidInput: The model has no token policy, there is no image, or the patches are no grid of squares.
    """
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("this model has no token policy, so there are no token samples.")
    if not len(images):
        raise InvalidInput("no image to show tokens on: give at least one.")
    if labels and len(labels) != len(images):
        raise InvalidInput(f"{len(labels)} labels for {len(images)} images: give one each, or none.")
    family, layout, policy = family_of(model), reduction.shape.layout, reduction.policy
    weight = next(model.parameters())
    run = token_run(model, images.to(weight.device, weight.dtype), tracked=True)
    if run.trail and len(run.trail[0]) != len(images):
        raise InvalidInput("this model gets several images for one input, so the tokens of an input are no one grid.")
    left = patches_left_by(reduction, run, len(images))
    # Without a trail no stage pruned a token.
    counts = [indices.shape[1] for indices in run.trail] or [layout.patches] * len(policy.layers)
    after = dict(zip(policy.layers, counts, strict=True))
    remaining, tokens = layout.patches, []
    for layer in range(1, len(family.attention(model)) + 1):
        remaining = after.get(layer, remaining)
        tokens.append(layout.prefix + remaining)
    return TokenSamples(
        images=_in_unit_range(images, model),
        left=left,
        policy=policy,
        tokens=tuple(tokens),
        grid=_grid(layout.patches, *family.input_shape(model)[1:]),
        labels=labels,
        groups=_groups(reduction, run),
    )


def patches_left_by(reduction: TokenReduction, run: TokenRun, images: int) -> Bool[Tensor, "images stages patches"]:
    """Returns the patches kept after each stage, from the statistics of a forward pass of this many images.

    A patch that others were merged into counts as kept; a patch merged into another or fused into a new token does not.
    """
    patches = reduction.shape.layout.patches
    # One tensor of indices per stage, [images, patches after the stage].
    if not run.trail:  # a policy that keeps every patch runs no stage
        return torch.ones(images, len(reduction.policy.layers), patches, dtype=torch.bool)
    # One more column collects the indices of no patch (-1), and is cut off.
    none = torch.zeros(images, patches + 1, dtype=torch.bool, device=run.trail[0].device)
    masks = [none.scatter(1, indices.where(indices >= 0, patches), True)[:, :patches] for indices in run.trail]
    return torch.stack(masks, dim=1).cpu()


def _grid(patches: int, height: int, width: int) -> tuple[int, int]:
    """Returns the rows and columns of the grid of square patches of an image of this size."""
    # Square patches: rows * columns = patches and rows / columns = height / width.
    rows = round((patches * height / width) ** 0.5)
    if rows < 1 or patches % rows:
        raise InvalidInput(
            f"{patches} patches of images of {height} x {width} are not a grid of squares; they cannot be drawn."
        )
    return rows, patches // rows


def _groups(reduction: TokenReduction, run: TokenRun) -> Int[Tensor, "images stages patches"] | None:
    """Returns the patch whose token represents each patch after every stage; None without merging."""
    stages = zip(reduction.policy.layers, run.trail, strict=False)  # without a trail no stage pruned a token
    found = [(run.representatives(layer), indices) for layer, indices in stages]
    if not isinstance(reduction.policy.reducer, Merging) or all(tokens is None for tokens, _ in found):
        return None
    groups = []
    for tokens, indices in found:
        if tokens is None:  # before the first stage that merges
            groups.append(indices)
        else:  # a mask keeps every token at its patch
            groups.append(tokens if reduction.by == "mask" else indices.gather(1, tokens))
    return torch.stack(groups, dim=1).cpu()
