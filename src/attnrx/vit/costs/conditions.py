"""The conditions of a comparison of two models: device, precision, threads, compilation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from attnrx.support.arguments import DEVICE, FLAG, THREADS, one_of, optional, require_fields
from attnrx.support.errors import InvalidInput
from attnrx.support.hardware import device_name
from attnrx.support.modules import copy_module
from attnrx.support.shapes import Float, Tensor

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Conditions:
    """Device, precision, threads and compilation of both models.

    Weights and images are cast to `precision`. `threads` is the number of CPU threads; None keeps the current number.
    `compiled` runs both models through torch.compile, after clearing its caches, so that an earlier model cannot use up
    the recompilation limit. `graphs` compiles too, and replays the kernels as one CUDA graph: with few images,
    launching a kernel costs more than running it. A replay overwrites the previous output.
    """

    device: str = "cpu"
    precision: str = "float32"
    threads: int | None = None
    compiled: bool = False
    graphs: bool = False

    def __post_init__(self):
        require_fields(
            self,
            device=DEVICE,
            precision=one_of(*PRECISIONS),
            threads=optional(THREADS),
            compiled=FLAG,
            graphs=FLAG,
        )
        if self.graphs and not self.on_cuda:
            raise InvalidInput(f"graphs=True on device={self.device!r}: CUDA graphs need device='cuda'.")

    def prepare(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Returns a copy of the model under these conditions, in evaluation mode; the model itself is unchanged."""
        # A copy made in inference mode has inference tensors, for which no derived value can be cached.
        with torch.inference_mode(mode=False):
            clone = copy_module(model).eval().to(self.device, PRECISIONS[self.precision])
        # fullgraph: a part that falls back to eager must fail here instead of being timed as compiled.
        # dynamic=False: one input shape is measured, and its kernels are specialized to it.
        mode = "reduce-overhead" if self.graphs else None  # CUDA graphs
        compiled = self.compiled or self.graphs
        return torch.compile(clone, fullgraph=True, dynamic=False, mode=mode) if compiled else clone

    def prepare_images(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        return images.to(self.device, PRECISIONS[self.precision])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Sets the number of threads and disables gradients inside the context."""
        num_threads = torch.get_num_threads()
        if self.compiled or self.graphs:
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
