"""Commands that are stopped anywhere, by a signal or by a disk that takes no more, and what they leave.

Afterwards every output is whole, the old one or the new one. No process, lock or temporary file is left that the next
run does not remove, and the next run ends as if nothing had happened. Run as a script, this stops every command at many
points and prints a table of what was found:

    python tests/support/kills.py --points 200 --out kills.json
"""

import argparse
import ctypes
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import attnrx as rx
from attnrx.exporting import present_exports
from attnrx.exporting.exported import present_facts
from attnrx.nouns.elastic import Elastic, is_elastic
from attnrx.support.storage import read_json
from attnrx.training.checkpoints import Checkpoints
from attnrx.vit.models import model_fingerprint
from attnrx_lab.vision_transformer import ViTConfig

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.cases import model
from support.interruptions import visible, watched
from support.pictures import write_folder

command_line: Any = importlib.import_module("attnrx.cli.main")  # `cli.main` is the function
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OF_THE_USER = b"of the user"
# Of ONNX Runtime and PyTorch's compiler, in the folder for temporary files.
OF_LIBRARIES = {".ses", "torchinductor_root"}
FULL, READ_ONLY = "full disk", "read-only"
SMALL = ViTConfig.uniform(
    "svda", width=12, depth=2, heads=3, image_size=16, patch_size=8, channels=3, classes=3, mlp_ratio=2.0
)
# Large enough that half of its MACs take visibly less time.
TIMED = ViTConfig.uniform(
    "dense", width=96, depth=3, heads=3, image_size=32, patch_size=4, channels=3, classes=3, mlp_ratio=4.0
)
RESULT = {"config.json", "model.safetensors", "prescription.json", "evidence.json", "README.md", "report.html"}
CHILD_SECONDS = 5.0  # in which the processes of a stopped command must end
LONGEST = 300.0  # seconds of one command
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, CLONE_NEWUSER, MS_RDONLY, MS_REMOUNT = 0x00020000, 0x10000000, 1, 32


# What is run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """Models and images that the commands read."""

    small: Path
    timed: Path
    data: Path
    timed_data: Path

    @classmethod
    def write(cls, root: Path) -> "Inputs":
        counts = {"train": 8, "validation": 3, "test": 4}
        data, timed_data = (
            write_folder(root / f"images{size}", counts, size=(size, size)) for size in (SMALL.image_size, 32)
        )
        small, timed = (rx.save(model(each, 0).float(), root / f"model{each.image_size}") for each in (SMALL, TIMED))
        return cls(small, timed, data, timed_data)


@dataclass(frozen=True)
class Command:
    """A command that writes to `out`.

    Attributes:
        words: The inputs, the output and 0 for an earlier or 1 for this result -> the words of the command line.
        state: The output -> "part" or "new"; raises an error where it is not whole.
        result: What two runs of the same command have in common.
        has_earlier: Whether this result replaces an earlier one, or adds to it.
        stopped: The exit code of a handled signal, if it is not 128 plus its number.
    """

    words: Callable[[Inputs, Path, int], Sequence[object]]
    state: Callable[[Path], str]
    result: Callable[[Path], Any]
    out: str = "out"
    has_earlier: bool = False
    stopped: int | None = None
    has_child: bool = False


def whole(folder: Path) -> str:
    """Returns the fingerprint of a saved model, after checking that every file beside it is of this model."""
    fingerprint = model_fingerprint(rx.load(folder))
    if (folder / "evidence.json").exists():
        rx.Evidence.load(folder / "evidence.json").require(fingerprint, str(folder))
    if (folder / "prescription.json").exists():
        rx.Prescription.load(folder / "prescription.json")
    for path, facts in present_exports(folder).items():
        assert facts["model"]["fingerprint"] == fingerprint, f"{path} is of another model"
    return fingerprint


def shrunk_state(folder: Path) -> str:
    whole(folder)
    missing = RESULT - shown(folder).keys()
    if "evidence.json" not in missing and rx.Evidence.load(folder / "evidence.json").about["nothing_removed"]:
        missing -= {"prescription.json"}  # on a busy machine the unchanged model may be fast enough
    assert not missing, f"{missing} are missing"
    return "new"


