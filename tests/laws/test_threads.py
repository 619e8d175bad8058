"""Threads that call one model at the same time get the logits of their own images."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnrx.vit.models import attach_tokens_, family_of, recording_tokens
from attnrx.vit.tokens import parse_policy
from support import cases
from support.pretrained import adopted_once

THREADS = 2
MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": lambda: cases.model(cases.CONFIGS["dense"]),
    "vit": lambda: copy.deepcopy(adopted_once("vit")[2]),
    "hf vit": lambda: copy.deepcopy(adopted_once("hf vit")[2]),
    "vit, mean pooled": lambda: copy.deepcopy(adopted_once("vit, mean pooled")[2]),
}
POLICIES = (None, "ward:0.5@2", "class_attention:0.5@2")
# A model without a class token has no attention of it.
CASES = [(name, policy) for name in MODELS for policy in POLICIES if policy != POLICIES[2] or name in ("vit", "hf vit")]


class Meeting:
    """A hook at which a thread waits for the others, so that each of their forward passes has reached the block."""

    by_image = True  # as the hooks of the model itself, so that its shortcuts stay

    def __init__(self, threads: int):
        self.barrier = threading.Barrier(threads)

    def __call__(self, *_: Any) -> None:
        self.barrier.wait(timeout=20)


@contextmanager
def meeting_in_blocks(model: nn.Module, threads: int) -> Iterator[None]:
    """Makes the threads wait for each other before every block, after its own hooks, and after it."""
    meeting, hooks = Meeting(threads), []
    for name in family_of(model).block_names(model):
        block = model.get_submodule(name)
        hooks += [block.register_forward_pre_hook(meeting), block.register_forward_hook(meeting)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def attached(name: str, policy: str | None) -> nn.Module:
    model = MODELS[name]()
    if policy is not None:
        attach_tokens_(model, family_of(model), parse_policy(policy))
    return model.eval()


def inputs_of(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, *family_of(model).input_shape(model), generator=generator) for _ in range(THREADS)]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_every_thread_gets_the_logits_of_its_own_images(name: str, policy: str | None) -> None:
    model = attached(name, policy)
    inputs = inputs_of(model)

    @torch.no_grad()  # a setting of the thread
    def run(images: Tensor) -> tuple[Tensor, list[Tensor]]:
        with recording_tokens(model) as runs:
            logits = model(images)
        return logits, [stage for run in runs for stage in run.trail]

    expected = [run(images) for images in inputs]
    with meeting_in_blocks(model, THREADS), ThreadPoolExecutor(THREADS) as pool:
        actual = list(pool.map(run, inputs))
    for (logits, trail), (own_logits, own_trail) in zip(expected, actual, strict=True):
        assert torch.equal(logits, own_logits)
        assert len(trail) == len(own_trail)
        assert all(torch.equal(*stages) for stages in zip(trail, own_trail, strict=True))


def test_logits_and_all_tokens_can_be_computed_at_the_same_time() -> None:
    model: Any = attached("vit", "ward:0.5@2")
    inputs, runs = inputs_of(model), (model, model.all_tokens)

    @torch.no_grad()
    def run(number: int) -> Tensor:
        return runs[number](inputs[number])

    expected = [run(number) for number in range(THREADS)]
    with meeting_in_blocks(model, THREADS), ThreadPoolExecutor(THREADS) as pool:
        actual = list(pool.map(run, range(THREADS)))
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))


@pytest.mark.parametrize("policy", [None, "ward:0.5@2"])
def test_a_copy_shares_no_state(policy: str | None) -> None:
    model = attached("vit", policy)
    (images, others), expected = inputs_of(model), []
    with torch.no_grad():
        expected.append(model(images))
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with recording_tokens(model) as runs:
                copied(others)
                assert torch.equal(copied(images), expected[0])
            assert not runs  # the recording is of the original
