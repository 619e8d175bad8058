"""Backends: `Eager` is the reference; the others equal it to rounding."""
