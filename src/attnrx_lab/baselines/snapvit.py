"""The baseline SnapViT, which ranks attention heads and hidden MLP units once, without labels, for all budgets."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.data.images import generator
from attnrx.decide.rules.prescribing import limited_to_heads
from attnrx.decide.rules.rule import keep_only
from attnrx.nouns.prescription import HeadDecision, HiddenDecision, LayerPrescription
from attnrx.support.shapes import Float, ImageBatch, Tensor
from attnrx_lab.baselines.compressor import PrescribedBaseline
from attnrx_lab.baselines.factoring import ATTENTION_MAPS, MLP_MAPS, linear_at, mean_squared_gradients

GRADIENT_IMAGES = 64
SMALLEST_CROP = 0.4  # as a share of the image's area
TEACHER, STUDENT = 0.04, 0.1  # temperatures (DINO: Caron et al., 2021)


@dataclass(frozen=True)
class Structure:
    """A removable attention head or hidden MLP unit, with its importance per parameter and its parameter count."""

    importance: float
    layer: int
    is_head: bool
    number: int
    params: int


class SnapVitBaseline(PrescribedBaseline):
    """Prunes by one ranking, without retraining (SnapViT, Simoncini et al., NeurIPS 2025, arXiv 2510.17700).

    The local curvature H is the squared gradient of a self-supervised loss (`self_supervised_loss`), averaged over
    images: H = mean |grad L_i|^2. The importance of a head or hidden unit is the sum of H theta^2 / 2 over its
    parameters theta. Near a minimum of the loss, removing the head or unit changes the loss by about this sum. The
    method removes the least important heads and units first, so one ranking serves every budget. The remaining weights
    are not adjusted.

    The paper also learns interactions between blocks by an evolutionary search, which this implementation omits. The
    implementation also differs from the paper, or adds details that the paper does not state, in the following points:

    - the importance is divided by the number of parameters, so that heads and units share one ranking
    - every MLP keeps at least one hidden unit
    - the loss compares the outputs of the model instead of projected features
    - the loss uses one crop of each of GRADIENT_IMAGES images
    """

    name = "snapvit"

    def layers(self, share: float, fitted: bool = True) -> list[LayerPrescription]:
        removed = self.removed(share)
        layers = []
        for index, layer in enumerate(self.diagnosis.layers):
            units, spectrum = layer.hidden, layer.spectrum
            assert units is not None
            importance = self.importance[index]
            heads, hidden = (torch.ones(len(each), dtype=torch.bool) for each in importance)
            for structure in (each for each in removed if each.layer == index):
                (heads if structure.is_head else hidden)[structure.number] = False
            decisions = {}
            head_decision = None
            if not bool(heads.all()):
                reason = f"keeps the {int(heads.sum())} heads with the largest sensitivity"
                head_decision = decisions["heads"] = HeadDecision(heads, importance[0], (reason,))
            decisions["qk"] = limited_to_heads(keep_only(spectrum, spectrum.used), head_decision)
            if not bool(hidden.all()):
                reason = f"keeps the {int(hidden.sum())} of {len(hidden)} hidden units with the largest sensitivity"
                weight = units.weight.double()[:, hidden]
                decisions["hidden"] = HiddenDecision(hidden, importance[1], weight, units.bias.double(), (reason,))
            layers.append(LayerPrescription(decisions))
        return layers

    def removed(self, share: float) -> list[Structure]:
        """Returns the least important structures, with at most `1 - share` of the prunable parameters in total."""
        allowed = (1 - share) * sum(each.params for each in self._ranking)
        structures, params = [], 0
        last = {(each.layer, each.is_head): each for each in self._ranking}  # each layer's most important, by kind
        for structure in self._ranking:
            if not structure.is_head and last[structure.layer, False] is structure:
                continue
            params += structure.params
            # Stop even if a later, smaller structure would fit, because every share removes a prefix of one ranking.
            if params > allowed:
                break
            structures.append(structure)
        return structures

    @cached_property
    def _ranking(self) -> list[Structure]:
        """All removable structures, in order of increasing importance per parameter."""
        structures = []
        for layer, (attention, parts) in enumerate(zip(self.attention, self.importance, strict=True)):
            width, inputs = attention.spec.width, self._linear(layer, "fc1").shape[1]
            # A head has rows of query, key and value, and columns of the output projection. Biases are not counted.
            head_params = [
                2 * width * (rows + value_dim)
                for rows, value_dim in zip(attention.spec.rows, attention.spec.value_dims, strict=True)
            ]
            params = (head_params, [2 * inputs] * len(parts[1]))  # a hidden unit has a row of fc1 and a column of fc2
            for is_head, importance, num_params in zip((True, False), parts, params, strict=True):
                pairs = enumerate(zip(importance.tolist(), num_params, strict=True))
                structures += [
                    Structure(value / count, layer, is_head, number, count) for number, (value, count) in pairs
                ]
        return sorted(structures, key=lambda each: (each.importance, each.layer, each.is_head, each.number))

    @cached_property
    def importance(self) -> list[tuple[Float[Tensor, "heads"], Float[Tensor, "units"]]]:
        """The sum of H theta^2 / 2 over the weights of each head and each hidden unit, by layer."""
        curvature = self._curvature
        importance = []
        for layer, attention in enumerate(self.attention):
            own = {
                name: curvature[layer, name] * self._linear(layer, name).detach().cpu().double().square() / 2
                for name in (*ATTENTION_MAPS, *MLP_MAPS)
            }
            # Each weight belongs to only one structure, so the sums over structures add up to the sum over weights.
            rows, value_dims = attention.spec.rows, attention.spec.value_dims
            parts = [own[name].sum(1).split(rows) for name in ("query", "key")]
            parts += [own["value"].sum(1).split(value_dims), own["output"].sum(0).split(value_dims)]
            heads = torch.stack([torch.stack([part.sum() for part in split]) for split in parts]).sum(0)
            importance.append((heads, own["fc1"].sum(1) + own["fc2"].sum(0)))
        return importance

    @cached_property
    def _curvature(self) -> dict[tuple[int, str], Tensor]:
        """The squared gradient of every weight, averaged over images."""
        places = [(layer, name) for layer in range(len(self.attention)) for name in (*ATTENTION_MAPS, *MLP_MAPS)]
        images = self.calibration.take(min(GRADIENT_IMAGES, len(self.calibration)))

        def loss(model: nn.Module, image: ImageBatch, number: int) -> Tensor:
            return self_supervised_loss(model(self.views_of(image, number)))

        return mean_squared_gradients(self.model, places, images, loss)

    def views_of(self, image: ImageBatch, number: int) -> ImageBatch:
        """Returns an image and a random crop of the image, resized to the same size."""
        # Every image has a separate generator, so that its crop does not depend on the images before it.
        draws = torch.rand(3, generator=generator(self.seed, number)).tolist()
        side = (SMALLEST_CROP + (1 - SMALLEST_CROP) * draws[0]) ** 0.5
        height, width = (round(side * length) for length in image.shape[2:])
        top, left = round(draws[1] * (image.shape[2] - height)), round(draws[2] * (image.shape[3] - width))
        crop = image[:, :, top : top + height, left : left + width]
        return torch.cat([image, F.interpolate(crop, image.shape[2:], mode="bilinear", antialias=True)])

    def _linear(self, layer: int, name: str) -> Tensor:
        return linear_at(self.model, (layer, name)).get_parameter("weight")


def self_supervised_loss(outputs: Float[Tensor, "2 features"]) -> Float[Tensor, ""]:
    """Returns the cross-entropy in nats between a model's outputs for an image and for a crop of the image.

    `outputs` contains the output for the image, then the output for the crop. Both outputs are divided by their norms.
    The image's output is the target, so it is sharpened by a low temperature and receives no gradient. The loss is
    DINO's (Caron et al., 2021). DINO's centering and moving-average teacher are omitted, because the teacher is fixed
    here.
    """
    whole, crop = F.normalize(outputs, dim=-1)
    return -((whole.detach() / TEACHER).softmax(-1) * (crop / STUDENT).log_softmax(-1)).sum()
