"""Conversion of dense attention to the form of SVDA, from the second moments of its queries and keys."""

from dataclasses import replace

import torch
from torch import nn

from attnrx.change.predictions import observe_images
from attnrx.data import ImageData
from attnrx.data.model_data import images_for
from attnrx.support.arguments import ANY, MODEL, checked
from attnrx.support.errors import DataError, NotSupported
from attnrx.support.modules import copy_module
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention import Attention, Observation
from attnrx.vit.models import family_of, require_all_tokens
from attnrx.vit.models.boundary.verbs import verb

BATCH = 16
# Images whose tokens define the moments.
OBSERVED = 256
# Eigenvalues of a moment below this share of the largest one are raised to it, because its root is inverted.
SMALLEST = 1e-8


# The second moments of the queries, the covariances of the keys, [heads, directions, directions] each, and the means of
# the keys [heads, directions] of a layer.
RowMoments = tuple[Float[Tensor, "heads d d"], Float[Tensor, "heads d d"], Float[Tensor, "heads d"]]


@checked(model=MODEL, calibration=ANY)
@verb
def to_svda(model: nn.Module, calibration: ImageData) -> nn.Module:
    """Returns a copy of the model whose dense attention has the form of SVDA (Eqs. 1-5): unit rows and a strength per
    direction.

    The directions of a head are the singular vectors of its scores q . (k - mean k) in the metric of the calibration
    images, in which queries and keys have the identity as second moment; the softmax cancels the mean of the keys. A
    strength is the singular value times the mean square of the norms of the rows, by which SVDA divides them. Scores of
    dense attention depend on the lengths of its rows, so the converted model is only a start: follow it by `repair`,
    which fits it to the original without labels.

    Args:
        model: A model with dense attention.
        calibration: Images, normalized for the model.

    Returns:
        The converted copy.

    Raises:
        NotSupported: A layer has another form than dense, norms of its own, or a bias per pair of tokens.
        DataError: There are no images, or they do not fit the model.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> svda = to_svda(rx.load(vit), torch.randn(64, 3, 32, 32))
        >>> rx.diagnose(svda, torch.randn(64, 3, 32, 32)).layers[0].spectrum.strength.shape  # per head and direction
        torch.Size([3, 64])
    """
    require_all_tokens(model, "convert")
    family, converted = family_of(model), copy_module(model)
    for index, attention in enumerate(family.attention(model)):
        spec = attention.spec
        if not spec.is_plain or spec.inner_norms or any(rank != spec.original_rank for rank in spec.ranks):
            raise NotSupported(
                f"the attention of layer {index} ({spec.form}, ranks {spec.ranks}) is not the plain one of an "
                "uncompressed model, which is converted to SVDA; convert the original model first."
            )
    with torch.no_grad():
        for index, (attention, moments) in enumerate(
            zip(family.attention(model), _moments(model, calibration), strict=True)
        ):
            family.set_attention_(converted, index, _converted(attention, moments))
    return converted


def _moments(model: nn.Module, calibration: ImageData) -> list[RowMoments]:
    image_set = images_for(model, calibration, "calibration", limit=OBSERVED)
    images = image_set.take(min(OBSERVED, len(image_set)))
    if not len(images):
        raise DataError("the calibration data are empty; give a few images, e.g. splits.train.take(256).")
    sums: dict[tuple[int, str], Tensor] = {}

    def observe(index: int, observation: Observation) -> None:
        for name, side in (("query", observation.query), ("key", observation.key)):
            # [heads, batch * tokens, directions + 1], with a one at the end: one product has the second moment, the sum
            # and the count of the rows.
            rows = side.flatten(0, 1).transpose(0, 1).double()
            rows = torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)
            sums[index, name] = sums.get((index, name), 0) + rows.mT @ rows

    observe_images(model, images, observe, "to_svda", "reading moments", BATCH)
    moments = []
    for index in range(len(family_of(model).attention(model))):
        # The last entry is the number of rows, so the last column becomes the mean.
        query, key = (sums[index, name] / sums[index, name][:, -1:, -1:] for name in ("query", "key"))
        mean = key[:, :-1, -1]
        # Queries are not centred: a constant in all queries changes scores per key, which the softmax does not cancel.
        moments.append((query[:, :-1, :-1], key[:, :-1, :-1] - mean[..., None] * mean[:, None], mean))
    return moments


def _roots(moment: Float[Tensor, "heads d d"]) -> tuple[Float[Tensor, "heads d d"], Float[Tensor, "heads d d"]]:
    """Returns the symmetric roots of the moments and the inverses of these."""
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp_min(values[..., -1:].clamp_min(1e-30) * SMALLEST)
    # [heads, 1, d]: scales the columns, i.e. the eigenvectors.
    root = values.sqrt()[..., None, :]
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def _converted(attention: Attention, moments: RowMoments) -> Attention:
    spec, (query_moment, key_moment, means) = attention.spec, moments
    # With whitened rows q = Mq^1/2 u and k = Mk^1/2 v the scores are u^T (Mq^1/2 Mk^1/2) v; the singular vectors of
    # that product are the new directions, in which the rows of either side are uncorrelated with equal variance.
    # The centring of the keys is a bias of theirs; unlike in the softmax it does not cancel in the norms of the rows.
    biases = tuple(name for name in ("query", "key", "value", "output") if spec.has_bias(name) or name == "key")
    new = Attention(replace(spec, form="svda", norms="kept", biases=biases), attention.backend).to(
        attention.value.weight
    )
    for side in ("value", "output"):
        getattr(new, side).load_state_dict(getattr(attention, side).state_dict())
    (query_root, query_inverse), (key_root, key_inverse) = _roots(query_moment), _roots(key_moment)
    left, strength, right = torch.linalg.svd(query_root @ key_root)
    directions = spec.original_rank
    # Rows of mean square norm one, so that the division by the norms changes them little.
    scale = directions**-0.5
    for name, turn, shift in (
        ("query", left.mT @ query_inverse, torch.zeros_like(means)),
        ("key", right @ key_inverse, means),
    ):
        old, target = getattr(attention.scores, name).augmented().to(means), getattr(new.scores, name)
        # [heads, directions, width + 1]; the last column is the bias.
        rows = old.unflatten(0, (len(spec.heads), directions))
        rows[..., -1] -= shift
        rows = scale * (turn @ rows).flatten(0, 1)
        target.weight.copy_(rows[:, :-1])
        if target.bias is not None:
            target.bias.copy_(rows[:, -1])
    # Both sides were scaled by directions ** -0.5, which the strengths make up for.
    new.scores.set_strengths_(list((directions * strength).to(attention.value.weight)))
    new.kept_patches = attention.kept_patches
    return new.train(attention.training)
