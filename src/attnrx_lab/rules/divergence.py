"""Measures the KL divergence of attention for every rank of every head, and allocates the ranks that minimize it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from attnrx.change.decompositions import require_directions, require_total
from attnrx.change.predictions import observe_images
from attnrx.data import ImageData
from attnrx.data.model_data import images_for
from attnrx.decide.rules.metrics import OWN, rewritten
from attnrx.decide.rules.rule import TotalRank
from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.nouns.prescription import Basis
from attnrx.support.arguments import checked
from attnrx.support.errors import DataError
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention import Observation
from attnrx.vit.models import model_fingerprint, require_all_tokens
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.spec import Spectrum

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class DivergenceRank(TotalRank):
    """Keeps the same number of directions as `total_rank`, with ranks that minimize the KL divergence of attention.

    Dynamic programming divides the total number of directions among the heads. Before you use the rule, call
    `measure_divergence` with the rule's metric. It adds the divergences to the diagnosis.
    """

    def allocated(
        self, diagnosis: Diagnosis, layers: Sequence[int], spectra: list[Spectrum], has_rows: list[Tensor]
    ) -> Sequence[Sequence[int]]:
        # The divergence was measured per head and rank, in the metric of the rewritten directions.
        name = f"divergence_{diagnosis.about.get('metric', OWN)}"
        losses = [
            diagnosis.layers[index].reading(name).double()[heads] for index, heads in zip(layers, has_rows, strict=True)
        ]
        options = {"multiple": self.multiple, "minimum": self.minimum}
        flat = torch.tensor(allocate_by_loss(torch.cat(losses), self.total(spectra), **options))
        return tuple(part.tolist() for part in flat.split([len(loss) for loss in losses]))


@checked()
@verb
def measure_divergence(
    model: nn.Module, diagnosis: Diagnosis, images: ImageData, metric: str = "mix", batch_size: int = 8
) -> Diagnosis:
    """Adds a reading named `divergence_METRIC` to a diagnosis. This takes one more pass over the images.

    Column r is the mean over queries of KL(attention || attention with only the first r directions), in nats. `metric`
    determines the order of the directions. The last column is zero up to rounding. The rule `DivergenceRank` minimizes
    the sum of these divergences.

    Args:
        model: The model whose attention is measured.
        diagnosis: The model's diagnosis.
        images: Images, normalized for the model.
        metric: The metric that orders the directions (one of `rules.METRICS`).
        batch_size: Images per forward pass.

    Returns:
        The diagnosis with the added reading in every layer.

    Raises:
        FingerprintMismatch: The diagnosis belongs to another model.
        DataError: There are no images, or the images do not fit the model.

    Examples:
        >>> from attnrx_lab.rules import measure_divergence
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> images = torch.randn(64, 3, 32, 32)  # normalized as the model expects them
        >>> model = rx.load(vit)
        >>> diagnosis = measure_divergence(model, rx.diagnose(model, images), images)
        >>> diagnosis.layers[0].readings["divergence_mix"].shape  # 3 heads, 0 to 64 directions
        torch.Size([3, 65])
    """
    require_all_tokens(model, "measure the divergence of")
    diagnosis.require(model_fingerprint(model), "the model to measure")
    # Rank r keeps the first r directions in the metric, so one pass serves every rank.
    rewritten_diagnosis, bases = rewritten(diagnosis, metric)
    shapes = [layer.spectrum.strength.shape for layer in rewritten_diagnosis.layers]
    # A head can have the ranks 0 to `directions`.
    sums = [torch.zeros(heads, directions + 1, dtype=torch.float64) for heads, directions in shapes]

    def observe(index: int, observation: Observation) -> None:
        divergences = _divergences(observation, rewritten_diagnosis.layers[index], bases[index])
        sums[index] += divergences * observation.query.shape[0]

    shown = images_for(model, images, "images")
    if not len(shown):
        raise DataError("measure_divergence was given no image; give a few, e.g. splits.train.take(24).")
    observe_images(model, shown, observe, "measure_divergence", "measuring divergence", batch_size)
    layers = tuple(
        replace(layer, readings={**layer.readings, f"divergence_{metric}": total / len(shown)})
        for layer, total in zip(diagnosis.layers, sums, strict=True)
    )
    return replace(diagnosis, layers=layers)


def _divergences(observation: Observation, layer: LayerDiagnosis, basis: Basis) -> Float[Tensor, "heads ranks"]:
    """Returns one batch's KL divergence at every rank. The function adds one direction after another to the scores."""
    # The step from rank r to r + 1 adds one outer product to a head's scores. So the loop computes directions + 1
    # softmaxes, but no matrix products.
    dtype = torch.promote_types(observation.query.dtype, torch.float32)
    left, right = (table.to(observation.query.device, dtype) for table in (basis.left, basis.right))
    strength = layer.spectrum.strength.to(observation.query.device, dtype)
    # [directions, batch, heads, tokens]: the rows of one direction are contiguous.
    query = torch.einsum("bthd,hrd->rbht", observation.query.to(dtype), left)
    query = query * strength.T[:, None, :, None] * observation.scale
    key = torch.einsum("bthd,hrd->rbht", observation.key.to(dtype), right)
    attention = observation.attention.to(dtype)
    # KL(a || b) = sum a log a - sum a log b. The first term does not depend on the rank. [heads]
    negative_entropy = torch.xlogy(attention, attention).sum(-1).mean((0, 2))
    scores = torch.zeros_like(attention)
    divergences = [negative_entropy - (attention * torch.log_softmax(scores, -1)).sum(-1).mean((0, 2))]
    for rows, columns in zip(query, key, strict=True):
        scores.addcmul_(rows[..., None], columns[..., None, :])  # [batch, heads, queries, keys], in place
        divergences.append(negative_entropy - (attention * torch.log_softmax(scores, -1)).sum(-1).mean((0, 2)))
    # Rounding can make the difference of two entropies negative.
    return torch.stack(divergences, dim=-1).clamp_min(0).double().cpu()


