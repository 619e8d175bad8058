"""Realizes a prescription: ranks layer by layer, then the token policy."""

import copy
import math
from collections.abc import Sequence

import torch
from torch import nn

from attnrx.change.predictions import mean_divergences
from attnrx.change.realization.directions import (
    compressed_spec,
    copy_kept_rows_,
    head_order,
    mask_rewritten_rows_,
    mask_rows_,
    write_rewritten_rows_,
)
from attnrx.change.realization.outputs import (
    compress_values_,
    compressed_linear,
    copy_values_,
    mask_linear_,
    mask_values_,
    realize_hidden_,
)
from attnrx.change.realization.strength_refit import refit_strengths
from attnrx.change.realization.token_policies import realize_tokens_
from attnrx.data import ImageData, ImageSet
from attnrx.data.model_data import images_for
from attnrx.nouns.prescription import LayerPrescription, Prescription
from attnrx.support.arguments import IMAGES, MODEL, checked, instance, one_of, optional
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import copy_module
from attnrx.vit.attention import Attention
from attnrx.vit.maps import LINEAR_MAPS, REALIZATIONS, REALIZED_NORMS
from attnrx.vit.models import Family, family_of, model_fingerprint, require_all_tokens, shape_of
from attnrx.vit.models.verbs import verb


@checked(
    model=MODEL,
    prescription=instance("a Prescription, e.g. attnrx.prescribe(diagnosis, rules)", Prescription),
    by=one_of(*REALIZATIONS),
    norms=one_of(*REALIZED_NORMS),
    calibration=optional(IMAGES),
)
@verb
def realize(
    model: nn.Module,
    prescription: Prescription,
    by: str = "compress",
    norms: str = REALIZED_NORMS[0],
    calibration: ImageData | None = None,
) -> nn.Module:
    """Returns a copy of the model with the prescription applied; the model itself is not changed.

    A mask keeps every shape and writes zeros: removed directions get strength zero (the original norms remain), removed
    heads a zero output projection. Compression deletes the zeros. For SVDA, whose rows are divided by their norms,
    there are three variants:

    - "exact" keeps all rows of the projections to compute the norms and equals the mask; it saves score MACs only.
    - "renormalized" (the paper's) deletes rows and divides by the norm of the remaining ones: smaller, and an
      approximation that can be far from the mask.
    - "refit" has the same size; the kept strengths are solved by least squares so that the attention approximates the
      original's, to second order in KL divergence (`StrengthFit`). If the refitted logits have the larger KL divergence
      from the original's on the calibration images, the strengths of "renormalized" are used.

    The default is "exact", because the other two delete rows whose norms the strengths cannot replace: once strengths
    have spread, "refit" is nearer to the original than "renormalized", and farther than the mask (docs/exact.md).

    Dense attention has no norms: there "exact" and "renormalized" are the same model. A prescription that keeps
    everything gives identical logits. Tokens are pruned or merged last. Statistics of the attention that a reducer uses
    are equal in mask and compressed model; keys (ToMe) are not, because the mask retains keys that the compressed model
    has lost.

    Args:
        model: The model that was prescribed for.
        prescription: Decisions about the maps, the heads and the tokens.
        by: "compress" deletes what is pruned, "mask" sets it to zero.
        norms: The norms of compressed SVDA layers.
        calibration: Images for norms="refit", and for a token policy by image, which finds its thresholds on them.

    Returns:
        The smaller model, or the masked one.

    Raises:
        FingerprintMismatch: The prescription is for another model.
        InvalidInput: The layers do not fit, or norms="refit" without images.
        NotSupported: A decision that cannot be realized, or a model that is compressed already.
    """
    prescription.require(model_fingerprint(model))
    require_all_tokens(model, "realize a prescription on")
    _require_shapes(model, prescription)
    if by == "mask" or norms != "refit":
        return _realized(model, prescription, prescription.layers, by, norms, calibration)
    images = images_for(model, _require_refittable(prescription, calibration), "calibration")
    # The order decides between equal candidates: the refit comes first.
    fits = (refit_strengths(model, prescription, images), prescription.layers)
    candidates = [_realized(model, prescription, layers, by, norms, images) for layers in fits]
    return nearest_candidate(candidates, model, images)


def nearest_candidate(candidates: Sequence[nn.Module], model: nn.Module, images: ImageSet) -> nn.Module:
    """Returns the candidate whose outputs have the smallest mean divergence from the model's; the first of equals."""
    # By outputs and not by layer: a fit that is better in every layer may be worse in the model.
    divergences = mean_divergences(candidates, model, images)
    # Of a candidate that returns NaN it is NaN, which argmin would take.
    return candidates[int(torch.tensor(divergences).nan_to_num(nan=math.inf).argmin())]


