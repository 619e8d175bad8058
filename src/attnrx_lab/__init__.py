"""The laboratory of attnrx: paper tables, baselines, corrupted images, and comparisons.

Entry points in pyproject.toml register the contents of this package in attnrx: commands (`attnrx reproduce`, `compare`,
`bench`, `demo`), checks for `attnrx verify` (`robustness`, `transfer`), token reducers and rules from papers, two
models (SVDA's Vision Transformer and LV-ViT), and a dataset of digits among clutter. attnrx itself never imports this
package.
"""
