"""Source files and compiler flags for the C++ kernels. The build of a wheel imports only this module of the package."""

from pathlib import Path

SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("attention.cpp", "blocks.cpp", "merging.cpp", "products.cpp")
)
HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.hpp", "columns.hpp"))
# Compilers may fuse products and sums. Mathematical functions do not set errno, which would prevent vectorization.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-w")
THREADS = "-fopenmp"
# The libraries that a wheel contains per processor architecture, and the instructions that each library uses. The names
# equal the results of torch.backends.cpu.get_cpu_capability(). One library is enough for AArch64, where every processor
# supports NEON.
SHIPPED = {
    "x86_64": {"avx2": ("-mavx2", "-mfma"), "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")},
    "aarch64": {"default": ()},
}


def shipped_library(name: str) -> Path:
    """Returns the path at which an installed wheel contains the library with this name."""
    return Path(__file__).with_name(f"native_{name}.so")