def _realized(
    model: nn.Module,
    prescription: Prescription,
    layers: Sequence[LayerPrescription],
    by: str,
    norms: str,
    calibration: ImageData | None,
) -> nn.Module:
    changed = copy_module(model)
    family = family_of(changed)
    with torch.no_grad():
        for index, (attention, layer) in enumerate(zip(family.attention(model), layers, strict=True)):
            if by == "mask":
                _mask_(family.attention(changed)[index], layer)
            else:
                family.set_attention_(changed, index, _compressed(attention, layer, norms))
            # Hidden units or ranks of the MLP maps: a prescription has one of them (`prescribe_maps`).
            if layer.hidden is not None:
                realize_hidden_(family, changed, index, layer.hidden, by)
            _realize_mlp_(family, changed, index, layer, by)
        if prescription.tokens is not None:
            heads = shape_of(model, family).heads
            # Last, on the realized model: thresholds are calibrated to its tokens. The heads are those of the original.
            realize_tokens_(changed, family, prescription.tokens, by, heads, calibration)
    return changed


def _require_shapes(model: nn.Module, prescription: Prescription) -> None:
    """Raises InvalidInput for layers, heads or directions that the model does not have."""
    specs = [attention.spec for attention in family_of(model).attention(model)]
    if len(specs) != len(prescription.layers):
        raise InvalidInput(f"the prescription has {len(prescription.layers)} layers, and the model has {len(specs)}.")
    for index, (spec, layer) in enumerate(zip(specs, prescription.layers, strict=True)):
        shape, expected = tuple(layer.qk.keep.shape), (len(spec.heads), max((*spec.ranks, 1)))
        if layer.qk.basis is None and shape != expected:
            raise InvalidInput(
                f"layers[{index}] of the prescription has (heads, directions) {shape}, the model has {expected}."
            )


def _require_refittable(prescription: Prescription, calibration: ImageData | None) -> ImageData:
    if calibration is None:
        raise InvalidInput(
            "norms='refit' solves for strengths on data: pass calibration images, e.g. splits.train.take(512)."
        )
    if any(layer.qk.basis is not None for layer in prescription.layers):
        raise NotSupported(
            "norms='refit' solves for the strengths of the model's own directions, and this prescription has "
            "rewritten ones, whose strengths follow from the metric; omit norms='refit'."
        )
    return calibration


def _mask_(attention: Attention, layer: LayerPrescription) -> None:
    spec, values = attention.spec, layer.outputs.get("vo")
    if values is not None:
        compressed_spec(spec, layer)  # raises NotSupported for decisions that cannot be realized
        mask_values_(attention, values)
    if layer.qk.basis is None:
        mask_rows_(attention, layer.qk)
    else:
        mask_rewritten_rows_(attention, layer.qk, layer.qk.basis)
    # [sum of value dimensions]: the columns of removed heads in the output projection.
    removed = (~layer.heads).repeat_interleave(torch.tensor(spec.value_dims, dtype=torch.long))
    attention.output.weight[:, removed] = 0
    # The values of a removed head do not affect the output; zeros give them norm 0, for reducers that use value norms.
    attention.value.weight[removed] = 0
    if attention.value.bias is not None:
        attention.value.bias[removed] = 0


def _compressed(attention: Attention, layer: LayerPrescription, norms: str) -> Attention:
    order, weight = head_order(layer), attention.value.weight
    small, values = compressed_spec(attention.spec, layer, norms), layer.outputs.get("vo")
    result = Attention(small, attention.backend).to(weight.device, weight.dtype)
    if layer.qk.basis is None:
        copy_kept_rows_(result, attention, layer.qk, order)
    else:
        write_rewritten_rows_(result, attention, layer.qk, layer.qk.basis, order)
    if values is None:
        copy_values_(result, attention, order)
    else:
        compress_values_(result, attention, values, order)
    # Modules of the library, with weights of their own; a spec has their names only.
    result.inner_norms.update(copy.deepcopy(dict(attention.inner_norms.items())))
    result.kept_patches = attention.kept_patches
    return result.train(attention.training)


def _realize_mlp_(family: Family, model: nn.Module, index: int, layer: LayerPrescription, by: str) -> None:
    for which, name in enumerate(LINEAR_MAPS):
        output = layer.outputs.get(name)
        if output is None:
            continue
        linear = family.mlp(model)[index][which]
        if not isinstance(linear, nn.Linear):
            raise NotSupported(f"the MLP of layer {index} already has two factors; prescribe on the original model.")
        if by == "mask":
            mask_linear_(linear, output)
        else:
            family.set_mlp_(model, index, which, compressed_linear(linear, output))
