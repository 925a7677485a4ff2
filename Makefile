# Two commands do everything: `make demo` and `make test`. `make install` alone sets up .venv once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: install demo test lint docs clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	$(BIN)/python -m pip install --quiet -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[mac,gpu,local,dev]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps trl  # its chat templates are read by a test, its code by nothing
	touch $@

demo: install
	$(BIN)/stoa demo $(ARGS)

test: install
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 $(ARGS)  # hundreds of processes: compile once

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright

docs: install
	$(BIN)/python -m cli.reference docs/reference

clean:
	rm -rf $(VENV) build *.egg-info
