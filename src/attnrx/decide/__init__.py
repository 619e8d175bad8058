"""What a model can do without: readings of its attention, rules, and plans for a budget."""
