"""Realizes a prescription: creates the smaller model, attaches its token policy, and fits its weights.

A compressed layer stores its kept heads by descending rank (`head_order`), but the prescription lists heads in their
original order. A head's query and key rows are copied from the model, or combined from the layer's rows by a change of
basis. Value and output projections are copied, or reduced to the kept dimensions.

The fits run in a fixed order. Repair comes first, then token pruning or merging is attached, and distillation comes
last. A prescription records the settings of every fit, including seeds. From this record, `realize_and_fit` can
recreate a model and the control models that it is compared with.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attnrx.change.predictions import predict
from attnrx.change.realization.distillation import HELD_OUT, Distill, distill
from attnrx.change.realization.repair import Repair, repair
from attnrx.data import ImageData, ImageSet
from attnrx.data.model_data import images_for
from attnrx.nouns.effort import Effort
from attnrx.nouns.prescription import (
    Basis,
    HiddenDecision,
    LayerPrescription,
    OutputDecision,
    Prescription,
    ScoreDecision,
    TokenPrescription,
)
from attnrx.support.arguments import IMAGES, checked, described_error, optional
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import copy_module, evaluating, random_images
from attnrx.support.progress import Log, begin, no_log
from attnrx.support.records import to_dict
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.attention import Attention
from attnrx.vit.attention.forms import AxialForm, ScoreForm, row_pairs
from attnrx.vit.attention.head_linear import HeadLinear
from attnrx.vit.kernels.native_products import NativeLinear
from attnrx.vit.maps import FITS, LINEAR_MAPS
from attnrx.vit.models import (
    Family,
    LowRankLinear,
    attach_tokens_,
    blocks_of,
    family_of,
    model_fingerprint,
    reduction_of,
    require_all_tokens,
    working_copy,
)
from attnrx.vit.models.boundary.shallower import shallower_form
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.models.working.adopted import Adopted
from attnrx.vit.spec import BIASES, COMPRESSIONS, AttentionSpec, Compression, compression_of

Fit = Repair | Distill
# The settings class of every fit, and its field that counts steps. A record stores this count under the fit's name.
KINDS: Mapping[str, tuple[type[Any], str]] = dict(zip(FITS, ((Repair, "steps"), (Distill, "epochs")), strict=True))

NO_INDICES = torch.zeros(0, dtype=torch.long)  # starts a concatenation, for layers without any head


@checked(calibration=optional(IMAGES))
@verb
def realize(
    model: nn.Module, prescription: Prescription, by: str = "compress", calibration: ImageData | None = None
) -> nn.Module:
    """Returns a copy of the model with the prescription applied. Your model is not changed.

    With `by="mask"`, all shapes stay the same, and zeros replace the removed weights. Removed directions get strength
    zero, but the norms of queries and keys still include their rows. Removed heads get a zero output projection.
    Removed blocks get zero weights.

    With `by="compress"`, the removed weights are deleted, and the outputs equal the masked model's outputs. If blocks
    are removed, the model's own library creates it again with a smaller depth. The new model keeps the training or
    evaluation mode of the original, but not its hooks. If a layer divides queries and keys by their norms, it keeps the
    removed rows that these norms need. In such a layer, only the attention scores become cheaper.

    Some forms of attention have further compressions, which you request by name. Such compressions also delete the rows
    that only the norms need, so the layer is smaller, but it only approximates the masked layer. Some compressions also
    fit the kept strengths to the `calibration` images. If the fitted strengths increase the divergence from the
    original model, the prescribed strengths are used. docs/exact.md compares these compressions.

    If a prescription keeps everything, the logits are identical to the original's logits. Token pruning and merging are
    added last. A token reducer that uses attention statistics gets the same statistics in the masked model and in the
    compressed model. A reducer that uses keys (`tome`) gets different keys, because only the masked model still has the
    removed keys.

    Args:
        model: The model for which the prescription was made.
        prescription: Decisions about the maps, the heads and the tokens.
        by: "compress" deletes what is pruned, and "mask" sets it to zero. You can also name another compression.
        calibration: Images for a compression that fits strengths. Other compressions ignore them.

    Returns:
        The smaller model, or the masked one.

    Raises:
        FingerprintMismatch: The prescription is for another model.
        InvalidInput: The layers do not match, `by` is unknown, or a compression that fits strengths has no images.
        NotSupported: A decision cannot be realized, or the model is compressed already.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> model = rx.load(vit)
        >>> diagnosis = rx.diagnose(model, torch.randn(64, 3, 32, 32))
        >>> small = rx.realize(model, rx.prescribe(diagnosis, "total_rank:0.5"))
        >>> sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
        True
    """
    compression = compression_of(by)
    prescription.require(model_fingerprint(model), "this model")
    require_all_tokens(model, "realize a prescription on")
    _require_shapes(model, prescription)
    if compression is None or compression.fit is None:
        return _realized(model, prescription, prescription.layers, compression)
    if calibration is None:
        raise InvalidInput(f"by={by!r} fits strengths to data: pass calibration images, e.g. splits.train.take(512).")
    images = images_for(model, calibration, "calibration")
    # On a tie, the first candidate is returned, so the candidate with fitted strengths comes first.
    fits = (compression.fit(model, prescription, images), prescription.layers)
    candidates = [_realized(model, prescription, layers, compression) for layers in fits]
    return nearest_candidate(candidates, model, images)


def nearest_candidate(candidates: Sequence[nn.Module], model: nn.Module, images: ImageSet) -> nn.Module:
    """Returns the candidate whose outputs diverge least from the model's on average. On a tie, returns the first."""
    # Whole outputs are compared. A fit that is better in every single layer may still be worse in the model.
    names = [f"candidate {index}" for index in range(len(candidates))]
    models = {"original": model, **dict(zip(names, candidates, strict=True))}
    found = predict(models, images, task="comparing candidates")
    divergences = torch.stack([found.divergence("original", name).mean() for name in names])
    # A candidate that returns NaN has the divergence NaN, which argmin would choose.
    return candidates[int(divergences.nan_to_num(nan=math.inf).argmin())]


