# Everything a contributor runs. `make` alone lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON_IN_VENV := .venv/bin/python
STAMP := .venv/.installed
# What runs inside a sandbox; there is none on other systems.
GUEST := $(if $(filter Linux,$(shell uname)),sandboxd/native/sandboxd-guest)
DEMO_ARGS ?= configs/demo.toml
PYTEST_ARGS ?=

.PHONY: help demo test check chaos format protos docs guest images clean

help: ## List the targets
	@grep -hE '^[a-z.]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

demo: $(STAMP) $(GUEST) ## Train a small language model through leased sandboxes (12 minutes on 2 cores); DEMO_ARGS= for others
	@exec $(PYTHON_IN_VENV) -m rl train $(DEMO_ARGS)

test: $(STAMP) $(GUEST) ## Run the whole test suite, in two processes; PYTEST_ARGS= to choose
	@exec $(PYTHON_IN_VENV) -m pytest -n 2 $(PYTEST_ARGS)

check: $(STAMP) $(GUEST) ## Lint, format, types, generated code, house rules
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check .
	@$(PYTHON_IN_VENV) -m mypy
	@scripts/protos.sh --check
	@$(PYTHON_IN_VENV) scripts/reference.py --check
	@$(PYTHON_IN_VENV) -m pytest -q tests/test_layers.py tests/test_house_rules.py

chaos: $(STAMP) $(GUEST) ## Play 960 rollouts among kills and faults, once for each of 20 seeds (SEEDS= for others)
	@scripts/chaos.sh $(SEEDS)

format: $(STAMP) ## Format the code and apply the safe lint fixes
	@$(PYTHON_IN_VENV) -m ruff check --fix .
	@$(PYTHON_IN_VENV) -m ruff format .

protos: $(STAMP) ## Generate sandboxd/v1 from protos/
	@scripts/protos.sh

docs: $(STAMP) ## Write the tables of settings and docs/reference.md from where these are defined
	@$(PYTHON_IN_VENV) scripts/reference.py

guest: $(GUEST) ## Compile what runs inside a sandbox

$(GUEST): $(wildcard sandboxd/native/*.[ch]) scripts/guest.sh
	@scripts/guest.sh

images: ## Build the Docker images that the tests use; no registry needed on Debian
	@images/build.sh

.venv: $(STAMP) $(GUEST) ## Make the virtual environment and install into it

# The stamp is newer than what it was made from, so that a second make costs nothing.
$(STAMP): requirements/cpu.lock pyproject.toml scripts/install.sh scripts/guest_build.py
	@scripts/install.sh
	@touch $@

clean: ## Remove caches and what was built; keeps .venv, models and runs
	rm -rf build *.egg-info sandboxd/native/sandboxd-guest* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
