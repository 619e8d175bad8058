"""Functions for device names, processor load, the cache folder, timing permission, bfloat16 and random states."""

import os
import platform
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from attnrx.support.errors import NotSupported

CACHE, MEASURE = "ATTNRX_CACHE", "ATTNRX_MEASURE"
# A device has fast bfloat16 products if it multiplies square matrices of the size PRODUCT at least LEAST_GAIN times as
# fast in bfloat16 as in float32.
PRODUCT, LEAST_GAIN = 768, 1.5


def device_name(device: str) -> str:
    """Returns the name of the processor or graphics card for a device such as "cpu" or "cuda:0"."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    if torch.device(device).type != "cpu":
        return device
    cpus = Path("/proc/cpuinfo")  # on Linux, because platform.processor() only returns the architecture there
    lines = cpus.read_text(encoding="utf-8", errors="replace").splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Returns attnrx's cache folder, which is $ATTNRX_CACHE or, by default, `attnrx` in the user's cache folder."""
    if os.environ.get(CACHE):
        return Path(os.environ[CACHE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnrx"


def governor() -> str:
    """Returns Linux's CPU frequency policy (governor), e.g. "performance", or "" if it is unknown."""
    path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


class Load:
    """The processor load of other processes, measured from the creation of this object."""

    def __init__(self):
        self._start = _processor_seconds()

    def taken(self, threads: int) -> float | None:
        """Returns how many processors, on average, other processes took away from this process's `threads` threads.

        Returns None if the number is unknown, e.g. on systems without /proc.
        """
        now = _processor_seconds()
        if now is None or self._start is None or now[0] <= self._start[0]:
            return None
        seconds, used, own = (after - before for after, before in zip(now, self._start, strict=True))
        others = max(used - own, 0.0) / seconds
        return max(others + threads - (os.cpu_count() or 1), 0.0)


def _processor_seconds() -> tuple[float, float, float] | None:
    """Returns the time now, the CPU seconds of all processes, and the CPU seconds of this process with its children.

    The seconds of all processes include the time that a hypervisor gave to other virtual machines. Returns None if the
    system does not report these numbers.
    """
    try:
        tick = os.sysconf("SC_CLK_TCK")
        first = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
        fields = [int(number) for number in first.split()[1:9]]
        used = sum(fields) - fields[3] - fields[4]  # idle, and waiting for a disk
        own = sum(_ticks_of_family(os.getpid()))
    except (OSError, ValueError, AttributeError, IndexError):
        return None
    return time.perf_counter(), used / tick, own / tick


def _ticks_of_family(process: int) -> Iterator[int]:
    """Yields the CPU times, in clock ticks, of a process and its descendants, including ended descendants."""
    times, children = dict[int, int](), dict[int, list[int]]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            # The fields come after the name, which may contain spaces and brackets.
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            number = int(path.parent.name)
            times[number] = sum(map(int, fields[11:15]))
            children.setdefault(int(fields[1]), []).append(number)
    waiting = [process]
    while waiting:
        number = waiting.pop()
        yield times.get(number, 0)
        waiting += children.get(number, [])


@contextmanager
def restored_random_states() -> Iterator[None]:
    """Restores the states of Python's, NumPy's and torch's global random generators after the context."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def may_measure() -> bool:
    """Whether attnrx may time operations on this machine. Set the variable ATTNRX_MEASURE to 0 to forbid it."""
    return os.environ.get(MEASURE, "1") != "0"


@lru_cache
def has_fast_bfloat16(device: str) -> bool:
    """Whether products in bfloat16 are faster than in float32 on a device ("cpu" or "cuda")."""
    if device not in ("cpu", "cuda") or not may_measure():
        return False
    # The products are timed, because libraries also multiply in bfloat16 on processors that have no instructions for
    # it. On CPUs, bfloat16 runs between half and ten times as fast as float32.
    seconds: list[float] = []
    for dtype in (torch.float32, torch.bfloat16):
        factor, times = torch.ones(PRODUCT, PRODUCT, dtype=dtype, device=device), []
        for _ in range(5):
            start = time.perf_counter()
            (factor @ factor)[0, 0].item()
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    return seconds[0] >= LEAST_GAIN * seconds[1]


@contextmanager
def bfloat16_products(device: torch.device, wanted: bool) -> Iterator[None]:
    """Turns matrix products in bfloat16 on or off for a device within the context. Contexts may be nested.

    Raises:
        NotSupported: A part of a model, or a loss, mixes these products with tensors of another precision.
    """
    if not wanted and not torch.is_autocast_enabled(device.type):
        yield
        return
    try:
        # The cache is off, because it would hold a bfloat16 copy of every weight.
        with torch.autocast(device.type, torch.bfloat16, enabled=wanted, cache_enabled=False):
            yield
    except RuntimeError as error:  # torch has no class of errors for dtypes
        if not wanted or not re.search(r"(?i)dtype|bfloat16|scalar type", str(error)):
            raise
        raise NotSupported(
            f"a part of the model, or a loss, takes no products of bfloat16 ({error}): use float32, or let that part "
            "convert its inputs to the dtype of its weights."
        ) from error


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one thread within the context, e.g. for small factorizations. You may also use it as a decorator.

    Several threads would divide a small factorization into parts that take microseconds, and wait for each other after
    every part. If another process uses the processor of one of these threads, the factorization takes up to a hundred
    times as long as on one thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
