"""Latency and memory on models whose answer is known."""

import copy
import math
import time
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from attnrx.support.errors import InvalidInput, UnknownName
from attnrx.support.estimate import Estimate
from attnrx.vit.costs import (
    Conditions,
    LatencyProtocol,
    compare_latency,
    compare_memory,
    interleave,
    measured,
    ratio_of,
)
from attnrx.vit.costs.measured import REFERENCE, UNCHANGED, peak_bytes
from support.cases import CONFIGS, images, model

QUICK = LatencyProtocol(rounds=4, warmup=1)


class Slow(nn.Module):
    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return images.sum((1, 2, 3))


class Session:
    """Can be copied, but not pickled."""

    def __deepcopy__(self, memo: object) -> "Session":
        return self

    def __reduce__(self) -> str:
        raise TypeError("a session cannot be pickled")


class Closed(Slow):
    """Cannot be pickled, like a file that a runtime has opened."""

    def __init__(self) -> None:
        super().__init__(0)
        self.session = Session()


class Wide(nn.Module):
    """Holds `copies` images of the batch at once, above the batch itself."""

    def __init__(self, copies: int):
        super().__init__()
        self.copies = copies

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        held = [images.clone() for _ in range(self.copies)]
        return held[-1]


def test_models_that_cannot_be_pickled_are_measured_in_this_process() -> None:
    protocol = LatencyProtocol(rounds=4, warmup=1, processes=2)
    found = compare_latency(Closed(), Slow(0), torch.zeros(2, 1, 4, 4), protocol)
    assert (found.processes, found.rounds) == (1, 4) and found.interval.endswith("parts of one run")


def test_an_interval_over_processes_has_the_spread_of_their_medians() -> None:
    medians = torch.tensor([1.0, 1.1, 1.2, 1.3], dtype=torch.float64)
    found = ratio_of(medians[:, None].expand(4, 9), torch.ones(4, 9))
    low, high = (found.value / found.low, found.high / found.value)
    half = 3.182 * float(medians.log().std()) / 2
    assert found.value == pytest.approx(1.15) and low == pytest.approx(high) == pytest.approx(math.exp(half))


def test_a_slower_candidate_is_seen_as_slower() -> None:
    found = compare_latency(Slow(0.03), Slow(0.003), torch.zeros(2, 1, 4, 4), QUICK)
    assert 1 / 12 < found.faster.value < 1 / 2  # ten, and room for a machine that wakes sleepers late
    assert found.faster.low <= found.faster.value <= found.faster.high
    assert found.candidate.median >= 0.03
    assert (found.batch, found.image_shape, found.rounds) == (2, (1, 4, 4), 4)
    assert found.hardware and found.torch_version == torch.__version__


def test_a_speed_is_the_product_of_the_runtime_and_the_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {REFERENCE: 0.03, UNCHANGED: 0.012, "candidate": 0.004}

    def timed(runs: Mapping[str, object], **_: object) -> dict[str, torch.Tensor]:
        return {name: torch.full((4,), seconds[name], dtype=torch.float64) for name in runs}

    monkeypatch.setattr(measured, "interleave", timed)
    found = compare_latency(Slow(0), Slow(0), torch.zeros(2, 1, 4, 4), QUICK, unchanged=Slow(0))
    assert found.unchanged is not None and found.by_runtime is not None and found.by_compression is not None
    assert (found.by_runtime.value, found.by_compression.value) == pytest.approx((2.5, 3.0))
    assert found.by_runtime.value * found.by_compression.value == pytest.approx(found.faster.value)
    assert "7.50x faster [7.50, 7.50] = 2.50x by attnrx's kernels x 3.00x by compression" in str(found)


@pytest.mark.parametrize("role", ["candidate", "reference"])
def test_an_unchanged_model_of_another_role_is_timed_once(role: str) -> None:
    models = {"candidate": Slow(0.002), "reference": Slow(0.004)}
    found = compare_latency(**models, images=torch.zeros(2, 1, 4, 4), protocol=QUICK, unchanged=models[role])
    own, other = found.by_compression, found.by_runtime
    if role == "reference":
        own, other = other, own
    assert own == Estimate(1.0, 1.0, 1.0) and other == found.faster


