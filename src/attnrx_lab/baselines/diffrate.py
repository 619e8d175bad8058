"""DiffRate as a baseline, which learns the number of patches in every layer by gradient descent for a MACs target."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.data import ImageSet
from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.costs import ModelCosts
from attnrx.vit.models import attach_tokens_, family_of
from attnrx.vit.tokens import ClassAttention, Shape, TokenPolicy, TokenState
from attnrx_lab.baselines.compressor import SearchedBaseline, largest_share
from attnrx_lab.tokens import DTPS, Predicting
from attnrx_lab.tokens.learned_scores import KeepDrop

STEPS, BATCH = 40, 8
LEARNING_RATE = 0.05
COST_WEIGHT = 100.0  # weight of (share of the MACs - target)^2, which is added to the KL divergence in nats
SOFTNESS = 4.0  # patches, the width of the boundary between kept and merged patches. Gradients flow through it.


class KeptShare(nn.Module):
    """The share of patches that a stage keeps, stored as a logit."""

    def __init__(self):
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(()))

    def forward(self) -> Float[Tensor, ""]:
        return self.logit.sigmoid()


@dataclass(frozen=True)
class RatedByAttention(Predicting):
    """Samples patches by their class attention. Each stage learns the share of patches that it keeps (`KeptShare`).

    The log-odds that a patch is kept are (share * patches - rank - 1/2) / SOFTNESS, where the most attended patch has
    rank 0. So a sample contains about share * patches patches. The share gets its gradients from the patches near the
    boundary between kept and pruned patches.
    """

    needs = ("class_attention",)

    def predictor(self, shape: Shape) -> nn.Module:
        return KeptShare()

    def keep_scores(self, state: TokenState, predictor: nn.Module) -> KeepDrop:
        assert state.class_attention is not None
        present_mask = state.present_mask
        # Attention is never negative, so -1 moves patches that an earlier stage removed to the end. The second argsort
        # inverts the permutation of the first, which gives the rank of every patch.
        relevance = state.class_attention[:, :, state.prefix :].mean(1).masked_fill(present_mask == 0, -1.0)
        rank = relevance.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        # Earlier stages decide how many patches are present, so this number is detached. A share then gets gradients
        # only from its own stage.
        logits = (predictor() * present_mask.sum(1, keepdim=True).detach() - rank - 0.5) / SOFTNESS
        return torch.stack([F.logsigmoid(logits), F.logsigmoid(-logits)], dim=-1)


class DiffRateBaseline(SearchedBaseline):
    """DiffRate (Chen et al., ICCV 2023) learns how many patches each layer keeps, with frozen weights.

    Adam learns one share per layer on unlabelled calibration images, starting from the uniform schedule that meets the
    target. The loss is the KL divergence from the original, plus COST_WEIGHT times the squared difference between the
    MACs and the target. The learned shares are then raised to a common power, so that the model meets the target. The
    result is an ordinary token policy that fuses the patches with the lowest class attention into the most similar
    other patches (`dtps` with class attention).

    The following choices are ours:

    - one rate per layer, instead of one for pruning and one for merging
    - fusion before a layer, instead of between attention and MLP
    - a logistic boundary with Gumbel noise (`RatedByAttention`), instead of probabilities over candidate rates with a
      straight-through mask
    - KL divergence instead of cross-entropy, so the method uses no labels
    - the number of steps, the learning rate and the loss weight (the paper trains for three epochs on ImageNet)
    """

    def __init__(self, model: nn.Module, calibration: ImageSet, seed: int = 0):
        super().__init__(model, calibration, seed)
        self.family = family_of(model)
        self.layout = self.family.token_layout(model)
        self.depth = len(self.family.attention(model))
        if not self.layout.class_token or self.depth < 2:
            raise NotSupported("the baseline diffrate needs a class token and two layers or more.")

    @property
    def least(self) -> float:
        """The share of the MACs at which every stage keeps one patch."""
        # Costs fall with the shares, and a policy keeps at least one patch.
        fewest = self._policy([1 / self.layout.patches] * (self.depth - 1))
        return self._costs(fewest).macs / self._macs

    def searched(self, share: float) -> nn.Module:
        changed = copy.deepcopy(self.model)
        attach_tokens_(changed, self.family, self.policy(share))
        return changed

    def policy(self, share: float) -> TokenPolicy:
        """Returns the learned schedule that has at most this share of the model's MACs.

        Raises:
            NotSupported: No schedule has so few MACs.
        """
        return self._within(self.learned_shares(share), share)

    def _policy(self, shares: list[float]) -> TokenPolicy:
        """Returns the policy in which stage i keeps `shares[i]` of the image's patches, but at least one patch."""
        least = 1 / self.layout.patches
        return TokenPolicy(DTPS(ClassAttention()), self._layers, tuple(max(share, least) for share in shares))

    @property
    def _layers(self) -> tuple[int, ...]:
        return tuple(range(2, self.depth + 1))

    def _costs(self, policy: TokenPolicy) -> ModelCosts:
        return self.family.costs(self.model, tokens=policy)

    def _within(self, shares: list[float], share: float) -> TokenPolicy:
        """Returns a policy with at most `share` of the model's MACs.

        Its stages keep the given `shares` after all of them are raised to the smallest power that meets this limit.
        """
        most = share * self._macs

        # The power 1 / part - 1 falls from infinity to 0 as `part` rises to 1. So costs rise with `part`, as
        # `largest_share` requires. A common power keeps the order of the stages, and does not change a share of 1.
        def at(part: float) -> TokenPolicy:
            return self._policy([kept_share ** (1 / part - 1) for kept_share in shares])

        part = largest_share(lambda part: self._costs(at(part)).macs <= most)
        if part is None:
            raise _unreachable(share)
        return at(part)

    def uniform_ratio(self, share: float) -> float | None:
        """Returns the largest keep ratio per stage that needs at most this share of the MACs, or None if none does."""
        most = share * self._macs

        def policy(ratio: float) -> TokenPolicy:
            return self._policy([ratio**stage for stage in range(1, self.depth)])

        return largest_share(lambda ratio: self._costs(policy(ratio)).macs <= most)

    def learned_shares(self, share: float) -> list[float]:
        """Learns and returns the share of the image's patches that remains after every stage.

        Raises:
            NotSupported: No schedule has so few MACs.
        """
        model, uniform = copy.deepcopy(self.model).eval().requires_grad_(False), self.uniform_ratio(share)
        if uniform is None:
            raise _unreachable(share)
        # `_policy` raises shares to at least one patch, because otherwise a late stage could keep less than one.
        shares = self._policy([uniform**stage for stage in range(1, self.depth)]).keep
        searched = TokenPolicy(DTPS(RatedByAttention()), self._layers, shares)
        reduction = attach_tokens_(model, self.family, searched)
        reduction.train().requires_grad_()  # a reduction samples in training mode, but the model is not trained
        logits = [stage.get_parameter("logit") for stage in reduction.stages]
        start = torch.tensor(uniform).logit(eps=1e-3).item()  # the logit of 1 is infinite
        for logit in logits:
            nn.init.constant_(logit, start)
        macs = differentiable_macs(self.model)
        optimizer = torch.optim.Adam(logits, lr=LEARNING_RATE)
        # The samples are drawn from the global generator, whose state is restored for the caller.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self.seed)
            for step in range(STEPS):
                images = self.images_of_step(step, BATCH)
                with torch.no_grad():
                    target = self.model.eval()(images).log_softmax(-1)
                divergence = F.kl_div(model(images).log_softmax(-1), target, log_target=True, reduction="batchmean")
                remaining = torch.stack([logit.sigmoid() for logit in logits]).cumprod(0)
                # The cost uses expected instead of sampled numbers of tokens, so it has no noise. The first layer
                # always has all tokens.
                patches = self.layout.patches * torch.cat([remaining.new_ones(1), remaining])
                cost = macs(self.layout.prefix + patches) / self._macs
                optimizer.zero_grad()
                (divergence + COST_WEIGHT * (cost - share).square()).backward()
                optimizer.step()
        return torch.stack([logit.sigmoid() for logit in logits]).cumprod(0).tolist()


def _unreachable(share: float) -> NotSupported:
    return NotSupported(f"no schedule of the baseline diffrate costs {100 * share:.1f} % of the MACs.")


def differentiable_macs(model: nn.Module) -> Callable[[Float[Tensor, "layers"]], Float[Tensor, ""]]:
    """Returns the MACs of the model as a function of the number of tokens in each layer.

    A layer with n tokens costs a n + b n^2. The quadratic part consists of the products of queries and keys, and of
    attention and values.
    """
    family = family_of(model)
    costs = family.costs(model)
    layers = costs.layers
    tokens = torch.tensor([float(layer.tokens) for layer in layers])
    # a and b follow from the costs at the model's own number of tokens. Without a policy all layers have this number.
    square = torch.tensor([float(layer.scores.macs + layer.read_out.macs) for layer in layers]) / tokens.square()
    linear = torch.tensor([float(layer.total.macs) for layer in layers]) / tokens - square * tokens
    rest = costs.macs - sum(layer.total.macs for layer in layers)
    return lambda count: rest + (linear.to(count) * count + square.to(count) * count.square()).sum()
