"""The base class of export formats, and their text form."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from attnrx.errors import InvalidInput, NotSupported, UnknownName
from attnrx.serialization.text_parsing import KnobReader, Language, knobs_of
from attnrx.shapes import Float, Tensor

Run = Callable[[Tensor], Tensor]
"""Images in, logits out, on the device of the file."""

# The largest difference of a logit attributed to rounding, as a share of the largest logit.
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
    """Whether attention is exported unfused at exact ranks, instead of as one fused call at padded ranks."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    on_cuda: ClassVar[bool] = False
    """Whether a model on a CUDA device is exported for CUDA; other formats run on the CPU."""
    is_native_code: ClassVar[bool] = False
    """Whether opening a file of this format runs machine code of the file."""
    calibrated: ClassVar[bool] = False
    """Whether the format needs calibration images."""

    @abstractmethod
    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Writes the program to `path`, whose suffix is the format's, and further files to the same folder.

        `images` are normalized batches, for calibration.
        """

    @abstractmethod
    def open(self, path: Path, device: str, threads: int) -> Run:
        """Opens the file and returns a function that runs it on a device with this many CPU threads."""

    def limit(self, dtype: torch.dtype) -> float:
        """Returns the largest allowed difference of a logit from eager PyTorch, as a share of the largest logit."""
        return ROUNDING[dtype]

    @property
    def wanted(self) -> int:
        """The number of images for parity and calibration, if there are enough."""
        return 32

    def require(self, dtype: torch.dtype) -> None:
        """Raises NotSupported for a dtype that the runtime does not support."""
        if dtype not in self.dtypes:
            known = " or ".join(_name(each) for each in self.dtypes)
            raise NotSupported(
                f"{self.name} at {_name(dtype)}: it is written at {known}. Give precision={_name(self.dtypes[0])!r}."
            )


def require_suffix(path: Path, suffix: str) -> None:
    """Raises InvalidInput for a path without the suffix of the format."""
    if path.suffix != suffix:
        raise InvalidInput(f"{path}: a file of this format ends in {suffix}; give {path.with_suffix(suffix).name}.")


def to_numpy(images: Float[Tensor, "batch channels height width"]) -> Any:
    """Returns images as a contiguous NumPy array, the input of CPU runtimes other than torch."""
    return images.detach().cpu().contiguous().numpy()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


LANGUAGE = Language("format", "Formats", "onnx, onnx(opset=18) or int8(images=128)", "(),=", InvalidInput)


def parse_format_text(text: str, registry: Mapping[str, type[Format]]) -> Format:
    """Parses one format; `registry` maps their names to classes."""
    reader = _Reader(text)
    name = reader.expect("name", "the name of a format")
    if name.text not in registry:
        raise UnknownName("format", name.text, registry)
    knobs = reader.read_knobs(name, knobs_of(registry[name.text]))
    reader.expect("end", "the end")
    return registry[name.text](**knobs)


class _Reader(KnobReader):
    language = LANGUAGE
