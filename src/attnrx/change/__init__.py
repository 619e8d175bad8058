"""A smaller model: decompositions, realization with its fits, and files for other runtimes."""
