"""Creates and fits smaller models: matrix decompositions, application of pruning plans, repair and distillation."""
