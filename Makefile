# Two commands: `make demo` runs the main job, `make test` the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint format line

demo: $(INSTALLED)
	$(BIN)/edge-node demo

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The line's install stands alone: no torch, and it judges an image.
line: $(INSTALLED)
	rm -rf build/line && mkdir -p build/line
	$(PYTHON) -m venv build/line/venv
	build/line/venv/bin/python -m pip install --quiet --constraint constraints.txt .
	$(BIN)/python -c "from pathlib import Path; from tests.tiny_bundle import tiny_bundle; tiny_bundle(Path('build/line/bundle'))"
	! build/line/venv/bin/python -c "import torch" 2>/dev/null
	build/line/venv/bin/edge-node infer build/line/bundle build/line/bundle/golden.png
	build/line/venv/bin/python -c "import trainer.federation.coordinator"
	du -sh build/line/venv

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	touch $@
