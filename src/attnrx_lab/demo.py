"""The demonstration `attnrx demo`, which trains a small Vision Transformer on generated images and shrinks it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import nn

from attnrx.data import Splits, load_data
from attnrx.nouns.evidence import Evidence, Finding, against_limit
from attnrx.show.checks import Latency
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.foreign_files import open_timm
from attnrx.support.optional import required_module
from attnrx.support.progress import Log, no_log
from attnrx.support.subprocess_runner import shared_subprocess
from attnrx.training import TrainingConfig, train
from attnrx.training.losses import Task
from attnrx.vit.costs import Conditions, LatencyProtocol
from attnrx.vit.kernels.compilation import native_library
from attnrx.vit.models import load_model, reduction_of
from attnrx.workflows.load import load
from attnrx.workflows.shrink import shrink
from attnrx.workflows.shrunk import Shrunk
from attnrx.workflows.verify import verify
from attnrx_lab.clutter import object_finding
from attnrx_lab.cluttered_digits import CLUTTERED, object_patches

# `demo` first measures how much faster attnrx's kernels are than timm's, because the ratio depends on the processor.
# The target is GAIN times the speed of the unchanged model in attnrx's kernels. The evidence makes two claims.
# Compression makes the model at least LEAST times as fast, and the model loses at most MOST_DROP points of accuracy. If
# no plan is fast enough, the target is SHARE of the MACs instead.
GAIN, LEAST, MOST_DROP, SHARE = 1.4, 1.2, 1.0, 0.4
MIN_SPEED = 1.05  # the lowest target, even if attnrx's kernels are slower than timm's
# The first latency measurement. In the process that trained the model, a short measurement may err by a quarter.
BATCH, THREADS, ROUNDS, PROCESSES = 32, 1, 12, 3
TRAINED, TESTED = 5_000, 2_000  # the images of cluttered-digits that are used
EPOCHS = 2
SHAPE = {"embed_dim": 64, "depth": 3, "num_heads": 4, "mlp_ratio": 2.0, "class_token": False, "global_pool": "avg"}
PATCHES = 10  # the approximate number of patches along one side of an image


@dataclass(frozen=True)
class DemoResult:
    """The result of `demo`. `folder` contains the smaller model, the report and the evidence.

    `accuracy` is the original model's accuracy in %. `seconds` is the time that `demo` took.
    """

    folder: Path
    evidence: Evidence
    summary: str
    accuracy: float
    seconds: float

    @property
    def report(self) -> Path:
        return self.folder / "report.html"


def demo(
    data: str | Path | Splits = CLUTTERED,
    folder: Path | str = "runs/demo",
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
    log: Log = no_log,
) -> DemoResult:
    """Trains a small timm ViT on a dataset, speeds it up by the factor GAIN with `shrink`, and writes a report.

    If the folder contains a finished training, `demo` uses the trained model. An interrupted training is resumed.
    """
    began, folder, step = time.perf_counter(), Path(folder), count(1)

    def stage(what: str) -> None:
        log(f"[{next(step)}/3] {what}")

    Thread(target=native_library, daemon=True).start()  # on first use, the kernels are built while the data are read
    splits = data if isinstance(data, Splits) else load_data(data)
    if splits.name == CLUTTERED:
        splits = replace(splits, train=splits.train.take(TRAINED), test=splits.test.take(TESTED))
    place = folder / "train" / splits.name.replace("/", "-")
    stage(f"training a small ViT on {len(splits.train):,} images of {splits.name}")
    model = load_model(small_model(splits, seed))
    with shared_subprocess():  # it starts during the training
        train(model, splits, training_of(splits, epochs, seed), place, log=log)
        original = load(place)
        shrunk, evidence = _shrunk(original, splits, folder, seed, stage, log)
        stage("writing the folder and model.onnx")
        result = replace(shrunk, evidence=evidence)
        result.save(folder, original=original, threads=THREADS)
    accuracy = next(each for each in evidence.of("accuracy") if each.details.get("model") == "reference")
    return DemoResult(folder, evidence, result.summary(), accuracy.value, time.perf_counter() - began)


def _shrunk(
    original: nn.Module, splits: Splits, folder: Path, seed: int, stage: Log, log: Log
) -> tuple[Shrunk, Evidence]:
    """Makes the model GAIN times as fast by compression. Returns the result, and evidence with the demo's claims."""
    timing = Latency(BATCH, LatencyProtocol(Conditions(threads=THREADS), ROUNDS, 2, processes=PROCESSES), library=True)
    # Measures how much faster attnrx's kernels are without compression.
    unchanged = verify(original, original, splits.test, [timing]).findings[0].value
    faster = max(GAIN * unchanged, MIN_SPEED)
    stage(
        f"making it {GAIN:g}x faster by compression: the unchanged model in attnrx's kernels has {unchanged:.2f}x the "
        f"speed of timm's, so the target is {faster:.2f}x"
    )
    settings: dict[str, Any] = {"batch": BATCH, "threads": THREADS, "folder": folder, "seed": seed, "log": log}
    try:
        shrunk = shrink(original, splits, faster=faster, **settings)
        findings = shrunk.evidence.findings
    except NotSupported as error:  # e.g. the machine's load changed while the costs were measured
        log(f"{error} The target is {SHARE:.0%} of the MACs instead.")
        shrunk = shrink(original, splits, macs=SHARE, **settings)
        # `shrink` measures no speed if the target is MACs, so it is measured here.
        findings = shrunk.evidence.findings + verify(shrunk.model, original, splits.test, [timing]).findings
    evidence = with_claims(replace(shrunk.evidence, findings=findings))
    if splits.name == CLUTTERED and reduction_of(shrunk.model) is not None:
        evidence = replace(
            evidence,
            findings=(*evidence.findings, object_finding(shrunk.model, splits.test, object_patches("test"), "demo")),
        )
    return shrunk, evidence


