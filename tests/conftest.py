"""float64, determinism, no network; and the choice between the quick tests and all of them."""

import os
import shutil
import socket
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# Deterministic products of matrices on CUDA need it, before the first one.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

QUICK_CASES = 4  # of one parametrized test, evenly spaced, in `make test`; `make test-all` runs every case
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
    parser.addoption("--all", action="store_true", help="the slow tests too, and every case of parametrized tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "slow" not in item.keywords:
            cases[item.nodeid.partition("[")[0]].append(item)
    quick = set()
    for each in cases.values():
        count = min(len(each), QUICK_CASES)
        quick |= {each[position * len(each) // count] for position in range(count)}
    config.hook.pytest_deselected(items=[item for item in items if item not in quick])
    items[:] = [item for item in items if item in quick]


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
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
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
    for module in (
        "attnrx.show.checks.latency",
        "attnrx.show.checks.promises",
        "attnrx.decide.planning.plan_measurements",
    ):
        monkeypatch.setattr(f"{module}.PROCESSES", 1)
    for module in ("attnrx.decide.planning.plan_measurements", "attnrx.decide.planning.measured_costs"):
        monkeypatch.setattr(f"{module}.call_in_subprocess_if", lambda function, *given, **_: function(*given))


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
