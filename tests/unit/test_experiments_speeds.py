"""Methods on the clock."""

from pathlib import Path

import pytest

from attnrx.support.storage import read_json
from attnrx.vit.costs import Conditions, LatencyProtocol
from attnrx.vit.models import build_model, family_of
from attnrx_lab.comparison import Method, Rates, compare_speeds, noise_bench
from support import cases

PROTOCOL = LatencyProtocol(Conditions(threads=1), rounds=2, warmup=1, clock="cpu")


def test_every_methods_is_timed_at_every_batch_size(tmp_path: Path) -> None:
    bench = noise_bench(cases.model(cases.CONFIGS["dense"]).float())
    methods = [Method.parse("ranks=uniform_rank:0.5"), Method.parse("drop=tokens=random:{share}@2")]
    out = tmp_path / "speeds.json"
    found = compare_speeds(bench, methods, Rates((1, 3), (PROTOCOL,), shares=(0.9, 0.5)), out=out)
    named = [(each.method, each.share, each.latency.batch) for each in found.speeds]
    once = [("attnrx", 1.0), ("ranks", None), ("drop", 0.9), ("drop", 0.5)]
    assert named == [(name, share, batch) for batch in (1, 3) for name, share in once]
    attnrx, ranks, mild, hard = found.speeds[:4]
    assert attnrx.ideal == 1 < mild.ideal < hard.ideal
    assert ranks.ideal > 1
    for each in found.speeds:
        value, low, high = each.speedup
        assert 0 < low <= value <= high
        assert value == pytest.approx(each.latency.faster.value)
    record = read_json(out)
    assert [reported["of_ideal"] for reported in record["speeds"]] == [
        each.speedup[0] / each.ideal for each in found.speeds
    ]
    assert found.to_markdown().count("\n") == 9


def test_speeds_are_beside_the_model_that_the_library_ships() -> None:
    timm = pytest.importorskip("timm")
    name, changes = "vit_tiny_patch16_224", {"img_size": 32, "depth": 2, "embed_dim": 12, "num_heads": 2}
    adopted = build_model(f"timm:{name}", **changes)
    library_model = family_of(adopted).library_model(adopted)
    assert type(library_model) is type(timm.create_model(name, **changes))
    assert not any("scores" in key for key in library_model.state_dict())
    assert sum(p.numel() for p in library_model.parameters()) == sum(p.numel() for p in adopted.parameters())
    own = cases.model(cases.CONFIGS["dense"])
    assert {key: value.shape for key, value in family_of(own).library_model(own).state_dict().items()} == {
        key: value.shape for key, value in own.state_dict().items()
    }


def test_what_cannot_be_reached_is_said_and_left_out() -> None:
    said: list[str] = []
    bench = noise_bench(cases.model(cases.CONFIGS["dense"]).float())
    rates = Rates((1,), (PROTOCOL,), macs=(0.01,))
    found = compare_speeds(bench, [Method.parse("qk=total_rank:{share}")], rates, said.append)
    assert [each.method for each in found.speeds] == ["attnrx"]
    assert "qk cannot cost 1 % of the MACs: left out" in said
