"""Prescriptions made real, as a mask or as a smaller model: the only file that changes a model."""

import copy

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.attention.forms import SvdaForm
from attnrx.attention.head_linear import HeadLinear
from attnrx.data import ImageSet
from attnrx.decompositions import StrengthFit
from attnrx.errors import InvalidInput, NotSupported
from attnrx.models import evaluating, family_of, model_fingerprint, observing
from attnrx.observation import Observation
from attnrx.prescription import LayerPrescription, Prescription
from attnrx.shapes import Float, Int, Tensor
from attnrx.spec import AttentionSpec

BY = ("mask", "compress")
NORMS = ("renormalized", "exact", "refit")


def realize(
    model: nn.Module,
    prescription: Prescription,
    by: str = "compress",
    norms: str = "renormalized",
    calibration: ImageSet | None = None,
) -> nn.Module:
    """Gives a copy of the model that carries the prescription out; the model itself stays as it is.

    `by="mask"` keeps every shape and writes zeros: removed directions get strength zero (the original norms remain),
    removed heads a zero read-out. `by="compress"` deletes what is zero; for SVDA, whose rows are divided by their
    norms, there are three kinds:

    - `"exact"` keeps all rows of the projections for the norms' sake and equals the mask; it saves score MACs only.
    - `"renormalized"` (the paper's) deletes rows and divides by the norm of what is left: smaller, and an
      approximation.
    - `"refit"` is as small, with the kept strengths solved by least squares so that the scores, centred over the
      keys, come nearest to the original's on `calibration` images.

    Dense attention has no norms: there "exact" and "renormalized" are the same model. Keeping everything gives
    identical logits.
    """
    prescription.require(model_fingerprint(model))
    if by not in BY or norms not in NORMS:
        raise InvalidInput(f"by={by!r}, norms={norms!r}: choose from {', '.join(BY)} and from {', '.join(NORMS)}.")
    if norms == "refit" and by == "compress" and calibration is None:
        raise InvalidInput(
            "norms='refit' solves for strengths on data: pass calibration images, e.g. splits.train.take(512)."
        )
    layers = list(prescription.layers)
    if by == "compress" and norms == "refit" and calibration is not None:
        layers = refitted(model, prescription, calibration)
    changed = copy.deepcopy(model)
    family = family_of(changed)
    for index, (attention, layer) in enumerate(zip(family.attention(model), layers, strict=True)):
        if by == "mask":
            _mask_(family.attention(changed)[index], layer)
        else:
            family.set_attention_(changed, index, _compressed(attention, layer, norms))
    return changed


def compressed_spec(spec: AttentionSpec, layer: LayerPrescription, norms: str = "renormalized") -> AttentionSpec:
    """The shape of the compressed layer: heads sorted by falling rank, so that those of equal rank are neighbours."""
    order = _head_order(layer)
    ranks = tuple(layer.ranks[head] for head in order)
    heads = tuple(spec.heads[head] for head in order)
    loses = any(0 < layer.ranks[head] < spec.ranks[head] for head in order)
    if norms != "exact" or spec.norms != "kept" or not loses:
        return spec.with_ranks(ranks, heads, spec.norms)
    if any(rank < spec.original_rank for rank in spec.ranks):
        raise NotSupported(
            f"norms='exact' needs the norms of all {spec.original_rank} original directions, but this layer was "
            f"compressed to ranks {spec.ranks} before; realize the prescription from the original model, "
            "or use 'renormalized'."
        )
    return spec.with_ranks(ranks, heads, "original")


def refitted(model: nn.Module, prescription: Prescription, calibration: ImageSet) -> list[LayerPrescription]:
    """Gives the layers with the kept strengths solved on the calibration images; untouched heads keep theirs, bit for
    bit.
    """
    family = family_of(model)
    attentions = family.attention(model)
    fits = [StrengthFit(*layer.keep.shape) for layer in prescription.layers]

    def observe(index: int, seen: Observation) -> None:
        keep = prescription.layers[index].keep.to(seen.query.device)
        has_norms = attentions[index].spec.norms != "none"
        left, right = _kept_rows(seen.query, keep, has_norms), _kept_rows(seen.key, keep, has_norms)
        strength = seen.strength if seen.strength is not None else torch.ones_like(keep, dtype=seen.query.dtype)
        fits[index].observe(left, right, seen.query, seen.key, strength)

    weight = next(model.parameters())
    with evaluating([model]), observing(model, family, observe):
        for batch in calibration.batches(64, device=weight.device):
            model(batch.images.to(weight.dtype))
    return [_with_fit(layer, fit) for layer, fit in zip(prescription.layers, fits, strict=True)]


