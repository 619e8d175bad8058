"""DiffRate as a baseline: the number of patches of every layer is learned by gradient, for a target of MACs."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.costs import ModelCosts
from attnrx.data import ImageSet
from attnrx.errors import NotSupported
from attnrx.models import attach_tokens_, family_of
from attnrx.planning.budget import largest_share
from attnrx.shapes import Float, Tensor
from attnrx.tokens import DTPS, ClassAttention, Predicting, Shape, TokenPolicy, TokenState
from attnrx.tokens.reducer import KeepDrop
from attnrx_lab.baselines.searched import SearchedBaseline

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
        there = state.there
        relevance = state.class_attention[:, :, state.prefix :].mean(1).masked_fill(there == 0, -1.0)
        rank = relevance.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        logits = (predictor() * there.sum(1, keepdim=True).detach() - rank - 0.5) / SOFTNESS
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
        super().__init__(model)
        self.calibration, self.seed = calibration, seed
        self.family = family_of(model)
        self.layout = self.family.token_layout(model)
        self.depth = len(self.family.attention(model))
        if not self.layout.class_token or self.depth < 2:
            raise NotSupported("the baseline diffrate needs a class token and two layers or more.")

    @property
    def least(self) -> float:
        """The share of the MACs at which every stage keeps one patch."""
        fewest = self._policy([1 / self.layout.patches] * (self.depth - 1))
        return self._costs(fewest).macs / self._macs

    def searched(self, share: float) -> nn.Module:
        changed = copy.deepcopy(self.model)
        attach_tokens_(changed, self.family, self.policy(share))
        return changed

    def policy(self, share: float) -> TokenPolicy:
        """Returns the learned schedule whose MACs are at most this share of the model's."""
        return self._within(self._learned(share), share)

    def _policy(self, kept: list[float]) -> TokenPolicy:
        """Returns the policy of these shares of the image's patches, one per stage; at least one patch is kept."""
        least = 1 / self.layout.patches
        return TokenPolicy(DTPS(ClassAttention()), self._layers, tuple(max(own, least) for own in kept))

    @property
    def _layers(self) -> tuple[int, ...]:
        return tuple(range(2, self.depth + 1))

    def _costs(self, policy: TokenPolicy) -> ModelCosts:
        return self.family.costs(self.model, tokens=policy)

    def _within(self, kept: list[float], share: float) -> TokenPolicy:
        """Returns the schedule to the smallest power with which it costs at most this share of the MACs."""
        most = share * self._macs

        def at(part: float) -> TokenPolicy:
            return self._policy([own ** (1 / part - 1) for own in kept])

        part = largest_share(lambda part: self._costs(at(part)).macs <= most)
        if part is None:
            raise NotSupported(f"no schedule of the baseline diffrate costs {100 * share:.1f} % of the MACs.")
        return at(part)

    def _uniform(self, share: float) -> float | None:
        """Returns the share that every stage keeps of its patches in a uniform schedule of these MACs."""
        most = share * self._macs

        def policy(kept: float) -> TokenPolicy:
            return self._policy([kept**stage for stage in range(1, self.depth)])

        return largest_share(lambda kept: self._costs(policy(kept)).macs <= most)

    def _learned(self, share: float) -> list[float]:
        """Returns the learned share of the image's patches after every stage."""
        model, uniform = copy.deepcopy(self.model).eval().requires_grad_(False), self._uniform(share)
        if uniform is None:
            raise NotSupported(f"no schedule of the baseline diffrate costs {100 * share:.1f} % of the MACs.")
        shares = tuple(uniform**stage for stage in range(1, self.depth))
        searched = TokenPolicy(DTPS(RatedByAttention()), self._layers, shares)
        reduction = attach_tokens_(model, self.family, searched)
        reduction.train().requires_grad_()  # a reduction in training samples; the model itself does not train
        logits = [stage.get_parameter("logit") for stage in reduction.stages]
        start = torch.tensor(uniform).logit(eps=1e-3).item()
        for logit in logits:
            nn.init.constant_(logit, start)
        macs = differentiable_macs(self.model)
        optimizer = torch.optim.Adam(logits, lr=LEARNING_RATE)
        weight = next(self.model.parameters())
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self.seed)
            for step in range(STEPS):
                images = self._batch(step).to(weight)
                with torch.no_grad():
                    target = self.model.eval()(images).log_softmax(-1)
                divergence = F.kl_div(model(images).log_softmax(-1), target, log_target=True, reduction="batchmean")
                kept = torch.stack([logit.sigmoid() for logit in logits]).cumprod(0)
                cost = macs(self.layout.prefix + self.layout.patches * torch.cat([kept.new_ones(1), kept])) / self._macs
                optimizer.zero_grad()
                (divergence + COST_WEIGHT * (cost - share).square()).backward()
                optimizer.step()
        return torch.stack([logit.sigmoid() for logit in logits]).cumprod(0).tolist()

    def _batch(self, step: int) -> Tensor:
        """Returns the images of one step; the passes over the images are shuffled by the seed."""
        size = min(BATCH, len(self.calibration))
        passes = len(self.calibration) // size
        epoch, start = divmod(step, passes)
        return next(iter(self.calibration.batches(size, seed=self.seed + epoch, start=start))).images


def differentiable_macs(model: nn.Module) -> Callable[[Float[Tensor, "layers"]], Float[Tensor, ""]]:
    """Returns the MACs of the model as a function of the numbers of tokens of its layers.

    Those of a layer are a n + b n^2: the products of queries and keys, and of attention and values, are quadratic.
    """
    family = family_of(model)
    layers = family.costs(model).layers
    tokens = torch.tensor([float(layer.tokens) for layer in layers])
    square = torch.tensor([float(layer.scores.macs + layer.read_out.macs) for layer in layers]) / tokens.square()
    linear = torch.tensor([float(layer.total.macs) for layer in layers]) / tokens - square * tokens
    rest = family.costs(model).macs - sum(layer.total.macs for layer in layers)
    return lambda count: rest + (linear.to(count) * count + square.to(count) * count.square()).sum()
