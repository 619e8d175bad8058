"""Costs of token pruning and merging in closed form, and the forward pass in which FLOPs can be counted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn

from attnrx.attention import AttentionCapture, CapturedAttention, Eager, using
from attnrx.costs import TokenCosts, token_costs
from attnrx.models.family import Family
from attnrx.models.token_hooks import reduction_of, require_all_tokens, shape_of
from attnrx.shapes import Tensor
from attnrx.spec import AttentionSpec
from attnrx.tokens import TokenPolicy


def costs_of_tokens(
    model: nn.Module, family: Family, policy: TokenPolicy | None, specs: Sequence[AttentionSpec], tokens: int
) -> TokenCosts:
    """Returns the token costs of `policy`, or else of the policy attached to the model, for layers with these specs.

    `tokens` is the number of tokens per layer without a policy.
    """
    attached = reduction_of(model)
    if policy is not None:
        require_all_tokens(model, "compute the costs of a policy on")
        return token_costs(policy, shape_of(model, family), specs)
    if attached is not None:
        return token_costs(attached.policy, attached.shape, specs, attached.by)
    return TokenCosts((tokens,) * len(specs))


@contextmanager
def counted_by_spec(model: nn.Module, family: Family) -> Iterator[None]:
    """Runs every layer on the eager backend, without padding, so that an operation counter finds the MACs of the specs.

    Token reducers receive uniform attention maps here: the logits are not those of the model, but the costs are,
    because they do not depend on which tokens are pruned.
    """
    layers = family.attention(model)
    handles = [
        layer.register_forward_hook(partial(_capture_uniform, layer.backend))
        for layer in layers
        if isinstance(layer.backend, AttentionCapture) and layer.backend.wanted
    ]
    try:
        with using(layers, [Eager()] * len(layers)):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _capture_uniform(capture: AttentionCapture, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    spec, (batch, count) = layer.spec, output.shape[:2]
    assert isinstance(spec, AttentionSpec)
    uniform = output.new_full((batch, len(spec.heads), count, count), 1 / count)
    keys = output.new_ones(batch, count, max((*spec.ranks, 1)))
    capture.show(CapturedAttention(uniform, uniform[:, :, 0], keys, uniform[:, :, 0]))