def _with_fit(layer: LayerPrescription, fit: StrengthFit) -> LayerPrescription:
    touched = ~layer.keep.all(-1, keepdim=True)
    strength = torch.where(touched & layer.keep, fit.solve(layer.keep).to(layer.strength.dtype), layer.strength)
    return LayerPrescription(layer.keep, strength, layer.heads, layer.reasons)


def _kept_rows(rows: Float[Tensor, "batch tokens heads directions"], keep: Tensor, has_norms: bool) -> Tensor:
    kept = rows * keep.to(rows.dtype)
    return nn.functional.normalize(kept, dim=-1) if has_norms else kept


def _head_order(layer: LayerPrescription) -> list[int]:
    staying = torch.nonzero(layer.heads).flatten().tolist()
    return sorted(staying, key=lambda head: -layer.ranks[head])


def _mask_(attention: Attention, layer: LayerPrescription) -> None:
    """Writes zeros: into the strengths (or, where the form has none, the query rows) and the read-out of removed
    heads.
    """
    spec = attention.spec
    strength = torch.where(layer.keep & layer.heads[:, None], layer.strength, 0)
    flat = torch.cat([row[:rank] for row, rank in zip(strength, spec.ranks, strict=True)])
    with torch.no_grad():
        if isinstance(attention.scores, SvdaForm):
            attention.scores.strength.copy_(flat)
        else:
            _scale_rows_(attention.scores.query, flat)
        readout = attention.output.weight.view(spec.width, len(spec.heads), spec.head_dim)
        readout[:, ~layer.heads] = 0


def _compressed(attention: Attention, layer: LayerPrescription, norms: str) -> Attention:
    """Builds the smaller layer from the rows that stay."""
    spec, small = attention.spec, compressed_spec(attention.spec, layer, norms)
    order = _head_order(layer)
    weight = attention.value.weight
    result = Attention(small, attention.backend).to(weight.device, weight.dtype)
    rows = _direction_rows(spec, layer, order, keep_all=small.norms == "original" and spec.norms != "original")
    features = torch.arange(weight.shape[0]).view(len(spec.heads), spec.head_dim)[order].flatten()
    strength = torch.cat([layer.strength.new_zeros(0), *(layer.strength[head, layer.keep[head]] for head in order)])
    with torch.no_grad():
        _copy_rows_(result.scores.query, attention.scores.query, rows)
        _copy_rows_(result.scores.key, attention.scores.key, rows)
        _copy_rows_(result.value, attention.value, features)
        result.output.weight.copy_(attention.output.weight[:, features])
        result.output.bias.copy_(attention.output.bias)
        if isinstance(result.scores, SvdaForm):
            result.scores.strength.copy_(strength)
        else:
            _scale_rows_(result.scores.query, strength)
    return result.train(attention.training)


def _direction_rows(
    spec: AttentionSpec, layer: LayerPrescription, order: list[int], keep_all: bool
) -> Int[Tensor, "rows"]:
    """Names the rows of query and key that are stored, kept directions first; with `keep_all` the others follow, for
    the norms.
    """
    starts = torch.tensor([0, *spec.rows]).cumsum(0)
    rows = [torch.zeros(0, dtype=torch.long)]
    for head in order:
        own = torch.arange(spec.rows[head])
        kept = torch.zeros(spec.rows[head], dtype=torch.bool)
        kept[: spec.ranks[head]] = layer.keep[head, : spec.ranks[head]]
        needed = (keep_all or spec.norms == "original") and bool(kept.any())
        rows.append(starts[head] + torch.cat([own[kept], own[~kept]] if needed else [own[kept]]))
    return torch.cat(rows)


def _copy_rows_(target: HeadLinear, source: HeadLinear, rows: Int[Tensor, "rows"]) -> None:
    target.weight.copy_(source.weight[rows])
    target.bias.copy_(source.bias[rows])


def _scale_rows_(linear: HeadLinear, factors: Float[Tensor, "rows"]) -> None:
    if not torch.equal(factors, torch.ones_like(factors)):
        linear.weight.mul_(factors.to(linear.weight.dtype)[:, None])
        linear.bias.mul_(factors.to(linear.bias.dtype))
