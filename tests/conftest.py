"""float64, determinism, no network; and the choice between the quick tests and all of them."""

import os
import shutil
import signal
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import jaxtyping
import pytest
import torch

REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# Deterministic products of matrices on CUDA need it, before the first one.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# A shell starts what runs in the background with signals that are ignored, and attnrx leaves ignored ones so.
for _name, _default in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    _number = getattr(signal, _name, None)  # Windows has no SIGHUP
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)

QUICK_CASES = 4  # of one parametrized test, evenly spaced, in `make test`
LEAST_CASES = 2  # of every value of every parameter, in `make test-all`; one parameter alone has all its values
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the slow tests too, and every value of parametrized tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if config.getoption("--all") or "slow" not in item.keywords:
            cases[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for each in map(covering, cases.values()):
        count = len(each) if config.getoption("--all") else min(len(each), QUICK_CASES)
        chosen |= {each[position * len(each) // count] for position in range(count)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def covering(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the cases of a test in which every value of every parameter occurs LEAST_CASES times, if it does at all.

    The cases of stacked `parametrize` decorators are the cells of a grid, taken along its diagonals. Cases that one
    decorator lists are all taken.
    """
    axes = []
    for mark in items[0].iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        # Values of the same decorator are the same objects in all its cases.
        values = [tuple(id(item.callspec.params[name]) for name in names) for item in items]  # type: ignore[attr-defined]
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        axes.append([numbers[value] for value in values])
    cells = [*zip(*axes, strict=True)] or [()] * len(items)
    longest = max((index + 1 for cell in cells for index in cell), default=1)
    found, chosen = Counter[tuple[int, int]](), set()
    for number in sorted(range(len(items)), key=lambda number: sum(cells[number]) % longest):
        if not cells[number] or any(found[each] < LEAST_CASES for each in enumerate(cells[number])):
            found.update(enumerate(cells[number]))
            chosen.add(number)
    return [items[number] for number in sorted(chosen)]


@pytest.fixture(autouse=True)
def exact_arithmetic() -> Iterator[None]:
    """Float64 by default and deterministic kernels, restored afterwards."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def single_precision(exact_arithmetic: None) -> None:
    """Float32, for runs as a user makes them, and shared runs that were made before any test's float64."""
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Fails a test that leaves a setting of attnrx behind: ATTNRX_BUILD=0 took the kernels from all later tests."""
    before = settings_of_attnrx()
    yield
    left = settings_of_attnrx()
    if left != before:
        os.environ.update(before)
        for name in left.keys() - before.keys():
            del os.environ[name]
        pytest.fail(f"the environment had {before}, and has {left}")


def settings_of_attnrx() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ATTNRX_")}


@pytest.fixture(autouse=True)
def no_network(same_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses every connection that leaves this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else None
        if host not in (None, "127.0.0.1", "localhost", "::1"):
            raise OSError(f"a test tried to reach {host}")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def timed_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latencies are measured in this process: another one imports torch, which takes seconds. Slow tests start them."""
    if "slow" in request.keywords:
        return
    for module in ("attnrx.show.checks.costs", "attnrx.decide.planning.measured_costs"):
        monkeypatch.setattr(f"{module}.PROCESSES", 1)
    monkeypatch.setattr(
        "attnrx.decide.planning.measured_costs.run_in_subprocess", lambda function, *given, **_: function(*given)
    )


@pytest.fixture
def no_type_checks() -> Iterator[None]:
    """For arguments of wrong types, whose own errors are tested, and for traces of torch, whose sizes are tensors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def real_data() -> Path:
    """The folder of real datasets beside the checkout, or a skip that says why."""
    if not REAL_DATA.is_dir():
        pytest.skip(f"the real datasets are not at {REAL_DATA}")
    return REAL_DATA


@pytest.fixture(scope="session")
def browser() -> Iterator:
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("there is no Chromium on this machine (Debian's package is called chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()
