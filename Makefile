PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup check format test test-slow judge judge-nano demo study language scenes parity precision clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,dense,report,readers,language,dev]"
	touch $@

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(STAMP)
	$(BIN)/python -m pytest -n auto

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not gpu"

judge: $(STAMP)
	$(BIN)/python tests/judge/run.py $(NAMES)

judge-nano: $(STAMP)
	$(BIN)/python tests/judge/run.py "*_nano"

demo: $(STAMP)
	$(BIN)/linvit demo

study: $(STAMP)
	$(BIN)/linvit study --write docs/results.md

language: $(STAMP)
	$(BIN)/linvit compare $(foreach m,softmax linear mala rala,recipes/language/stdlib_bytes_$(m).yaml) \
		--folder runs/language/bytes --seeds 3 --workers 2
	$(BIN)/linvit compare $(foreach m,softmax linear mala rala,recipes/language/memory/recall_$(m).yaml) \
		--folder runs/language/recall --seeds 3 --workers 2 --over data.pairs=4,8,16,32
	$(BIN)/linvit compare $(foreach m,softmax linear mala rala,recipes/language/memory/copy_$(m).yaml) \
		--folder runs/language/copy --seeds 3 --workers 2 --over data.symbols=8,16,32,64
	$(BIN)/python -m linvit.analysis.decoding runs/language/decoding.svg

scenes: $(STAMP)
	test -d data/scenes || $(BIN)/linvit data make-scenes data/scenes
	for name in mask_rcnn retinanet cascade_mask_rcnn semantic_fpn upernet; do \
		$(BIN)/linvit train recipes/dense/scenes/$$name.yaml --resume && \
		$(BIN)/linvit eval runs/scenes_$$name --report || exit 1; \
	done

parity: $(STAMP)
	$(BIN)/python -m pytest -m "slow or not slow" -s -q tests/models/test_parity.py

precision: $(STAMP)
	$(BIN)/python -m linvit.analysis.precision

clean:
	rm -rf $(VENV) runs build dist
