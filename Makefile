# make run: set up, start a local cluster on a real model, replay agents, keep serving.  RUN_EXIT=1 ends after the replay.
# make test: set up, then every check and test.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
NICE ?=

.PHONY: run test lint setup clean

setup:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed and none was found"; exit 1; }
	@$(PYTHON) scripts/setup.py

run: setup
	@$(BIN)/ei demo $(DEMO)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint
	$(NICE) $(BIN)/python -m pytest -m "not e2e" $(ARGS)
	$(NICE) $(BIN)/python -m pytest -m e2e tests/e2e $(ARGS)

clean:
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
