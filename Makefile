# Everything a developer runs. A fresh machine needs Python >= 3.11 (transformers 5.23 does) and make: `make quickstart` or `make test`.
# Another interpreter: `make test PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip
# A stamp is touched when its installation has succeeded, so that a second run installs nothing.
TORCH := $(VENV)/.installed-torch
QUICKSTART := $(VENV)/.installed-quickstart
DEV := $(VENV)/.installed-dev
# The tests start processes of their own: one thread each is faster than all of them fighting for the cores.
TEST_ENVIRONMENT := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}
# One process for each core, up to four, and a file of tests in one of them: fixtures of a file are made once.
TEST_PROCESSES := -n auto --maxprocesses 4 --dist loadfile
# An environment of the oldest versions, and what else their tests need.
OLDEST := .venv-oldest
# An environment of the newest versions that pyproject.toml allows.
NEWEST := .venv-newest
# An environment with gradio.
APP := .venv-app
# `build` and setuptools make the wheel that tests look at; fastapi is what an example runs on.
TEST_TOOLS := pytest pytest-xdist pytest-timeout hypothesis parameterized scikit-image scikit-learn fastapi build 'setuptools>=77'
# Options for pytest, for instance `make test PYTEST="tests/cli -x"`, or `PYTEST="-n 0"` for a single process.
PYTEST ?=

.PHONY: help quickstart test slow docs released oldest newest test-app conformance gpu lint format typecheck build smoke clean
.DELETE_ON_ERROR:

help:
	@echo "make quickstart    train, push to a Hub on this machine, pull, restore, merge, sample"
	@echo "make test          the test suite (PYTEST='options' are passed on)"
	@echo "make slow          the slow tests: transformers' own test suite against our classes, long runs"
	@echo "make conformance   only transformers' own test suite"
	@echo "make test-app      the tests of hf-ext app in a separate environment, and in Chromium if it is installed"
	@echo "make oldest        the test suite with the oldest versions that pyproject.toml allows (KEEP=torch: but for torch)"
	@echo "make newest        the test suite with the newest versions that pyproject.toml allows (KEEP=torch: but for torch)"
	@echo "make released      trains the released models, or resumes their training: DATA=folder (hours)"
	@echo "make gpu           the GPU benchmarks (PART=name, RESULTS=folder; DEVICE=cpu: tiny sizes on the CPU)"
	@echo "make docs          the site in docs/_build, without a network"
	@echo "make lint          ruff: rules and format        make format   let ruff rewrite the files"
	@echo "make typecheck     mypy"
	@echo "make build         sdist and wheel in dist/      make smoke    build, install elsewhere, try the wheel"
	@echo "make clean         remove what the commands above wrote, but not .venv"

quickstart: $(QUICKSTART)
	$(PY) examples/quickstart.py

test: $(DEV)
	$(TEST_ENVIRONMENT) $(PY) -m pytest $(TEST_PROCESSES) $(PYTEST)

slow: $(DEV)
	$(TEST_ENVIRONMENT) $(PY) -m pytest -m slow $(TEST_PROCESSES) $(PYTEST)

# Trains the released models, or goes on, at the lowest priority; DATA is the folder of bsds500, cifar10 and the others.
released: $(DEV)
	$(PY) examples/released/train.py $(DATA)

# With another interpreter (`make gpu PY=python3`) nothing is installed: it runs with what is there.
gpu: $(if $(filter $(VENV)/bin/python,$(PY)),$(DEV))
	$(PY) examples/benchmarks/gpu/run.py --part "$(PART)" --device "$(DEVICE)" --results "$(RESULTS)" --limit "$(or $(LIMIT),480)"

docs: $(DEV)
	$(PY) -m sphinx -b html -W --keep-going docs docs/_build

# The lower bounds of pyproject.toml. KEEP=torch takes that of constraints.txt, where the oldest is not at hand.
oldest:
	$(PYTHON) -m venv --clear $(OLDEST)
	$(PYTHON) .ci/oldest.py $(KEEP) > $(OLDEST)/oldest.txt
	$(if $(KEEP),$(OLDEST)/bin/python -m pip install -c constraints.txt $(KEEP))
	$(OLDEST)/bin/python -m pip install -c $(OLDEST)/oldest.txt -e '.[all]' $(TEST_TOOLS)
	$(TEST_ENVIRONMENT) $(OLDEST)/bin/python -m pytest $(TEST_PROCESSES) $(PYTEST)

# The upper bounds of pyproject.toml: no constraints. KEEP=torch takes that of constraints.txt.
newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(if $(KEEP),$(NEWEST)/bin/python -m pip install -c constraints.txt $(KEEP))
	$(NEWEST)/bin/python -m pip install -e '.[all]' $(TEST_TOOLS)
	$(NEWEST)/bin/python -m pip list --format freeze > $(NEWEST)/newest.txt
	$(TEST_ENVIRONMENT) $(NEWEST)/bin/python -m pytest $(TEST_PROCESSES) $(PYTEST)

# The app wants an older Pillow than the rest. In its browser tests, Chromium that is installed.
test-app:
	$(PYTHON) -m venv $(APP)
	$(APP)/bin/python -m pip install -c constraints.txt torch
	$(APP)/bin/python -m pip install -c constraints.txt -e '.[app-dev]'
	$(TEST_ENVIRONMENT) $(APP)/bin/python -m pytest -n 0 -m "slow or not slow" tests/app $(PYTEST)

conformance: $(DEV)
	$(TEST_ENVIRONMENT) $(PY) -m pytest -m slow tests/conformance $(PYTEST)

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: $(DEV)
	$(PY) -m mypy

build: $(DEV)
	rm -rf build dist
	$(PY) -m build

smoke: build
	$(PY) tests/smoke_wheel.py dist/*.whl

clean:
	rm -rf build dist docs/_build docs/jupyter_execute quickstart .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# A half-made environment (no venv module, an interrupt) must not look like a finished one: pip has to run first.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hf-ext needs Python >= 3.11, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=/path/to/a/newer/python")'
	test -x $(PY) && $(PIP) --version || $(PYTHON) -m venv --clear $(VENV)
	touch $@

# torch first and pinned: whatever comes after finds it there and cannot pull another build of it.
$(TORCH): constraints.txt | $(VENV)/.created
	$(PIP) install -c constraints.txt torch
	touch $@

$(QUICKSTART): pyproject.toml constraints.txt $(TORCH)
	$(PIP) install -c constraints.txt -e '.[quickstart]'
	touch $@

# The dev extra contains the quickstart one.
$(DEV): pyproject.toml constraints.txt $(TORCH)
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $(QUICKSTART) $@
