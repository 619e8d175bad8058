"""Evidence: checks with their statistics, HTML reports and model cards."""
