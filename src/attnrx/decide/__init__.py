"""Decides what to remove from a model: diagnoses of its layers, pruning rules, and plans for a budget."""
