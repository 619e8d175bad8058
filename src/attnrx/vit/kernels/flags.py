"""Sources and compiler flags of the C++ kernels, and a wheel's libraries. Building a wheel imports only this file."""

from pathlib import Path

SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("attention.cpp", "blocks.cpp", "merging.cpp", "products.cpp")
)
HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.hpp", "columns.hpp"))
# Products and sums may be fused. Mathematical functions do not set errno, because this would rule out vector code.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-w")
THREADS = "-fopenmp"
# The libraries of a wheel and their instructions, by processor. Their names are the results of
# torch.backends.cpu.get_cpu_capability(). AArch64 has one library, because all such processors have NEON.
SHIPPED = {
    "x86_64": {"avx2": ("-mavx2", "-mfma"), "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")},
    "aarch64": {"default": ()},
}


def shipped_library(name: str) -> Path:
    """Returns the path of the library with this name in a wheel."""
    return Path(__file__).with_name(f"native_{name}.so")
