"""CORP as a baseline, which removes hidden units and query-key dimensions, and compensates by ridge regression."""

from functools import cached_property
from math import floor

import torch

from attnrx.change.decompositions import compensated
from attnrx.nouns.prescription import Basis, HiddenDecision, LayerPrescription, ScoreDecision
from attnrx.support.modules import evaluating
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.attention import Observation
from attnrx.vit.models import family_of, observing
from attnrx_lab.baselines.compressor import PrescribedBaseline

# The penalty of both regressions, relative to the mean diagonal of their normal equations.
PENALTY = 1e-2
# The normal equations of the logits need both Gram matrices of every image. For ViT-Tiny in float32 (12 layers, 3
# heads, 2 x 64 x 64 numbers) these matrices take 1.2 MB per image.
LOGIT_IMAGES = 128
BATCH = 32


class CorpBaseline(PrescribedBaseline):
    """CORP (Zhang and Yang, 2026, arXiv 2602.05243): closed-form one-shot pruning without labels or gradients.

    Every MLP keeps the same share of its hidden units, and every head keeps the same share of its query-key dimensions.
    CORP predicts the removed activations x_P by an affine function of the kept ones, x_P ~ A x_S + c. It predicts the
    removed part of the attention logits by a bilinear function of the kept dimensions, Q_P K_P^T ~ Q_S M K_S^T. Ridge
    regression on the calibration images finds A, c and M. CORP folds A and c into the MLP's second linear layer, whose
    weight becomes W_S + W_P A. It folds M into the queries, which become Q_S (I + M).

    The objectives and the folding follow the paper's abstract. The following choices are ours:

    - the ranking: hidden units by their mean square, and query-key dimensions by the energy of their logits (the mean
      over images of |q_j|^2 |k_j|^2)
    - the penalty (PENALTY)
    - one share for both kinds of units in all layers
    - the number of images on which M is fitted (LOGIT_IMAGES)
    """

    name = "corp"

    def layers(self, share: float, fitted: bool = True) -> list[LayerPrescription]:
        layers = []
        for index in range(len(self.attention)):
            decisions = {"qk": self._scores(index, share, fitted), "hidden": self._hidden(index, share, fitted)}
            layers.append(
                LayerPrescription({name: decision for name, decision in decisions.items() if decision is not None})
            )
        return layers

    def _hidden(self, index: int, share: float, fitted: bool) -> HiddenDecision | None:
        units = self.diagnosis.layers[index].hidden
        assert units is not None and units.covariance is not None and units.mean is not None
        # The ranking uses the mean square, but a diagnosis contains the covariance about the mean.
        energy = units.covariance.diagonal() + units.mean.square()
        keep = _strongest(energy[None], share)[0]
        if bool(keep.all()):
            return None
        weight, bias = units.weight.double()[:, keep], units.bias.double()
        if fitted:
            # The regression is about the means, so the covariance determines its slope A. c = E[x_P] - A E[x_S] keeps
            # the mean output: W E[x] = (W_S + W_P A) E[x_S] + W_P c.
            mean = units.mean.double()
            weight = compensated(units.covariance, units.weight, keep, PENALTY)
            bias = bias + units.weight.double() @ mean - weight @ mean[keep]
        reason = f"keeps the {int(keep.sum())} of {len(keep)} hidden units with the largest mean square"
        return HiddenDecision(keep, energy.clamp_min(0).sqrt(), weight, bias, (reason,))

    def _scores(self, index: int, share: float, fitted: bool) -> ScoreDecision:
        spectrum = self.diagnosis.layers[index].spectrum
        query, key = self._grams[index]
        # |q_j|^2 |k_j|^2 = |q_j k_j^T|^2 is the energy that dimension j adds to the logits of an image, up to a factor
        # that depends only on the number of tokens.
        energy = (query.diagonal(dim1=-2, dim2=-1) * key.diagonal(dim1=-2, dim2=-1)).mean(0)
        keep = _strongest(energy, share)
        strength = torch.where(keep, spectrum.strength.double(), 0.0)
        num_kept = int(keep[0].sum())
        reasons = (f"keeps the {num_kept} of {keep.shape[1]} query-key dimensions with the largest logits",) * len(keep)
        if bool(keep.all()):
            return ScoreDecision(keep, strength, reasons)
        # Q_S (I + M) K_S^T changes only the queries. The kept keys are the model's keys.
        identity = torch.eye(keep.shape[1], dtype=torch.float64).expand(len(keep), -1, -1)
        left = identity.clone()
        if fitted:
            for head, kept_dims in enumerate(keep):
                rows = torch.nonzero(kept_dims).flatten()
                mix = logit_compensation(query[:, head], key[:, head], kept_dims)
                left[head, rows[:, None], rows] += mix.T  # a row of `left` makes a query row: a column of I + M
        return ScoreDecision(keep, strength, reasons, Basis(left, identity, shared=False))

    @cached_property
    def _grams(self) -> list[tuple[Float[Tensor, "images heads d d"], Float[Tensor, "images heads d d"]]]:
        """Returns the Gram matrices of queries and keys for every layer and image, averaged over tokens."""
        # Every image has separate matrices, because the normal equations sum their products over the images.
        sums: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.attention]

        def observe(index: int, observation: Observation) -> None:
            for grams, side in zip(sums[index], (observation.query, observation.key), strict=True):
                rows = side.transpose(1, 2).float()  # [batch, heads, tokens, directions]
                grams.append((rows.mT @ rows / rows.shape[2]).cpu())

        images = self.calibration.take(min(LOGIT_IMAGES, len(self.calibration)))
        weight = next(self.model.parameters())
        with evaluating([self.model]), observing(self.model, family_of(self.model), observe):
            for batch in images.batches(BATCH, device=weight.device):
                self.model(batch.images.to(weight.dtype))
        return [(torch.cat(query), torch.cat(key)) for query, key in sums]


