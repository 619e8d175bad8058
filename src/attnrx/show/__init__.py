"""Shows what a compression costs: checks with their statistics, figures, HTML reports and model cards."""
