"""A token reducer collects the statistics of attention that its variant reads, and no others."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnrx.vit.models import family_of, observing, token_run
from attnrx.vit.tokens import Reducer, TokenPolicy, TokenState
from attnrx_lab.tokens import AttentionAverage, Spot
from support.pretrained import inputs
from support.token_models import reduced

STAGES = (2, 4)


class MapOperations(TorchDispatchMode):
    """Counts the operations whose output is an attention map of all heads."""

    def __init__(self):
        super().__init__()
        self.maps: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(each, torch.Tensor):
                self.maps[str(func.overloadpacket)] += each.ndim == 4 and each.shape[-1] == each.shape[-2] > 4
        return output


def operations(reducer: Reducer) -> Counter[str]:
    """Counts one forward pass of a model of four layers."""
    model = reduced("deep", TokenPolicy.staged(reducer, 0.6, STAGES), "compress")
    counted, images = MapOperations(), inputs(model, 2)
    with torch.no_grad():
        model(images)
        with counted:
            model(images)
    return counted.maps


@pytest.mark.parametrize(
    ("reducer", "computed", "summed", "squared", "moved"),
    [
        (Spot(), 3, 2, 2, 4),
        (Spot(mean=False), 3, 2, 2, 4),
        (Spot(variance=False), 3, 2, 0, 2),
        (Spot(mean=False, variance=False), 2, 0, 0, 0),
        (AttentionAverage(), 0, 0, 0, 0),
    ],
)
def test_only_the_statistics_in_use_are_collected(
    reducer: Reducer, computed: int, summed: int, squared: int, moved: int
) -> None:
    """The maps of `computed` layers exist; `summed` of them are added to a sum and `squared` to one of squares.

    The sums that exist are moved at both stages.
    """
    found = operations(reducer)
    assert found["aten._softmax"] == computed
    assert found["aten.add"] + found["aten.add_"] == summed
    # Of one layer, before the first stage, the variance is zero and not computed.
    variances = 1 if isinstance(reducer, Spot) and reducer.variance else 0
    assert found["aten.addcmul"] + found["aten.addcmul_"] == squared + variances
    assert found["aten.gather"] == moved


def test_the_attention_average_orders_patches_by_the_sum_over_stored_maps() -> None:
    """Over all layers before a stage and over the heads, for the patches that are left."""
    model = reduced("deep", TokenPolicy.staged(AttentionAverage(), 0.6, STAGES), "compress")
    state, relevance = [], AttentionAverage.relevance

    def spy(self: AttentionAverage, given: TokenState, predictor: nn.Module) -> torch.Tensor:
        state.append(relevance(self, given, predictor))
        return state[-1]

    maps: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AttentionAverage, "relevance", spy)
        with observing(model, family_of(model), lambda _, each: maps.append(each.attention)):
            run = token_run(model, inputs(model))
    rows = [each[:, :, 0, 1:].mean(1) for each in maps]
    torch.testing.assert_close(state[0], rows[0])
    left = run.trail[0]
    torch.testing.assert_close(state[1], rows[0].gather(1, left) + rows[1] + rows[2])
