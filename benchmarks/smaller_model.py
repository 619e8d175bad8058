"""Compares a pruned model with a smaller model that was trained from scratch, at the same multiply-accumulates (MACs).

    python benchmarks/smaller_model.py fashion-mnist --seeds 0 1 2 --epochs 10 --out runs/smaller-model

For every seed, the same recipe trains two timm Vision Transformers, which differ only in their number of blocks
(--blocks). attnrx then prunes the larger one to the MACs of the smaller one, without labels. All three models predict
the same test images. The table has their accuracy, and the differences with 95 % intervals, over the images of each
seed and over the seeds (Student's t). A finished seed is kept in --out, and an interrupted training is resumed.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import timm
import torch
from torch import nn

import attnrx as rx
from attnrx.change.predictions import predict
from attnrx.data import Splits, load_data
from attnrx.show.checks.statistics import paired_change
from attnrx.support.estimate import Estimate
from attnrx.support.storage import read_json, write_json
from attnrx.support.tables import markdown_table
from attnrx.training import TrainingConfig, train
from attnrx.training.losses import Task
from attnrx.vit.models import family_of
from attnrx_lab.papers.table import t_interval

WIDTH, HEADS, PATCH = 64, 4, 4
LARGE, SMALL, PRUNED = "large", "small", "pruned"


def untrained(splits: Splits, blocks: int, seed: int) -> nn.Module:
    """Returns a timm Vision Transformer with this number of blocks and random weights."""
    torch.manual_seed(seed)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=splits.image_size, patch_size=PATCH, in_chans=splits.channels, depth=blocks,
        embed_dim=WIDTH, num_heads=HEADS, mlp_ratio=2.0, class_token=False, global_pool="avg",
        num_classes=len(splits.class_names),
    )  # fmt: skip
    scale = splits.normalization
    model.pretrained_cfg.update(mean=scale.mean, std=scale.std, crop_pct=1.0, interpolation="bilinear")
    return model


def macs_of(model: nn.Module) -> float:
    return float(family_of(model).costs(model).macs)


def measured(splits: Splits, blocks: Sequence[int], seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains both models of one seed, prunes the larger one, and returns accuracies, MACs and differences."""
    config = TrainingConfig(
        epochs=arguments.epochs, batch_size=arguments.batch_size, learning_rate=2e-3, losses=(Task(),),
        precision="fp32", seed=seed,
    )  # fmt: skip
    models, place = dict[str, nn.Module](), arguments.out / str(seed)
    for name, number in zip((LARGE, SMALL), blocks, strict=True):
        model = rx.load(untrained(splits, number, seed))
        models[name] = train(model, splits, config, place / name, log=print).model
    share = macs_of(models[SMALL]) / macs_of(models[LARGE])
    result = rx.shrink(models[LARGE], splits, macs=share, effort=arguments.effort, seed=seed, log=print)
    models[PRUNED] = result.model
    found = predict(models, splits.test, 100)
    correct = {name: outputs.argmax(1) == found.labels for name, outputs in found.outputs.items()}
    changes = {name: paired_change(correct[name], correct[PRUNED], seed=seed).scaled(100) for name in (LARGE, SMALL)}
    return {
        "seed": seed,
        "images": len(splits.test),
        "macs": {name: macs_of(model) for name, model in models.items()},
        "accuracy": {name: 100 * float(each.double().mean()) for name, each in correct.items()},
        "change": {name: asdict(each) for name, each in changes.items()},
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table with a row per seed, and a row for the mean over the seeds."""
    head = ("seed", "large, %", "small, %", "pruned, %", "pruned - small", "pruned - large", "MACs, small and pruned")
    lines = list[tuple[str, ...]]()
    for row in rows:
        accuracy, change, macs = (row[name] for name in ("accuracy", "change", "macs"))
        shares = [f"{100 * macs[name] / macs[LARGE]:.1f} %" for name in (SMALL, PRUNED)]
        texts = [Estimate(**change[name]).text(2) for name in (SMALL, LARGE)]
        accuracies = [f"{accuracy[name]:.2f}" for name in (LARGE, SMALL, PRUNED)]
        lines.append((f"{row['seed']}", *accuracies, *texts, ", ".join(shares)))
    if len(rows) > 1:
        means = [f"{fmean(row['accuracy'][name] for row in rows):.2f}" for name in (LARGE, SMALL, PRUNED)]
        means += [t_interval([row["change"][name]["value"] for row in rows]).text(2) for name in (SMALL, LARGE)]
        lines.append((f"mean of {len(rows)}", *means, ""))
    return markdown_table(head, lines)


def main(words: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a dataset with labels, as in `attnrx`")
    parser.add_argument("--blocks", type=int, nargs=2, default=[6, 3], metavar=("LARGE", "SMALL"))
    parser.add_argument("--train", type=int, default=20_000, metavar="N", help="training images")
    parser.add_argument("--test", type=int, default=10_000, metavar="N", help="test images")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--effort", default="normal", choices=["quick", "normal", "thorough"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/smaller-model"))
    arguments = parser.parse_args(words)
    splits, rows = load_data(arguments.data), []
    few = {name: min(getattr(arguments, name), len(getattr(splits, name))) for name in ("train", "test")}
    splits = replace(splits, train=splits.train.take(few["train"]), test=splits.test.take(few["test"]))
    for seed in arguments.seeds:
        path = arguments.out / f"{seed}.json"
        if not path.exists():
            write_json(path, measured(splits, arguments.blocks, seed, arguments))
        rows.append(read_json(path))
    print(table(rows))


if __name__ == "__main__":
    main()
