# Needs Python 3.11 (or PYTHON=python3.x, 3.10 to 3.13) and a C compiler. Everything else goes into .venv.
#
#   make run                      compile DeepSeek-V3.2 (tiny) for both phases, run it, check it, write out/
#   make run ARGS="--size tiny --steps 2"
#   make test ARGS="tests/cli -k help"

PYTHON ?= python3.11
# CPU builds of torch. PyPI's own are CUDA builds on x86-64, several gigabytes that nothing here uses.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet

.PHONY: help run test test-fast lint docs calibrate compat setup clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(READY) ## compile and run the tiny DeepSeek-V3.2: fusions, parity, timings; report in out/
	@$(BIN)/cannopy run deepseek-v3.2 --size tiny --out out $(ARGS)

# One file of tests per worker at a time: files share captured models. A worker's torch keeps to one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test: $(READY) ## all tests
	@$(PYTEST) $(ARGS)

test-fast: $(READY) ## the tests without those marked slow
	@$(PYTEST) -m "not slow" $(ARGS)

lint: $(READY) ## ruff and a strict mypy
	@$(BIN)/ruff check .
	@$(BIN)/python tools/typecheck.py

docs: $(READY) ## write the pages that are generated from rules, contracts and the cost model
	@$(BIN)/python docs/generate.py
	@OMP_NUM_THREADS=1 $(BIN)/python tools/fusion_table.py

calibrate: $(READY) ## fit the cost model's constants and write docs/accuracy.md (minutes)
	@$(BIN)/python benchmarks/calibrate.py
	@$(BIN)/python benchmarks/accuracy.py

compat: $(READY) ## the main job and the core tests on torch 2.8 and 2.14, in environments of their own (gigabytes)
	@TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python tools/compat.py $(ARGS)

setup: $(READY) ## only make .venv

clean: ## remove .venv and everything generated
	rm -rf .venv .compat build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml setup.py requirements/dev.txt requirements/torch.txt $(wildcard */__init__.py)
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: $(PYTHON) not found. Install Python 3.11, or name another: make PYTHON=python3.12 (3.10 to 3.13)." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "make: $(PYTHON) is not Python 3.10 to 3.13, for which torch_npu has wheels: make PYTHON=python3.11" >&2; exit 1; }
	@command -v "$${CC:-cc}" >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || { \
	  echo "make: no C compiler (cc, gcc or clang), which the CANN stand-in is built with. Install gcc." >&2; exit 1; }
	@echo "Setting up .venv: about 600 MB to download, a few minutes the first time"
	@echo "  1/5 Python environment in .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "  2/5 downloading torch (CPU build) and torch_npu: $(TORCH_INDEX) and PyPI"
	@$(PIP) --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -r requirements/torch.txt
	@echo "  3/5 downloading transformers, sympy and the tools for tests: requirements/dev.txt, from PyPI"
	@$(PIP) -c requirements/torch.txt -r requirements/dev.txt
	@echo "  4/5 installing cannopy from this folder"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@echo "  5/5 building the stand-in for CANN where there is none"
	@$(BIN)/cannopy host status >/dev/null || $(BIN)/cannopy host install
	@touch $@