def _realized(
    model: nn.Module, prescription: Prescription, layers: Sequence[LayerPrescription], compression: Compression | None
) -> nn.Module:
    family, by = family_of(model), "mask" if compression is None else "compress"
    changed, attentions, kept = copy_module(model), family.attention(model), prescription.kept_blocks
    if prescription.depth is not None:
        shallower = working_copy(shallower_form(model, kept))  # also for a mask, as it checks that blocks can go
        if compression is not None:
            changed, attentions, layers = shallower, [attentions[at] for at in kept], [layers[at] for at in kept]
    with torch.no_grad():
        for index, (attention, layer) in enumerate(zip(attentions, layers, strict=True)):
            if compression is None:
                masked = family.attention(changed)[index]
                mask_attention_(masked, layer)
                family.set_attention_(changed, index, masked)  # this also describes the layers
            else:
                family.set_attention_(changed, index, compressed_attention(attention, layer, compression.keeps_norms))
            # A layer has either hidden units or ranks of MLP maps, because `prescribe_maps` refuses both together.
            if layer.hidden is not None:
                _realize_hidden_(family, changed, index, layer.hidden, by)
            _realize_linear_maps_(family, changed, index, layer, by)
        if compression is None:
            for index in {*range(len(layers))} - {*kept}:
                # Zeros remove everything that a block adds to the stream, even after its own norm.
                for weight in blocks_of(changed, family)[index].parameters():
                    weight.zero_()
        if prescription.tokens is not None:
            heads = family.token_shape(model).heads
            # Tokens come last, on the realized model, but with the original number of heads.
            realize_tokens_(changed, family, prescription.tokens, by, heads)
    return changed


def _require_shapes(model: nn.Module, prescription: Prescription) -> None:
    """Raises InvalidInput if the prescription has layers, heads or directions that the model does not have."""
    expected = [(len(spec.heads), max((*spec.ranks, 1))) for spec in family_of(model).specs(model)]
    shapes = [tuple(layer.qk.keep.shape) for layer in prescription.layers]
    own = [layer.qk.basis is None for layer in prescription.layers]  # other layers combine the model's rows
    pairs = zip(own, shapes, expected, strict=False)
    if len(shapes) != len(expected) or any(is_own and shape != other for is_own, shape, other in pairs):
        raise InvalidInput(f"the prescription has (heads, directions) {shapes} by layer, and the model {expected}.")


def _realize_linear_maps_(family: Family, model: nn.Module, index: int, layer: LayerPrescription, by: str) -> None:
    """Replaces y = W x + b in one MLP by decode @ (encode @ W x) + constant. A mask stores the product as one map."""
    for which, name in enumerate(LINEAR_MAPS):
        output = layer.outputs.get(name)
        if output is None:
            continue
        linear = family.mlp(model)[index][which]
        if not isinstance(linear, nn.Linear):
            raise NotSupported(
                f"the MLP of layer {index + 1} already has two factors; prescribe on the original model."
            )
        weight = linear.weight.detach().cpu().double()
        bias = weight.new_zeros(weight.shape[0]) if linear.bias is None else linear.bias.detach().cpu().double()
        encode, decode, center = output.encode.double(), output.decode.double(), output.center.double()
        # The output is decode @ encode @ (y - center) + center. All constants are collected in one bias.
        first, constant = encode @ weight, center + decode @ (encode @ (bias - center))
        if by == "mask":
            # The product is rounded once. So in the model's precision, a mask differs from the two factors by rounding.
            linear.weight.copy_(decode @ first)
            _required_bias(linear).copy_(constant)
            continue
        factors = LowRankLinear(linear.in_features, linear.out_features, sum(output.ranks))
        factors = factors.to(linear.weight.device, linear.weight.dtype).train(linear.training)
        factors.first.weight.copy_(first)
        factors.second.weight.copy_(decode)
        factors.second.bias.copy_(constant)
        family.set_mlp_(model, index, which, _frozen_as(factors, linear))


