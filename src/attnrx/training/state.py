"""The state of a run as named tensors, and how it is restored."""

from collections.abc import Mapping

from torch import nn

from attnrx.errors import CheckpointError
from attnrx.shapes import Tensor
from attnrx.training.optimization import load_optimizer_, optimizer_tensors
from attnrx.training.sharding import all_whole, put_
from attnrx.training.step import Learner


def state_tensors(learner: Learner, sums: Tensor) -> dict[str, Tensor]:
    """Returns weights, running mean, optimizer state and the sums of the epoch so far, gathered in the first process.

    All processes must call this, because each may hold a shard; in the others the result is empty. Random generators
    need no state: every step derives its seed from the config's seed and its number.
    """
    parts: dict[str, Mapping[str, Tensor]] = {
        "model": learner.model.state_dict(),
        "mean": learner.mean.tensors if learner.mean else {},
        "optimizer": optimizer_tensors(learner.model, learner.optimizer),
        "meter": {"sums": sums},
    }
    named_tensors = {f"{part}/{name}": tensor for part, group in parts.items() for name, tensor in group.items()}
    return all_whole(named_tensors, keep=learner.accelerator.is_main_process)


def load_state_(learner: Learner, state: Mapping[str, Tensor]) -> None:
    """Restores the output of `state_tensors`; the sums, which are those of all processes, go to the first process."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        part, _, name = key.partition("/")
        parts.setdefault(part, {})[name] = tensor
    load_whole_(learner.model, parts["model"])
    load_optimizer_(learner.model, learner.optimizer, parts.get("optimizer", {}))
    if learner.mean is not None:
        learner.mean.load_(parts["mean"])
    if learner.accelerator.is_main_process:
        learner.meter.sums.copy_(parts["meter"]["sums"])


def load_whole_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Loads whole tensors into a model that may be sharded."""
    own = model.state_dict()
    if own.keys() != tensors.keys():
        differing = ", ".join(sorted(own.keys() ^ tensors.keys())[:4])
        raise CheckpointError(f"the checkpoint is of another model: only one of the two has {differing}.")
    for name, tensor in own.items():
        put_(tensor, tensors[name])
