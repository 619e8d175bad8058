"""Random numbers that are a function of the seed and the step, so that no generator has to be saved to resume a run."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

EPOCH, STEP, NOISE, PROBE = 0, 1, 2, 3  # what a seed is for, so that no two purposes share random numbers


def derived_seed(*parts: int) -> int:
    """Gives a seed that depends on every part; neighbouring parts give unrelated seeds."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


@contextmanager
def reproducible() -> Iterator[None]:
    """Asks for deterministic kernels wherever there are some, and leaves the caller's settings and generators as they were."""
    strict, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with torch.random.fork_rng():
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs a pass over memory
            yield
        finally:
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
            torch.utils.deterministic.fill_uninitialized_memory = fill
