"""Kernels in Triton, which is imported when one is first run."""
