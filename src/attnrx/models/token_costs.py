"""The price of tokens that leave a model, or that would: in closed form, and what counting it needs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn

from attnrx.attention import AttentionCapture, CapturedAttention, Eager, using
from attnrx.costs import TokenCosts, token_costs
from attnrx.models.family import Family
from attnrx.models.token_reduction import reduction_of, require_all_tokens, shape_of
from attnrx.shapes import Tensor
from attnrx.spec import AttentionSpec
from attnrx.tokens import TokenPolicy


def priced_tokens(
    model: nn.Module, family: Family, policy: TokenPolicy | None, specs: Sequence[AttentionSpec], tokens: int
) -> TokenCosts:
    """Prices a policy on a model with these layers: this one if it is given, else the one that the model carries.

    `tokens` are those of every layer where all stay.
    """
    at_work = reduction_of(model)
    if policy is not None:
        require_all_tokens(model, "price a policy on")
        return token_costs(policy, shape_of(model, family), specs)
    if at_work is not None:
        return token_costs(at_work.policy, at_work.shape, specs, at_work.by)
    return TokenCosts((tokens,) * len(specs))


@contextmanager
def unfused(model: nn.Module, family: Family) -> Iterator[None]:
    """Runs every layer on the eager backend, which pads nothing, so that what is counted is what the specs ask for.

    Where tokens leave, reducers are shown maps in which every token attends to all alike: the answers are then not
    those of the model, but its costs are, as they do not depend on which tokens leave.
    """
    layers = family.attention(model)
    handles = [
        layer.register_forward_hook(partial(_show_even, layer.backend))
        for layer in layers
        if isinstance(layer.backend, AttentionCapture) and layer.backend.wanted
    ]
    try:
        with using(layers, [Eager()] * len(layers)):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _show_even(capture: AttentionCapture, layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
    spec, (batch, count) = layer.spec, output.shape[:2]
    assert isinstance(spec, AttentionSpec)
    even = output.new_full((batch, len(spec.heads), count, count), 1 / count)
    keys = output.new_ones(batch, count, max((*spec.ranks, 1)))
    capture.show(CapturedAttention(even, even[:, :, 0], keys, even[:, :, 0]))
