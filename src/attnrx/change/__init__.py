"""Makes models smaller and fits their weights: matrix decompositions, pruning plans, repair and distillation."""
