"""Code that users, loggers, compilers and adapters add to a model: carried along where it is right, else refused."""

import copy
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import attnrx
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.vit.models import model_fingerprint
from support.pretrained import VIT, of_hf, of_timm

IMAGES = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
GLOBAL: Any = None
pytestmark = pytest.mark.filterwarnings("ignore::attnrx.support.errors.ScaleWarning")


def closure(model: Any) -> str:
    """As a logger or an adapter replaces `forward`."""
    part = model.blocks[0].mlp.fc1
    forward = part.forward
    part.forward = lambda tokens: forward(tokens)
    return "blocks.0.mlp.fc1"


def global_variable(model: Any) -> str:
    """As in a notebook."""
    global GLOBAL
    GLOBAL = model
    model.blocks[0].norm1.forward = lambda tokens: nn.LayerNorm.forward(GLOBAL.blocks[0].norm1, tokens)
    return "blocks.0.norm1"


def compiled_forward(model: Any) -> str:
    model.blocks[0].mlp.forward = torch.compile(model.blocks[0].mlp.forward)
    return "blocks.0.mlp"


def compiled_part(model: Any) -> str:
    model.blocks[0].mlp.act = torch.compile(model.blocks[0].mlp.act)
    return "blocks.0.mlp.act was compiled"


def hook(model: Any) -> str:
    norm = model.blocks[1].norm1
    model.blocks[0].register_forward_hook(lambda module, args, output: norm(output))
    return "a hook .* of blocks.0"


SHARED = (closure, global_variable, compiled_forward, compiled_part, hook)


@pytest.mark.parametrize("change", SHARED, ids=lambda change: change.__name__)
def test_functions_that_a_copy_would_share_are_refused_by_name(change: Callable[[Any], str]) -> None:
    model = of_timm(VIT)
    expected = change(model)
    with pytest.raises(NotSupported, match=expected):
        attnrx.load(model)


def own_bound_method(model: Any) -> None:
    model.blocks[0].mlp.fc1.forward = model.blocks[0].mlp.fc1.forward


def partial_function(model: Any) -> None:
    """As accelerate replaces `forward`."""
    part = model.blocks[0].norm1
    part.forward = functools.update_wrapper(functools.partial(nn.LayerNorm.forward, part), part.forward)


def compiled_in_place(model: Any) -> None:
    model.blocks[0].compile()


def logger(model: Any) -> None:
    shapes: list[torch.Size] = []
    model.blocks[0].register_forward_hook(lambda module, args, output: shapes.append(output.shape))


def kept_activation(model: Any) -> None:
    model.blocks[0].kept = model.patch_embed(IMAGES)
    model.history = {"all": [model.blocks[0].kept]}


CARRIED = (
    own_bound_method, partial_function, logger, kept_activation,
    pytest.param(compiled_in_place, marks=pytest.mark.slow),
)  # fmt: skip


@pytest.mark.parametrize("change", CARRIED, ids=lambda change: getattr(change, "__name__", None))
def test_a_copy_is_equal_and_shares_nothing(change: Callable[[Any], None], tmp_path: Path) -> None:
    model = of_timm(VIT)
    change(model)
    adopted = attnrx.load(model)
    with torch.no_grad():
        expected = model.eval()(IMAGES)
        torch.testing.assert_close(adopted.eval()(IMAGES), expected)
        if change is not compiled_in_place:  # which a copy is not
            assert str(model) == str(model.eval())
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.mul_(1.5)
        torch.testing.assert_close(adopted(IMAGES), expected)
        # Every later step copies it again, and a saved one is an ordinary model.
        torch.testing.assert_close(copy.deepcopy(adopted)(IMAGES), expected)
        attnrx.save(adopted, tmp_path / "saved")
        torch.testing.assert_close(attnrx.load(tmp_path / "saved")(IMAGES), expected)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.blocks[0].mlp.fc1, "weight", 0.5)
    prune.ln_structured(model.blocks[1].attn.qkv, "weight", 0.2, 2, 0)


