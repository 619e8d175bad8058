"""The load of the machine while something is measured: what is known of it, and what is said."""

import multiprocessing
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from attnrx.support import hardware
from attnrx.support.hardware import Load
from attnrx.vit.costs import LatencyProtocol, compare_latency, measured

pytestmark = pytest.mark.skipif(hardware._processor_seconds() is None, reason="this system does not state its load")


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_the_own_work_and_that_of_child_processes_is_none_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware.os, "cpu_count", lambda: 0)  # so that every processor in use is one that is lacking
    load = Load()
    busy(0.6)
    alone = load.taken(0)
    load = Load()
    child = multiprocessing.get_context("spawn").Process(target=busy, args=(0.6,))
    child.start()
    child.join()
    beside = load.taken(0)
    assert alone is not None and beside is not None
    assert abs(beside - alone) < 0.7  # it would be more by one


def test_what_is_measured_beside_others_is_measured_again_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[float] = []

    def taken(load: Load, threads: int) -> float:
        rounds.append(1.5)
        return 1.5

    monkeypatch.setattr(measured.Load, "taken", taken)
    model, images = nn.Flatten(), torch.randn(2, 1, 2, 2)
    once = compare_latency(model, nn.Flatten(), images, LatencyProtocol(rounds=2, warmup=1))
    assert once.taken == 1.5 and len(rounds) == 1
    assert str(once).endswith("measured beside other processes, which took 1.5 of the processors that it needs")
    assert "beside" not in str(replace(once, taken=0.1)) and "beside" not in str(replace(once, taken=None))
    runs: list[int] = []

    def run(*_: object) -> list[object]:
        runs.append(1)
        return [(dict.fromkeys(("candidate", measured.REFERENCE), torch.ones(2)), 1, 1.0 / len(runs))] * 2

    monkeypatch.setattr(measured, "_runs", run)
    evidence = compare_latency(model, nn.Flatten(), images, LatencyProtocol(rounds=4, warmup=1, processes=2))
    assert len(runs) == 2 and evidence.taken == 0.5


def test_nothing_is_said_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_processor_seconds", lambda: None)
    assert Load().taken(1) is None