def _realize_hidden_(family: Family, model: nn.Module, index: int, hidden: HiddenDecision, by: str) -> None:
    """Removes hidden units of one MLP and writes its refitted second map. A mask only zeroes the units' columns."""
    first, second = family.mlp(model)[index]
    if not (isinstance(first, nn.Linear) and isinstance(second, nn.Linear)):
        raise NotSupported(f"the MLP of layer {index + 1} has factored maps; prescribe hidden on the original model.")
    keep = hidden.keep.to(first.weight.device)
    weight, bias = (part.to(second.weight.device, second.weight.dtype) for part in (hidden.weight, hidden.bias))
    # A mask still computes the removed units. Their columns are zero, so their activations do not matter.
    if by == "mask":
        second.weight.zero_()
        second.weight[:, keep] = weight
        _required_bias(second).copy_(bias)
        return
    # The first map loses rows. The refitted weight replaces the second map, and has only the kept columns.
    num_kept = int(keep.sum())
    small = (
        NativeLinear(first.in_features, num_kept, bias=first.bias is not None),
        NativeLinear(num_kept, second.out_features),
    )
    family.keep_units_(model, index, keep)
    for which, (linear, original) in enumerate(zip(small, (first, second), strict=True)):
        linear.to(original.weight.device, original.weight.dtype).train(original.training)
        family.set_mlp_(model, index, which, _frozen_as(linear, original))
    small[0].weight.copy_(first.weight[keep])
    if first.bias is not None:
        small[0].bias.copy_(first.bias[keep])
    small[1].weight.copy_(weight)
    small[1].bias.copy_(bias)


def _required_bias(linear: nn.Module) -> Tensor:
    """Returns a linear map's bias, in which a mask stores the mean of removed features. Raises InvalidInput if None."""
    if not isinstance(linear.bias, Tensor):
        raise InvalidInput("a map without a bias cannot hold the mean of what a mask removes; use by='compress'.")
    return linear.bias


def prescribed_tokens(model: nn.Module) -> TokenPrescription:
    """Returns the token policy of a model as a prescription, with copies of its predictors if they are learned.

    Use this function to reuse trained token predictors in a model with other ranks.

    Raises:
        InvalidInput: The model does not prune or merge tokens.
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
        NotSupported: The code of a user's module needs all tokens between its blocks.
    """
    # Fresh predictors depend only on the prescription's seed. The caller's random state does not change.
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
    require_fewer_tokens(model)


def require_fewer_tokens(model: nn.Module) -> None:
    """Raises NotSupported if the code of a user's module fails with fewer tokens between its blocks."""
    if not isinstance(model, Adopted) or model.around is None:  # library blocks accept any number of tokens
        return
    try:
        with evaluating((model,)):
            model(random_images(model, model.input_shape, 1))
    except Exception as error:  # the code of a module raises errors of any type
        raise NotSupported(
            f"the code of {model.name} needs all tokens between its blocks: with fewer it raised "
            f"{type(error).__name__}: {described_error(error)}. Omit tokens."
        ) from error


# Fits -----------------------------------------------------------------------------------------------------------------


def fits_of(steps: Mapping[str, int], seed: int) -> tuple[Fit, ...]:
    """Returns the settings of all fits. `steps` maps the name of a fit to its number of steps, where 0 means no fit."""
    return tuple(kind(**{count: steps[name], "seed": seed}) for name, (kind, count) in KINDS.items() if steps.get(name))


def fits_record(*fits: Fit) -> dict[str, Any]:
    """Returns a record with the number of steps of every fit under its name, and other settings under "settings"."""
    record: dict[str, Any] = {"settings": {}}
    for settings in fits:
        name = _name_of(settings)
        # The record has the form that JSON returns, so a prescription equals its saved copy.
        record["settings"][name] = to_dict(settings, typed=False)
        record[name] = record["settings"][name].pop(KINDS[name][1])
    return record


