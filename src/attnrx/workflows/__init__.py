"""The functions that users call, each in its own module."""
