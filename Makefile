# Every target does its own set-up: a virtual environment in .venv with pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_WAIT_POLICY ?= PASSIVE
# Tests start many processes, which begin sooner from compiled modules.
unexport PYTHONDONTWRITEBYTECODE

# Three on two cores, as many tests wait; a file's tests stay on one, so that its engines start once.
WORKERS ?= 3
PYTEST := $(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

.PHONY: demo test quick more again clients browser soak cards docs lint types unit install clean

# REPLICAS=2: on a fleet of as many engines, updated as one.
demo: $(STAMP)
	$(BIN)/python trainer_examples/grpo_fsdp2.py --replicas $(or $(REPLICAS),1)

# What every commit must pass, in 15 minutes on two idle cores.
# mypy runs beside the tests, which often wait.
test: lint
	$(MAKE) --no-print-directory --jobs=2 types unit

# What shows most, in 3 minutes, while you work.
QUICK := $(addprefix tests/,nouns engine_core loader models/test_model_registry.py \
	models/test_weight_load.py weight_sync/test_transaction.py api/test_updates.py \
	test_layers_of_imports.py test_errors.py)

quick: lint
	$(PYTEST) $(QUICK)

# What is slow or broad: sweeps and long courses, in 18 minutes.
more: $(STAMP)
	-$(BIN)/python tests/clients/install.py
	$(PYTEST) -m "more and not soak"

# What failed last, by itself; an error where nothing did, as where the tests never began.
again: $(STAMP)
	$(BIN)/pytest -m "more or soak or not more" --last-failed --last-failed-no-failures none

# Clients of other frameworks whose pins exclude ours, each in .clients/NAME, over the same torch.
# One that cannot be installed is named, and its tests in `make more` are skipped.
clients: $(STAMP)
	$(BIN)/python tests/clients/install.py

# Debian's Chromium, in which `make more` looks at the server's page; needs root.
browser:
	command -v chromium >/dev/null || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

# What runs for its length, three hours in all: the largest simulated fleet takes one of them.
# SEED=n for another course.
soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py --seconds 600 --seed $(or $(SEED),0)
	$(BIN)/python benchmarks/soak_fleet.py --seconds 600 --seed $(or $(SEED),0)
	$(BIN)/python benchmarks/fuzz.py --seconds 600 --seed $(or $(SEED),0)
	$(BIN)/python benchmarks/simulated_fleets.py --members 4,16,64 --updates 10000 \
		--faults 100000 --fault-rate 2 --limit 120 --seed $(or $(SEED),0)
	$(BIN)/python benchmarks/simulated_fleets.py --members 4,16,64,256,1024 --updates 12000 \
		--faults 100000 --fault-every 960 --of-all 0.05 --seed $(or $(SEED),0) \
		--curve benchmarks/out/simulated_fleets.png
	ROLLOUT_TEST_RANDOM=1 $(PYTEST)
	ROLLOUT_TEST_FLEETS=2000 $(BIN)/pytest tests/fleet/test_faults_by_a_model.py
	$(PYTEST) -m soak
	ROLLOUT_TEST_EXITS=30 $(BIN)/pytest -m "more or not more" tests/api/test_clean_exits.py

# Every figure that several GPUs of one machine give, in nine minutes: send cards-results with an issue.
cards: $(STAMP)
	$(BIN)/python benchmarks/cards.py --out cards-results

# The documentation site, in site/; a link that leads nowhere fails.
docs: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(PYTEST)

install: $(STAMP)

# torch goes first, by its exact version, so that a machine that holds a CPU build uses it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .clients build site *.egg-info