def small_model(splits: Splits, seed: int) -> nn.Module:
    """Returns a small timm Vision Transformer with about PATCHES x PATCHES patches and random weights.

    Raises:
        InvalidInput: The images are not square.
    """
    required_module("timm", "timm", "the demonstration")
    torch.manual_seed(seed)  # timm draws the weights from the global generator
    side = splits.image_size
    if not isinstance(side, int):
        raise InvalidInput(f"{splits.name} has images of {side} pixels: give data of square images.")
    # The patch size must divide the side.
    patch = min((size for size in range(1, side + 1) if side % size == 0), key=lambda size: abs(size - side / PATCHES))
    shape = {"img_size": side, "patch_size": patch, "in_chans": splits.channels, **SHAPE}
    model = open_timm("vit_tiny_patch16_224", pretrained=False, num_classes=len(splits.class_names), **shape)
    # attnrx reads a timm model's preprocessing from its `pretrained_cfg`. The images were resized without a crop.
    scale = splits.normalization
    model.pretrained_cfg.update(mean=scale.mean, std=scale.std, crop_pct=1.0, interpolation="bilinear")
    return model


def training_of(splits: Splits, epochs: int, seed: int) -> TrainingConfig:
    """Returns the settings of a short training in float32."""
    batch = min(32, len(splits.train))
    return TrainingConfig(
        epochs=epochs, batch_size=batch, learning_rate=3e-3, losses=(Task(),), precision="fp32", seed=seed,
        checkpoint_every=100,
    )  # fmt: skip


def with_claims(evidence: Evidence) -> Evidence:
    """Adds the demo's two claims to the evidence: a minimum speed-up by compression and a maximum loss of accuracy."""
    findings = []
    for finding in evidence.findings:
        quantity = finding.details.get("quantity")
        findings.append(finding)
        if quantity == "speed by compression":
            claim = f"at least {LEAST:g}x faster than the unchanged model in the same kernels"
            findings.append(_claim(finding, claim, LEAST, at_least=True))
        elif quantity == "accuracy change":
            claim = f"the accuracy falls by at most {MOST_DROP:g} point"
            findings.append(_claim(finding, claim, -MOST_DROP, at_least=True))
    return replace(evidence, findings=tuple(findings))


def _claim(finding: Finding, claim: str, limit: float, at_least: bool) -> Finding:
    outcome = against_limit(finding.value, limit, (finding.low, finding.high), finding.n, at_least=at_least)
    details: Mapping[str, Any] = {"quantity": "demonstration"}
    return replace(finding, check="demo", claim=claim, **outcome, details=details)
