"""C++ kernels for inference on a CPU. Wheels contain them, and other installations compile them on first use."""
