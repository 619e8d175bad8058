"""WDPruning as a baseline: gates and weights are trained together, then pruned and fine-tuned."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.change.realization import realize
from attnrx.data import ImageSet
from attnrx_lab.baselines.gates import GatedModel, least_gated_share, prescribe_gates
from attnrx_lab.baselines.searched import SearchedBaseline

STEPS, BATCH = 100, 32  # of the gates, and again of the fine-tuning
LEARNING_RATE = 3e-4  # of the weights
GATE_RATE = 0.02  # of the scores, which are ranks in (0, 1)
BUDGET_WEIGHT = 100.0  # of the distance from a share of the MACs, beside KL in nats


class GatedBaseline(SearchedBaseline):
    """Trains the gates of WDPruning for a share of the MACs (`UnitGates`), prunes and fine-tunes.

    Weights and gates are trained by Adam for STEPS steps, the gates are read into a prescription
    (`prescribe_gates`), and the smaller model is fine-tuned for as many steps. Ours are: the divergence
    KL(original || model) instead of cross-entropy and distillation, so that no labels are used; the numbers of steps
    (the paper trains for tens of epochs); all rates and weights.
    """

    def __init__(self, model: nn.Module, calibration: ImageSet, seed: int = 0):
        super().__init__(model, calibration, seed)
        GatedModel(model)  # raises for models without units to gate

    @property
    def least(self) -> float:
        return least_gated_share(self.model)

    def searched(self, share: float) -> nn.Module:
        gated = GatedModel(copy.deepcopy(self.model))
        groups = [
            {"params": list(gated.model.parameters())},
            {"params": list(gated.gates.parameters()), "lr": GATE_RATE},
        ]
        self._train_(gated, groups, share)
        small = realize(gated.model, prescribe_gates(gated.model, gated.gates.margins(), share))
        self._train_(small, [{"params": list(small.parameters())}])
        return small.eval()

    def _train_(self, model: nn.Module, groups: list[dict], macs: float | None = None) -> None:
        """Trains by the divergence from the original, and by the budget of the gates, on the calibration images."""
        optimizer = torch.optim.Adam(groups, lr=LEARNING_RATE)
        model.train()
        reference = self.model.eval()
        with torch.enable_grad():
            for step in range(STEPS):
                images = self.images_of_step(step, BATCH)
                with torch.no_grad():
                    target = reference(images).log_softmax(-1)
                logits = model(images)
                loss = F.kl_div(logits.log_softmax(-1), target, log_target=True, reduction="batchmean")
                if macs is not None:
                    assert isinstance(model, GatedModel)
                    loss = loss + BUDGET_WEIGHT * model.budget(macs)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
