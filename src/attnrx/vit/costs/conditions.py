"""The conditions of a comparison of two models: device, precision, threads, compilation, recorded CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnrx.support.arguments import one_of, require_fields
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.hardware import device_name, on_another_stream
from attnrx.support.modules import copy_module
from attnrx.support.shapes import Float, ImageBatch, Tensor

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# PyTorch needs passes before a recording: libraries of kernels allocate their memory in the first ones.
PASSES_BEFORE = 3


class RecordedCalls:
    """Calls of a model on a CUDA device, for inference, that replay its kernels as one CUDA graph: for few images or
    small layers, launching them one by one takes longer than running them.

    The first call with inputs of a shape and type records. A later one copies its inputs to the memory of the recorded
    ones, and overwrites the outputs of the call before. Weights may change in place; a weight that is replaced by
    another tensor is not seen.
    """

    def __init__(self, model: Callable[[Tensor], Any]):
        self.model = model
        self._recorded: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor, Any]] = {}

    @torch.inference_mode()
    def __call__(self, images: Float[Tensor, "batch *sizes"]) -> Any:
        """Returns the outputs of the model.

        Raises:
            NotSupported: The model does something that cannot be recorded, e.g. it waits for the device.
        """
        key = images.shape, images.dtype, images.device
        if key not in self._recorded:
            self._recorded[key] = self._record(images.clone())
        graph, inputs, outputs = self._recorded[key]
        inputs.copy_(images)
        graph.replay()
        return outputs

    def _record(self, inputs: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Any]:
        on_another_stream(lambda: [self.model(inputs) for _ in range(PASSES_BEFORE)])
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                outputs = self.model(inputs)
        except RuntimeError as error:
            raise NotSupported(
                f"this model cannot be recorded as a CUDA graph ({str(error).strip().splitlines()[0]}): run it without "
                "one (graphs=False)."
            ) from error
        return graph, inputs, outputs


@dataclass(frozen=True)
class Conditions:
    """Device, precision, threads and compilation of both models.

    Weights and images are cast to `precision`. `threads` is the number of CPU threads; None keeps the current number.
    `compiled` runs both models through torch.compile, after clearing its caches, so that an earlier model cannot use up
    the recompilation limit. `graphs` replays the kernels as one CUDA graph (`RecordedCalls`).
    """

    device: str = "cpu"
    precision: str = "float32"
    threads: int | None = None
    compiled: bool = False
    graphs: bool = False

    def __post_init__(self):
        require_fields(self, precision=one_of(*PRECISIONS))
        if self.graphs and not self.on_cuda:
            raise InvalidInput(f"graphs=True on device={self.device!r}: CUDA graphs need device='cuda'.")

    def prepare(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Returns a copy of the model under these conditions, in evaluation mode; the model itself is unchanged.

        With `graphs` the calls are recorded (`RecordedCalls`).
        """
        # A copy made in inference mode has inference tensors, for which no derived value can be cached.
        with torch.inference_mode(mode=False):
            clone = copy_module(model).eval().to(self.device, PRECISIONS[self.precision])
        # fullgraph: a part that falls back to eager must fail here instead of being timed as compiled.
        # dynamic=False: one input shape is measured, and its kernels are specialized to it.
        ready = torch.compile(clone, fullgraph=True, dynamic=False) if self.compiled else clone
        return RecordedCalls(ready) if self.graphs else ready

    def prepare_images(self, images: ImageBatch) -> ImageBatch:
        return images.to(self.device, PRECISIONS[self.precision])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Sets the number of threads and disables gradients inside the context."""
        num_threads = torch.get_num_threads()
        if self.compiled:
            torch.compiler.reset()
        try:
            torch.set_num_threads(self.threads or num_threads)
            with torch.inference_mode():
                yield
        finally:
            torch.set_num_threads(num_threads)

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def hardware(self) -> str:
        return device_name(self.device)
