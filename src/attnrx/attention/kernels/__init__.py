"""Kernels: in Triton, which is imported when one is first run, and in C++, built when it is first run."""
