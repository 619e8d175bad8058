"""Environments that are odd: variables, defaults of torch, folders. The chain of verbs gives what it always gives."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

import attnrx as rx
from attnrx.cli import main
from attnrx.support.errors import InvalidInput
from support.sweep.case import Case
from support.sweep.workshop import WORKSHOP

# Of this process, for the time of a case.
VARIABLES: tuple[Mapping[str, str | None], ...] = (
    {"HOME": None},
    {"HOME": "/proc/nowhere"},
    {"HOME": ""},
    {"XDG_CACHE_HOME": "/proc/nowhere"},
    {"XDG_CACHE_HOME": "/dev/null"},
    {"XDG_CACHE_HOME": ""},
    {"XDG_CACHE_HOME": "relative"},
    {"ATTNRX_CACHE": "/proc/nowhere"},
    {"ATTNRX_CACHE": "/dev/null"},
    {"ATTNRX_CACHE": ""},
    {"ATTNRX_CACHE": "x" * 5000},
    {"ATTNRX_MEASURE": "0"},
    {"ATTNRX_BUILD": "0"},
    {"ATTNRX_DATA": "/proc/nowhere"},
    {"TMPDIR": "/proc/nowhere"},
    {"LANG": "C", "LC_ALL": "C"},
    {"LC_ALL": "tlh_KX.UTF-8"},
    {"TZ": "nowhere"},
    {"COLUMNS": "0"},
    {"COLUMNS": "x"},
    {"TERM": "dumb", "NO_COLOR": "1"},
    {"PYTHONHASHSEED": "x"},
    {"OMP_NUM_THREADS": "x"},
    {"USER": None, "LOGNAME": None},
    {"PATH": ""},
    {"HF_HOME": "/dev/null"},
)


@contextmanager
def _set(variables: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def _anomalies() -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        yield


@contextmanager
def _without_folder() -> Iterator[None]:
    """The current folder is deleted."""
    import tempfile

    before, gone = Path.cwd(), Path(tempfile.mkdtemp())
    os.chdir(gone)
    gone.rmdir()
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _recursion() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "float64 by default": lambda: _dtype(torch.float64),
    "float16 by default": lambda: _dtype(torch.float16),
    "bfloat16 by default": lambda: _dtype(torch.bfloat16),
    "meta by default": lambda: _device("meta"),
    "a context on meta": lambda: torch.device("meta"),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": _deterministic,
    "anomalies": _anomalies,
    "no current folder": _without_folder,
    "a low limit of recursion": _recursion,
}


def chain(folder: Path) -> Any:
    """The verbs on the model of the workshop, with its numbers."""
    model = WORKSHOP.model
    diagnosis = rx.diagnose(model, WORKSHOP.images)
    slim = rx.realize(model, rx.prescribe(diagnosis, "qk=total_rank:0.5 vo=total_rank:0.5 tokens=ward:0.5@2"))
    evidence = rx.verify(slim, model, WORKSHOP.images, "fidelity,costs")
    loaded = rx.load(rx.save(slim, folder / "slim", evidence=evidence))
    rx.write_report(folder / "report.html", evidence=evidence)
    return {f"{each.check} {each.claim}": each.value for each in evidence.findings}, rx.models.model_fingerprint(loaded)


@cache
def usual() -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return chain(Path(folder))


def as_usual(result: Any) -> str | None:
    """The law: the numbers and weights are those of an ordinary environment."""
    values, fingerprint = result
    wanted, weights = usual()
    far = [name for name, value in wanted.items() if abs(values.get(name, 1e9) - value) > 1e-6 * max(1, abs(value))]
    return (
        f"{far[0]} is {values.get(far[0])}, not {wanted[far[0]]}"
        if far
        else None
        if weights == fingerprint
        else "other weights"
    )


def _inside(context: Callable[[], Any], folder: Path) -> Any:
    with ExitStack() as stack:
        stack.enter_context(context())
        return chain(folder)


def _command(variables: Mapping[str, str | None], folder: Path) -> None:
    """The command line, which refuses what it cannot use."""
    with _set(variables):
        code = main(
            [
                "realize",
                str(WORKSHOP.original_folder),
                "--prescription",
                str(WORKSHOP.prescription_file),
                "--out",
                str(folder / "out"),
            ]
        )
    if code == 2:
        raise InvalidInput("the command line refused its environment, as it may")
    assert code == 0, f"exit code {code}"


# Of a process of its own: what Python reads when it starts, and standard streams.
PROCESSES: dict[str, tuple[str, tuple[int, ...], str]] = {
    "an ASCII terminal": ("LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii {attnrx} costs svda:digits", (0,), "all"),
    "no standard output": ("{attnrx} costs svda:digits >&-", (0, 2), ""),
    "a full disk": ("{attnrx} costs svda:digits > /dev/full", (2,), ""),
    "a closed pipe": ("{attnrx} costs svda:digits | true", (0,), ""),
    "no variable at all": ("env -i PYTHONPATH=$PYTHONPATH {attnrx} costs svda:digits", (0,), "all"),
    "an odd folder": (
        "mkdir 'mü ller' && cd 'mü ller' && LC_ALL=C PYTHONUTF8=0 {attnrx} costs svda:digits", (0,), "all",
    ),
    "optimized": ("PYTHONOPTIMIZE=2 {attnrx} costs svda:digits", (0,), "all"),
}  # fmt: skip


def _process(name: str, folder: Path) -> str:
    line, codes, _ = PROCESSES[name]
    # The sources by their absolute path: some cases have another current folder.
    paths = os.pathsep.join(str(Path(each).resolve()) for each in sys.path if each)
    done = subprocess.run(
        ["bash", "-c", line.format(attnrx=f"{sys.executable} -m attnrx")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
    )
    assert done.returncode in codes, f"exit code {done.returncode}: {done.stderr[-300:]}"
    assert "Traceback" not in done.stderr, done.stderr[-500:]
    return done.stdout


def draw(number: int, folder: Path) -> Case:
    contexts, processes = list(CONTEXTS), list(PROCESSES)
    if number < len(contexts):
        name = contexts[number]
        return Case(name, lambda: _inside(CONTEXTS[name], folder / "case"), as_usual)
    number -= len(contexts)
    if number < len(processes):
        name = processes[number]
        return Case(name, lambda: _process(name, folder), lambda shown: None if PROCESSES[name][2] in shown else shown)
    variables = VARIABLES[(number - len(processes)) % len(VARIABLES)]
    text = " ".join(f"{name}={value!r}"[:60] for name, value in variables.items())
    if (number - len(processes)) // len(VARIABLES):
        return Case(f"command line with {text}", lambda: _command(variables, folder / "case"), lambda _: None)
    return Case(text, lambda: _inside(lambda: _set(variables), folder / "case"), as_usual)
