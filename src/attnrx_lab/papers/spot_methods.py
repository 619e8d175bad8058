"""The methods of SPOT's tables: token policies, their fine-tuning, and their costs."""

from dataclasses import dataclass, replace
from statistics import fmean

from torch import nn

from attnrx.costs import IRRATT
from attnrx.errors import InvalidInput
from attnrx.models import family_of, shape_of
from attnrx.prescription import TokenPrescription
from attnrx.realization import realize_tokens_
from attnrx.tokens import Random, TokenPolicy, parse_policy

QUARTERS = (1, 2, 3)


@dataclass(frozen=True)
class TokenMethod:
    """One line of a table: a reducer as text with a keep ratio at three stages, or None if all tokens are kept.

    The stages are one layer after each quarter of the depth, as in the paper: 4, 7, 10 of 12 layers, 5, 9, 13 of 16.
    A method that is not `trained` is measured without fine-tuning.
    """

    name: str
    reducer: str | None = None
    ratio: float = 0.7
    trained: bool = True

    def __post_init__(self):
        if self.learned and not self.trained:  # an invalid text raises here
            raise InvalidInput(f"{self.name}: {self.reducer} has predictors that must be trained; leave trained=True.")

    @property
    def learned(self) -> bool:
        """Whether it has predictors."""
        policy = self.policy(4)
        return policy is not None and policy.reducer.learned

    def policy(self, depth: int, seed: int = 0) -> TokenPolicy | None:
        """Returns the policy for a model of this depth; random patches are drawn from the seed."""
        if self.reducer is None:
            return None
        stages = ",".join(str(depth * quarter // 4 + 1) for quarter in QUARTERS)
        policy = parse_policy(f"{self.reducer}:{self.ratio}@{stages}")
        return replace(policy, reducer=Random(seed)) if isinstance(policy.reducer, Random) else policy

    def policy_for(self, model: nn.Module, seed: int = 0) -> TokenPolicy | None:
        """The policy for a model."""
        return self.policy(len(family_of(model).attention(model)), seed)

    def attach_(self, model: nn.Module, seed: int) -> None:
        """Attaches the policy to the model, in place; new predictors are drawn from the seed."""
        policy = self.policy_for(model, seed)
        if policy is not None:
            family = family_of(model)
            requested = TokenPrescription.of(policy, seed=seed)
            realize_tokens_(model, family, requested, "compress", shape_of(model, family).heads)


def token_price(outline: nn.Module, method: TokenMethod) -> dict[str, float]:
    """Returns the costs for one image in the paper's convention, in closed form; needs shapes only.

    `gmacs`, which the paper prints as GFLOPS, counts every matrix product including the classifier's; `predictors` are
    the
    costs of the predictors, with a LayerNorm at five per feature. `percent` is the remaining share of the MACs,
    `patches_N`
    the patches after each stage, and `tokens` the mean over the layers.
    """
    family, policy = family_of(outline), method.policy_for(outline)
    before, after = family.costs(outline), family.costs(outline, tokens=policy)
    whole, left = (costs.macs + costs.classifier_macs for costs in (before, after))
    layout, depth = family.token_layout(outline), len(family.attention(outline))
    counts = (layout.patches,) * len(QUARTERS) if policy is None else policy.counts(layout.patches)
    tokens = (layout.tokens,) * depth if policy is None else policy.tokens(layout, depth)
    return {
        "gmacs": left / 1e9,
        "predictors": IRRATT.price(after).parts["predictors"].macs / 1e9,
        "percent": 100 * left / whole,
        "tokens": fmean(tokens),
        **{f"patches_{stage}": float(count) for stage, count in enumerate(counts, 1)},
    }
