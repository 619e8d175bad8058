"""The base class of export formats, the code that formats share (scripts, errors, dtypes), and PyTorch's own formats.

PyTorch's formats are programs of torch.export and AOTInductor packages.
"""

import inspect
import sys
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import torch

from attnrx.support import pictures
from attnrx.support.errors import AttnrxError, InvalidInput, NotSupported, is_out_of_memory
from attnrx.support.foreign_files import open_package, open_program
from attnrx.support.optional import required_module
from attnrx.support.shapes import Float, Tensor
from attnrx.support.text_parsing import spelled_knobs

INPUT = "images"  # the name of the input in ONNX graphs

Run = Callable[[Tensor], tuple[Tensor, ...]]
"""A function that takes images and returns outputs, both on the device of the file."""

# The beginnings of lines in OpenVINO's messages that only name a place in its source code.
PLACES = ("Check '", "Exception from ")

# The largest difference of a logit that counts as rounding, as a share of the largest logit.
ROUNDING: dict[torch.dtype, float] = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


# The start and the end of the script beside a file. The script classifies an image with the runtime, NumPy and Pillow.
HEAD = '''"""Classifies an image: python {script} IMAGE"""

import io
import json
import sys
from pathlib import Path

import numpy as np
import {runtime}
'''
TAIL = """

here = Path(__file__)
{opening}
how, names = about["preprocessing"], about["class_names"]
pixels = pixels_of(open_picture(Path(sys.argv[1]).read_bytes()), how["channels"], how["alpha"])
images = normalize_pixels(fit_pixels(pixels, how), how["mean"], how["std"])[None].repeat(batch, 0)
logits = {call}[0]
if len(logits) == 1:  # that of class 1 against class 0
    logits = np.array([0.0, logits[0]])
best = int(logits.argmax())
probability = np.exp(logits[best] - np.logaddexp.reduce(logits))
print(names[best] if names else best, f"{{probability:.3f}}")
"""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PRECISIONS: dict[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in ROUNDING}


class Format(ABC):
    """One kind of file that runs without attnrx. Every format is a frozen dataclass, and its fields are its options."""

    name: ClassVar[str]
    suffix: ClassVar[str]
    runtime: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    on_cuda: ClassVar[bool] = False
    """Whether a model on a CUDA device is exported for CUDA. Files of other formats run on the CPU."""
    runs_code: ClassVar[bool] = False
    """Whether a file of this format can contain code that runs when the file is opened: machine code or pickles."""

    def __str__(self) -> str:
        """Returns the format as text, which you can pass instead of the format, e.g. "openvino(precision=bf16)"."""
        knobs = spelled_knobs(self)
        return self.name + (f"({knobs})" if knobs else "")

    @abstractmethod
    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Writes the program to `path`, which has the format's suffix, and further files to the same folder.

        `images` are normalized batches for calibration, of shape [batch, channels, height, width].
        """

    @abstractmethod
    def open(self, path: Path, device: str, threads: int) -> Run:
        """Opens the file for a device and a number of CPU threads.

        Returns a function that runs the file and returns its outputs.
        """

    def describe(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Writes the facts into the file, if the format has a place for them."""
        del path, facts

    def example(self, path: Path) -> str | None:
        """Returns a script that classifies an image using only the exported file, or None if the format has none."""
        return None

    def runtime_at(self, precision: str) -> str:
        """Returns the name of the runtime, and the precision in which it runs a file with inputs at `precision`."""
        return f"{self.runtime} in {precision}"

    def limit(self, dtype: torch.dtype) -> float:
        """Returns how far a logit may differ from eager PyTorch, as a share of the largest logit."""
        return ROUNDING[dtype]

    def files(self, path: Path) -> tuple[Path, ...]:
        """Returns the files that every export to `path` writes. Weights above MOST_BYTES need additional files."""
        return (path,)

    @property
    def place(self) -> str:
        """The key in RUNTIMES for the runtime of this format."""
        return self.name

    @property
    def libraries(self) -> tuple[str, ...]:
        """The optional libraries that write and run the file. `extra` names the pip extra that installs them."""
        return ()

    @property
    def extra(self) -> str:
        return "onnx"

    @property
    def calibrated(self) -> bool:
        """Whether the format needs calibration images."""
        return False

    @property
    def wanted(self) -> int:
        """How many images are used to calibrate the file and to compare it with the model, if there are enough."""
        return 32

    def require(self, path: Path, dtype: torch.dtype) -> None:
        """Raises InvalidInput for a path without the format's suffix, and NotSupported for an unsupported dtype."""
        if path.suffix != self.suffix:
            renamed = path.with_suffix(self.suffix).name
            raise InvalidInput(f"{path}: a file of this format ends in {self.suffix}; give {renamed}.")
        if dtype not in self.dtypes:
            supported = [dtype_name(each) for each in self.dtypes]
            raise NotSupported(
                f"{self.name} at {dtype_name(dtype)}: it is written at {' or '.join(supported)}. Give "
                f"precision={supported[0]!r}."
            )


