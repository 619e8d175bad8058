"""The model side: attention, tokens, kernels, costs, and the models of libraries."""
