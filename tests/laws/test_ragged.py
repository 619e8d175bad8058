"""The ragged kernel equals attention written out.

Triton's interpreter must be asked for before Triton is imported, so these laws run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnrx.vit.kernels.ragged_launch import ragged_attention

pytest.importorskip("triton")

# Ranks of the heads, what they read out, and tokens: ranks of zero and one, wider and narrower than the values, more
# than a step; tokens fewer than a block, one block, and not a multiple of it.
SHAPES = (
    ((0, 1, 5, 64), (8, 3, 20, 64), 70),
    ((17,), (16,), 5),
    ((16, 16), (32, 32), 64),
    ((3, 40), (33, 1), 129),
)


def compare(ranks: tuple[int, ...], value_dims: tuple[int, ...], tokens: int, device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def drawn(features: int) -> torch.Tensor:  # with features that belong to nobody between two tokens
        wide = torch.randn(2, tokens, features + 3, generator=generator, dtype=torch.float32)
        return wide.to(device, dtype)[..., :features]

    query, key, value = drawn(sum(ranks)), drawn(sum(ranks)), drawn(sum(value_dims))
    output = ragged_attention(query, key, value, ranks, value_dims, 0.3)
    sides = (side.double().split(sizes, -1) for side, sizes in ((query, ranks), (key, ranks), (value, value_dims)))
    heads = zip(*sides, strict=True)
    truth = torch.cat([torch.softmax(0.3 * q @ k.transpose(1, 2), -1) @ v for q, k, v in heads], -1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(output.double(), truth, rtol=0, atol=tolerance)


def interpreted() -> None:
    """What the process with the interpreter runs."""
    import attnrx as rx
    from attnrx.change.realization import realize
    from attnrx.vit.attention import Ragged
    from cases import CONFIGS, PATTERNS, images, model, prescription
    from layers import LAYERS, by_definition

    for shape in SHAPES:
        compare(*shape, "cpu", torch.float32)
    with torch.no_grad():
        for name, case in LAYERS.items():  # other scales and value widths than a head's, and over 1,024 tokens
            layer, tokens = case.layer(Ragged(anywhere=True), torch.float32), case.inputs(torch.float32)
            expected = by_definition(case.layer(layer.backend), case.inputs())
            torch.testing.assert_close(
                layer(tokens).double(), expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())), msg=name
            )
    torch.set_default_dtype(torch.float64)
    for config in ("svda", "dense"):
        for pattern in ("ragged", "one", "head-removed", "zero"):
            vit = model(CONFIGS[config])
            small, inputs = realize(vit, prescription(vit, PATTERNS[pattern])).float(), images(CONFIGS[config]).float()
            with torch.no_grad():
                truth = rx.use_backend(small, "eager")(inputs)
                logits = rx.use_backend(small, Ragged(anywhere=True))(inputs)
            torch.testing.assert_close(logits, truth, rtol=0, atol=1e-5 * max(1.0, float(truth.abs().max())))


@pytest.mark.slow
def test_kernels_equal_eager_in_the_interpreter() -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", "import test_ragged; test_ragged.interpreted()"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_eager_on_cuda(shape: tuple[tuple[int, ...], tuple[int, ...], int], dtype: torch.dtype) -> None:
    compare(*shape, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="speed is measured on CUDA")
def test_ragged_ranks_are_faster_than_padding_on_cuda() -> None:
    """Twelve heads of which one kept all directions and eleven a few: padding computes all as the one."""
    import attnrx.vit.costs as costs
    from attnrx.vit.attention import Attention, Fused, Ragged
    from attnrx.vit.spec import AttentionSpec

    ranks = (64, *(8,) * 11)
    spec = AttentionSpec("dense", 768, 64, ranks, tuple(range(12)), 0.125, 64, value_ranks=ranks)
    tokens = torch.randn(64, 577, 768, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        runs = {}
        for backend in (Fused(), Ragged()):
            layer = Attention(spec, backend).to("cuda", torch.bfloat16)
            runs[type(backend).__name__] = lambda layer=layer: layer(tokens)
        seconds = costs.interleave(runs, rounds=20, warmup=5, clock="cuda")
    assert seconds["Ragged"].median() < seconds["Fused"].median()
