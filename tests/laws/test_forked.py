"""A process that is forked after its parent used several threads computes what the parent computes, and ends."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from attnrx.vit.attention import Attention
from attnrx.vit.kernels import compilation
from attnrx.vit.kernels.native_products import native_maps
from attnrx.vit.models import attach_tokens_, family_of
from attnrx.vit.tokens import parse_policy
from attnrx_lab.vision_transformer import full_spec
from support import cases

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.skipif(compilation.native_library() is None, reason="the kernels need a C++ compiler"),
    # Python warns of a fork after threads were started, which is what happens here.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

PATIENCE = 30  # seconds until a child counts as hanging


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def attention() -> Callable[[], Tensor]:
    layer = Attention(full_spec("dense", 96, 4)).eval().float()
    tokens = torch.randn(4, 300, 96, dtype=torch.float32)
    return lambda: layer(tokens)


def maps() -> Callable[[], Tensor]:
    features, weight = torch.randn(900, 200, dtype=torch.float32), torch.randn(700, 200, dtype=torch.float32)
    return lambda: native_maps(features, (weight,), (None,), (False,))


def merging_model() -> Callable[[], Tensor]:
    config = cases.ViTConfig.uniform("dense", image_size=64, patch_size=4, width=64, depth=3, heads=4)
    model: nn.Module = cases.initialize_(cases.VisionTransformer(config), 0)
    attach_tokens_(model, family_of(model), parse_policy("ward:0.5@2"))
    model.eval().float()
    images = torch.randn(4, 3, 64, 64, dtype=torch.float32)
    return lambda: model(images)


@pytest.mark.parametrize("compute_of", [attention, maps, merging_model])
@torch.no_grad()
def test_a_forked_process_computes_and_ends(compute_of: Callable[[], Callable[[], Tensor]]) -> None:
    compute = compute_of()
    expected = compute()
    child = os.fork()
    if not child:  # no test, no fixture and no exit handler may run here
        code = 1
        try:
            code = 0 if torch.allclose(compute(), expected, rtol=1e-5, atol=1e-6) else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended, "the forked process hangs"
    assert os.waitstatus_to_exitcode(status) == 0
    assert compilation.kernel_threads() == 2  # the parent's
