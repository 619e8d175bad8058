"""The identity of a run, so that a checkpoint is never resumed with other settings."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from attnrx.data import Splits
from attnrx.errors import CheckpointError
from attnrx.models import described_tokens, family_of
from attnrx.serialization.config import to_dict
from attnrx.training.config import TrainingConfig

HARMLESS = {"config.checkpoint_every", "config.parallel"}  # may change when a run is resumed


def identity(model: nn.Module, splits: Splits, config: TrainingConfig) -> dict[str, Any]:
    """Returns the model, the data and the config of a run as JSON-ready values."""
    return {
        "config": to_dict(config),
        "data": {"name": splits.name, "train": splits.train.fingerprint, "validation": splits.validation.fingerprint},
        "model": family_of(model).describe(model),
        "tokens": described_tokens(model),
    }


def require_same_run(saved: Mapping[str, Any], requested: Mapping[str, Any], folder: Path) -> None:
    """Raises CheckpointError if the run differs from the saved one, with a list of the differences."""
    before, now = dict(_flat(saved)), dict(_flat(requested))
    differing = [
        f"{name} was {before.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name not in HARMLESS
    ]
    if differing:
        shown = "; ".join(differing[:8]) + (f"; and {len(differing) - 8} more" if len(differing) > 8 else "")
        raise CheckpointError(
            f"{folder} holds another run: {shown}. Train with the same settings to resume it, or choose another folder."
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
