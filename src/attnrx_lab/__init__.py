"""The laboratory of attnrx: paper tables, baselines, corrupted images, comparisons and sweeps.

It plugs into the command line (`attnrx reproduce`, `compare`, `bench`, `sweep`, `demo`) and into `attnrx verify`
(the checks `robustness` and `transfer`) by the entry points that pyproject.toml declares; attnrx never imports it.
"""
