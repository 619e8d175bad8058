"""Everything about the models: attention layers, token reducers, C++ kernels, costs, and adapters for libraries."""
