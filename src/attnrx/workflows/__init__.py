"""The functions that users call. Each has a module here, from its arguments to its result."""
