"""Random numbers as a function of seed and step, so that no generator state has to be saved to resume a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

EPOCH, STEP, NOISE, MIXING = 0, 1, 2, 3  # the purpose is part of a seed, so that no two purposes share random numbers


def derived_seed(*parts: int) -> int:
    """Returns a seed that depends on every part; neighbouring parts give unrelated seeds."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


@contextmanager
def reproducible() -> Iterator[None]:
    """Enables deterministic algorithms where they exist; restores the caller's settings and generators at the end."""
    debugging: Any = torch.utils.deterministic  # its attribute is set at run time, unknown to type checkers
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = debugging.fill_uninitialized_memory
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            debugging.fill_uninitialized_memory = False  # a debugging aid that costs a pass over memory
            yield
        finally:
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
            debugging.fill_uninitialized_memory = fill
