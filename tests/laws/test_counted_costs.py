"""The MACs of every adopted model equal a count on its own module, however that calls its parts, before and after."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.support.errors import NotSupported
from attnrx.support.modules import random_images
from attnrx.vit.costs import count_product_macs
from attnrx.vit.models import family_of, library_form
from attnrx.vit.models.observation_hooks import counted_by_spec
from attnrx.vit.tokens import TokenPolicy, ToMe
from support import pretrained, users_models
from support.token_models import original, reduced
from support.users_models import CLASSES, WIDTH, Around

pytestmark = pytest.mark.filterwarnings("ignore")
GROUPED = "sapiens2, grouped heads"  # counted with the keys and values of all heads, which attnrx attention computes


def require_counted(model: nn.Module, module: nn.Module | None = None) -> None:
    """Compares the costs of a model with a count on this module, by default the library's own."""
    images, module = random_images(model, family_of(model).input_shape(model), 1), module or library_model(model)
    with counted_by_spec(model, family_of(model)):
        counted = count_product_macs(module, images)
    assert family_of(model).costs(model).product_macs == counted


def library_model(model: nn.Module) -> nn.Module:
    return family_of(model).library_model(model).to(next(model.parameters())).eval()


@pytest.mark.parametrize("name", [name for name in pretrained.CASES if name != GROUPED])
def test_the_closed_form_of_a_library_s_model_is_the_count_of_it(name: str) -> None:
    require_counted(pretrained.adopted_once(name)[2])


@pytest.mark.parametrize("name", ["vit, attention pooling", "hf siglip tower", "open_clip, attention pooling"])
def test_a_pooling_by_attention_costs_the_tokens_that_are_left(name: str) -> None:
    small = reduced(name, TokenPolicy(ToMe(), (2,), (0.5,)), "compress")
    assert family_of(small).costs(small).product_macs < family_of(small).costs(original(name)).product_macs
    require_counted(small, library_form(small))


@pytest.mark.parametrize("name", [name for name, case in users_models.CASES.items() if not case.is_slow])
def test_the_closed_form_of_a_user_s_model_is_the_count_of_it(name: str) -> None:
    require_counted(rx.load(users_models.made(name)))


# modules that call a Vision Transformer in their own way


def tokens_of(module: Any, images: Tensor) -> Tensor:
    return module.net._pos_embed(module.net.patch_embed(images))


def tokens_behind(module: Any, images: Tensor) -> Tensor:
    tokens = tokens_of(module, images)
    return module.net.norm(module.net.blocks(torch.cat([tokens, tokens[:, :5]], 1)))[:, -5:]


def prompts_in_every_block(module: Any, images: Tensor) -> Tensor:
    tokens = tokens_of(module, images)
    for index, block in enumerate(module.net.blocks):
        tokens = block(torch.cat([tokens, module.prompts[index].expand(len(images), -1, -1)], 1))
    return module.head(module.net.norm(tokens)[:, 0])


def windows(module: Any, images: Tensor) -> Tensor:
    tokens = tokens_of(module, images)[:, 1:]
    for index, block in enumerate(module.net.blocks):
        parts = tokens.reshape(len(images), 2, 2, 2, 2, WIDTH).transpose(2, 3)  # 2 x 2 windows of 2 x 2 patches
        if index % 2 == 0:
            parts = block(parts.reshape(-1, 4, WIDTH)).view_as(parts)
        tokens = parts.transpose(2, 3).reshape_as(tokens)
        if index % 2:
            tokens = block(tokens)
    return module.head(module.net.norm(tokens).mean(1))


def crops_of_two_sizes(module: Any, images: Tensor) -> Tensor:
    return module.head(module.net(images) + module.net(images[..., :16, :16]))


def blocks_called_twice(module: Any, images: Tensor) -> Tensor:
    tokens = tokens_of(module, images)
    for block in module.net.blocks:
        tokens = block(block(tokens))
    return module.head(module.net.norm(tokens)[:, 0])


def without_its_head(module: Any, images: Tensor) -> Tensor:
    return module.head(module.net.forward_features(images)[:, 0])


def its_head_on_all_patches(module: Any, images: Tensor) -> Tensor:
    return module.net.head(module.net.forward_features(images)[:, 1:])


def its_pooler_twice(module: Any, images: Tensor) -> Tensor:
    return module.net(images) + module.net(images.flip(-1))


CALLS: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any]]] = {
    "tokens behind the patches": (tokens_behind, {}),
    "prompts": (prompts_in_every_block, {}),
    "windows": (windows, {}),
    "crops": (crops_of_two_sizes, {"dynamic_img_size": True}),
    "blocks twice": (blocks_called_twice, {}),
    "no head": (without_its_head, {"num_classes": CLASSES}),
    "dense head": (its_head_on_all_patches, {"num_classes": CLASSES}),
    "pooler": (its_pooler_twice, {"num_classes": CLASSES, "global_pool": "map", "class_token": False}),
}


def called(name: str) -> Around:
    run, options = CALLS[name]
    torch.manual_seed(0)
    model = Around(run, **options).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("name", CALLS)
def test_costs_follow_the_calls_of_a_module(name: str, tmp_path: Path) -> None:
    model = rx.load(called(name))
    require_counted(model)
    text = "qk=total_rank:0.5 vo=total_rank:0.5 hidden=total_rank:0.5"
    small = rx.realize(model, rx.prescribe(rx.diagnose(model, random_images(model, (3, 32, 32), 4)), text))
    require_counted(small, small)
    rx.save(small, tmp_path / "small")
    loaded = rx.load(tmp_path / "small", factory=lambda: called(name))
    assert family_of(loaded).costs(loaded) == family_of(small).costs(small)


@pytest.mark.parametrize("name", ["tokens behind the patches", "prompts", "windows", "crops"])
def test_tokens_are_pruned_only_where_sequences_are_those_of_an_image(name: str) -> None:
    model = rx.load(called(name))
    with pytest.raises(NotSupported, match="gives its blocks sequences of"):
        family_of(model).token_layout(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompts", "windows", "crops", "blocks twice"])
@pytest.mark.usefixtures("single_precision")
def test_such_modules_are_planned_and_fitted(name: str) -> None:
    result = rx.shrink(called(name).float(), torch.randn(48, 3, 32, 32), macs=0.7, log=lambda _: None)
    counts = [finding for finding in result.evidence.findings if "closed form" in finding.claim]
    assert counts and all(finding.value == 0 for finding in counts)