def allocate_by_loss(loss: Float[Tensor, "units ranks"], total: int, *, multiple: int = 1, minimum: int = 0) -> Ranks:
    """Returns one rank per unit, so that the ranks sum to `total` and minimize the sum of `loss[unit, rank]`.

    This allocation is a multiple-choice knapsack problem. Dynamic programming over the total rank of the first units
    solves the problem exactly. A unit's loss need not fall with its rank, but the losses of different units must be
    additive, such as KL divergences in nats. `loss` has one column per rank, from 0 to the number of directions. If
    several allocations are optimal, the function prefers larger ranks in the first units.

    `multiple`, `minimum` and the errors are as in `water_fill`.

    Raises:
        InvalidInput: The multiple, the minimum or the total is not possible with this number of directions.
    """
    units, largest = loss.shape[0], loss.shape[1] - 1
    require_directions(largest, multiple, minimum)
    floor = -(-minimum // multiple)
    require_total(total, multiple, units * floor * multiple, units * largest)
    choices = loss.detach().cpu().double()[:, floor * multiple :: multiple]
    steps = _cheapest(choices.numpy(), total // multiple - units * floor)
    return tuple((step + floor) * multiple for step in steps)


def _cheapest(loss: np.ndarray, budget: int) -> list[int]:
    """Returns one number of steps per unit. They sum to `budget` and minimize the sum of `loss` [units, steps + 1]."""
    # best[b] is the smallest loss of the units so far with b steps in total. Each unit replaces it by the minimum of
    # best[b - t] + loss[t] over its steps t. The choices are stored, and then followed backwards from best[budget].
    widest = loss.shape[1] - 1
    best = np.full(budget + 1, np.inf)
    best[0] = 0.0
    best_steps = []
    for unit_loss in loss:
        # Column t of row b is the smallest loss if this unit takes t steps and the units before it take b - t. Among
        # equal values, numpy's argmin returns the first, but torch's may return any.
        padded = np.concatenate([np.full(widest, np.inf), best])
        sums = np.lib.stride_tricks.sliding_window_view(padded, widest + 1)[:, ::-1] + unit_loss
        best_steps.append(sums.argmin(1))
        best = sums.min(1)
    steps = []
    for unit_steps in reversed(best_steps):
        steps.append(int(unit_steps[budget]))
        budget -= steps[-1]
    return steps[::-1]
