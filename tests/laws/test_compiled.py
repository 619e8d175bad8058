"""Compiled == eager, in one graph, for ragged ranks on every backend that models are made with."""

import os
import subprocess
import sys
from typing import Any

import pytest
import timm
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import attnrx as rx
from attnrx.change.realization import realize
from attnrx.support.errors import NotSupported
from attnrx.vit.attention import Backend, Eager, Fused
from attnrx.vit.costs import Conditions
from attnrx.vit.models import attach_tokens_, family_of, library_form, working_copy
from support.cases import CONFIGS, PATTERNS, images, model, prescription
from support.layers import LAYERS
from support.operations import is_computing

BACKENDS: tuple[type[Backend], ...] = (Fused, Eager)


@pytest.mark.slow
def test_compressed_models_are_one_graph() -> None:
    """In a process of its own: Dynamo does not follow the checks of shapes that the tests turn on."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [*(each.__name__ for each in BACKENDS), "library"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_cuda_graphs_give_what_the_model_gives(precision: str) -> None:
    small = realize(model(CONFIGS["dense"]), prescription(model(CONFIGS["dense"]), PATTERNS["ragged"]))
    eager, graphs = (Conditions("cuda", precision, graphs=on) for on in (False, True))
    inputs = eager.prepare_images(images(CONFIGS["dense"]))
    with graphs.held():
        captured, plain = graphs.prepare(small), eager.prepare(small)
        kept = inputs.clone()
        for given in (inputs, inputs.flip(0), inputs[:1]):  # recorded, replayed with other images, another shape
            torch.testing.assert_close(captured(given), plain(given), rtol=2e-2, atol=2e-2)
        assert torch.equal(inputs, kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
def test_a_model_that_waits_for_the_device_is_not_recorded() -> None:
    class Waits(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return given * float(given.sum())

    with pytest.raises(NotSupported, match="cannot be recorded"):
        Conditions("cuda", graphs=True).prepare(Waits())(torch.ones(2, device="cuda"))


if __name__ == "__main__":
    for kind in BACKENDS:
        for config in ("svda", "dense"):
            for pattern, dtype in (("ragged", torch.float64), ("ragged-falling", torch.bfloat16)):
                vit, inputs = model(CONFIGS[config]), images(CONFIGS[config]).to(dtype)
                small = realize(vit, prescription(vit, PATTERNS[pattern])).to(dtype)
                rx.use_backend(small, kind())
                torch.compiler.reset()
                with torch.no_grad():
                    logits = torch.compile(small, fullgraph=True, dynamic=False, backend="aot_eager")(inputs)
                    wanted = small(inputs)
                close = 40 * torch.finfo(dtype).eps * float(wanted.abs().max())
                torch.testing.assert_close(logits, wanted, rtol=0, atol=close)
        if kind is Eager:  # the backend of mixed attention while a graph is recorded
            layer = LAYERS["mixed"].layer(kind())
            torch.compiler.reset()
            with torch.no_grad():
                compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
                tokens = LAYERS["mixed"].inputs()
                torch.testing.assert_close(compiled(tokens), layer(tokens), rtol=1e-10, atol=1e-10)
        print(kind.__name__)
    working = rx.models.build_model("timm:vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2).eval()
    for policy in (None, "ward:0.5@2"):
        if policy is not None:
            attach_tokens_(working, family_of(working), rx.tokens.parse_policy(policy)).eval()
        for vit in (working, library_form(working)):
            torch.compiler.reset()
            with torch.no_grad():
                inputs = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
                compiled = torch.compile(vit, fullgraph=True, dynamic=False, backend="aot_eager")
                torch.testing.assert_close(compiled(inputs), vit(inputs), rtol=1e-5, atol=1e-5)
    print("library")
    # The graph of an unchanged model is that of its library; that of its working copy has two products more per block,
    # whose weights timm has in one, and less that the last block does.
    counts = []

    def counting(graph: torch.fx.GraphModule, _: object) -> object:
        targets: list[Any] = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        counts.append(len([each for each in targets if is_computing(each)]))
        return make_boxed_func(graph.forward)

    reference = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3).eval()
    loaded = rx.load(reference)
    for vit in (reference, loaded, working_copy(loaded)):
        torch.compiler.reset()
        with torch.no_grad():
            compiled = torch.compile(vit, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=counting))
            compiled(inputs.to(next(vit.parameters())))
    # A product of the weight and the features, and no view, for each; the last block normalizes its queries again.
    assert counts[1] == counts[0] and counts[2] <= counts[0] + 2 * 3 + 1, counts
