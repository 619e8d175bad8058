"""Vision Transformers: attention layers, token reducers, C++ kernels, costs, and adapters for model libraries."""
