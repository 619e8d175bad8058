"""The functions that users call, each in a module of its own."""
