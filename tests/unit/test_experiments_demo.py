"""The demonstration: its files and claims, and its exit code."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

import attnrx_lab.demo
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.vit.models import model_fingerprint
from attnrx.workflows.load import load
from attnrx_lab.cluttered_digits import CLUTTER, GRID, PATCH, SPAN, canvases, object_patches
from attnrx_lab.commands import demo as command
from attnrx_lab.demo import DemoResult, demo, with_claims


@pytest.mark.slow
def test_the_demonstration_writes_a_smaller_model_with_its_evidence(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    stages: list[str] = []
    result = demo(folder=tmp_path, epochs=2, log=stages.append)
    assert result.report.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [line for line in stages if line.startswith("[")][-1].startswith("[3/3]")
    slim, written = load(tmp_path), Evidence.load(tmp_path / "evidence.json")
    assert model_fingerprint(slim) == written.about["candidate"]
    claims = {finding.claim for finding in written.claims}
    assert {
        "at least 1.2x faster than the unchanged model in the same kernels",
        "the accuracy falls by at most 1 point",
    } <= claims
    assert 50 < result.accuracy < 100
    weights = tmp_path / "train" / "cluttered-digits" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    demo(folder=tmp_path, epochs=2)
    assert weights.stat().st_mtime_ns == before  # the finished training is used again


def evidence_of(faster: float, change: float) -> Evidence:
    speed = Finding("latency", "speed", faster, low=faster, high=faster, details={"quantity": "speed by compression"})
    drop = Finding("accuracy", "change", change, low=change, high=change, details={"quantity": "accuracy change"})
    return with_claims(Evidence((speed, drop), {}))


@pytest.mark.parametrize(
    ("faster", "change", "failures"), [(1.4, -0.9, 0), (1.1, -0.9, 1), (1.4, -1.1, 1), (1.1, -1.1, 2)]
)
def test_a_claim_that_does_not_hold_fails_the_command(
    faster: float, change: float, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = evidence_of(faster, change)
    assert len(evidence.claims) == 2 and len(evidence.failures) == failures
    monkeypatch.setattr(attnrx_lab.demo, "demo", lambda *_, **__: DemoResult(Path("x"), evidence, "faster", 90.0, 1.0))
    arguments = Namespace(data="cluttered-digits", out="x", epochs=1, seed=0)
    outcome = command.demo(arguments, print)
    assert outcome.code == (1 if failures else 0)
    words = "\n".join(map(str, outcome.shown))
    assert (f"compression alone: {faster:.2f}x, less than 1.2x" in words) == (faster < 1.2)


def test_cluttered_digits_share_no_digit_between_splits_and_are_repeatable() -> None:
    parts = {split: canvases(split) for split in ("train", "validation", "test")}
    digits = [set(part.digits.tolist()) for part in parts.values()]
    assert not digits[0] & digits[1] and not digits[0] & digits[2] and not digits[1] & digits[2]
    assert sum(map(len, digits)) == 1797
    again = canvases.__wrapped__("validation")
    assert torch.equal(again.pixels, parts["validation"].pixels)
    other = canvases.__wrapped__("validation", 1)
    assert torch.equal(other.labels, again.labels) and not torch.equal(other.pixels, again.pixels)


def test_the_digit_lies_on_the_marked_patches_and_half_of_the_others_hold_clutter() -> None:
    part = canvases("validation")
    patches = part.pixels.unflatten(2, (GRID, PATCH)).unflatten(1, (GRID, PATCH)).transpose(2, 3).flatten(1, 2)
    objects = object_patches("validation")
    assert torch.equal(objects.sum(1), torch.full((len(objects),), SPAN**2))
    digits = patches[objects].unflatten(0, (-1, SPAN, SPAN)).transpose(2, 3).flatten(3).flatten(1, 2)
    from attnrx.data.loading import digit_images

    assert torch.equal(digits, digit_images()[0][part.digits])
    filled = (patches[~objects].flatten(1).max(1).values > 0).float().mean().item()
    assert filled == pytest.approx(CLUTTER, abs=0.05)
