"""A training step as a CUDA graph: the kernels of a step are recorded once and launched together after that.

A small model computes faster than the processor launches its kernels one by one. The recorded step reads its batch,
the learning rates and the number of the step from tensors, which are filled before each replay; everything else has to
be the same in all steps, so only some settings can be recorded.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from attnrx.data import Batch
from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Int, Tensor
from attnrx.training.config import TrainingConfig
from attnrx.training.losses import Task
from attnrx.vit.models import reduction_of

if TYPE_CHECKING:
    from accelerate import Accelerator

WARMUP = 3  # ordinary steps before the recording: they compile, and create the optimizer's state

Work = Callable[[Batch, Int[Tensor, ""]], None]
"""A whole step on a batch, with its number as a tensor."""


def require_recordable(model: torch.nn.Module, config: TrainingConfig, accelerator: "Accelerator") -> None:
    """Raises NotSupported for settings whose steps are not the same kernels on the same constants."""
    problems = {
        "on a CPU": accelerator.device.type != "cuda",
        "with several processes": accelerator.num_processes > 1,
        "with accumulate": config.accumulate > 1,
        "with losses other than Task": any(not isinstance(loss, Task) for loss in config.losses),
        "with mixing": config.mixing is not None,
        "with ema": config.ema is not None,
        "with nonnegative_fusion": config.nonnegative_fusion,
        "with a token policy": reduction_of(model) is not None,
    }
    found = [what for what, holds in problems.items() if holds]
    if found:
        raise NotSupported(f"cuda_graph=True: a step cannot be recorded {', '.join(found)}; omit cuda_graph.")


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """Records the kernels of `work` without running them, and returns their replay."""
    graph = torch.cuda.CUDAGraph()
    # Only this thread is watched: the threads of a data loader may allocate memory meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


def on_another_stream(work: Callable[[], None]) -> None:
    """Runs `work` as PyTorch requires of the steps before a recording."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)


class RecordedStep:
    """Runs `work` step by step at first, then as a CUDA graph; batches of another size than the recorded one are run.

    If recording fails, `forget` removes the gradients that it left, a warning states why, and no step is recorded.
    """

    def __init__(self, work: Work, forget: Callable[[], None], device: torch.device):
        self._work, self._forget = work, forget
        self._number = torch.zeros((), dtype=torch.int64, device=device)
        self._left = WARMUP
        self._batch: Batch | None = None
        self._replay: Callable[[], None] | None = None

    def __call__(self, batch: Batch, step: int) -> None:
        self._number.fill_(step)
        if self._left == 0:
            self._record(batch)
        self._left -= 1
        static = self._batch
        if self._replay is None or static is None or batch.images.shape != static.images.shape:
            on_another_stream(lambda: self._work(batch, self._number))
            return
        static.images.copy_(batch.images)
        static.labels.copy_(batch.labels)
        self._replay()

    def _record(self, batch: Batch) -> None:
        static = Batch(batch.images.clone(), batch.labels.clone(), batch.index)
        try:
            self._replay = recorded(lambda: self._work(static, self._number))
        except Exception as error:
            self._forget()
            warnings.warn(
                f"the step could not be recorded as a CUDA graph, and runs without one: {type(error).__name__}: "
                f"{str(error)[:300]}",
                stacklevel=2,
            )
            return
        self._batch = static
