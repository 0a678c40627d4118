# `make demo` and `make test` do their own set-up: a virtual environment in .venv with pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test lint types unit unit-first unit-second soak install clean

demo: $(STAMP)
	$(BIN)/python trainer_examples/grpo_fsdp2.py

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Two halves at once, one for each core; the second is whatever the first does not name.
HALF := $(addprefix tests/,demo determinism engine_core engine_exec frameworks gpu kernels loader \
	models nouns weight_sync_source)

unit: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target unit-first unit-second

unit-first: $(STAMP)
	$(BIN)/pytest $(HALF)

unit-second: $(STAMP)
	$(BIN)/pytest tests $(addprefix --ignore=,$(HALF))

# Ten minutes of updates, faults and streams; prints what was checked. SEED=n for another course.
soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py --seconds 600 --seed $(or $(SEED),0)

install: $(STAMP)

# torch goes first, by its exact version, so that a machine that holds a CPU build uses it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
