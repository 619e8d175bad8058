"""Varies the training settings that SVDA's paper does not state, and counts how many score directions pruning removes.

    ATTNRX_DATA=data python benchmarks/svda_settings.py --subjects cifar10 --seeds 42 --jobs 8 --out runs/svda-settings
    python benchmarks/svda_settings.py --settings stated lr-5e-4 no-augmentation ...   # only these settings

Every model is trained by the paper's protocol (SVDA, Table 4: 80 epochs, batch 256) in a separate process, with one of
SETTINGS changed. The table has the accuracy on the test images, the effective rank of the heads, and the share of
directions that energy retention removes at the paper's three ratios. If --limit ends a training, the model is measured
in its current state, and the table says so.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnrx.data import Augmentation
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.rules import EnergyRetention
from attnrx.decide.rules.prescribing import prescribe
from attnrx.show.checks import Accuracy
from attnrx.support.errors import NoOpPrescription, TrainingInterrupted
from attnrx.support.storage import read_json, write_json
from attnrx.support.tables import markdown_table
from attnrx.training import TrainingConfig, train
from attnrx.training.losses import Task
from attnrx_lab.papers.experiment import comparison_with
from attnrx_lab.papers.svda import RHOS, SvdaExperiment

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "recipe": {},
    "lr-5e-4": {"learning_rate": 5e-4},
    "lr-3e-4": {"learning_rate": 3e-4},
    "lr-1e-4": {"learning_rate": 1e-4},
    "no-augmentation": {"augmentation": Augmentation(padding=0, flip=False)},
    "no-smoothing": {"losses": (Task(label_smoothing=0.0),)},
    "decayed-strengths": {"strength_decay": 0.05},
    "no-decay": {"weight_decay": 0.0},
    "float32": {"precision": "fp32"},
}


def trained(subject: str, setting: str, seed: int, out: Path, tiny: bool) -> dict[str, Any]:
    """Trains one model, and returns the share that the rules remove from it."""
    experiment = SvdaExperiment(subject, seed)
    experiment = experiment.as_tiny() if tiny else experiment
    splits = experiment.images()
    model = experiment.model(splits)
    config: TrainingConfig = replace(experiment.training(), **SETTINGS[setting])
    begun, folder = time.monotonic(), out / "train"
    row: dict[str, Any] = {"subject": subject, "setting": setting, "seed": seed, "epochs": config.epochs}
    try:
        train(model, splits, config, folder)
    except TrainingInterrupted as interrupted:
        row["interrupted"] = str(interrupted)[:200]
    row["seconds"] = round(time.monotonic() - begun, 1)
    history = folder / "history.jsonl"
    row["epochs_done"] = len(history.read_text().splitlines()) if history.exists() else 0
    model = model.cpu().eval()
    found = Accuracy(most_drop=None)(comparison_with(model, splits.test))
    row["accuracy"] = next(each.value for each in found if each.details.get("model") == "reference")
    diagnosis = diagnose(model, splits.validation, images=min(64, len(splits.validation)))
    ranks = torch.cat([layer.readings["effective_rank"].flatten() for layer in diagnosis.layers])
    row["effective_rank"] = float(ranks.double().mean())
    row["removed"] = {}
    for rho in RHOS:
        try:
            row["removed"][f"{rho:.2f}"] = 100 * prescribe(diagnosis, EnergyRetention(rho)).removed_share
        except NoOpPrescription:
            row["removed"][f"{rho:.2f}"] = 0.0
    return row


def table(rows: list[dict[str, Any]]) -> str:
    head = ["dataset", "setting", "seed", "epochs", "accuracy, %", "effective rank"]
    head += [f"removed at {rho:.2f}, %" for rho in RHOS]
    lines = [
        [row["subject"], row["setting"], str(row["seed"]), f"{row['epochs_done']} of {row['epochs']}"]
        + [f"{row['accuracy']:.2f}", f"{row['effective_rank']:.1f}"]
        + [f"{value:.2f}" for value in row["removed"].values()]
        for row in rows
    ]
    return markdown_table(head, lines)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", nargs="+", default=["cifar10"], help="cifar10 fashion_mnist")
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds until trainings are ended and measured")
    parser.add_argument("--tiny", action="store_true", help="small models on generated images")
    parser.add_argument("--one", action="store_true", help="the one training, in this process")
    parser.add_argument("--out", type=Path, default=Path("runs/svda-settings"))
    arguments = parser.parse_args(words)
    wanted = [
        (subject, setting, seed)
        for seed in arguments.seeds
        for setting in arguments.settings
        for subject in arguments.subjects
    ]
    if arguments.one:
        ((subject, setting, seed),) = wanted
        row = trained(subject, setting, seed, arguments.out, arguments.tiny)
        write_json(arguments.out / "row.json", row)
        return 0
    begun, waiting, running = time.monotonic(), list(wanted), dict[Path, subprocess.Popen[bytes]]()
    folders = {each: arguments.out / "-".join(str(part) for part in each) for each in wanted}
    ended = False
    while waiting or running:
        while waiting and len(running) < arguments.jobs and not ended:
            subject, setting, seed = each = waiting.pop(0)
            folder = folders[each]
            folder.mkdir(parents=True, exist_ok=True)
            options = [
                "--subjects",
                subject,
                "--settings",
                setting,
                "--seeds",
                str(seed),
                "--out",
                str(folder),
                "--one",
            ]
            options += ["--tiny"] if arguments.tiny else []
            with (folder / "log.txt").open("w") as log:
                running[folder] = subprocess.Popen([sys.executable, __file__, *options], stdout=log, stderr=log)
        time.sleep(0.2)
        running = {folder: process for folder, process in running.items() if process.poll() is None}
        if not ended and time.monotonic() - begun > arguments.limit:
            ended, waiting = True, []
            for process in running.values():
                process.send_signal(signal.SIGTERM)
    rows = [read_json(folder / "row.json") for folder in folders.values() if (folder / "row.json").exists()]
    write_json(arguments.out / "rows.json", rows)
    print(table(rows))
    missing = [str(folder / "log.txt") for folder in folders.values() if not (folder / "row.json").exists()]
    if missing:
        print("Not measured, see", *missing)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
