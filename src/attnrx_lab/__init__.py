"""The laboratory of attnrx: paper tables, baselines, corrupted images, comparisons and sweeps.

It plugs into the command line (`attnrx reproduce`, `compare`, `bench`, `sweep`, `demo`), into `attnrx verify` (the
checks `robustness` and `transfer`) and into texts of token policies (reducers of other papers) by the entry points that
pyproject.toml declares; attnrx never imports it.
"""