def logit_compensation(
    query: Float[Tensor, "images d d"],
    key: Float[Tensor, "images d d"],
    keep: Bool[Tensor, "d"],
    penalty: float = PENALTY,
) -> Float[Tensor, "kept kept"]:
    """Returns the M that minimizes the sum over images of |Q_S M K_S^T - Q_P K_P^T|^2 plus a penalty on |M|^2.

    `query` and `key` are the Gram matrices Gq = Q^T Q and Gk = K^T K of every image. S denotes the kept dimensions, and
    P the removed ones. The normal equations are sum Gq_SS M Gk_SS = sum Gq_SP Gk_PS, with sums over the images. For the
    row-major vec(M), the matrix of these equations is a sum of Kronecker products.
    """
    query, key, size = query.double(), key.double(), int(keep.sum())
    query_kept, key_kept = query[:, keep][:, :, keep], key[:, keep][:, :, keep]
    # One product covers all images, [a b, images] @ [images, c d]. Its axes are then ordered like a Kronecker product.
    products = (query_kept.flatten(1).T @ key_kept.flatten(1)).reshape(size, size, size, size)
    system = products.permute(0, 2, 1, 3).reshape(size * size, size * size)
    removed = (query[:, keep][:, :, ~keep] @ key[:, ~keep][:, :, keep]).sum(0)
    scale = penalty * system.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny ** 0.5)
    system.diagonal().add_(scale)
    return torch.linalg.solve(system, removed.flatten()).reshape(size, size)


def _strongest(energy: Float[Tensor, "groups units"], share: float) -> Bool[Tensor, "groups units"]:
    """Returns a mask of the units with the largest energy in every row.

    The mask keeps a `share` of the units in each row. Their number is rounded down, but it is at least one.
    """
    num_kept = max(1, floor(share * energy.shape[1]))
    return torch.zeros_like(energy, dtype=torch.bool).scatter_(1, energy.topk(num_kept, dim=1).indices, True)
