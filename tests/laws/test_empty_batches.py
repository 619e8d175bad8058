"""A batch without images has outputs without rows, as in the libraries."""

import copy

import pytest
import torch

from attnrx.vit.models import attach_tokens_, family_of
from attnrx.vit.tokens import parse_policy
from support import cases
from support.pretrained import adopted_once

POLICIES = (None, "ward:0.5@2", "tome:0.5@2", "pitome:0.5@2", "attention_received:0.5@2")


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("by", ["compress", "mask"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["own", "vit"])
def test_an_empty_batch_has_no_outputs(name: str, policy: str | None, by: str, with_gradients: bool) -> None:
    model = cases.model(cases.CONFIGS["dense"]) if name == "own" else copy.deepcopy(adopted_once(name)[2])
    family = family_of(model)
    if policy is not None:
        attach_tokens_(model, family, parse_policy(policy), by)
    shape = family.input_shape(model)
    with torch.set_grad_enabled(with_gradients):
        one, none = model.eval()(torch.zeros(1, *shape)), model(torch.zeros(0, *shape))
    assert none.shape == (0, *one.shape[1:]) and none.dtype == one.dtype
    assert not with_gradients or none.requires_grad
