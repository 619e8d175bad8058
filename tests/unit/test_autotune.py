"""Autotuned backends: the fastest correct one, measured once, stored on disk, pinned on request."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnrx.support.errors import CacheWarning, CheckpointError
from attnrx.support.hardware import Measurements, cache_folder
from attnrx.support.storage import read_json
from attnrx.vit.attention import (
    Attention,
    AttentionCapture,
    AttentionContext,
    Auto,
    Autotuned,
    Backend,
    Eager,
    Explicit,
    Fused,
    autotune,
)
from attnrx.vit.attention.factors import ScoreFactors
from attnrx.vit.spec import AttentionSpec

SPEC = AttentionSpec("dense", 12, 4, (2, 3, 1), (0, 1, 2), 0.5, 4)
WIDE = replace(SPEC, ranks=(4, 4, 4))
CONTEXT = AttentionContext(2, 5, "cpu", torch.float64, 1, True)


class Wrong(Eager):
    """The fastest of all, but wrong."""

    def attend(self, factors: ScoreFactors, value: torch.Tensor) -> torch.Tensor:
        return value


class Slow(Eager):
    """Right, and slow."""

    def attend(self, factors: ScoreFactors, value: torch.Tensor) -> torch.Tensor:
        torch.mm(torch.randn(300, 300), torch.randn(300, 300))
        return super().attend(factors, value)


class Failing(Eager):
    """A kernel that does not run here."""

    def attend(self, factors: ScoreFactors, value: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNRX_CACHE", str(tmp_path))
    candidates: dict[str, type[Backend]] = {"wrong": Wrong, "slow": Slow, "failing": Failing, "explicit": Explicit}
    monkeypatch.setitem(autotune.CANDIDATES, "cpu", candidates)
    return tmp_path / "measurements.json"


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*given: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(autotune, "measured_record", measured)


def test_the_fastest_that_is_right_is_chosen_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    backend = Autotuned()
    assert type(backend.at(SPEC, CONTEXT)) is Explicit
    assert torch.equal(torch.get_rng_state(), before)
    (record,) = read_json(cache)["machines"].popitem()[1].values()
    trials = record["trials"]
    assert record["backend"] == "explicit" and trials["explicit"]["seconds"] < trials["slow"]["seconds"]
    assert trials["wrong"]["seconds"] is None and trials["wrong"]["error"] > 1e-6
    assert trials["failing"] == {"seconds": None, "error": None}
    forbid(monkeypatch)
    assert type(Autotuned().at(SPEC, CONTEXT)) is Explicit  # from the file


def test_a_candidate_that_came_later_is_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = autotune.CANDIDATES["cpu"]
    monkeypatch.setitem(autotune.CANDIDATES, "cpu", {"slow": Slow})
    assert type(Autotuned().at(SPEC, CONTEXT)) is Slow
    monkeypatch.setitem(autotune.CANDIDATES, "cpu", later)
    assert type(Autotuned(measure=False).at(SPEC, CONTEXT)) is Slow
    assert type(Autotuned().at(SPEC, CONTEXT)) is Explicit
    forbid(monkeypatch)
    assert type(Autotuned().at(SPEC, CONTEXT)) is Explicit


def test_nothing_is_measured_where_it_must_not_be(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch)
    assert type(Autotuned(measure=False).at(WIDE, CONTEXT)) is Fused
    assert type(Autotuned(measure=False).at(SPEC, CONTEXT)) is Explicit  # without a measurement: narrow on a CPU
    assert type(Autotuned().at(SPEC, CONTEXT._replace(free=False))) is Fused
    assert type(Autotuned().at(SPEC, CONTEXT._replace(device="meta"))) is Fused
    monkeypatch.setenv("ATTNRX_MEASURE", "0")
    assert type(Autotuned().at(WIDE, CONTEXT)) is Fused
    layer, tokens = Attention(SPEC, Autotuned()), torch.randn(2, 5, 12)
    layer(tokens).sum().backward()
    assert not cache.exists()


def test_a_pinned_table_is_only_read(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "pinned.json"
    with pytest.raises(CheckpointError, match="does not exist"):
        Autotuned(str(table), pinned=True)
    Measurements("cpu", table).put(autotune.key_of(SPEC, CONTEXT), {"backend": "slow", "trials": {}})
    written = table.read_bytes()
    forbid(monkeypatch)
    backend = Autotuned(str(table), pinned=True)
    assert type(backend.at(SPEC, CONTEXT)) is Slow
    assert type(backend.at(WIDE, CONTEXT._replace(images=3))) is Fused
    assert table.read_bytes() == written and not cache.exists()


@pytest.mark.parametrize(
    ("ranks", "images", "written"),
    [
        ((4, 4, 4), 400, False),
        ((2, 2, 2), 400, True),
        ((4, 2, 1), 400, True),  # every head at its own rank
        ((4, 2, 1), 1, False),  # with few tokens all heads at the largest
        ((2, 2, 2), 1, True),
        ((0, 0, 0), 400, False),
    ],
)
def test_narrow_attention_is_written_out_on_a_cpu(ranks: tuple[int, ...], images: int, written: bool) -> None:
    spec, context = replace(SPEC, ranks=ranks), CONTEXT._replace(images=images)
    sized, watched = (AttentionCapture(lambda: None, print, wanted) for wanted in ((), ("class_attention",)))
    for backend, other in ((Auto(), Fused), (sized, AttentionCapture)):
        assert type(backend.at(spec, context)) is (Explicit if written else other)
        assert type(backend.at(spec, context._replace(free=False))) is other
        assert type(backend.at(spec, context._replace(device="cuda"))) is other
        assert type(backend.at(spec, context._replace(threads=2))) is other
    assert watched.at(spec, context) is watched


def test_measurements_survive_others() -> None:
    first, second = Measurements("cpu"), Measurements("cpu")
    first.put("one", {"a": 1})
    second.put("two", {"a": 2})
    again = Measurements("cpu")
    assert (again.get("one"), again.get("two"), again.get("three")) == ({"a": 1}, {"a": 2}, None)


TABLE = {"kind": "attnrx measurements", "schema": 1}
TRIALS = {name: {"seconds": 1.0, "error": 0.0} for name in ("wrong", "slow", "failing", "explicit")}
BROKEN = ["{", "[" * 100_000, "[]", "null", b"\xff", TABLE, TABLE | {"schema": 9}, TABLE | {"machines": [1]}]


@pytest.mark.parametrize("content", [*BROKEN, TABLE | {"machines": {"a": 1}}, TABLE | {"machines": {"a": {"b": "c"}}}])
def test_a_broken_table_in_the_cache_is_measured_anew_with_a_warning(
    cache: Path, tmp_path: Path, content: bytes | str | dict[str, object]
) -> None:
    for path in (cache, tmp_path / "named.json"):
        encoded = json.dumps(content) if isinstance(content, dict) else content
        path.write_bytes(encoded if isinstance(encoded, bytes) else encoded.encode())
    with pytest.warns(CacheWarning, match=f"{cache}.*measured anew"):
        assert type(Autotuned().at(SPEC, CONTEXT)) is Explicit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Measurements("cpu").get(autotune.key_of(SPEC, CONTEXT)) is not None  # written anew
    with pytest.raises(CheckpointError, match=r"named\.json"):
        Measurements("cpu", tmp_path / "named.json")


@pytest.mark.parametrize(
    "record",
    [{}, {"backend": "explicit"}, {"backend": 3, "trials": TRIALS}, {"backend": [], "trials": TRIALS},
     {"backend": "slow", "trials": 3}, {"backend": "slow", "trials": list(TRIALS)}],
)  # fmt: skip
def test_a_record_that_is_not_whole_is_measured_anew(cache: Path, tmp_path: Path, record: dict[str, object]) -> None:
    Measurements("cpu").put(autotune.key_of(SPEC, CONTEXT), record)
    with pytest.warns(CacheWarning, match=f"{cache}.*measured anew"):
        assert type(Autotuned().at(SPEC, CONTEXT)) is Explicit
    Measurements("cpu", tmp_path / "named.json").put(autotune.key_of(SPEC, CONTEXT), record)
    with pytest.raises(CheckpointError, match=r"named\.json"):
        Autotuned(str(tmp_path / "named.json")).at(SPEC, CONTEXT)


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNRX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/attnrx")
