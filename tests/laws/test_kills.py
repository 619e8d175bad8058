"""Commands that are stopped anywhere leave the old or the new result, whole, and the next run ends as if nothing had
happened (`support/kills.py`, which stops every command at as many points as you like).
"""

import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.kills import COMMANDS, Bench, Found, Inputs, Stop, answer_signals, import_ahead, may_mount

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
]
SLOW = ("shrink, with ONNX", "shrink, timed", "export to ONNX")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    import_ahead()
    return Inputs.write(tmp_path_factory.mktemp("inputs"))


def require_lawful(found: list[Found]) -> None:
    problems = [f"{each.signal}, {each.where}: {problem}" for each in found for problem in each.problems]
    assert not problems, "\n".join(problems)


def test_a_stopped_comparison_and_training_leave_whole_files_and_go_on(inputs: Inputs, tmp_path: Path) -> None:
    found = []
    for name in ("compare", "train"):
        bench = Bench(name, inputs, tmp_path / name)
        found += [bench.stopped(stop) for stop in bench.stops(4)]
    require_lawful(found)
    assert len({each.signal for each in found}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_stopped_command_leaves_whole_files_and_the_next_run_ends(name: str, inputs: Inputs, tmp_path: Path) -> None:
    bench = Bench(name, inputs, tmp_path)
    found = [bench.stopped(stop) for stop in bench.stops(3 if name in SLOW else 6)]
    require_lawful(found)
    assert {each.state for each in found} & {"old", "absent", "part"}, "every stop came too late"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in SLOW])
def test_a_disk_that_takes_no_more_leaves_whole_files(name: str, inputs: Inputs, tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("this system lets no process mount a disk of its own")
    bench = Bench(name, inputs, tmp_path)
    found = [bench.on_a_full_disk(0.0), bench.on_a_full_disk(0.5), bench.read_only()]
    require_lawful(found)
    assert found[0].code == found[-1].code == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_new_interpreter_that_is_stopped_leaves_no_process(
    number: signal.Signals, inputs: Inputs, tmp_path: Path
) -> None:
    bench = Bench("shrink", inputs, tmp_path)
    require_lawful([bench.stopped(Stop(number, seconds=seconds), fresh=True) for seconds in (1.0, 6.0)])


READING = """
import os, sys, time, torch, attnrx
from pathlib import Path

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        (Path(sys.argv[2]) / str(os.getpid())).touch()
        time.sleep(0.05)
        return torch.randn(3, 16, 16)

loader = torch.utils.data.DataLoader(Images(), batch_size=8, num_workers=2)
attnrx.shrink(sys.argv[1], loader, macs=0.8)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_of_a_loader_end_with_the_call_that_reads_it(
    number: signal.Signals, inputs: Inputs, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", READING, str(inputs.small), str(tmp_path)]
    running = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    while len(workers := list(tmp_path.iterdir())) < 2:
        assert running.poll() is None
        time.sleep(0.05)
    began = time.monotonic()
    running.send_signal(number)
    assert running.wait(30) != 0
    while any(is_running(worker.name) for worker in workers):
        assert time.monotonic() - began < 30
        time.sleep(0.05)


def is_running(process: str) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_a_closed_terminal_ends_a_command_as_documented(inputs: Inputs, tmp_path: Path) -> None:
    """Nothing can be printed any more, and temporary files are deleted all the same."""
    words = ("train", inputs.small, "--data", inputs.data, "--epochs", 2000, "--out", tmp_path / "run")
    child, terminal = pty.fork()
    if not child:
        answer_signals()
        os.execv(sys.executable, [sys.executable, "-m", "attnrx", *map(str, words)])
    os.set_blocking(terminal, False)
    began, printed = time.monotonic(), b""
    while not (tmp_path / "run" / "history.jsonl").exists():
        assert time.monotonic() - began < 120, printed
        with suppress(BlockingIOError):
            printed += os.read(terminal, 4096)
        time.sleep(0.01)
    os.close(terminal)  # the system sends SIGHUP
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert not list(tmp_path.rglob("*.partial"))
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
