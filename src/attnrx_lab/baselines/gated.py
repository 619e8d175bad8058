"""VTP, WDPruning and UVC as baselines: gates and weights are trained together, then pruned and fine-tuned."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.change.realization import realize
from attnrx.data import ImageSet
from attnrx.training.losses import Loss, LossContext
from attnrx_lab.baselines.gates import UVC, VTP, WDPRUNING, GateBudget, GatedModel, least_gated_share, prescribe_gates
from attnrx_lab.baselines.searched import SearchedBaseline

STEPS, BATCH = 100, 32  # of the gates, and again of the fine-tuning
LEARNING_RATE = 3e-4  # of the weights
# Of the scores, whose scales differ: gates from 1, ranks in (0, 1), logits of gates.
GATE_RATE = {VTP: 0.01, WDPRUNING: 0.02, UVC: 0.1}
# The term of VTP is a sum over all units; the others are of a share of the MACs, beside KL in nats.
BUDGET_WEIGHT = {VTP: 1e-4, WDPRUNING: 100.0, UVC: 1.0}


class GatedBaseline(SearchedBaseline):
    """Trains the gates of one method for a share of the MACs (`UnitGates`, `GateBudget`), prunes and fine-tunes.

    Weights and gates are trained by Adam for STEPS steps, the gates are folded into the weights and read into a
    prescription (`prescribe_gates`), and the smaller model is fine-tuned for as many steps. Ours are: the divergence
    KL(original || model) instead of cross-entropy and distillation, so that no labels are used; the numbers of steps
    (the papers train for tens or hundreds of epochs); all rates and weights.
    """

    def __init__(self, model: nn.Module, kind: str, calibration: ImageSet, seed: int = 0):
        super().__init__(model, calibration, seed)
        self.kind = kind
        GatedModel(model, kind)  # raises for models without units to gate

    @property
    def least(self) -> float:
        return least_gated_share(self.model)

    def searched(self, share: float) -> nn.Module:
        gated = GatedModel(copy.deepcopy(self.model), self.kind)
        gates, weights = list(gated.gates.parameters()), list(gated.model.parameters())
        groups = [{"params": weights}, {"params": gates, "lr": GATE_RATE[self.kind]}]
        self._train_(gated, groups, GateBudget(share, BUDGET_WEIGHT[self.kind]))
        # The soft gates of the kept units stay in the weights, so the pruned model starts from what was trained.
        folded = gated.fold_()
        small = realize(folded, prescribe_gates(folded, gated.gates.importance(), share))
        self._train_(small, [{"params": list(small.parameters())}], None)
        return small.eval()

    def _train_(self, model: nn.Module, groups: list[dict], budget: Loss | None) -> None:
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
                if budget is not None:
                    labels = torch.zeros(len(images), dtype=torch.long)  # not read
                    loss = loss + budget.weight * budget(LossContext(model, images, labels, logits, self.seed))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