@verb
def realize_and_fit(
    model: nn.Module,
    prescription: Prescription,
    images: ImageData | None = None,
    fits: Sequence[Fit] = (),
    by: str = "compress",
    log: Log = no_log,
) -> nn.Module:
    """Realizes a prescription like `realize`, and fits the new weights to the original model, without labels.

    Repair compares each token with the original's token, so it runs before tokens are pruned or merged. Distillation
    accepts a model with fewer tokens, and runs last.

    Args:
        model: The original model. It is not changed.
        prescription: The prescription for the original.
        images: Images to fit to. A compression that fits strengths uses them, too.
        fits: The settings of the fits. Without fits, the prescription is only realized.
        by: A compression, as in `realize`. With "mask", no fits are possible.
        log: A function that is called with notes on the repair, e.g. that its budget requires fewer images or steps,
            and with the result of the distillation.

    Raises:
        InvalidInput: Fits are requested for a mask, or without images.
    """
    if not fits:
        return realize(model, prescription, by=by, calibration=images)
    if by == "mask" or images is None:
        requested = " and ".join(map(_name_of, fits))
        raise InvalidInput(
            f"{requested} with by={by!r} and {'no images' if images is None else 'images'}: the weights of "
            "compressed layers are fitted on images; give by='compress' and images (on the command line --by compress "
            "and --data NAME)."
        )
    images, ranks, tokens = images_for(model, images, "images"), replace(prescription, tokens=None), prescription.tokens
    if ranks.rules or tokens is None:
        realized = realize(model, ranks, by=by, calibration=images)
    else:  # no ranks to realize, so a copy is enough
        prescription.require(model_fingerprint(model), "this model")
        realized = copy_module(model)
    removed = () if ranks.depth is None else ranks.depth.removed
    for settings in (replace(fit, removed=removed) for fit in fits if isinstance(fit, Repair)):
        result = repair(realized, model, images, settings)
        for note in (each for each in result.notes if each not in images.notes):
            log(note)
        realized = result.model
    if tokens is not None:
        heads = family_of(model).token_shape(model).heads
        realize_tokens_(realized, family_of(realized), tokens, "compress", heads)
    for settings in (fit for fit in fits if isinstance(fit, Distill)):
        begin("distilling")
        result = distill(realized, model, images, settings)
        reached = f"{result.before[0]:.4f} to {result.after[0]:.4f} on images it was not fitted to"
        log(f"distilled at the rate {result.learning_rate}: {reached}")
        realized = result.model
    return realized


def realize_with_effort(
    model: nn.Module,
    prescription: Prescription,
    images: ImageSet,
    effort: Effort,
    bfloat16: bool = False,
    log: Log = no_log,
    bits: int | None = None,
) -> tuple[nn.Module, tuple[Fit, ...]]:
    """Realizes a prescription with the fits of an effort level, and skips a repair that is not possible.

    Returns the model and the settings of the fits that ran.

    Args:
        model: The original model. It is not changed.
        prescription: The prescription for the original.
        images: The images to fit to.
        effort: The effort level, which sets the number of repair steps and the number of distillation epochs.
        bfloat16: Whether a repair may compute products in bfloat16 if the device is faster with them.
        log: A function that is called with the reports of the fits, and with a line if the model cannot be repaired.
        bits: 8 for a model that will become an 8-bit file, else None.
    """
    fits, seed = list[Fit](), effort.settings.seed
    # Without tokens, the remaining rules are for ranks and units. If there are none, no map needs a repair.
    if effort.repair is not None and replace(prescription, tokens=None).rules:
        steps, at_once, macs = effort.repair
        fits.append(Repair(steps, images=at_once, macs=macs, seed=seed, bfloat16=bfloat16, bits=bits))
    if effort.distill_epochs and len(images) >= 2 * HELD_OUT:
        fits.append(Distill(effort.distill_epochs, seed=seed, directions=effort.keep_index, bits=bits))
    try:
        return realize_and_fit(model, prescription, images, fits, log=log), tuple(fits)
    except (NotSupported, InvalidInput) as error:  # e.g. other MLPs, or fewer images than repair needs
        if not any(isinstance(fit, Repair) for fit in fits):
            raise
        log(f"not repaired: {error}")
    others = [fit for fit in fits if not isinstance(fit, Repair)]
    return realize_and_fit(model, prescription, images, others, log=log), tuple(others)


def _name_of(settings: Fit) -> str:
    return next(name for name, (kind, _) in KINDS.items() if isinstance(settings, kind))


# Attention ------------------------------------------------------------------------------------------------------------


