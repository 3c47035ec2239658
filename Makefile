# make install   make train [ARGS="mode=sync model=cnn"]   make test   make thorough   make slow   make chaos [SEED=1]   make bench [ARGS="--only torch"]   make versions [ARGS=oldest]   make lint   make docs   make lock   make dist   make clean

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Made when everything in requirements.lock is installed.
STAMP := $(VENV)/.installed

# Where it is set, as in many containers, each of the hundreds of commands in the tests would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install train test thorough slow chaos bench versions lint docs lock dist clean

# An environment in .venv, with the versions of requirements.lock.
install: $(STAMP)

train: $(STAMP)
	$(BIN)/python -m tf2dist $(ARGS)

# Side by side, the fast ones first, and lint among them. The tests of a file stay in one process, sharing slow setup; in
# the first of the two commands that process ends with the file and gives back the memory of its clusters. Most tests
# wait for much of their time, so three processes suit two cores as well, and four are no faster; but those of whole
# commands have deadlines that a busy machine would miss. With ARGS="-k NAME" one of the two may have no test, which is code 5.
# If one of the processes is lost, that ends the tests: pytest-xdist may wait for its successor for ever.
SIDE_BY_SIDE := --dist loadfile --max-worker-restart 0
define PYTEST_SIDE_BY_SIDE
	$(BIN)/python -m pytest $(MARKED) -n 3 $(SIDE_BY_SIDE) -p tests.process_per_file tests/unit tests/replica tests/process $(ARGS) || [ $$? = 5 ]
	$(BIN)/python -m pytest $(MARKED) -n logical --maxprocesses 4 $(SIDE_BY_SIDE) --no-loadscope-reorder tests/e2e $(ARGS) || [ $$? = 5 ]
endef

test: $(STAMP)
	$(PYTEST_SIDE_BY_SIDE)

# Further rows of comparisons that `make test` makes once, and second ways to the same code.
thorough: MARKED := -m "thorough and not slow"
thorough: $(STAMP)
	$(PYTEST_SIDE_BY_SIDE)

# Whole hosts cut off for good, frozen tasks, the second of two similar runs: slow tests, one after another.
# The tests of SLURM start one of their own, and are skipped where it is not installed.
slow: $(STAMP)
	command -v slurmctld > /dev/null || { [ "$$(id -u)" = 0 ] && apt-get install --yes slurm-wlm munge; } || true
	$(BIN)/python -m pytest -m slow tests/unit tests/replica tests/process tests/e2e $(ARGS)

# Two minutes of kills and freezes in each mode and with each algorithm.
chaos: $(STAMP)
	TF2DIST_CHAOS_SECS=120 TF2DIST_CHAOS_SEED=$(SEED) $(BIN)/python -m pytest -s -m "slow or not slow" tests/e2e/test_chaos.py $(ARGS)

# Needs MNIST; compares with torch and with Keras on JAX, too, where they are installed: see docs/benchmarks.md.
bench: $(STAMP)
	$(BIN)/python -m tests.bench $(ARGS)

# Makes an environment for each set of releases in build/versions; writes docs/versions.md.
versions: $(STAMP)
	$(BIN)/python -m tests.versions $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --line-length 88 README.md README.zh.md
	$(BIN)/mypy

# Into build/docs/README.html; runs the page that is a notebook. A warning, as of a link that leads nowhere, is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -c docs . build/docs

# pip compiles to byte code, which makes importing TensorFlow twice as fast.
$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 11) <= v < (3, 14); sys.exit(None if ok else "tf2dist needs Python 3.11 to 3.13; this is %d.%d: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --compile --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# The wheel and the source archive, as a package index takes them.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# Needs uv; writes no index address.
lock:
	uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --no-annotate --extra dev pyproject.toml --output-file requirements.lock

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
