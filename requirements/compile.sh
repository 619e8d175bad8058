#!/bin/sh
# Resolves pyproject.toml into requirements/constraints.txt: every version pinned, with hashes, no index lines.
set -eu
cd "$(dirname "$0")/.."
uv pip compile pyproject.toml --all-extras --group dev --group docs --group build --universal --python-version 3.11 \
    --generate-hashes --no-header --no-emit-index-url --no-annotate --quiet -o requirements/constraints.txt