def compressed_attention(attention: Attention, layer: LayerPrescription, keeps_norms: bool) -> Attention:
    """Returns a layer's compressed attention, which stores its heads by descending rank.

    Raises:
        NotSupported: `keeps_norms` is set, but an earlier compression has removed rows that the norms need.
        InvalidInput: A decision does not fit the form of the attention.
    """
    order, values, weight = head_order(layer), layer.outputs.get("vo"), attention.value.weight
    small = compressed_spec(attention.spec, layer, keeps_norms)
    result = Attention(small, attention.backend).to(weight.device, weight.dtype)
    if layer.qk.basis is None:
        _copy_directions_(result, attention, layer.qk, order)
    else:
        _combine_directions_(result, attention, layer.qk, layer.qk.basis, order)
    _follow_queries_(result.scores, attention.scores)
    if values is None:
        features = _in_order(attention.spec.value_dims, order)
        _copy_rows_(result.value, attention.value, features)
        result.output.weight.copy_(attention.output.weight[:, features])
        if result.output.bias is not None and attention.output.bias is not None:
            result.output.bias.copy_(attention.output.bias)
    else:
        value, output, bias = _reduced_values(attention, values)
        features = _in_order(values.ranks, order)
        _write_values_(result, value[features], output[:, features], bias)
    # The inner norms are the library's modules with their own weights. A spec holds only their names.
    result.inner_norms.update(copy.deepcopy(dict(attention.inner_norms.items())))
    result.kept_patches = attention.kept_patches
    return _frozen_as(result, attention).train(attention.training)


def _frozen_as(small: nn.Module, original: nn.Module) -> Any:
    """Freezes the weights of a smaller module if the matching original weights are frozen, and returns the module."""
    own = dict(original.named_parameters())
    for name, parameter in small.named_parameters():
        owner = name.rpartition(".")[0]
        like = next((own[each] for each in (name, f"{owner}.weight".lstrip("."), "weight") if each in own), None)
        if like is not None:
            parameter.requires_grad_(like.requires_grad)
    return small


def mask_attention_(attention: Attention, layer: LayerPrescription) -> None:
    """Zeroes all weights that a layer's prescription removes, in place. All shapes stay the same.

    Raises:
        NotSupported: The decision's directions are shared by all heads, and the original layer has no rows for them.
        InvalidInput: A decision does not fit the form of the attention, or values are reduced although the output
            projection has no bias.
    """
    spec, values = attention.spec, layer.outputs.get("vo")
    if values is not None:
        compressed_spec(spec, layer)  # raises an error for decisions that cannot be realized
        _mask_values_(attention, values)
    before = copy.deepcopy(attention.scores)
    if layer.qk.basis is None:
        # Zeros go into the strengths or, in forms without strengths, into the query rows.
        strength = torch.where(layer.qk.keep, layer.qk.strength, 0)
        attention.scores.set_strengths_([row[:rank] for row, rank in zip(strength, spec.ranks, strict=True)])
    else:
        _mask_combined_directions_(attention, layer.qk, layer.qk.basis)
    _follow_queries_(attention.scores, before)
    # This mask [sum of value dimensions] selects the output projection's columns for removed heads.
    removed = (~layer.heads).repeat_interleave(torch.tensor(spec.value_dims, dtype=torch.long))
    attention.output.weight[:, removed] = 0
    # A removed head's values do not affect the output. They are zeroed for token reducers that use value norms.
    attention.value.weight[removed] = 0
    if attention.value.bias is not None:
        attention.value.bias[removed] = 0


# Shapes ---------------------------------------------------------------------------------------------------------------


def head_order(layer: LayerPrescription) -> list[int]:
    """Returns the kept heads by descending rank, which is the order in the compressed layer."""
    # Heads of equal rank become neighbours, so a backend can compute them together as one bucket.
    heads, ranks = torch.nonzero(layer.heads).flatten().tolist(), layer.qk.ranks
    return sorted(heads, key=lambda head: -ranks[head])


