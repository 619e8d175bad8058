"""Small models that prune or merge tokens, and the state of tokens inside one."""

import copy

import torch
from torch import nn

from attnrx.vit.models import attach_tokens_, family_of
from attnrx.vit.tokens import Reducer, TokenPolicy, TokenState
from support import cases
from support.pretrained import adopted_once, deep

# One reducer of each class; the others differ in their knobs.
KINDS = list({type(reducer): kind for kind, reducer in reversed(cases.REDUCTIONS.items())}.values())


def original(name: str) -> nn.Module:
    if name == "deep":
        return copy.deepcopy(deep())
    return copy.deepcopy(cases.own(cases.OWN[name]) if name in cases.OWN else adopted_once(name)[2])


def reduced(name: str, policy: TokenPolicy, by: str) -> nn.Module:
    model = original(name)
    reduction = attach_tokens_(model, family_of(model), policy, by)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in reduction.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()


def fits(name: str, reducer: Reducer) -> bool:
    model = original(name)
    return "class_attention" not in reducer.needs or family_of(model).token_layout(model).class_token


def drawn(images: int, patches: int, sized: bool) -> TokenState:
    """Tokens whose rows are parts of longer ones, as a view of a projection has them."""
    generator = torch.Generator().manual_seed(patches)
    tokens = torch.randn(images, patches + 1, 75, generator=generator, dtype=torch.float32)[..., :70]
    keys = torch.randn(images, patches + 1, 19, generator=generator, dtype=torch.float32)
    sizes = torch.randint(1, 5 if sized else 2, tokens.shape[:2], generator=generator).float()
    attention = torch.rand(images, 3, patches + 1, generator=generator, dtype=torch.float32) * sizes[:, None]
    indices = torch.arange(patches).expand(images, -1)
    return TokenState(tokens, 1, sizes, indices, class_attention=attention, keys=keys, unmasked=True)
