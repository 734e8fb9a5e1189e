.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Setup compiles nothing: most modules are never imported. With this variable every process would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup check format docs docs-serve notebooks try-notebooks test test-slow durations mutants judge judge-nano demo parity summaries reproduce gpu gpu-list gpu-dry gpu-prepare gpu-tables explorer clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[train,dense,report,cpp,readers,language,speech,generation,onnx,openvino,executorch,coreml,int8,stream,docs,hf,dev]"
	touch $@

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/durations.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site, in site/: broken links and anchors, and public names without a docstring, end it. `make explorer` before it adds the explorer.
docs: notebooks
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The notebooks with their results, which the site shows: about 4 minutes of one core together.
NOTEBOOKS := $(notdir $(wildcard notebooks/*.ipynb))
notebooks: $(NOTEBOOKS:%=build/notebooks/%)

# Whether every cell of them works, with a few training steps; keeps nothing.
try-notebooks: $(NOTEBOOKS:%=try/%)

try/%.ipynb: notebooks/%.ipynb | $(STAMP)
	$(BIN)/python docs/hooks/notebook_pages.py $< --try

build/notebooks/%.ipynb: notebooks/%.ipynb | $(STAMP)
	$(BIN)/python docs/hooks/notebook_pages.py $<

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# A file's tests share what they train and export, so they run in one process.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST)

# Fuzz tests fork, which a process with pools of threads does not survive.
test-slow: $(STAMP)
	$(PYTEST) -m "not gpu" --ignore tests/fuzz
	OMP_NUM_THREADS=1 $(PYTEST) -m "not gpu" tests/fuzz

# What each file of the quick tests takes, in tests/durations.csv, from which `make check` knows whether a folder is within its budget.
durations: $(STAMP)
	PYTHONPATH=tests $(PYTEST) -p durations $(TESTS)

# Whether the tests notice mistakes: make mutants ONLY="'ops_*' 'loss_*'"
mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py $(if $(ONLY),--only $(ONLY))

judge: $(STAMP)
	$(BIN)/python tests/judge/run.py $(NAMES)

judge-nano: $(STAMP)
	$(BIN)/python tests/judge/run.py "*_nano"

demo: $(STAMP)
	$(BIN)/linvit demo

parity: $(STAMP)
	$(BIN)/python -m pytest -m "slow or not slow" -s -q tests/models/test_parity.py

# What pages take from ledgers, tables and headers of recipes. `python -m evidence list` shows the studies and benchmarks behind them.
summaries reproduce: $(STAMP)
	$(BIN)/python -m evidence pages $@

# Jobs for a GPU, docs/contribute/gpu.md; with the Python of the machine where there is no .venv, since it may have no network.
GPU = $(or $(wildcard $(BIN)/python),$(PYTHON)) -m evidence.gpu
JOBS :=

gpu:
	$(GPU) $(JOBS) $(if $(OUT),--out "$(OUT)")

gpu-list gpu-dry gpu-prepare gpu-tables:
	$(GPU) --$(@:gpu-%=%) $(JOBS)

# The page of `linvit explore` in build/explorer; needs npm, which downloads the runtime of the networks. Two minutes.
explorer: $(STAMP)
	mkdir -p build/npm
	cp linvit/explorer/npm/package.json linvit/explorer/npm/package-lock.json build/npm
	npm ci --prefix build/npm --ignore-scripts --no-audit --no-fund
	$(BIN)/python -m evidence.explorer build/npm/node_modules build/explorer

clean:
	rm -rf $(VENV) runs build dist site
