"""The contract of a format: a captured program in, a file out, and what runs the file."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from attnrx.errors import InvalidInput, NotSupported
from attnrx.shapes import Float, Tensor

Run = Callable[[Tensor], Tensor]
"""Images in, logits out, on the device of the file."""

# The largest difference of a logit that rounding may make, as a share of the largest logit.
ROUNDING: dict[torch.dtype, float] = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
PRECISIONS: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in ROUNDING}


class Format(ABC):
    """One kind of file that runs without attnrx. Every format is a frozen dataclass whose fields are its knobs."""

    name: ClassVar[str]
    suffix: ClassVar[str]
    writes_out: ClassVar[bool] = True
    """Whether attention is exported step by step at exact ranks, instead of as one fused call at padded ones."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    on_cuda: ClassVar[bool] = False
    """Whether a model on a CUDA device gives a file for CUDA; the others run on the CPU."""
    is_native_code: ClassVar[bool] = False
    """Whether opening a file of it runs machine code of the file."""
    calibrated: ClassVar[bool] = False
    """Whether it needs images that show what activations are like."""

    @abstractmethod
    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Writes the program to `path`, whose suffix is the format's, and what belongs to it beside it.

        `images` are batches on the model's scale, for formats that are calibrated.
        """

    @abstractmethod
    def open(self, path: Path, device: str, threads: int) -> Run:
        """Returns what runs the file on a device with so many CPU threads."""

    def limit(self, dtype: torch.dtype) -> float:
        """The most that a logit may differ from eager's, as a share of the largest logit."""
        return ROUNDING[dtype]

    @property
    def wanted(self) -> int:
        """How many images it is compared on, and calibrated where it is, if there are so many."""
        return 32

    def require(self, dtype: torch.dtype) -> None:
        """Refuses a precision that what runs the file does not know."""
        if dtype not in self.dtypes:
            known = " or ".join(_name(each) for each in self.dtypes)
            raise NotSupported(
                f"{self.name} at {_name(dtype)}: it is written at {known}. Give precision={_name(self.dtypes[0])!r}."
            )


def require_suffix(path: Path, suffix: str) -> None:
    """Refuses a file name that does not say what the file is."""
    if path.suffix != suffix:
        raise InvalidInput(f"{path}: a file of this format ends in {suffix}; give {path.with_suffix(suffix).name}.")


def to_numpy(images: Float[Tensor, "batch channels height width"]) -> Any:
    """Returns images as what runs on the CPU outside of torch takes them."""
    return images.detach().cpu().contiguous().numpy()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
