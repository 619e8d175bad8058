"""Sources and compiler flags of the C++ kernels, and the libraries of a wheel; its build reads only this file."""

from pathlib import Path

SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("attention.cpp", "blocks.cpp", "merging.cpp", "products.cpp")
)
HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.hpp", "columns.hpp"))
# Products and sums may be fused. Mathematical functions do not set errno, which would rule out vector code.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-w")
THREADS = "-fopenmp"
# By processor, the libraries of a wheel and their instructions. The names are those that
# torch.backends.cpu.get_cpu_capability() returns. AArch64 has one library, because all such processors have NEON.
SHIPPED = {
    "x86_64": {"avx2": ("-mavx2", "-mfma"), "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")},
    "aarch64": {"default": ()},
}


def shipped_library(name: str) -> Path:
    """Returns where a wheel holds the library with this name."""
    return Path(__file__).with_name(f"native_{name}.so")
