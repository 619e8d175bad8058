"""Realizes a prescription: ranks layer by layer, then the token policy with its predictors."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from attnrx.change.predictions import predict
from attnrx.change.realization.attention_layers import compressed_attention, mask_attention_
from attnrx.data import ImageData, ImageSet
from attnrx.data.model_data import images_for
from attnrx.nouns.prescription import HiddenDecision, LayerPrescription, Prescription, TokenPrescription
from attnrx.support.arguments import IMAGES, checked, one_of, optional
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import copy_module
from attnrx.support.optional import import_plugins
from attnrx.vit.kernels.native_products import NativeLinear
from attnrx.vit.maps import LINEAR_MAPS, REALIZATIONS, REALIZED_NORMS
from attnrx.vit.models import (
    Family,
    LowRankLinear,
    attach_tokens_,
    family_of,
    model_fingerprint,
    reduction_of,
    require_all_tokens,
)
from attnrx.vit.models.verbs import verb

# How `norms` of layers whose rows are divided by their norms (SVDA) change the strengths; the laboratory has "refit".
REFITS: dict[str, Callable[[nn.Module, Prescription, ImageSet], Sequence[LayerPrescription]]] = {}


@checked(by=one_of(*REALIZATIONS), norms=one_of(*REALIZED_NORMS), calibration=optional(IMAGES))
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
      original's, to second order in KL divergence (`attnrx_lab.strength_refit`). If the refitted logits have the larger
      KL divergence from the original's on the calibration images, the strengths of "renormalized" are used.

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
        calibration: Images for norms="refit".

    Returns:
        The smaller model, or the masked one.

    Raises:
        FingerprintMismatch: The prescription is for another model.
        InvalidInput: The layers do not fit, or norms="refit" without images.
        NotSupported: A decision that cannot be realized, or a model that is compressed already.

    Examples:
        >>> model = rx.load("svda:digits")
        >>> diagnosis = rx.diagnose(model, torch.randn(64, 1, 16, 16))
        >>> small = rx.realize(model, rx.prescribe(diagnosis, "total_rank:0.5"))
        >>> sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
        True
    """
    prescription.require(model_fingerprint(model))
    require_all_tokens(model, "realize a prescription on")
    _require_shapes(model, prescription)
    if by == "mask" or norms != "refit":
        return _realized(model, prescription, prescription.layers, by, norms)
    if calibration is None:
        raise InvalidInput(
            "norms='refit' solves for strengths on data: pass calibration images, e.g. splits.train.take(512)."
        )
    images = images_for(model, calibration, "calibration")
    import_plugins()
    # The order decides between equal candidates: the refit comes first.
    fits = (REFITS[norms](model, prescription, images), prescription.layers)
    candidates = [_realized(model, prescription, layers, by, norms) for layers in fits]
    return nearest_candidate(candidates, model, images)


def nearest_candidate(candidates: Sequence[nn.Module], model: nn.Module, images: ImageSet) -> nn.Module:
    """Returns the candidate whose outputs have the smallest mean divergence from the model's; the first of equals."""
    # By outputs and not by layer: a fit that is better in every layer may be worse in the model.
    names = [f"candidate {index}" for index in range(len(candidates))]
    models = {"original": model, **dict(zip(names, candidates, strict=True))}
    found = predict(models, images, task="comparing candidates")
    divergences = torch.stack([found.divergence("original", name).mean() for name in names])
    # Of a candidate that returns NaN it is NaN, which argmin would take.
    return candidates[int(divergences.nan_to_num(nan=math.inf).argmin())]


def _realized(
    model: nn.Module,
    prescription: Prescription,
    layers: Sequence[LayerPrescription],
    by: str,
    norms: str,
) -> nn.Module:
    changed = copy_module(model)
    family = family_of(changed)
    with torch.no_grad():
        for index, (attention, layer) in enumerate(zip(family.attention(model), layers, strict=True)):
            if by == "mask":
                masked = family.attention(changed)[index]
                mask_attention_(masked, layer)
                family.set_attention_(changed, index, masked)  # which describes the layers
            else:
                family.set_attention_(changed, index, compressed_attention(attention, layer, norms))
            # Hidden units or ranks of the MLP maps: a prescription has one of them (`prescribe_maps`).
            if layer.hidden is not None:
                _realize_hidden_(family, changed, index, layer.hidden, by)
            _realize_linear_maps_(family, changed, index, layer, by)
        if prescription.tokens is not None:
            heads = family.token_shape(model).heads
            # Last, on the realized model; the heads are those of the original.
            realize_tokens_(changed, family, prescription.tokens, by, heads)
    return changed


def _require_shapes(model: nn.Module, prescription: Prescription) -> None:
    """Raises InvalidInput for layers, heads or directions that the model does not have."""
    expected = [(len(spec.heads), max((*spec.ranks, 1))) for spec in family_of(model).specs(model)]
    shapes = [tuple(layer.qk.keep.shape) for layer in prescription.layers]
    own = [layer.qk.basis is None for layer in prescription.layers]  # others combine the rows of the model
    pairs = zip(own, shapes, expected, strict=False)
    if len(shapes) != len(expected) or any(is_own and shape != other for is_own, shape, other in pairs):
        raise InvalidInput(f"the prescription has (heads, directions) {shapes} by layer, and the model {expected}.")


