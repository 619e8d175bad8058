"""One run of the SPOT experiment; an interrupted run continues on the next call."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.api import adapt_preprocessing, load
from attnrx.checks import Accuracy, Comparison, Fidelity
from attnrx.data import Splits
from attnrx.errors import CheckpointError
from attnrx.evidence import Evidence
from attnrx.models import model_fingerprint, reduction_of
from attnrx.progress import Log, no_log
from attnrx.serialization.config import to_dict
from attnrx.serialization.storage import write_json
from attnrx.training import Reporter, train
from attnrx_lab.papers.evidence_bench import answering_device, evidence_at
from attnrx_lab.papers.measures import Measure, measures, plain_measure
from attnrx_lab.papers.spot_experiment import SpotExperiment, SpotRun
from attnrx_lab.papers.spot_methods import token_price

ANSWERED = 64  # images at a time


def run_spot(
    experiment: SpotExperiment, folder: Path | str, *, reporter: Reporter | None = None, log: Log = no_log
) -> SpotRun:
    """Trains the original if necessary, prunes tokens, fine-tunes and measures; no stage is repeated.

    If two processes request the same run, the first makes it; the second waits and reads it back. The same holds for an
    original that several runs share.
    """
    folder = Path(folder)
    experiment.require(folder)
    if not (folder / "result.json").exists():
        with alone(folder):
            if not (folder / "result.json").exists():
                _make(experiment, folder, reporter, log)
    return SpotRun.load(folder)


def _make(experiment: SpotExperiment, folder: Path, reporter: Reporter | None, log: Log) -> None:
    splits = experiment.splits()
    original, teacher = _original(experiment, splits, folder, reporter, log)
    experiment.claim(folder)
    log(f"{experiment.name}: {folder}")
    evidence = evidence_at(
        folder / "evidence.json", lambda: _evidence(experiment, (original, teacher), splits, folder, reporter)
    )
    method = experiment.method
    record = {
        "kind": SpotRun.kind,
        "schema": SpotRun.schema,
        "settings": to_dict(experiment),
        "data": {"name": splits.name, "test": evidence.about["data"], "notes": [*splits.notes, *_notes(experiment)]},
        "model": {"fingerprint": evidence.about["reference"]},
        "rules": {
            method.name: {
                "paper": _plain(token_price(experiment.outline(), method)),
                "measured": measures(evidence),
                "training": _plain(evidence.about["training"]),
            }
        },
        "measured_with": {"device": str(answering_device()), "threads": torch.get_num_threads()},
    }
    write_json(folder / "result.json", record)
    accuracy = record["rules"][method.name]["measured"]["accuracy"]["value"]
    log(f"{experiment.name}: top-1 {accuracy:.2f} %, {folder / 'result.json'}")


def _original(
    experiment: SpotExperiment, splits: Splits, folder: Path, reporter: Reporter | None, log: Log
) -> tuple[nn.Module, str]:
    """Returns the original, and its source as a teacher for losses; it is trained once if necessary."""
    if not experiment.made:
        assert experiment.model is not None
        return experiment.pretrained(), experiment.model
    place, recipe = experiment.originals_place(folder), experiment.original
    with alone(place):
        log(f"{experiment.subject}: the original, {place}")
        model = recipe.build(splits.normalization)
        trained = train(model, splits, recipe.training(), place, reporter=reporter)
    return load(trained.folder).eval(), str(place)


def _evidence(
    experiment: SpotExperiment,
    original: tuple[nn.Module, str],
    splits: Splits,
    folder: Path,
    reporter: Reporter | None,
) -> Evidence:
    """Fine-tunes trained methods; accuracy and fidelity against the original, on the same images."""
    model, teacher = original
    candidate = copy.deepcopy(model)
    experiment.method.attach_(candidate, experiment.seed)
    about: dict[str, Any] = {}
    if experiment.method.trained:
        own, config = experiment.tuned_on(splits, model), experiment.training(teacher)
        trained = train(candidate, own, config, folder / "train", reporter=reporter)
        candidate = load(trained.folder)
        about = {"steps": trained.record["steps"], "seconds": trained.record["seconds"]}
        about |= {f"loss_{name}": value for name, value in trained.history[-1]["losses"].items()}
    device = answering_device()
    reference = model.to(device)
    comparison = Comparison(
        candidate.to(device),
        reference,
        adapt_preprocessing(splits, model).test,
        seed=experiment.seed,
        device=device,
        batch_size=ANSWERED,
    )
    found = (*Accuracy(most_drop=None)(comparison), *Fidelity()(comparison))
    reduction = reduction_of(candidate)
    return Evidence(
        found,
        {
            "experiment": to_dict(experiment),
            "policy": None if reduction is None else str(reduction.policy),
            "training": about,
            "reference": model_fingerprint(model),
            "data": comparison.data.fingerprint,
            "images": len(comparison.data),
        },
    )


def _notes(experiment: SpotExperiment) -> list[str]:
    """Returns notes on the protocol, for readers of the numbers."""
    method, tuning = experiment.method, experiment.tuning
    notes = []
    if method.trained and not tuning.task:
        notes.append("fine-tuned by the answers of the original alone, without labels")
    if method.trained and tuning.images is not None:
        steps = experiment.epochs * (tuning.images // experiment.batch_size)
        notes.append(f"fine-tuned for {steps} steps of {experiment.batch_size} images, the same for all seeds")
    if experiment.made:
        epochs = experiment.original.epochs
        notes.append(f"the original is not pre-trained: a small model, trained here for {epochs} epochs")
    return notes


def _plain(numbers: Mapping[str, float | int]) -> dict[str, Measure]:
    return {name: plain_measure(float(value)) for name, value in numbers.items()}


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits until no other process works in the folder; the system releases the lock when this process ends."""
    import fcntl  # not on every system, and needed only here

    path = folder.with_name(f".{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}. Choose another folder.") from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
