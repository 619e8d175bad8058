#!/bin/sh
# Resolves pyproject.toml into requirements/constraints.txt, the newest versions, and requirements/oldest.txt, the oldest
# that pyproject.toml allows: every version pinned, with hashes, no index lines.
set -eu
cd "$(dirname "$0")/.."
extras=$(sed -n "/^\[project.optional-dependencies\]/,/^$/s/^\([a-z0-9]*\) = .*/--extra \1/p" pyproject.toml)
compile() {
    uv pip compile pyproject.toml $extras --group dev --group build --python-version 3.11 \
        --generate-hashes --no-header --no-emit-index-url --no-annotate --quiet "$@"
}
compile --group docs --group package --universal -o requirements/constraints.txt
compile --resolution lowest-direct -o requirements/oldest.txt
