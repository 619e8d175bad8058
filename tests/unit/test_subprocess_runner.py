"""A function in a process of its own: its value, its lines, its errors, and arguments that cannot be pickled."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from attnrx.decide.planning import Target
from attnrx.support import atomic_writes
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.subprocess_runner import FORKS, run_in_subprocess, run_side_by_side, shared_subprocess
from attnrx.vit.kernels.compilation import kernel_threads
from attnrx.vit.kernels.native_products import linear_map

pytestmark = pytest.mark.slow
SOURCES = Path(atomic_writes.__file__).parents[2]


def test_the_value_comes_from_another_process() -> None:
    assert run_in_subprocess(divmod, 7, 2) == (3, 1)
    assert run_in_subprocess(os.getpid) != os.getpid()


@pytest.mark.skipif(not FORKS, reason="processes are forked on Linux only")
def test_every_call_has_a_process_without_the_memory_of_another() -> None:
    with shared_subprocess() as process:
        assert run_in_subprocess(os.getpid) != run_in_subprocess(os.getpid)
        assert len({os.getpid(), *process.calls(3, os.getpid)}) == 4  # with the same arguments, which are sent once


@pytest.mark.parametrize("in_subprocess", [True, False])
def test_two_processes_share_the_calls(in_subprocess: bool, tmp_path: Path) -> None:
    # The first call waits for the second one, so another process must take the second.
    first = partial(wait_for, str(tmp_path / "done")) if in_subprocess else os.getpid
    values = run_side_by_side([first, partial(finish, str(tmp_path / "done")), partial(divmod, 7, 2)], in_subprocess)
    assert values[0] == os.getpid() and values[2] == (3, 1)
    assert (values[1] != os.getpid()) == in_subprocess
    # What cannot be sent to another process is called in this one.
    lock = threading.Lock()
    assert run_side_by_side([lambda: lock.locked(), lambda: lock.locked()], in_subprocess) == [False, False]
    with pytest.raises(InvalidInput, match="give one of latency"):
        run_side_by_side([os.getpid, partial(Target.parse, "speed=2x")], in_subprocess)


def wait_for(path: str) -> int:
    ends = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < ends:
        time.sleep(0.05)
    return os.getpid()


def finish(path: str) -> int:
    Path(path).touch()
    return os.getpid()


def slow(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(60)


def test_two_processes_share_the_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert run_side_by_side([torch.get_num_threads] * 3) == [2] * 3
        assert torch.get_num_threads() == 4
        assert run_side_by_side([torch.get_num_threads] * 2, in_subprocess=False) == [4, 4]
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not FORKS, reason="processes are forked on Linux only")
def test_no_call_outlives_its_process(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with ThreadPoolExecutor(1) as pool:
        with shared_subprocess():
            failed = pool.submit(run_in_subprocess, slow, str(path))
            while not (path.exists() and path.read_text()):
                time.sleep(0.05)
        with pytest.raises(NotSupported, match="ended by SIGTERM"):
            failed.result(timeout=20)
    require_ended(path)


def require_ended(path: Path) -> None:
    """Checks that the process whose number is in a file is gone soon, or waits for its parent to notice."""
    state, deadline = Path(f"/proc/{path.read_text()}/stat"), time.monotonic() + 20
    with suppress(FileNotFoundError, ProcessLookupError):
        while state.read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.skipif(not FORKS, reason="on Linux alone the system ends processes with their parents")
def test_no_call_outlives_the_process_that_called_it(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    imports = f"from {run_in_subprocess.__module__} import run_in_subprocess; from {slow.__module__} import slow"
    code = f"{imports}; run_in_subprocess(slow, {str(path)!r})"
    places = os.pathsep.join(map(str, (SOURCES, Path(__file__).parent)))
    caller = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": places})
    while not (path.exists() and path.read_text()):
        assert caller.poll() is None
        time.sleep(0.05)
    began = time.monotonic()
    caller.kill()
    caller.wait()
    require_ended(path)
    assert time.monotonic() - began < 20


def test_kernels_use_as_many_threads_in_another_process_as_in_this_one() -> None:
    """Otherwise another library's code, on several threads, is compared with kernels on one thread."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert run_in_subprocess(kernel_threads) == kernel_threads() == 2
        # A kernel that needed threads that do not exist would wait forever.
        tokens, weight = torch.randn(512, 256, dtype=torch.float32), torch.randn(128, 256, dtype=torch.float32)
        expected = linear_map(tokens, weight, None)
        torch.testing.assert_close(run_in_subprocess(linear_map, tokens, weight, None), expected, rtol=1e-5, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_what_is_printed_is_heard() -> None:
    heard: list[str] = []
    run_in_subprocess(print, "one\ntwo", on_line=heard.append)
    assert heard == ["one", "two"]


def test_an_error_comes_back() -> None:
    with pytest.raises(NotSupported, match="give one of latency"):
        run_in_subprocess(Target.parse, "speed=2x")


def test_a_process_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotSupported, match="exited with code 1"):
        run_in_subprocess(divmod, 1, 0)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(NotSupported, match="cannot be pickled"):
        run_in_subprocess(len, threading.Lock())


SCRIPT = """
from torch import nn, ones
from attnrx.support.subprocess_runner import run_in_subprocess, run_side_by_side

SIDE = 3

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIDE, 1)

    def forward(self, x):
        return self.layer(x).sum() * SIDE

def called(net):
    return net, net(ones(1, SIDE)).item()

net = Net()
copied, found = run_in_subprocess(called, net)
assert found == called(net)[1] == copied(ones(1, SIDE)).item()
"""


def test_classes_and_functions_of_a_script_are_sent(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    subprocess.run([sys.executable, str(tmp_path / "script.py")], env=environment, check=True)