def compressed_spec(spec: AttentionSpec, layer: LayerPrescription, keeps_norms: bool = True) -> AttentionSpec:
    """Returns the spec (form and shapes) of the compressed layer, which by default keeps the original norms.

    If directions are expressed in a new basis, no key bias is needed, because the softmax cancels it (except with
    RoPE). If values are reduced, no value bias is needed, because the bias of the output projection absorbs it.

    Raises:
        NotSupported: `keeps_norms` is set, but an earlier compression has removed rows that the norms need.
        InvalidInput: A decision does not fit the form of the attention.
    """
    scores, values, order = layer.qk, layer.outputs.get("vo"), head_order(layer)
    ranks, biases = tuple(scores.ranks[head] for head in order), set(spec.biases)
    large, pairs, kept_norms = spec, None, spec.norms
    if scores.basis is not None and scores.basis.shared:
        kept, blocks = scores.keep[order].any(0), scores.basis.blocks
        if blocks is not None:
            blocks = tuple(int(part.sum()) for part in kept.split(blocks))  # a block may lose all of its directions
        large, kept_norms = spec.with_shared_directions(int(kept.sum()), blocks), "none"
        ranks = large.ranks[: len(order)]
        biases.discard("key")
    elif spec.traits.shares_directions and not (order and bool(scores.keep[order].all())):
        # Heads no longer share directions, so each head stores its own rows.
        large, kept_norms = replace(spec, form="dense", blocks=None), "none"
    elif spec.traits.rotates:
        # The bias of a rotated key depends on the position, so the softmax does not cancel it.
        pairs = _kept_pairs(spec, scores, order)
    elif scores.basis is not None:
        biases.discard("key")
    elif keeps_norms and _needs_original_norms(spec, scores, order):
        kept_norms = "original"
    # `heads` keeps the numbers from the original model. Ranks and value ranks refer to the heads of `spec`.
    small = large.with_ranks(ranks, tuple(spec.heads[head] for head in order), kept_norms, pairs)
    if values is not None:
        kept_dims = tuple(values.ranks[head] for head in order)
        biases.add("output")
        # If a head keeps all value dimensions, its value bias stays (as zeros), because library attention has biases.
        if kept_dims != tuple(spec.value_dims[head] for head in order):
            biases.discard("value")
        small = replace(small, value_ranks=kept_dims)
    # Biases are listed in the order of BIASES, so that equal layers compare equal.
    return replace(small, biases=tuple(name for name in BIASES if name in biases))


def _needs_original_norms(spec: AttentionSpec, scores: ScoreDecision, order: Sequence[int]) -> bool:
    """Returns whether the norms need removed rows. Raises NotSupported if an earlier compression deleted such rows."""
    # If every head keeps all or none of its directions, the norms do not change, so no extra row is stored.
    loses = any(0 < scores.ranks[head] < spec.ranks[head] for head in order)
    if not spec.has_norms or spec.keeps_original_norms or not loses:
        return False
    if any(rank < spec.original_rank for rank in spec.ranks):
        others = [f"or give by={name!r}" for name, compression in COMPRESSIONS.items() if not compression.keeps_norms]
        raise NotSupported(
            f"by='compress' needs the norms of all {spec.original_rank} original directions, but this layer was "
            f"compressed to ranks {spec.ranks} before; "
            + ", ".join(["realize the prescription from the original model", *others])
            + "."
        )
    return True


