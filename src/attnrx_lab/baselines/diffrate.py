"""DiffRate as a baseline: the number of patches of every layer is learned by gradient, for a target of MACs."""

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
COST_WEIGHT = 100.0  # of the squared distance to the target, as a share of the model's MACs, beside KL in nats
SOFTNESS = 4.0  # patches: the width of the boundary between kept and merged patches, through which gradients flow


class KeptShare(nn.Module):
    """The share of its patches that a stage keeps, as a logit."""

    def __init__(self):
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(()))

    def forward(self) -> Float[Tensor, ""]:
        return self.logit.sigmoid()


@dataclass(frozen=True)
class RatedByAttention(Predicting):
    """Samples for every stage the patches of the highest class attention, as many as its parameter `KeptShare` states.

    The log-odds of keep are (share * patches - rank - 1/2) / SOFTNESS, rank 0 being the most attended patch: a sample
    has about share * patches patches, and the gradient of the loss reaches the share through those at the boundary.
    """

    needs = ("class_attention",)

    def predictor(self, shape: Shape) -> nn.Module:
        return KeptShare()

    def keep_scores(self, state: TokenState, predictor: nn.Module) -> KeepDrop:
        assert state.class_attention is not None
        present_mask = state.present_mask
        # Attention is not negative, so patches that an earlier stage removed come last. The second argsort inverts the
        # permutation of the first: the rank of every patch.
        relevance = state.class_attention[:, :, state.prefix :].mean(1).masked_fill(present_mask == 0, -1.0)
        rank = relevance.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        # Detached, because the samples of earlier stages decide how many patches there are: a share learns from its own
        # stage only.
        logits = (predictor() * present_mask.sum(1, keepdim=True).detach() - rank - 0.5) / SOFTNESS
        return torch.stack([F.logsigmoid(logits), F.logsigmoid(-logits)], dim=-1)


class DiffRateBaseline(SearchedBaseline):
    """DiffRate (Chen et al., ICCV 2023): a schedule of patches for all layers, learned with frozen weights.

    One share per layer is learned on unlabelled calibration images by Adam, from a uniform schedule of the target's
    MACs: the KL divergence from the original plus COST_WEIGHT times the squared distance of the MACs from the target.
    The schedule is then brought to the target by one common power, and realized as an ordinary token policy: the
    patches of the lowest class attention are fused into the most similar others (`dtps` with class attention).

    Ours are: one rate per layer instead of one for pruning and one for merging; fusion before a layer instead of
    between attention and MLP; a logistic boundary with Gumbel noise (`RatedByAttention`) instead of the paper's
    probabilities of candidate rates with a straight-through mask; divergence instead of cross-entropy, so that no
    labels are used; and the steps, rates and weights above (the paper trains three epochs of ImageNet).
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
        """Returns the learned schedule whose MACs are at most this share of the model's.

        Raises:
            NotSupported: No schedule has these MACs.
        """
        return self._within(self.learned_shares(share), share)

    def _policy(self, shares: list[float]) -> TokenPolicy:
        """Returns the policy of these shares of the image's patches, one per stage; at least one patch is kept."""
        least = 1 / self.layout.patches
        return TokenPolicy(DTPS(ClassAttention()), self._layers, tuple(max(share, least) for share in shares))

    @property
    def _layers(self) -> tuple[int, ...]:
        return tuple(range(2, self.depth + 1))

    def _costs(self, policy: TokenPolicy) -> ModelCosts:
        return self.family.costs(self.model, tokens=policy)

    def _within(self, shares: list[float], share: float) -> TokenPolicy:
        """Returns the schedule to the smallest power with which it costs at most this share of the MACs."""
        most = share * self._macs

        # The power 1 / part - 1 falls from infinity to 0 as `part` rises to 1, so costs rise with `part`, as
        # `largest_share` needs. A common power keeps the order of the stages, and a share of 1.
        def at(part: float) -> TokenPolicy:
            return self._policy([kept_share ** (1 / part - 1) for kept_share in shares])

        part = largest_share(lambda part: self._costs(at(part)).macs <= most)
        if part is None:
            raise _unreachable(share)
        return at(part)

    def uniform_ratio(self, share: float) -> float | None:
        """Returns the share that every stage keeps of its patches in a uniform schedule of these MACs."""
        most = share * self._macs

        def policy(ratio: float) -> TokenPolicy:
            return self._policy([ratio**stage for stage in range(1, self.depth)])

        return largest_share(lambda ratio: self._costs(policy(ratio)).macs <= most)

    def learned_shares(self, share: float) -> list[float]:
        """Returns the learned share of the image's patches after every stage.

        Raises:
            NotSupported: No schedule has these MACs.
        """
        model, uniform = copy.deepcopy(self.model).eval().requires_grad_(False), self.uniform_ratio(share)
        if uniform is None:
            raise _unreachable(share)
        # With the least shares of `_policy`: a late stage of a reachable schedule may be left with less than one patch.
        shares = self._policy([uniform**stage for stage in range(1, self.depth)]).keep
        searched = TokenPolicy(DTPS(RatedByAttention()), self._layers, shares)
        reduction = attach_tokens_(model, self.family, searched)
        reduction.train().requires_grad_()  # a reduction in training samples; the model itself does not train
        logits = [stage.get_parameter("logit") for stage in reduction.stages]
        start = torch.tensor(uniform).logit(eps=1e-3).item()  # the logit of 1 is infinite
        for logit in logits:
            nn.init.constant_(logit, start)
        macs = differentiable_macs(self.model)
        optimizer = torch.optim.Adam(logits, lr=LEARNING_RATE)
        # The samples draw from the global generator, whose state is restored for the caller.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self.seed)
            for step in range(STEPS):
                images = self.images_of_step(step, BATCH)
                with torch.no_grad():
                    target = self.model.eval()(images).log_softmax(-1)
                divergence = F.kl_div(model(images).log_softmax(-1), target, log_target=True, reduction="batchmean")
                remaining = torch.stack([logit.sigmoid() for logit in logits]).cumprod(0)
                # The expected numbers of tokens, not the sampled ones, so that the cost has no noise. The first layer
                # has all of them.
                patches = self.layout.patches * torch.cat([remaining.new_ones(1), remaining])
                cost = macs(self.layout.prefix + patches) / self._macs
                optimizer.zero_grad()
                (divergence + COST_WEIGHT * (cost - share).square()).backward()
                optimizer.step()
        return torch.stack([logit.sigmoid() for logit in logits]).cumprod(0).tolist()


def _unreachable(share: float) -> NotSupported:
    return NotSupported(f"no schedule of the baseline diffrate costs {100 * share:.1f} % of the MACs.")


def differentiable_macs(model: nn.Module) -> Callable[[Float[Tensor, "layers"]], Float[Tensor, ""]]:
    """Returns the MACs of the model as a function of the numbers of tokens of its layers.

    Those of a layer are a n + b n^2: the products of queries and keys, and of attention and values, are quadratic.
    """
    family = family_of(model)
    costs = family.costs(model)
    layers = costs.layers
    tokens = torch.tensor([float(layer.tokens) for layer in layers])
    # Solved from the costs at the model's own numbers of tokens, which are those of all layers without a policy.
    square = torch.tensor([float(layer.scores.macs + layer.read_out.macs) for layer in layers]) / tokens.square()
    linear = torch.tensor([float(layer.total.macs) for layer in layers]) / tokens - square * tokens
    rest = costs.macs - sum(layer.total.macs for layer in layers)
    return lambda count: rest + (linear.to(count) * count + square.to(count) * count.square()).sum()
