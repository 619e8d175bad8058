"""One merging round of the C++ kernel equals PyTorch's operations, for any counts, sizes, strides and threads."""

from dataclasses import replace

import pytest
import torch

from attnrx.errors import InvalidInput
from attnrx.kernels import compilation
from attnrx.tokens import Reduction, TokenState, merging, parse_reducer

pytestmark = pytest.mark.skipif(compilation.native_library() is None, reason="the kernel needs a C++ compiler")

REDUCERS = ("ward", "ward(lengths=false)", "tome")
# Images, patches and remaining patches: fewer than a vector, not a multiple of it, and the most that one round merges.
ROUNDS = ((3, 196, 137), (2, 196, 98), (1, 195, 194), (1, 9, 8), (2, 5, 2), (1, 2, 1), (5, 33, 17))


def drawn(images: int, patches: int, sized: bool) -> TokenState:
    """Tokens whose rows are parts of longer ones, as a view of a projection has them."""
    generator = torch.Generator().manual_seed(patches)
    tokens = torch.randn(images, patches + 1, 75, generator=generator, dtype=torch.float32)[..., :70]
    keys = torch.randn(images, patches + 1, 19, generator=generator, dtype=torch.float32)
    sizes = torch.randint(1, 5 if sized else 2, tokens.shape[:2], generator=generator).float()
    return TokenState(tokens, 1, sizes, torch.arange(patches).expand(images, -1), keys=keys, whole=True)


@torch.no_grad()
def both(text: str, state: TokenState, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Reduction, Reduction]:
    reducer, predictor = parse_reducer(text), torch.nn.Module()
    found = reducer.reduce(state, count, predictor)
    with monkeypatch.context() as patch:
        patch.setattr(merging, "can_merge", lambda *_: False)
        return found, reducer.reduce(state, count, predictor)


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize(("images", "patches", "count"), ROUNDS)
@pytest.mark.parametrize("text", REDUCERS)
def test_the_kernel_equals_the_operations(
    text: str, images: int, patches: int, count: int, sized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, before = drawn(images, patches, sized), torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            found, wanted = both(text, state, count, monkeypatch)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(found.kept, wanted.kept)
        torch.testing.assert_close(found.sizes, wanted.sizes)
        torch.testing.assert_close(found.tokens, wanted.tokens, rtol=0, atol=1e-5)


@pytest.mark.parametrize("text", REDUCERS)
@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), float("inf")])
def test_equal_and_unusable_patches_end_in_a_valid_choice(
    text: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = drawn(2, 21, sized=False)
    found, _ = both(text, replace(state, tokens=torch.full_like(state.tokens, value)), 15, monkeypatch)
    assert found.kept.shape == (2, 15) and bool((found.kept.diff() > 0).all()) and int(found.kept.max()) < 21
    assert found.sizes is not None and torch.equal(found.sizes.sum(1), torch.full((2,), 21.0, dtype=torch.float32))
    if value in (0.0, 1.0):  # the mean of equal patches is the patch
        torch.testing.assert_close(found.tokens, torch.full_like(found.tokens, value))


def test_arguments_that_do_not_fit_are_refused() -> None:
    merge = torch.ops.attnrx.native_merge.default
    patches, sizes = torch.ones(1, 8, 4, dtype=torch.float32), torch.ones(1, 8, dtype=torch.float32)
    with pytest.raises(InvalidInput, match="merge at most half"):
        merge(patches, sizes, None, 5, False)
    with pytest.raises(InvalidInput, match="not those of the same patches"):
        merge(patches, sizes[:, :7], None, 2, False)
    with pytest.raises(InvalidInput, match="reads float32"):
        merge(patches.double(), sizes.double(), None, 2, False)
    with pytest.raises(InvalidInput, match="give no keys"):
        merge(patches, sizes, patches, 2, True)
