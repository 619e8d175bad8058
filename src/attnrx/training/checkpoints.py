"""The stored state of a training run: its checkpoints, and the settings that must not change when it is resumed."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.data import Splits
from attnrx.support import arguments as kinds
from attnrx.support.atomic_writes import temporary_folder
from attnrx.support.errors import CheckpointError
from attnrx.support.records import to_dict, without_folders
from attnrx.support.shapes import Float, Tensor
from attnrx.support.storage import (
    file_sha256,
    fingerprint,
    read_record,
    read_tensors,
    require_finite_tensors,
    write_json,
    write_tensors,
)
from attnrx.training.config import TrainingConfig
from attnrx.training.losses import TeacherSource
from attnrx.training.step import Learner, copy_whole_, gather_tensors, shard_like
from attnrx.vit.models import described_tokens, family_of, model_fingerprint

KIND, SCHEMA = "attnrx training state", 1
# `require_same_run` compares the settings field by field with the requested settings.
IDENTITY = kinds.record({"weights": kinds.ANY_TEXT}, open=True)
HISTORY = {"history": kinds.each(kinds.JSON_OBJECT)}  # one record per epoch
STATE = kinds.record(
    {"identity": IDENTITY, "step": kinds.whole(0, 2**40), "seconds": kinds.finite(0.0), "sha256": kinds.ANY_TEXT},
    HISTORY,
    open=True,
)
NUM_KEPT = 2  # one more checkpoint than needed to resume, in case the last one is damaged


class Checkpoints:
    """The newest checkpoints of a training run, each in a folder such as `checkpoints/step-00000420/`.

    A folder contains one JSON file and one safetensors file. A new checkpoint is written under a temporary name and
    then renamed, so an interruption never leaves a partial checkpoint.
    """

    def __init__(self, folder: Path):
        self.folder = folder / "checkpoints"

    def all(self) -> list[Path]:
        """Returns the checkpoints, with the oldest first."""
        # Sorting by name sorts by step, because every number has eight digits.
        return sorted(self.folder.glob("step-*"))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def write(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Writes a checkpoint, reads it back to verify it, and only then adds it to the checkpoints.

        Raises:
            InvalidInput: A tensor contains NaN or infinity.
            CheckpointError: The checkpoint cannot be written, or its tensors differ when they are read back.
        """
        require_finite_tensors(tensors, f"the state of step {step}")
        path = self.path(step)
        if path.exists():
            return
        with temporary_folder(path) as partial:
            file = write_tensors(partial / "state.safetensors", tensors)
            content = {"kind": KIND, "schema": SCHEMA, "step": step, "sha256": file_sha256(file), **record}
            write_json(partial / "state.json", content)
            _require_written(partial, tensors)
            partial.rename(path)  # both files are complete now
        for old in self.all()[:-NUM_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Returns the newest checkpoint, or None if there is none. A damaged checkpoint raises CheckpointError."""
        checkpoints = self.all()
        if not checkpoints:
            return None
        # A damaged checkpoint is not skipped, because the user should decide whether to repeat its steps.
        path = checkpoints[-1]
        try:
            record = read_record(path / "state.json", KIND, SCHEMA, STATE)
            if self.path(record["step"]) != path:
                raise CheckpointError(f"{path / 'state.json'}: step is {record['step']}, and its folder {path.name}.")
            return record, read_tensors(path / "state.safetensors", record["sha256"])
        except CheckpointError as error:
            before = f"from {checkpoints[-2].name}" if len(checkpoints) > 1 else "from the beginning"
            raise CheckpointError(f"{error} Delete the folder {path} to resume {before}.") from error


def _require_written(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError unless the checkpoint in `folder` can be read and contains exactly these tensors."""
    read_record(folder / "state.json", KIND, SCHEMA, STATE)
    stored = read_tensors(folder / "state.safetensors")
    if stored.keys() != tensors.keys() or not all(torch.equal(stored[name], tensors[name].cpu()) for name in stored):
        raise CheckpointError(
            f"a checkpoint of {folder.parent.parent} has other tensors than were written: the disk is not reliable. "
            "Train in a folder on another disk."
        )


def state_tensors(learner: Learner, sums: Float[Tensor, "names"]) -> dict[str, Tensor]:
    """Returns the state of a training run as tensors, gathered in the main process.

    The state consists of the weights, their running mean, the optimizer state, and the sums of losses and counts in the
    current epoch. All processes must call this function, because each may hold a shard. In all processes except the
    main process, the result is empty. Random generator states are not stored, because every step derives its seed from
    the config's seed and the step number.
    """
    parts: dict[str, Mapping[str, Tensor]] = {
        "model": learner.model.state_dict(),
        "mean": learner.mean.tensors if learner.mean else {},
        "optimizer": optimizer_tensors(learner.model, learner.optimizer),
        "meter": {"sums": sums},
    }
    named_tensors = {f"{part}/{name}": tensor for part, group in parts.items() for name, tensor in group.items()}
    return gather_tensors(named_tensors, keep=learner.accelerator.is_main_process)


def load_state_(learner: Learner, state: Mapping[str, Tensor]) -> None:
    """Restores a learner's state from the output of `state_tensors`."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        part, _, name = key.partition("/")
        parts.setdefault(part, {})[name] = tensor
    load_tensors_(learner.model, parts["model"])
    load_optimizer_(learner.model, learner.optimizer, parts.get("optimizer", {}))
    if learner.mean is not None:
        for name, mean in learner.mean.tensors.items():
            copy_whole_(mean, parts["mean"][name])
    # The stored sums are over all processes. Only the first process gets them, and the others begin at 0, because the
    # sums of all processes are added at the end of the epoch.
    if learner.accelerator.is_main_process:
        learner.sums.copy_(parts["meter"]["sums"])


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the state of the optimizer as tensors with the names `PARAMETER/FIELD`."""
    return {
        f"{name}/{field}": value
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restores the state of the optimizer from tensors with the names `PARAMETER/FIELD`.

    Raises:
        CheckpointError: A tensor belongs to a parameter that the model does not have.
    """
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, field = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(f"the checkpoint holds optimizer state of {name!r}, which the model does not have.")
        # The field `step` is a scalar, so `shard_like` does not shard it.
        optimizer.state[parameters[name]][field] = shard_like(value, parameters[name])


def load_tensors_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies whole (unsharded) tensors into a model, whose own tensors may be sharded.

    Raises:
        CheckpointError: The model has tensors with other names.
    """
    state = model.state_dict()
    if state.keys() != tensors.keys():
        differing = ", ".join(sorted(state.keys() ^ tensors.keys())[:4])
        raise CheckpointError(f"the checkpoint is of another model: only one of the two has {differing}.")
    for name, tensor in state.items():
        copy_whole_(tensor, tensors[name])


# Settings that you may change when you resume a run. They only change how the run is stored or distributed, and change
# its result at most by rounding.
HARMLESS = {"config.checkpoint_every", "config.parallel", "config.accumulate"}


def identity(
    model: nn.Module, splits: Splits, config: TrainingConfig, teachers: Mapping[TeacherSource, nn.Module]
) -> dict[str, Any]:
    """Returns the record that identifies a run, as JSON-ready values.

    The record contains the config, the model's structure, and fingerprints of the data, the initial weights and the
    teachers.
    """
    return {
        "config": without_folders(to_dict(config)),
        "data": {
            "name": splits.name,
            "train": splits.train.fingerprint,
            "validation": splits.validation.fingerprint,
            "test": splits.test.fingerprint,
        },
        "model": family_of(model).describe(model),
        "weights": fingerprint(model.state_dict()),
        "tokens": described_tokens(model),
        # The config only has the locations of teachers, whose files may have changed, so fingerprints are stored, too.
        "teachers": {
            " ".join(without_folders([part for part in source if part])): model_fingerprint(teacher)
            for source, teacher in teachers.items()
        },
    }


def require_same_run(saved: Mapping[str, Any], requested: Mapping[str, Any], folder: Path, reached: str) -> None:
    """Raises CheckpointError with a list of differences if the requested run is not the saved run.

    The requested model may have the initial weights of the saved run, or its last saved weights. The fingerprint of the
    last saved weights is `reached`. They are allowed, because training changes a model in place, and you may resume the
    run with the changed model.
    """
    # The records are flattened, so that a difference is named by its path, e.g. config.losses.tuple.0.weight.
    before = dict(_flat(saved))
    now = dict(_flat(requested))
    if now["weights"] == reached:
        now["weights"] = before.get("weights")
    differing = [
        f"{name} was {before.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name not in HARMLESS
    ]
    if differing:
        shown = "; ".join(differing[:8]) + (f"; and {len(differing) - 8} more" if len(differing) > 8 else "")
        raise CheckpointError(
            f"{folder} holds another run: {shown}. Train the same model with the same settings to resume it, or choose "
            "another folder."
        )


def _flat(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(record, Mapping):
        for key, value in record.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(record, list | tuple):
        for index, value in enumerate(record):
            yield from _flat(value, f"{prefix}.{index}")
    else:
        yield prefix, record
