"""Makes a smaller model: decompositions, the realization of prescriptions, and fits."""
