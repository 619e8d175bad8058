"""Kernels: in Triton, imported on first use, and in C++, built on first use."""
