"""What several test files use: models, images, data, comparisons, and scripts that run in other processes."""
