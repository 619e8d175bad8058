"""Devices, the cache folder, whether measurements are allowed, random states, and work on one thread."""

import os
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

CACHE, MEASURE = "ATTNRX_CACHE", "ATTNRX_MEASURE"


def device_name(device: str) -> str:
    """Returns the name of the processor or graphics card of a device, e.g. "cpu" or "cuda:0"."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    if torch.device(device).type != "cpu":
        return device
    cpus = Path("/proc/cpuinfo")  # of Linux, where platform.processor() returns the architecture only
    lines = cpus.read_text(encoding="utf-8", errors="replace").splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Returns the cache folder: $ATTNRX_CACHE, or attnrx in the user's cache folder."""
    if os.environ.get(CACHE):
        return Path(os.environ[CACHE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnrx"


@contextmanager
def restored_random_states() -> Iterator[None]:
    """Restores the states of the global random generators of Python, NumPy and torch after the context."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def may_measure() -> bool:
    """Whether measurements are allowed: false if ATTNRX_MEASURE is 0."""
    return os.environ.get(MEASURE, "1") != "0"


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs small factorizations on one thread, as `with one_thread():` or as a decorator.

    Threads share them in parts of microseconds, and wait for each other after every part. Where another process has
    the processor of one of them, that takes up to a hundred times as long as one thread takes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
