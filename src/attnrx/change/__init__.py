"""Creates and fits smaller models: matrix decompositions, realization of prescriptions, repair and distillation."""
