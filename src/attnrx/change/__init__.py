"""A smaller model: decompositions, realization and its fits, files for other runtimes."""
