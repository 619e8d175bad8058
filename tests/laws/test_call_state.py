"""A module keeps nothing of a call: everything that can be done with a fresh model can be done after a forward pass."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import replicate
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import attnrx as rx
from attnrx.support.errors import InvalidInput
from attnrx.vit.models import family_of, library_form, recording_tokens
from attnrx.vit.models.parts.token_reduction import CallState
from attnrx.vit.tokens import TokenPolicy
from support.cases import REDUCTIONS
from support.pretrained import adopted_once, inputs
from support.token_models import KINDS as REDUCERS
from support.token_models import fits, original, reduced

# The models of libraries as users have them, and the working copies that verbs compute with.
WORKING = {"timm, working": "deep", "transformers, working": "hf vit"}
LIBRARIES = {"timm": "deep", "transformers": "hf vit", "own": "lvvit", **WORKING}
KINDS = ("none", *REDUCERS, "ward-relevance")
CASES = [
    (kind, library, grad)
    for kind in KINDS
    for library in LIBRARIES
    for grad in (True, False)
    if kind == "none" or fits(LIBRARIES[library], REDUCTIONS[kind])
]
# What else can be done after a call follows from the first law below: each kind in two libraries, which take turns.
TURNS = [case for case in CASES if (KINDS.index(case[0]) + [*LIBRARIES].index(case[1])) % len(LIBRARIES) in (0, 2)]
COMPILED = [case for case in TURNS if (KINDS.index(case[0]) + [*LIBRARIES].index(case[1])) % len(LIBRARIES) == 0]
LAYERS = {"deep": (2, 4), "hf vit": (2,), "lvvit": (2,)}


def fresh(kind: str, library: str, by: str = "compress") -> nn.Module:
    name = LIBRARIES[library]
    if kind == "none":
        model = original(name).eval()
    else:
        model = reduced(name, TokenPolicy.staged(REDUCTIONS[kind], 0.6, LAYERS[name]), by)
    return model if library in WORKING else library_form(model)


def block_of(model: nn.Module, index: int) -> nn.Module:
    return model.get_submodule(family_of(model).block_names(model)[index])


def tensor_of(output: Any) -> Tensor:
    """The logits of what a model returned; a model of transformers returns them among others."""
    return getattr(output, "logits", output)


def called(kind: str, library: str, grad: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a model after one forward pass, its images, and the detached logits."""
    model = fresh(kind, library)
    images = inputs(model)
    with torch.set_grad_enabled(grad):
        logits = tensor_of(model(images))
    assert logits.requires_grad == grad
    return model, images, logits.detach()


