"""The laboratory of attnrx: paper tables, baselines, corrupted images, and comparisons.

The entry points in pyproject.toml register its parts in attnrx. They add commands (`attnrx reproduce`, `compare`,
`bench`, `demo`), checks for `attnrx verify` (`robustness`, `transfer`), and token reducers and rules from papers. They
also add two models (SVDA's Vision Transformer and LV-ViT) and the dataset of digits among clutter. attnrx itself never
imports this package.
"""