def test_runs_take_turns_and_warm_ups_do_not_count() -> None:
    order: list[str] = []
    runs = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = interleave(runs, rounds=3, warmup=1, repeated=False)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    order.clear()
    # Every timed call of a short run follows several of its own.
    interleave(runs, rounds=2, warmup=1)
    assert "".join(order) == "ab" + "a" * 7 + "b" * 14 + "a" * 7
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}
    with pytest.raises(UnknownName, match="unknown clock"):
        interleave({"a": list}, rounds=1, warmup=0, clock="sundial")
    with pytest.raises(InvalidInput, match="at least one round"):
        interleave({}, rounds=3, warmup=1)


@pytest.mark.parametrize(("enough", "rounds"), [(0.9, 16), (1e-12, 44), (None, 44)])
def test_rounds_end_when_the_speeds_are_precise(enough: float | None, rounds: int) -> None:
    protocol = LatencyProtocol(rounds=44, warmup=1, enough=enough)
    assert compare_latency(Slow(0.002), Slow(0.001), torch.zeros(1, 1, 4, 4), protocol).rounds == rounds


def test_the_cpu_clock_does_not_count_sleep() -> None:
    found = compare_latency(Slow(0.02), Slow(0.02), torch.zeros(1, 1, 4, 4), LatencyProtocol(rounds=2, clock="cpu"))
    assert found.candidate.median < 0.01
    assert found.clock == "cpu"


def test_the_ratio_pairs_the_rounds() -> None:
    # The machine gets ten times slower half-way: both medians are useless, every pair still says 2.
    reference = torch.tensor([1.0, 1.0, 10.0, 10.0, 10.0])
    ratio = ratio_of(2 * reference, reference)
    assert (ratio.value, ratio.low, ratio.high) == (2, 2, 2)
    noisy = ratio_of(torch.tensor([1.0, 3.0, 2.0, 4.0]), torch.ones(4))
    assert noisy.low < noisy.value == 2.5 < noisy.high
    assert noisy == ratio_of(torch.tensor([1.0, 3.0, 2.0, 4.0]), torch.ones(4))


def test_the_peak_is_what_is_held_at_once() -> None:
    batch = torch.zeros(2, 3, 16, 16)
    size = batch.float().nbytes
    found = compare_memory(Wide(5), Wide(2), batch)
    assert (found.candidate.activations, found.reference.activations) == (5 * size, 2 * size)
    assert (found.candidate.weights, found.ratio) == (0, 2.5)
    half = compare_memory(Wide(5), Wide(2), batch, Conditions(precision="bfloat16"))
    assert half.candidate.activations == 5 * size // 2


def test_the_peak_sees_work_space_inside_one_operation() -> None:
    rows = torch.rand(100, 100)
    assert peak_bytes(lambda: rows.sort(dim=0)) >= 2 * rows.nbytes


def test_weights_are_counted_in_the_precision_they_run_in() -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    found = compare_memory(linear, linear, torch.zeros(2, 1, 4, 4), Conditions(precision="bfloat16"))
    assert found.candidate.weights == 2 * (16 * 3 + 3)
    assert found.ratio == 1


def test_measuring_changes_neither_the_models_nor_the_settings() -> None:
    vit = model(CONFIGS["svda"]).train()
    before, threads = copy.deepcopy(vit.state_dict()), torch.get_num_threads()
    conditions = Conditions(precision="bfloat16", threads=1)
    found = compare_latency(vit, vit, images(vit.config), LatencyProtocol(conditions, rounds=2, warmup=1))
    compare_memory(vit, vit, images(vit.config), conditions)
    assert found.threads == 1
    assert vit.training and torch.is_grad_enabled() and torch.get_num_threads() == threads
    for name, tensor in vit.state_dict().items():
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, before[name])