def held_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Returns every tensor that is reachable from a model."""
    found: dict[int, Tensor] = {}
    visited: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        each = waiting.pop()
        if id(each) in visited or isinstance(each, type | ModuleType):
            continue
        visited.add(id(each))
        if isinstance(each, Tensor):
            found[id(each)] = each
        elif isinstance(each, FunctionType):  # its closure, without the globals of its module
            waiting += [cell.cell_contents for cell in each.__closure__ or ()]
        else:
            # The collector does not see the contents of thread-local objects.
            waiting += vars(each).values() if isinstance(each, CallState) else gc.get_referents(each)
    return found


def elements(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in held_tensors(model).values())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("kind", "library", "grad"), CASES)
def test_no_tensor_of_a_call_survives_it(kind: str, library: str, grad: bool, training: bool) -> None:
    model = fresh(kind, library).train(training)
    getattr(model, "_patching", None)  # numbers that follow from the model alone
    before, size = held_tensors(model), len(pickle.dumps(model))
    with torch.set_grad_enabled(grad):
        logits = tensor_of(model(inputs(model, 5)))
    after = held_tensors(model)
    assert after.keys() == before.keys()
    assert all(tensor.grad_fn is None for tensor in after.values())
    assert len(pickle.dumps(model)) == size
    assert bool(logits.isfinite().all())


@pytest.mark.filterwarnings("ignore::attnrx.support.errors.ScaleWarning")
@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_of_a_diagnosis_survives_it(library: str) -> None:
    model = fresh("none", library)
    model(inputs(model))
    before = held_tensors(model).keys()
    rx.diagnose(model, inputs(model, 8))
    assert held_tensors(model).keys() == before


@pytest.mark.parametrize("name", ["dinov3", "rotary, mixed", "hf dinov3", "beit, bias per layer", "hf beit, one bias"])
def test_no_table_of_positions_survives_a_call(name: str) -> None:
    model = copy.deepcopy(adopted_once(name)[2])
    for dtype in (torch.float64, torch.float32):  # the C++ kernel reads rotations in a form of its own
        model.to(dtype)
        before = elements(model)
        with torch.no_grad():
            model(inputs(model).to(dtype))
        assert elements(model) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("kind", ["ward", "spot", "evit"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_tensor_survives_a_call_that_fails(kind: str, library: str, error: type[BaseException]) -> None:
    model = fresh(kind, library)
    before = held_tensors(model).keys()

    def fail(*_: Any) -> None:
        raise error

    last = [module for module in model.modules() if isinstance(module, nn.LayerNorm)][-1]
    hook = last.register_forward_hook(fail)
    with pytest.raises(error):
        model(inputs(model))
    hook.remove()
    if error is KeyboardInterrupt and library not in ("own", *WORKING):
        # PyTorch calls no hook after Ctrl-C: the next call, also of a method, forgets the one that ended.
        expected = tensor_of(fresh(kind, library)(inputs(model)))
        if hasattr(model, "forward_features"):
            features: Any = model.forward_features
            assert features(inputs(model)).shape[1] == 17
        assert torch.equal(tensor_of(model(inputs(model))), expected)
    assert held_tensors(model).keys() == before
    copy.deepcopy(model)


@pytest.mark.parametrize("is_working", [False, True])
@pytest.mark.parametrize("pooled", ["deep", "vit, mean pooled"])
@pytest.mark.parametrize("training", [False, True])
def test_no_tensor_survives_a_method_of_the_library(pooled: str, training: bool, is_working: bool) -> None:
    model: Any = reduced(pooled, TokenPolicy(REDUCTIONS["dynamicvit"], (2,), (0.5,)), "compress").train(training)
    model = model if is_working else library_form(model)
    own = model.source if is_working else model
    before, images = held_tensors(model).keys(), inputs(model)
    with recording_tokens(model) as runs:
        own(images)
        own.forward_features(images)
        own.forward_intermediates(images, norm=True)
    assert len(runs) == 3
    runs.clear()
    assert held_tensors(model).keys() == before


@pytest.mark.parametrize("library", ["timm", "timm, working"])
def test_a_block_alone_has_no_tokens_of_an_earlier_call(library: str) -> None:
    model = fresh("ward", library)
    model(inputs(model))
    block = block_of(model, 3)
    with pytest.raises(InvalidInput, match="was called alone"):
        block(torch.zeros(1, 9, 12))


@pytest.mark.parametrize("library", ["timm", "timm, working"])
def test_a_model_that_is_called_in_a_hook_of_itself_keeps_its_own_tokens(library: str) -> None:
    model = fresh("ward", library)
    images = inputs(model)
    expected, calls = model(images), []

    def again(*_: Any) -> None:
        if not calls:
            calls.append(1)
            model(-images)

    again.by_image = True  # type: ignore[attr-defined]
    block_of(model, 2).register_forward_hook(again)
    with recording_tokens(model) as runs:
        assert torch.equal(model(images), expected)
    assert calls and len(runs) == 2


@pytest.mark.parametrize(("kind", "library", "grad"), TURNS)
def test_a_model_can_be_copied_after_a_call(kind: str, library: str, grad: bool) -> None:
    model, images, logits = called(kind, library, grad)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    model(images)
    averaged.update_parameters(model)
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), averaged.module)
    with torch.no_grad():
        for copied in copies:
            torch.testing.assert_close(tensor_of(copied(images)), logits, rtol=1e-10, atol=1e-10)
        for dtype in (torch.float16, torch.bfloat16):
            assert tensor_of(copy.deepcopy(model).to(dtype)(images.to(dtype))).dtype == dtype
    assert copy.deepcopy(model).double().load_state_dict(model.state_dict())


@pytest.mark.parametrize(("kind", "library", "grad"), TURNS)
def test_a_model_is_vectorized_before_and_after_a_call(kind: str, library: str, grad: bool) -> None:
    model, images, logits = called(kind, library, grad)
    for each in (fresh(kind, library), model):
        with warnings.catch_warnings(), torch.set_grad_enabled(grad):
            warnings.filterwarnings("ignore", "There is a performance drop")
            per_image = torch.func.vmap(lambda image, each=each: tensor_of(each(image[None]))[0])(images)
        torch.testing.assert_close(per_image.detach(), logits, rtol=1e-10, atol=1e-10)
        # Without devices the model itself.
        assert torch.equal(tensor_of(nn.DataParallel(each)(images)), tensor_of(each(images)))


def replicas(model: nn.Module, factors: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Returns the replicas that DataParallel makes for several GPUs, on the CPU, and with other weights in each.

    Copies on another device would show that a replica reads the original's weights; here their factors do.
    """

    def copies(tensors: Sequence[Tensor], devices: Sequence[float], detach: bool = False) -> list[list[Tensor]]:
        return [[each * factor if each.is_floating_point() else each.clone() for each in tensors] for factor in devices]

    module = sys.modules[replicate.__module__]
    monkeypatch.setattr(module, "_get_device_index", lambda device, *_: device)
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    return replicate(model, factors, not torch.is_grad_enabled())  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "library", "grad"), TURNS)
def test_replicas_have_weights_of_their_own_before_and_after_a_call(
    kind: str, library: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images, _ = called(kind, library, grad)
    factors = (1.0, 1.3)

    def output(replica: nn.Module) -> Tensor:
        with torch.set_grad_enabled(grad):
            return tensor_of(replica(images))

    for each in (fresh(kind, library), model):
        before = held_tensors(each).keys()
        with torch.set_grad_enabled(grad), ThreadPoolExecutor(len(factors)) as threads:
            # They are called at once, each in a thread of its own.
            outputs = [*threads.map(output, replicas(each, factors, monkeypatch))]
        for factor, logits in zip(factors, outputs, strict=True):
            state = {
                name: tensor * factor if tensor.is_floating_point() else tensor
                for name, tensor in each.state_dict().items()
            }
            with torch.no_grad():
                expected = tensor_of(torch.func.functional_call(each, state, (images,)))
            torch.testing.assert_close(logits.detach(), expected, rtol=1e-9, atol=1e-9)
        assert held_tensors(each).keys() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="DataParallel has devices with CUDA only")
