"""Sources and compiler flags of the C++ kernels, and the libraries of a wheel; its build reads this file alone."""

from pathlib import Path

SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("attention.cpp", "blocks.cpp", "merging.cpp", "products.cpp")
)
HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.hpp", "columns.hpp"))
# Products and sums may be fused, and errno of mathematical functions is not set, which would prevent vector code.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-w")
THREADS = "-fopenmp"
# Per processor, the libraries of a wheel and their instructions: those that torch.backends.cpu.get_cpu_capability()
# tests for, by its names. AArch64 has one, because every such processor has NEON.
SHIPPED = {
    "x86_64": {"avx2": ("-mavx2", "-mfma"), "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")},
    "aarch64": {"default": ()},
}


def shipped_library(name: str) -> Path:
    """Returns where a wheel has the library of that name."""
    return Path(__file__).with_name(f"native_{name}.so")