def _realize_linear_maps_(family: Family, model: nn.Module, index: int, layer: LayerPrescription, by: str) -> None:
    """Reduces the maps of one MLP: y = W x + b becomes decode @ (encode @ W x) + a constant, for a mask in one map."""
    for which, name in enumerate(LINEAR_MAPS):
        output = layer.outputs.get(name)
        if output is None:
            continue
        linear = family.mlp(model)[index][which]
        if not isinstance(linear, nn.Linear):
            raise NotSupported(f"the MLP of layer {index} already has two factors; prescribe on the original model.")
        weight = linear.weight.detach().cpu().double()
        bias = weight.new_zeros(weight.shape[0]) if linear.bias is None else linear.bias.detach().cpu().double()
        encode, decode, center = output.encode.double(), output.decode.double(), output.center.double()
        # decode @ encode @ (y - center) + center, with the constants collected in one bias.
        first, constant = encode @ weight, center + decode @ (encode @ (bias - center))
        if by == "mask":
            if linear.bias is None:
                raise InvalidInput(
                    "a map without a bias cannot hold the mean of its reduced outputs; use by='compress'."
                )
            # Rounded once: a mask in the precision of the model differs from the two factors by rounding.
            linear.weight.copy_(decode @ first)
            linear.bias.copy_(constant)
            continue
        factors = LowRankLinear(linear.in_features, linear.out_features, sum(output.ranks))
        factors = factors.to(linear.weight.device, linear.weight.dtype).train(linear.training)
        factors.first.weight.copy_(first)
        factors.second.weight.copy_(decode)
        factors.second.bias.copy_(constant)
        family.set_mlp_(model, index, which, factors)


def _realize_hidden_(family: Family, model: nn.Module, index: int, hidden: HiddenDecision, by: str) -> None:
    """Removes hidden units of one MLP, and refits its second linear map; by a mask with zeros in their place."""
    first, second = family.mlp(model)[index]
    if not (isinstance(first, nn.Linear) and isinstance(second, nn.Linear)):
        raise NotSupported(f"the MLP of layer {index} has factored maps; prescribe hidden on the original model.")
    keep = hidden.keep.to(first.weight.device)
    weight, bias = (part.to(second.weight.device, second.weight.dtype) for part in (hidden.weight, hidden.bias))
    # Units that are removed are still computed, and multiplied by zero columns: their activations do not matter.
    if by == "mask":
        if second.bias is None:
            raise InvalidInput("a second map without a bias cannot hold the mean of removed units; use by='compress'.")
        second.weight.zero_()
        second.weight[:, keep] = weight
        second.bias.copy_(bias)
        return
    # The first map loses rows; the second one is replaced by the refitted weight, which has the kept columns only.
    num_kept = int(keep.sum())
    small = (
        NativeLinear(first.in_features, num_kept, bias=first.bias is not None),
        NativeLinear(num_kept, second.out_features),
    )
    family.keep_units_(model, index, keep)
    for which, (linear, original) in enumerate(zip(small, (first, second), strict=True)):
        linear.to(original.weight.device, original.weight.dtype).train(original.training)
        family.set_mlp_(model, index, which, linear)
    small[0].weight.copy_(first.weight[keep])
    if first.bias is not None:
        small[0].bias.copy_(first.bias[keep])
    small[1].weight.copy_(weight)
    small[1].bias.copy_(bias)


def prescribed_tokens(model: nn.Module) -> TokenPrescription:
    """Returns the policy attached to a model as a prescription, with copies of its predictors where they are learned.

    Predictors trained in one model can thus be realized together with other ranks.

    Raises:
        InvalidInput: The model prunes and merges no tokens.
    """
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("this model prunes and merges no tokens, so it has no policy to return.")
    learned = {name: tensor.detach().cpu().clone() for name, tensor in reduction.stages.state_dict().items()}
    return TokenPrescription(reduction.policy, learned if reduction.policy.reducer.learned else None)


def realize_tokens_(model: nn.Module, family: Family, tokens: TokenPrescription, by: str, heads: int) -> None:
    """Attaches the prescribed token policy to the model, in place.

    Raises:
        InvalidInput: The predictors were made for another model.
    """
    # Fresh predictors depend on the seed of the prescription only, and the random numbers of the caller do not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tokens.seed)
        reduction = attach_tokens_(model, family, tokens.policy, by, heads)
    if tokens.predictors is not None:
        try:
            reduction.stages.load_state_dict(dict(tokens.predictors))
        except RuntimeError as error:
            raise InvalidInput(
                f"the predictors of {reduction.policy} were made for another model: {error}. Train predictors for this "
                "model, or omit them for fresh ones."
            ) from error
