"""The laboratory of attnrx: paper tables, baselines, corrupted images, and comparisons.

It plugs in by the entry points that pyproject.toml declares: commands (`attnrx reproduce`, `compare`, `bench`,
`demo`), checks of `attnrx verify` (`robustness`, `transfer`), token reducers and rules of papers, the Vision
Transformer of SVDA and LV-ViT, and the dataset of digits among clutter. attnrx never imports it.
"""
