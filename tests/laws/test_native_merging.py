"""One merging round of the C++ kernel equals PyTorch's operations, for any counts, sizes, strides and threads."""

from dataclasses import replace

import pytest
import torch

from attnrx.vit.kernels import compilation
from attnrx.vit.kernels.native_attention import Merged
from attnrx.vit.models.parts.token_reduction import compressed_state
from attnrx.vit.tokens import TokenState, parse_reducer
from support.token_models import drawn

pytestmark = pytest.mark.skipif(compilation.native_library() is None, reason="the kernel needs a C++ compiler")

REDUCERS = ("ward", "ward(lengths=false)", "ward(relevance=0.4)", "tome")
# Images, patches and remaining patches: fewer than a vector, not a multiple of it, and the most that one round merges.
ROUNDS = ((3, 196, 137), (2, 196, 98), (1, 195, 194), (1, 9, 8), (2, 5, 2), (1, 2, 1), (5, 33, 17))


Both = tuple[Merged, tuple[torch.Tensor | None, ...]]


@torch.no_grad()
def both(text: str, state: TokenState, count: int) -> Both:
    """Returns tokens, sizes, indices and destinations by the kernel, and by the operations."""
    reducer = parse_reducer(text)
    found = reducer.native_merge(state, count)
    assert found is not None
    reduction = reducer.reduce(replace(state, tracked=True), count, torch.nn.Module())
    after = compressed_state(state, reduction)
    return found, (after.tokens, after.sizes, after.patch_indices, reduction.destinations)


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize(("images", "patches", "count"), ROUNDS)
@pytest.mark.parametrize("text", REDUCERS)
def test_the_kernel_equals_the_operations(text: str, images: int, patches: int, count: int, sized: bool) -> None:
    state, before = drawn(images, patches, sized), torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            found, wanted = both(text, state, count)
        finally:
            torch.set_num_threads(before)
        assert wanted[2] is not None and torch.equal(found[2], wanted[2])
        assert wanted[3] is not None and torch.equal(found[3], wanted[3])
        torch.testing.assert_close(found[1], wanted[1])
        torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("text", REDUCERS)
@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), float("inf")])
def test_equal_and_unusable_patches_end_in_a_valid_choice(text: str, value: float) -> None:
    state = drawn(2, 21, sized=False)
    (tokens, sizes, indices, _), _ = both(text, replace(state, tokens=torch.full_like(state.tokens, value)), 15)
    assert indices.shape == (2, 15) and bool((indices.diff() > 0).all()) and int(indices.max()) < 21
    assert torch.equal(sizes[:, 1:].sum(1), torch.full((2,), 21.0, dtype=torch.float32))
    if value in (0.0, 1.0):  # the mean of equal patches is the patch
        torch.testing.assert_close(tokens, torch.full_like(tokens, value))
