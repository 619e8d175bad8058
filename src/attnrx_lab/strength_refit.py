"""Refits SVDA's strengths by least squares on images, so that pruned attention approximates the original attention."""

from dataclasses import replace

import torch
from torch import nn

from attnrx.change.predictions import observe_images
from attnrx.data import ImageSet
from attnrx.nouns.prescription import LayerPrescription, Prescription
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.attention import Observation
from attnrx.vit.models import family_of

# Normal matrices are summed from float32 products, so eigenvalues below this share of the largest one are rounding.
_NULL = 1e-6


class StrengthFit:
    """Fits strengths s by least squares: min over s of sum_i Var_{j ~ a_i} [ T_ij - scale sum_r l_ir s_r r_jr ].

    The matrix T contains the reference's scores, and a_i = softmax(T_i) is the reference attention of query i. To
    second order, the sum is twice the KL divergence between the reference attention and the attention with strengths s.
    The reason is that softmax ignores a constant per query, and that errors at keys with zero attention have no effect.
    The class stores only the normal equations, one matrix [terms, terms] per head, so memory does not grow with the
    number of samples.
    """

    def __init__(self, heads: int, terms: int):
        self.normal = torch.zeros(heads, terms, terms, dtype=torch.float64)
        self.right_side = torch.zeros(heads, terms, dtype=torch.float64)
        self.target_energy = torch.zeros(heads, dtype=torch.float64)
        self.samples = 0

    def observe(
        self,
        left: Float[Tensor, "batch queries heads terms"],
        right: Float[Tensor, "batch keys heads terms"],
        target: Float[Tensor, "batch heads queries keys"],
        scale: float,
    ) -> None:
        """Adds one batch to the normal equations.

        `left` and `right` hold the two factors l and r of every term. `target` holds the reference's scores T.
        """
        for sample in range(left.shape[0]):
            # Samples run one at a time to limit memory: a sample's products have queries x keys x terms entries.
            lefts, rights = scale * left[sample].movedim(1, 0), right[sample].movedim(1, 0)  # [heads, tokens, terms]
            attention = target[sample].softmax(-1)
            root = attention.sqrt()  # multiplies both factors of the normal equations, so their weight is a_ij
            # Subtracts each query's mean under its attention, so the sum of squares is a variance. The shape is
            # [heads, queries, keys, terms], then [heads, queries * keys, terms].
            centred = rights[:, None] - (attention @ rights)[:, :, None]
            products = (centred * lefts[:, :, None] * root[..., None]).flatten(1, 2)
            errors = root * (target[sample] - (attention * target[sample]).sum(-1, keepdim=True))
            targets = errors.flatten(1)
            # Sums over all samples need float64, which some devices do not support.
            self.normal += (products.mT @ products).to("cpu", torch.float64)
            self.right_side += (targets[:, None] @ products).to("cpu", torch.float64).squeeze(1)
            self.target_energy += targets.square().sum(-1).to("cpu", torch.float64)
        self.samples += left.shape[0]

    def solve(
        self, keep: Bool[Tensor, "heads terms"], start: Float[Tensor, "heads terms"]
    ) -> Float[Tensor, "heads terms"]:
        """Returns the least-squares strengths of the kept terms, and zero for the other terms.

        If the data does not determine a strength, its value in `start` is kept. No head's error is larger than with
        `start`.

        Raises:
            InvalidInput: No sample was observed.
        """
        if self.samples == 0:
            raise InvalidInput("the least-squares strengths need at least one observed sample; give calibration data.")
        start = torch.where(keep, start, 0).to(self.normal)
        strength = start.clone()
        for head, mask in enumerate(keep):
            if bool(mask.any()):
                normal = self.normal[head][mask][:, mask]
                # The pseudoinverse corrects the start, so a strength that the data does not determine does not change.
                residual = self.right_side[head, mask] - normal @ start[head, mask]
                strength[head, mask] += torch.linalg.pinv(normal, rtol=_NULL, hermitian=True) @ residual
        # The pseudoinverse drops eigenvalues below _NULL, so a fit can be worse than its start.
        better = self.relative_error(strength) <= self.relative_error(start)
        return torch.where(better[:, None], strength, start)

    def relative_error(self, strength: Float[Tensor, "heads terms"]) -> Float[Tensor, "heads"]:
        """Returns each head's root squared error, relative to the error at zero strengths (0 for constant targets)."""
        square = (
            self.target_energy
            - 2 * (strength * self.right_side).sum(-1)
            + torch.einsum("hr,hrs,hs->h", strength, self.normal, strength)
        )
        share = square.clamp_min(0) / self.target_energy.clamp_min(torch.finfo(torch.float64).tiny)
        return torch.where(self.target_energy > 0, share.sqrt(), torch.zeros_like(share))


def refit_strengths(model: nn.Module, prescription: Prescription, calibration: ImageSet) -> list[LayerPrescription]:
    """Returns the prescription's layers with the kept strengths refitted on the calibration images.

    If a head keeps all its directions, its strengths stay bit-identical.

    Raises:
        NotSupported: The prescription rewrites the directions.
    """
    if any(layer.qk.basis is not None for layer in prescription.layers):
        raise NotSupported(
            "by='refit' solves for the strengths of the model's own directions, and this prescription has rewritten "
            "ones, whose strengths follow from the metric; omit by='refit'."
        )
    attentions = family_of(model).attention(model)
    fits = [StrengthFit(*layer.qk.keep.shape) for layer in prescription.layers]

    def observe(index: int, observation: Observation) -> None:
        # Rows are computed as in the compressed layer: pruned directions are zero, and norms are over the kept ones.
        keep = prescription.layers[index].qk.keep.to(observation.query.device)
        has_norms = attentions[index].spec.has_norms
        left, right = _kept_rows(observation.query, keep, has_norms), _kept_rows(observation.key, keep, has_norms)
        fits[index].observe(left, right, observation.scores, observation.scale)

    observe_images(model, calibration, observe, "realize", "fitting strengths")
    layers = []
    for layer, fit in zip(prescription.layers, fits, strict=True):
        keep, strength = layer.qk.keep, layer.qk.strength
        # A head that keeps all its directions is already exact, so a refit would only add rounding.
        changed = keep & ~keep.all(-1, keepdim=True)
        solved = fit.solve(keep, strength).to(strength.dtype)
        layers.append(layer.with_scores(replace(layer.qk, strength=torch.where(changed, solved, strength))))
    return layers


def _kept_rows(rows: Float[Tensor, "batch tokens heads directions"], keep: Tensor, has_norms: bool) -> Tensor:
    masked = rows * keep.to(rows.dtype)
    # The observed rows are already divided by their norms. Dividing by the kept part's norm gives the right rows.
    return nn.functional.normalize(masked, dim=-1) if has_norms else masked
