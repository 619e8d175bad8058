"""Decides what a model can do without: diagnoses of its attention, pruning rules, and plans for a budget."""
