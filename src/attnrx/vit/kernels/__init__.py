"""C++ kernels, built on first use."""