@pytest.mark.parametrize(("kind", "library", "grad"), TURNS)
def test_a_model_runs_in_data_parallel_on_a_gpu(kind: str, library: str, grad: bool) -> None:
    model, images, logits = called(kind, library, grad)
    # As many replicas as there are GPUs; of one, DataParallel calls the model itself.
    parallel = nn.DataParallel(model.cuda())
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            found = tensor_of(parallel(images.cuda())).detach().cpu()
        torch.testing.assert_close(found, logits, rtol=1e-6, atol=1e-6)


def require_compiled(kind: str, library: str, grad: bool) -> None:
    model, images, logits = called(kind, library, grad)
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=False, backend="aot_eager")
    for _ in range(2):  # a second call finds the state of the first one, if there is any
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(tensor_of(compiled(images)).detach(), logits, rtol=1e-9, atol=1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.utils.counters.clear()


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_is_compiled_to_one_graph_after_a_call(library: str) -> None:
    """In a process of its own: Dynamo does not follow the checks of shapes that the tests turn on."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, __file__, library]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [f"{kind}-{grad}" for kind, where, grad in COMPILED if where == library]


@pytest.mark.parametrize(
    ("kind", "library", "grad"), [("ward", "timm", True), ("spot", "own", True), ("ward", "timm, working", True)]
)
def test_a_model_is_exported_after_a_call(kind: str, library: str, grad: bool) -> None:
    model, images, logits = called(kind, library, grad)
    with torch.no_grad():
        program = torch.export.export(copy.deepcopy(model), (images,)).module()
        torch.testing.assert_close(program(images), logits, rtol=1e-9, atol=1e-9)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    for kind, library, grad in COMPILED:
        if library == sys.argv[1]:
            require_compiled(kind, library, grad)
            print(f"{kind}-{grad}")
