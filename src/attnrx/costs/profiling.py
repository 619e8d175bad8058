"""The operations of one run and the memory of the CPU allocator, recorded by torch's profiler."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile

MEMORY_EVENT = "[memory]"
KERNEL_PREFIX = "aten::_scaled_dot_product_"
NATIVE = "attnrx::native_attention"


@dataclass(frozen=True)
class Profile:
    """The names of the operations that ran, and the peak memory above the memory held before."""

    operations: frozenset[str]
    peak_bytes: int

    @property
    def attention_kernel(self) -> str:
        """The kernel that scaled_dot_product_attention selected, "native" for the C++ kernel, or "unfused"."""
        kernels = (name for name in self.operations if name.startswith(KERNEL_PREFIX))
        chosen = sorted(name.removeprefix(KERNEL_PREFIX) for name in kernels)
        chosen += ["native"] * (NATIVE in self.operations)
        if chosen:
            return " + ".join(chosen)
        return "unfused" if any("softmax" in name for name in self.operations) else "unknown"


def profiled(run: Callable[[], object]) -> Profile:
    """Runs once under the profiler."""
    # By default the profiler's library logs its start to stderr, and an error on a CPU-only machine.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    del result  # kept alive until here: the output of the run is part of its peak
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    # The events of an operation contain its net memory only; the allocator's events include temporary allocations.
    events = sorted(results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == MEMORY_EVENT]  # type: ignore[attr-defined]
    operations = frozenset(event.name() for event in events if event.name().startswith(("aten::", "attnrx::")))
    return Profile(operations, max(accumulate(changes), default=0))