def script_path(path: Path) -> Path:
    """Returns the path of the script for a file, in the same folder."""
    return path.with_name(f"run_{path.stem}.py")


def run_script(path: Path, runtime: str, opening: str, call: str) -> str:
    """Returns the script that classifies an image with the file at `path`.

    `opening` holds statements that set `about` to the file's facts, and `batch` to the number of images per call.
    `call` is an expression that returns the outputs for `images`.
    """
    # The script contains the source of the module `pictures`, so it preprocesses exactly like attnrx.
    computing = inspect.getsource(pictures).partition("import numpy as np\n")[2]
    head = HEAD.format(script=script_path(path).name, runtime=runtime)
    return head + computing + TAIL.format(opening=opening, call=call)


@contextmanager
def raising(problem: str, advice: str = "", kind: type[AttnrxError] = NotSupported) -> Iterator[None]:
    """Turns exceptions of a runtime or converter into an error of the class `kind` with the message `problem`."""
    try:
        yield
    except AttnrxError:
        raise
    except Exception as error:
        if is_out_of_memory(error):  # too little memory says nothing about the file
            raise
        # Only the first line that says something is kept, because exporters append whole reports to their messages.
        # OpenVINO's messages begin with places in its source code.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if not line.startswith(PLACES)), lines[0] if lines else "no message")
        raise kind(f"{problem} ({type(error).__name__}: {reason}). {advice}".rstrip()) from error


def library(module: str, extra: str = "onnx") -> Any:
    """Imports a module that a format needs. `extra` names the pip extra of attnrx that installs the module."""
    return required_module(module, extra, "this format")


def to_numpy(inputs: Float[Tensor, "batch *sizes"]) -> Any:
    """Returns images or tokens as a contiguous NumPy array, which CPU runtimes other than torch take as input."""
    return inputs.detach().cpu().contiguous().numpy()


# The formats of PyTorch -----------------------------------------------------------------------------------------------


def _returning_all(run: Callable[[Tensor], Any]) -> Run:
    def run_all(images: Tensor) -> tuple[Tensor, ...]:
        outputs = run(images)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    return run_all


@dataclass(frozen=True)
class Program(Format):
    """A program captured by torch.export, with its weights. You only need PyTorch to load it.

    When torch opens the file, it unpickles parts of it, e.g. weights and constants. A pickle can run any code.
    """

    name: ClassVar[str] = "program"
    runtime: ClassVar[str] = "torch.export"
    suffix: ClassVar[str] = ".pt2"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = tuple(ROUNDING)
    on_cuda: ClassVar[bool] = True
    runs_code: ClassVar[bool] = True

    @property
    def place(self) -> str:
        return "eager"

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        # The program is written to memory first. If the disk is full, torch's own file writer would end the process.
        content = BytesIO()
        torch.export.save(program, content)
        path.write_bytes(content.getbuffer())

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Loads the program, which runs on torch's threads."""
        # Guards are not needed, because `Exported` validates shapes.
        return _returning_all(open_program(path).module(check_guards=False))


def remove_folders(package: BytesIO) -> BytesIO:
    """Returns an AOTInductor package without the names of folders on this machine. The package runs as before.

    The source code of the package's libraries is removed, because it contains the compiler's command. In the libraries
    themselves, the folder names in the paths of source files are replaced by slashes. These paths appear only in
    messages.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folders = [cache_dir(), Path(torch.__file__).parents[1], sys.prefix, sys.base_prefix, tempfile.gettempdir()]
    names = [str(folder).encode() for folder in folders]
    written = BytesIO()
    with zipfile.ZipFile(package) as archive, zipfile.ZipFile(written, "w") as smaller:
        for entry in archive.infolist():
            content = archive.read(entry)
            for name in names if entry.filename.endswith(".so") else ():
                content = content.replace(name, b"/" * len(name))  # keeps the length, because addresses must not change
            if not entry.filename.endswith(".cpp"):
                smaller.writestr(entry, content)
    return written


@dataclass(frozen=True)
class AOTInductor(Program):
    """An AOTInductor package, compiled for this kind of machine. It loads in seconds and also runs from C++.

    You need a C++ compiler to export, and the same version of PyTorch to run the package.
    """

    name: ClassVar[str] = "aotinductor"
    runtime: ClassVar[str] = "AOTInductor"

    @property
    def place(self) -> str:
        return "compiled"

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Compiles the program with its weights. If that fails, torch's own error names the compilers that it tried."""
        from torch._inductor import aoti_compile_and_package

        package = BytesIO()  # compiled to memory, for the same reason as a program
        aoti_compile_and_package(program, package_path=package)
        path.write_bytes(remove_folders(package).getbuffer())

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Loads the package, which runs on torch's threads."""
        return _returning_all(open_package(path))