def elastic_state(folder: Path) -> str:
    for each in folder.iterdir():
        if each.is_dir() and not each.name.endswith(".partial"):  # a temporary folder, which a kill leaves
            whole(each)
    if not is_elastic(folder):
        return "part"
    sizes = Elastic.read(folder).sizes
    for size in sizes:
        if size.macs + 1e-6 < 1:
            rx.load(f"{folder}@macs={size.macs + 1e-6}")
    return "new" if len(sizes) == 3 else "part"


def elastic_result(folder: Path) -> Any:
    return [(size.name, size.fingerprint) for size in Elastic.read(folder).sizes]


def training_state(folder: Path) -> str:
    Checkpoints(folder).read()
    if (folder / "history.jsonl").exists():
        [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    if not (folder / "training.json").exists():
        assert not (folder / "config.json").exists()
        return "part"
    read_json(folder / "training.json")
    whole(folder)
    return "new"


def comparison_state(path: Path) -> str:
    return "new" if len(read_json(path)["trials"]) == 4 else "part"


def comparison_result(path: Path) -> Any:
    return [each["macs"] for each in read_json(path)["trials"]]


def reproduced_state(folder: Path) -> str:
    for path in folder.rglob("*.json"):
        read_json(path)
    for path in folder.rglob("evidence*.json"):
        rx.Evidence.load(path)
    for path in folder.rglob("train"):
        training_state(path)
    table = folder / "svda" / "table1.json"
    return "new" if table.exists() and table.with_suffix(".md").exists() else "part"


def reproduced_result(folder: Path) -> Any:
    return sorted(model_fingerprint(rx.load(each.parent)) for each in folder.rglob("config.json"))


def exported_state(path: Path) -> str:
    return "new" if present_facts(path) is not None else "part"


def exported_result(path: Path) -> Any:
    facts = present_facts(path)
    assert facts is not None
    return facts["images"], facts["model"]


def shrinking(*options: object, timed: bool = False) -> Callable[[Inputs, Path, int], Sequence[object]]:
    def words(inputs: Inputs, out: Path, number: int) -> Sequence[object]:
        place = (inputs.timed, "--data", inputs.timed_data) if timed else (inputs.small, "--data", inputs.data)
        target = ("--faster", 1.2, "--threads", 1, "--batch", 8) if timed else ("--macs", (0.9, 0.8)[number])
        return ("shrink", *place, *target, *options, "--out", out)

    return words


def exporting(form: str) -> Callable[[Inputs, Path, int], Sequence[object]]:
    return lambda inputs, out, number: ("export", inputs.small, "--to", form, "--batch", 1 + number, "--out", out)


COMMANDS = {
    "shrink": Command(shrinking("--no-onnx"), shrunk_state, whole, has_earlier=True),
    "shrink, with ONNX": Command(shrinking(), shrunk_state, whole),
    # In other processes the model is timed.
    "shrink, timed": Command(
        shrinking("--no-onnx", timed=True), shrunk_state, lambda folder: whole(folder) and None, has_child=True
    ),
    "elastic": Command(
        lambda inputs, out, number: (
            *("elastic", inputs.small, "--data", inputs.data, "--macs", ("0.9", "0.9,0.8")[number], "--out", out),
        ),
        elastic_state,
        elastic_result,
        has_earlier=True,
    ),
    "train": Command(
        lambda inputs, out, number: (
            *("train", inputs.small, "--data", inputs.data, "--epochs", 3, "--batch-size", 4),
            *("--checkpoint-every", 2, "--precision", "fp32", "--out", out),
        ),
        training_state,
        whole,
        stopped=128 + signal.SIGINT,
    ),
    "compare": Command(
        lambda inputs, out, number: (
            *("compare", inputs.small, "--data", inputs.data, "--methods", "a=total_rank:{share}"),
            *("b=uniform_rank:{share}", "--shares", ("0.5", "0.75,0.5")[number], "--out", out),
        ),
        comparison_state,
        comparison_result,
        "out.json",
        has_earlier=True,
    ),
    "reproduce": Command(
        lambda inputs, out, number: ("reproduce", "svda/table1", "--tiny", "--seeds", 7, "--out", out),
        reproduced_state,
        reproduced_result,
        stopped=128 + signal.SIGINT,  # within its trainings
    ),
    "export": Command(exporting("program"), exported_state, exported_result, "out.pt2", has_earlier=True),
    "export to ONNX": Command(exporting("onnx"), exported_state, exported_result, "out.onnx"),
}


# How it is stopped ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stop:
    """A signal before a change of the file system, by its number, or after some seconds."""

    number: signal.Signals
    event: int | None = None
    seconds: float | None = None


@dataclass
class Ended:
    """How a process ended: its code, negative for a signal, and what it printed and changed."""

    code: int
    said: str
    seconds: float
    events: list[str] = field(default_factory=list)
    orphans: float = 0.0  # seconds until all its processes had ended


def ran(words: Sequence[object], root: Path, scratch: Path, stop: Stop | None = None, fresh: bool = False) -> Ended:
    """Runs a command in a fork of this process, or in a new one, and stops it.

    Args:
        words: The command line.
        root: The folder whose changes are events.
        scratch: The folder of the system for temporary files.
        stop: None to let it end.
        fresh: Whether it runs in a new interpreter.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # processes that it leaves become children of this one
    before, log = children(), scratch.with_name("log")
    began, texts = time.monotonic(), [str(word) for word in words]
    if fresh:
        environment = {**os.environ, "TMPDIR": str(scratch), "ATTNRX_CACHE": str(scratch.with_name("cache"))}
        environment["ATTNRX_BUILD"] = "0"  # a compiler runs on to its end, once per machine
        with log.open("wb") as out:
            command = [sys.executable, "-m", "attnrx", *texts]
            child = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True, preexec_fn=answer_signals
            ).pid
    else:
        blocked = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # until the command runs
        child = os.fork()
        if child:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        else:
            _run_forked(texts, root, scratch, log, stop)
    code = None
    while code is None:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        elapsed = time.monotonic() - began
        if stop is not None and stop.seconds is not None and elapsed >= stop.seconds:
            os.kill(child, stop.number)
            stop = None
        if elapsed > LONGEST:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    seconds = time.monotonic() - began
    orphans = _wait_for(children() - before)
    events = log.with_suffix(".events")
    lines = events.read_text().splitlines() if events.exists() else []
    events.unlink(missing_ok=True)
    return Ended(code, log.read_text(errors="replace"), seconds, lines, orphans)


def _run_forked(words: list[str], root: Path, scratch: Path, log: Path, stop: Stop | None) -> None:
    """Runs a command, and ends this process."""
    code, events = 99, list[str]()
    try:
        os.setsid()
        answer_signals()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        tempfile.tempdir = os.environ["TMPDIR"] = str(scratch)
        os.environ["ATTNRX_CACHE"] = str(scratch.with_name("cache"))
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)

        def act(number: int) -> None:
            if stop is not None and number == stop.event:
                os.kill(os.getpid(), stop.number)

        parse = command_line.parsed

        def running(given: Sequence[str]) -> Any:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            return parse(given)

        command_line.parsed = running

        def call() -> None:
            nonlocal code
            code = command_line.main(words)

        events = watched(root, call, act).events
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            log.with_suffix(".events").write_text("\n".join(events))
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def answer_signals() -> None:
    """Undoes what a shell or nohup did: a job in its background ignores Ctrl-C and the end of the terminal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def children() -> set[int]:
    """Returns the processes that this one must wait for, without those that have ended."""
    found = set[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == os.getpid() and state != "Z":
                    found.add(int(entry.name))
    return found


def _wait_for(processes: set[int]) -> float:
    """Waits until the processes have ended, and returns the seconds; ends those that stay, after twice the limit."""
    began = time.monotonic()
    while (left := processes & children()) and time.monotonic() - began < 2 * CHILD_SECONDS:
        time.sleep(0.01)
    seconds = time.monotonic() - began
    for each in left:
        os.kill(each, signal.SIGKILL)
    for each in processes:
        with suppress(ChildProcessError):
            os.waitpid(each, 0)
    return seconds


# What it leaves ---------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What one stop left: the state of the output, and everything that breaks the law."""

    command: str
    signal: str
    where: str
    code: int
    state: str
    problems: list[str]
    seconds: float


@dataclass
class Bench:
    """One command with its inputs, an earlier result, and how it ends where nothing stops it."""

    name: str
    inputs: Inputs
    place: Path
    ended: Ended = field(init=False)
    expected: Any = field(init=False)

    def __post_init__(self) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        for name in ("scratch", "cache"):
            (self.place / name).mkdir(exist_ok=True)
        if self.command.has_earlier:
            ended = self.run(self.place / "earlier", 0)
            assert ended.code in (0, 1), ended.said
        root = self.fresh()
        self.ended = self.run(root)
        assert self.ended.code in (0, 1) and self.state(root) == "new", self.ended.said
        self.expected = self.command.result(root / self.command.out)
        shutil.copytree(root, self.place / "whole", symlinks=True)

    @property
    def command(self) -> Command:
        return COMMANDS[self.name]

    def run(self, root: Path, number: int = 1, stop: Stop | None = None, fresh: bool = False) -> Ended:
        root.mkdir(exist_ok=True)
        words = self.command.words(self.inputs, root / self.command.out, number)
        return ran(words, root, self.place / "scratch", stop, fresh)

    def fresh(self) -> Path:
        """Returns a folder with the earlier result and a file of the user's."""
        root = self.place / "root"
        shutil.rmtree(root, ignore_errors=True)
        if self.command.has_earlier:
            shutil.copytree(self.place / "earlier", root, symlinks=True)
        root.mkdir(exist_ok=True)
        (root / "notes.txt").write_bytes(OF_THE_USER)
        if (root / self.command.out).is_dir():
            (root / self.command.out / "notes.txt").write_bytes(OF_THE_USER)
        return root

    def state(self, root: Path) -> str:
        """Returns "absent", "old", "part" or "new"; raises an error where the output is not whole."""
        out = root / self.command.out
        if not os.path.lexists(out):
            assert not self.command.has_earlier, "the earlier result is gone"
            return "absent"
        for path in (root, out) if self.command.has_earlier and out.is_dir() else (root,):
            assert (path / "notes.txt").read_bytes() == OF_THE_USER, "a file of the user's is gone"
        if self.command.has_earlier:
            found = {name: content for name, content in shown(root).items() if content != OF_THE_USER}
            if found == shown(self.place / "earlier"):
                return "old"
        return self.command.state(out)

    def stopped(self, stop: Stop, fresh: bool = False) -> Found:
        """Stops the command, looks at what it left, and runs it again."""
        root = self.fresh()
        ended = self.run(root, stop=stop, fresh=fresh)
        where = f"{stop.seconds:.2f} s" if stop.event is None else f"before event {stop.event}"
        if stop.event is not None and stop.event <= len(self.ended.events):
            where += f" ({self.ended.events[stop.event - 1].replace(str(root), 'ROOT')})"
        handled = stop.number != signal.SIGKILL
        codes = {-stop.number} if not handled else {self.command.stopped or 128 + stop.number, 128 + stop.number}
        # A signal may come after the last step, and a new interpreter handles none until it runs the command.
        codes |= {0, 1} if stop.seconds is not None or handled else set()
        codes |= {-stop.number} if fresh else set()
        problems = [] if ended.code in codes else [f"exit code {ended.code} after {stop.number.name}: {_end(ended)}"]
        if "Traceback" in ended.said and ended.code != -stop.number and not (fresh and "import" in ended.said):
            problems.append(f"a traceback: {_end(ended)}")
        return self.judged(root, ended, stop.number.name, where, problems, handled and ended.code != -stop.number)

    def judged(
        self, root: Path, ended: Ended, stopped_by: str, where: str, problems: list[str], handled: bool = True
    ) -> Found:
        state = "damaged"
        try:
            state = self.state(root)
        except BaseException as error:
            problems.append(f"not whole: {type(error).__name__}: {error}")
        if ended.orphans > CHILD_SECONDS:
            problems.append(f"a process ran on for more than {CHILD_SECONDS:g} s")
        # Where the signal came while temporary files were deleted, the next run deletes them.
        if handled and not re.search(r"\((os.remove|os.rmdir)", where):
            problems += [f"left by a handled stop: {each}" for each in self.leftovers(root)]
        if (
            self.command.has_child
        ):  # it takes minutes, and what it leaves is what the same command without a child leaves
            return Found(self.name, stopped_by, where, ended.code, state, problems, ended.seconds)
        again = self.run(root)
        if again.code not in (0, 1):
            problems.append(f"the next run exits with {again.code}: {_end(again)}")
        else:
            try:
                assert self.state(root) == "new"
                found = self.command.result(root / self.command.out)
                assert found == self.expected, f"{found}, not {self.expected}"
            except BaseException as error:
                problems.append(f"the next run left another result: {type(error).__name__}: {error}")
        problems += [f"left after the next run: {each}" for each in self.leftovers(root)]
        return Found(self.name, stopped_by, where, ended.code, state, problems, ended.seconds + again.seconds)

    def leftovers(self, root: Path) -> list[str]:
        """Returns hidden and temporary files that are left."""
        hidden = [each for place in (root, self.place / "cache") for each in place.rglob(".*")]
        scratch = [each for each in (self.place / "scratch").iterdir() if each.name not in OF_LIBRARIES]
        return [str(each) for each in (*hidden, *scratch)]

    def stops(self, count: int) -> list[Stop]:
        """Returns stops by all signals in turn: half at changes of the file system, first at renames, half in time."""
        events = self.ended.events
        renames = [number for number, event in enumerate(events, 1) if event.startswith("os.rename")]
        # Before and after each rename; evenly spaced where there are more.
        near = [each for number in renames for each in (number, number + 1) if each <= len(events)]
        others = [number for number in range(1, len(events) + 1) if number not in near]
        chosen = evenly(near, (count + 1) // 3) + evenly(others, count // 6)
        moments = count - len(chosen)
        stops: list[tuple[int | None, float | None]] = [(event, None) for event in chosen]
        stops += [(None, self.ended.seconds * (index + 0.5) / moments) for index in range(moments)]
        return [Stop(SIGNALS[index % len(SIGNALS)], *each) for index, each in enumerate(stops)]

    def on_a_full_disk(self, share: float) -> Found:
        """Runs the command on a disk that has room for a share of what it writes, and again on a larger one."""
        return self._on_a_disk(FULL, f"{share:.0%} of the space", share)

    def read_only(self) -> Found:
        """Runs the command on a disk that cannot be written, and again on one that can."""
        return self._on_a_disk(READ_ONLY, "", None)

    def _on_a_disk(self, kind: str, where: str, share: float | None) -> Found:
        """In a process that alone has this disk; without one, if the system lets nobody mount one."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            found: dict[str, Any] = {}
            try:
                found = asdict(self._judged_on_a_disk(kind, where, share))
            except BaseException as error:
                traceback.print_exc()
                found = asdict(Found(self.name, kind, where, 99, "damaged", [f"{type(error).__name__}: {error}"], 0.0))
            finally:
                os.write(writing, json.dumps(found).encode())
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            found = json.loads(pipe.read())
        os.waitpid(child, 0)
        return Found(**found)

    def _judged_on_a_disk(self, kind: str, where: str, share: float | None) -> Found:
        root = self.fresh()
        earlier = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        size = sum(in_pages(len(content)) for content in earlier.values())
        system = ctypes.CDLL(None, use_errno=True)

        def mount(flags: int, options: str) -> None:
            if system.mount(b"tmpfs", os.fsencode(root), b"tmpfs", flags, options.encode()):
                raise OSError(ctypes.get_errno(), "a disk cannot be mounted")

        require_own_mounts()
        needed = sum(in_pages(path.stat().st_size) for path in (self.place / "whole").rglob("*") if path.is_file())
        room = 0 if share is None else int(share * needed)
        mount(0, f"size={size + in_pages(room)}" if kind == FULL else "size=256m")
        for path, content in earlier.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if kind == READ_ONLY:
            mount(MS_REMOUNT | MS_RDONLY, "size=256m")
        ended = self.run(root)
        mount(MS_REMOUNT, "size=256m")
        problems = []
        if ended.code != 2 and not (kind == FULL and ended.code in (0, 1)):
            problems.append(f"exit code {ended.code} ({kind}): {_end(ended)}")
        if "Traceback" in ended.said:
            problems.append(f"a traceback: {_end(ended)}")
        elif ended.code == 2 and not any(each in ended.said for each in ("space", "ead-only", "permission")):
            problems.append(f"the message does not say that the disk is the reason: {_end(ended)}")
        return self.judged(root, ended, kind, where, problems)


def in_pages(size: int) -> int:
    return -(-size // 4096) * 4096


def require_own_mounts() -> None:
    """Gives this process mounts of its own, as root or as a user who may have namespaces."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.unshare(CLONE_NEWNS | (0 if os.geteuid() == 0 else CLONE_NEWUSER)):
        raise OSError(ctypes.get_errno(), "no namespace of mounts")
    # Of root, whose mounts would be seen by other processes.
    system.mount(None, b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE


def may_mount() -> bool:
    """Whether this system lets a process have a disk of its own."""
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            require_own_mounts()
            code = 0
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def shown(folder: Path) -> dict[str, bytes]:
    """The content of every file, without hidden ones."""
    return {name: content for name, content in visible(folder).items() if not re.search(r"(^|/)\.", name)}


def evenly(values: Sequence[int], count: int) -> list[int]:
    count = min(count, len(values))
    return [values[(2 * index + 1) * len(values) // (2 * count)] for index in range(count)]


def _end(ended: Ended) -> str:
    return ended.said.strip()[-700:]


def import_ahead() -> None:
    """Imports what the commands import, so that forks need not; nothing is run, which could start threads."""
    for name in ("torch._dynamo", "torch.onnx", "torch.export", "timm", "accelerate", "onnx", "onnxscript"):
        with suppress(ImportError):
            __import__(name)


# The table --------------------------------------------------------------------------------------------------------

# Of all stops the parts of each command. Those with other processes are slow.
SHARES = {
    "shrink": 0.2,
    "shrink, with ONNX": 0.06,
    "shrink, timed": 0.08,
    "elastic": 0.12,
    "train": 0.16,
    "compare": 0.12,
    "reproduce": 0.1,
    "export": 0.12,
    "export to ONNX": 0.04,
}
FRESH = 4  # of them in a new interpreter, per command


def table(found: Sequence[Found]) -> str:
    """Returns a row per command and kind of stop: how often, the states that were left, and the problems."""
    rows = defaultdict[tuple[str, str], list[Found]](list)
    for each in found:
        rows[each.command, each.signal].append(each)
    lines = ["| command | stopped by | times | absent | old | part | new | exit codes | problems |", "|---" * 9 + "|"]
    for (command, kind), group in rows.items():
        states = Counter(each.state for each in group)
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(Counter(each.code for each in group).items()))
        counts = " | ".join(str(states[name]) for name in ("absent", "old", "part", "new"))
        lines.append(
            f"| {command} | {kind} | {len(group)} | {counts} | {codes} | {sum(bool(each.problems) for each in group)} |"
        )
    return "\n".join(lines)


def all_stops(bench: Bench, count: int) -> Iterator[Found]:
    fresh = min(FRESH, count // 4)
    for stop in bench.stops(count - fresh):
        yield bench.stopped(stop)
    for index in range(fresh):  # the import takes about as long as the command
        yield bench.stopped(Stop(SIGNALS[index], seconds=2 + bench.ended.seconds * index / FRESH), fresh=True)


def run_all(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=200, help="stops by signals in all (200)")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--no-disks", action="store_true", help="stops by signals only")
    parser.add_argument("--out", type=Path, help="a JSON file of everything that was found")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    import_ahead()
    found = list[Found]()
    with tempfile.TemporaryDirectory() as folder:
        inputs = Inputs.write(Path(folder))
        total = sum(SHARES[name] for name in options.only)
        for name in options.only:
            bench = Bench(name, inputs, Path(folder) / re.sub(r"\W+", "-", name))
            print(f"{name}: {bench.ended.seconds:.1f} s, {len(bench.ended.events)} events", file=sys.stderr, flush=True)
            has_disks = may_mount() and not options.no_disks and not bench.command.has_child
            disks = [bench.on_a_full_disk(share) for share in (0.0, 0.2, 0.5, 0.8)] if has_disks else []
            disks += [bench.read_only()] if has_disks else []
            for each in (*disks, *all_stops(bench, round(options.points * SHARES[name] / total))):
                found.append(each)
                for problem in each.problems:
                    print(f"{each.command}, {each.signal}, {each.where}: {problem}", file=sys.stderr, flush=True)
            if options.out:
                options.out.write_text(json.dumps([asdict(each) for each in found], indent=1))
    print(table(found))
    return int(any(each.problems for each in found))


if __name__ == "__main__":
    sys.exit(run_all())