def old_weight_norm(model: Any) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.blocks[0].attn.proj)
        nn.utils.weight_norm(model.blocks[0].mlp.fc1)


def parametrized(model: Any) -> None:
    parametrizations.weight_norm(model.blocks[0].mlp.fc1)
    parametrizations.spectral_norm(model.blocks[0].attn.qkv)


def adapted(model: Any) -> None:
    """As `add_adapter` of transformers and `get_peft_model` do it."""
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["qkv"]), model)


COMPUTED = (pruned, old_weight_norm, parametrized, pytest.param(adapted, marks=pytest.mark.slow))


@pytest.mark.parametrize("change", COMPUTED, ids=lambda change: getattr(change, "__name__", None))
def test_weights_that_are_computed_from_others_are_refused(change: Callable[[Any], None]) -> None:
    model = of_timm(VIT)
    change(model)
    with pytest.raises(NotSupported, match=r"prune\.remove|merge_and_unload"):
        attnrx.load(model)


@pytest.mark.parametrize("attribute", ["lock", "file", "thread"])
def test_attributes_that_cannot_be_copied_are_named(attribute: str, tmp_path: Path) -> None:
    model = of_hf("ViTForImageClassification")
    with (tmp_path / "log").open("w") as file:
        values = {"lock": threading.Lock(), "file": [file], "thread": {"of": threading.Thread()}}
        model.vit.layers[0].mlp.__dict__[attribute] = values[attribute]
        with pytest.raises(NotSupported, match=rf"vit\.layers\.0\.mlp\.{attribute}"):
            attnrx.load(model)


@pytest.mark.parametrize("path", ["", "blocks.0.mlp.fc1"])
def test_weights_on_the_meta_device_are_named(path: str) -> None:
    model = of_timm(VIT)
    model.get_submodule(path).to_empty(device="meta")
    with pytest.raises(InvalidInput, match=f"{path}.* is on the meta device"):
        attnrx.load(model)


def doubled(model: Any) -> None:
    model.blocks[0].attn.register_forward_hook(lambda module, args, output: 2 * output)


def replaced_forward(model: Any) -> None:
    model.blocks[0].mlp.act.forward = torch.tanh


def pruned_later(model: Any) -> None:
    prune.l1_unstructured(model.blocks[0].mlp.fc1, "weight", 0.5)


LATER = (doubled, replaced_forward, pruned_later)


@pytest.mark.parametrize("change", LATER, ids=lambda change: change.__name__)
def test_changes_after_loading_are_refused_by_every_verb(change: Callable[[Any], None], tmp_path: Path) -> None:
    model = attnrx.load(of_timm(VIT))
    diagnosis = attnrx.diagnose(model, IMAGES)
    prescription = attnrx.prescribe(diagnosis, "qk=total_rank:0.5")
    change(model)
    for call in (
        lambda: attnrx.diagnose(model, IMAGES),
        lambda: attnrx.realize(model, prescription, by="mask"),
        lambda: attnrx.realize(model, prescription),
        lambda: attnrx.verify(model, model, IMAGES),
        lambda: attnrx.save(model, tmp_path / "saved"),
        lambda: attnrx.export(model, tmp_path / "model.onnx"),
    ):
        with pytest.raises(NotSupported, match=r"blocks\.[01]"):
            call()
    assert not list(tmp_path.iterdir())


def test_hooks_that_observe_are_allowed_after_loading() -> None:
    model: Any = attnrx.load(of_timm(VIT))
    logger(model)
    diagnosis = attnrx.diagnose(model, IMAGES)
    prescription = attnrx.prescribe(diagnosis, "qk=total_rank:0.5")
    masked, compressed = (attnrx.realize(model, prescription, by=by) for by in ("mask", "compress"))
    torch.testing.assert_close(masked(IMAGES), compressed(IMAGES))
    assert model_fingerprint(masked) != model_fingerprint(model)