def _kept_pairs(spec: AttentionSpec, scores: ScoreDecision, order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the RoPE frequencies of the kept rotary pairs, for the heads in `order`.

    Raises:
        InvalidInput: The decision is for another form of attention, or keeps only one row of a pair.
    """
    table = None if scores.basis is None else scores.basis.pairs
    if table is None and scores.basis is not None:
        raise InvalidInput("directions of a rotary layer need the frequencies of their pairs; prescribe again.")
    # [heads, directions]: the frequency of every row, or -1 for a row that is not rotated.
    rows = row_pairs(spec) if table is None else table
    chosen = [rows[head, : scores.keep.shape[1]][scores.keep[head, : rows.shape[1]]] for head in order]
    pairs = [row[row >= 0].tolist() for row in chosen]
    if any(frequencies[: len(frequencies) // 2] != frequencies[len(frequencies) // 2 :] for frequencies in pairs):
        raise InvalidInput("a decision keeps one row of a rotated pair: keep or remove both of them.")
    return tuple(tuple(frequencies[: len(frequencies) // 2]) for frequencies in pairs)


def _in_order(sizes: Sequence[int], order: Sequence[int]) -> Int[Tensor, "indices"]:
    """Returns the row indices of the heads in `order`, if head h has `sizes[h]` rows."""
    rows = torch.arange(sum(sizes)).split(list(sizes))
    return torch.cat([NO_INDICES, *(rows[head] for head in order)])


# Query and key --------------------------------------------------------------------------------------------------------


def _copy_directions_(target: Attention, source: Attention, scores: ScoreDecision, order: Sequence[int]) -> None:
    """Copies the kept query and key rows and their strengths into a smaller layer."""
    spec, small = source.spec, target.spec
    if small.traits.shares_directions:
        rows = torch.arange(sum(small.rows))
    elif spec.traits.shares_directions:  # a direction kept by two heads is stored twice
        rows = torch.nonzero(scores.keep[order])[:, 1]
    else:
        starts, parts = torch.tensor([0, *spec.rows]).cumsum(0), [NO_INDICES]
        for head in order:
            kept = torch.zeros(spec.rows[head], dtype=torch.bool)
            kept[: spec.ranks[head]] = scores.keep[head, : spec.ranks[head]]
            # If the small layer divides by norms over all rows, it stores the removed rows after the kept ones. A head
            # without directions attends uniformly and needs no norm.
            stores_all = small.keeps_original_norms and bool(kept.any())
            chosen = torch.cat([torch.nonzero(kept), torch.nonzero(~kept)[: None if stores_all else 0]])
            parts.append(starts[head] + chosen.flatten())
        rows = torch.cat(parts)
    _copy_rows_(target.scores.query, source.scores.query, rows)
    _copy_rows_(target.scores.key, source.scores.key, rows)
    keep = torch.ones_like(scores.keep) if small.traits.shares_directions else scores.keep
    target.scores.set_strengths_([scores.strength[head, keep[head]] for head in order])


def _combine_directions_(
    target: Attention, source: Attention, scores: ScoreDecision, basis: Basis, order: Sequence[int]
) -> None:
    """Writes the kept directions of a basis into a smaller layer.

    If heads do not share directions, each query row and each key row is multiplied by the square root of its strength.
    """
    kept = scores.keep[order].any(0)
    for name, table in (("query", basis.left), ("key", basis.right)):
        rows = _combined(getattr(source.scores, name), source.spec, table, shared=basis.shared)
        _write_rows_(getattr(target.scores, name), rows[0, kept] if basis.shared else _scaled(rows, scores, order))
    if basis.shared:
        # A shared direction is stored if any head keeps it. For the other heads, its strength is zero.
        target.scores.set_strengths_(list(torch.where(scores.keep, scores.strength, 0.0)[order][:, kept]))


def _follow_queries_(scores: ScoreForm, before: ScoreForm) -> None:
    """Adapts tables of relative positions to query rows that have changed, in place.

    If the old query rows are linear combinations of the new rows, the products of queries and tables stay the same. If
    not, the new tables approximate these products by least squares.
    """
    if not isinstance(scores, AxialForm) or not isinstance(before, AxialForm):
        return
    old_rows, new_rows = (form.query.augmented().split(form.spec.rows) for form in (before, scores))
    for name in ("down", "right"):
        table, old_table = getattr(scores, name), getattr(before, name).detach().cpu().double()
        old = dict(zip(before.spec.heads, zip(old_rows, old_table.split(before.spec.rows), strict=True), strict=True))
        parts = [table.new_zeros(0, table.shape[1])]
        for head, rows in zip(scores.spec.heads, new_rows, strict=True):
            rows_before, vectors = old[head]
            if not torch.equal(rows, rows_before):
                # rows_before = combination @ rows, by least squares.
                vectors = torch.linalg.pinv(rows.mT) @ rows_before.mT @ vectors
            parts.append(vectors.to(table))
        table.copy_(torch.cat(parts))


def _mask_combined_directions_(attention: Attention, scores: ScoreDecision, basis: Basis) -> None:
    """Writes the kept directions of a basis into each head's rows, and zeros into the others. Shapes stay the same."""
    spec = attention.spec
    if basis.shared:
        raise NotSupported(
            "directions that all heads share have no mask: the original layer has no rows for them. "
            "Realize the prescription by='compress'."
        )
    pairs = None if basis.pairs is None else _kept_pairs(spec, scores, range(len(spec.heads)))
    # [heads, directions, 1]. Query and key rows each get the root of the strength, as this form stores no strengths.
    root = torch.where(scores.keep, scores.strength, 0.0).sqrt()[..., None]
    for side, table in ((attention.scores.query, basis.left), (attention.scores.key, basis.right)):
        rows = _combined(side, spec, table, shared=False)
        if pairs is None:
            parts = [head_rows[:rank] for head_rows, rank in zip(root * rows, spec.rows, strict=True)]
        else:
            # Pairs are always the last rows of a head (`row_pairs`), so zeros are inserted before them.
            parts = []
            for head, frequencies in enumerate(pairs):
                kept = _scaled(rows, scores, [head])
                num_others = len(kept) - 2 * len(frequencies)
                zeros = kept.new_zeros(spec.ranks[head] - len(kept), kept.shape[1])
                parts += [kept[:num_others], zeros, kept[num_others:]]
        _write_rows_(side, torch.cat(parts))
    if pairs is not None:
        attention.spec = attention.scores.spec = replace(spec, pairs=pairs)


def _combined(
    side: HeadLinear, spec: AttentionSpec, table: Tensor, *, shared: bool
) -> Float[Tensor, "owners directions augmented"]:
    """Returns query or key rows in a new basis, with the bias as last column, in float64 on the CPU."""
    # The rows are combined in float64, because a basis may be ill-conditioned. The bias is treated like a feature.
    stored, owners = side.augmented(), (sum(spec.rows),) if spec.traits.shares_directions else spec.rows
    num_rows = table.shape[-1] // len(owners) if shared else table.shape[-1]
    padded = stored.new_zeros(len(owners), num_rows, stored.shape[1])
    for owner_rows, rows in zip(padded, stored.split(owners), strict=True):
        owner_rows[: rows.shape[0]] = rows  # a view of `padded`
    return table @ (padded.flatten(0, 1) if shared else padded)


def _scaled(rows: Tensor, scores: ScoreDecision, order: Sequence[int]) -> Float[Tensor, "rows augmented"]:
    """Returns the kept rows of the heads in `order`, multiplied by the square roots of their strengths."""
    roots = [scores.strength[head, scores.keep[head]].sqrt()[:, None] for head in order]
    parts = [root * rows[head, scores.keep[head]] for root, head in zip(roots, order, strict=True)]
    return torch.cat([rows.new_zeros(0, rows.shape[-1]), *parts])  # also works without any head


def _copy_rows_(target: HeadLinear, source: HeadLinear, rows: Int[Tensor, "rows"]) -> None:
    target.weight.copy_(source.weight[rows])
    if target.bias is not None and source.bias is not None:
        target.bias.copy_(source.bias[rows])


def _write_rows_(side: HeadLinear, augmented: Float[Tensor, "rows augmented"]) -> None:
    side.weight.copy_(augmented[:, :-1])
    if side.bias is not None:
        side.bias.copy_(augmented[:, -1])


# Value and output -----------------------------------------------------------------------------------------------------


def _mask_values_(attention: Attention, values: OutputDecision) -> None:
    """Writes the reduced values into each head's first features, and zeros into the rest. All shapes stay the same."""
    value, output, bias = _reduced_values(attention, values)
    spec = attention.spec
    _required_bias(attention.output)
    # A reduced direction combines all features and belongs to no single one, so the first features are used.
    starts = torch.tensor([0, *spec.value_dims]).cumsum(0).tolist()
    indices = torch.cat([start + torch.arange(rank) for start, rank in zip(starts, values.ranks, strict=False)])
    rows = value.new_zeros(sum(spec.value_dims), value.shape[1])
    columns = output.new_zeros(output.shape[0], sum(spec.value_dims))
    rows[indices], columns[:, indices] = value, output
    _write_values_(attention, rows, columns, bias)


def _reduced_values(
    attention: Attention, values: OutputDecision
) -> tuple[Float[Tensor, "kept width"], Float[Tensor, "width kept"], Float[Tensor, "width"]]:
    """Returns reduced value rows, output columns and output bias in float64, with heads in the order of `attention`.

    Attention rows sum to one, so a constant in the values only adds a constant to the output. A head's output o =
    attention @ x + value bias is replaced by decode @ encode @ (o - center) + center. The bias of the output projection
    absorbs all constants.
    """
    dims = attention.spec.value_dims
    # Everything is in float64, like the factors. Values are rounded to the weights' precision only when written.
    stored = attention.value.augmented()
    encodes = values.encode.double().split(values.ranks)
    # `encode` rows are padded to the widest head. Each part is [ranks[head], width + 1], with the bias as last column.
    parts = zip(encodes, stored.split(list(dims)), strict=True)
    rows = [encode[:, : block.shape[0]] @ block for encode, block in parts]
    augmented = torch.cat([stored.new_zeros(0, stored.shape[1]), *rows])
    weight = attention.output.weight.detach().cpu().double()
    # `decode` and `center` are padded to the widest head, but the weight is not.
    widest = len(values.center) // max(len(dims), 1)
    present = torch.cat([NO_INDICES, *(head * widest + torch.arange(width) for head, width in enumerate(dims))])
    decode, center = values.decode.double()[present], values.center.double()[present]
    output = weight @ decode
    own_bias = attention.output.bias
    bias = weight.new_zeros(weight.shape[0]) if own_bias is None else own_bias.detach().cpu().double()
    # encode @ center is computed per head, because a row of `encode` is nonzero only for its own head.
    by_head = zip(encodes, center.split(dims), strict=True)
    encoded_centers = torch.cat([encode[:, : len(mean)] @ mean for encode, mean in by_head])
    bias = bias + weight @ center + output @ (augmented[:, -1] - encoded_centers)
    return augmented[:, :-1], output, bias


def _write_values_(target: Attention, value: Tensor, output: Tensor, bias: Tensor) -> None:
    target.value.weight.copy_(value)
    target.output.weight.copy_(output)
    if target.value.bias is not None:
        target.value.bias.zero_()
    if target.output.bias is not None:
        target.output.bias.copy_(bias)
