# Both main targets set up everything they need in a virtual environment; they need Python >= 3.11 and pip.
#
#   make search               tune both kernels here (without a GPU: replay the shipped recordings), print the winners
#   make search KERNEL=moe
#   make test                 the tests that need no GPU
#   make test TESTS=tests/report
#   make fuzz                 100,000 hostile tables, for a night (CI has 2,000)
#   make lint                 ruff and mypy
#
# TORCH and TRITON choose other requirements; more than one may be named: make test TRITON="triton==3.6.0 numpy<2.4"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?=
KERNEL ?= mla-decode moe
TESTS ?= tests

BIN := $(VENV)/bin
# Another choice of versions is another stamp, and so an installation.
CHOICE := $(shell echo '$(TORCH) $(TRITON)' | cksum | cut -d ' ' -f 1)
REQUIREMENTS := $(foreach requirement,$(TORCH) $(TRITON),'$(requirement)')
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: search test fuzz lint clean

search: $(VENV)/installed-$(CHOICE)
	@for kernel in $(KERNEL); do $(BIN)/kerneltune search $$kernel || exit; done

test: $(VENV)/installed-dev-$(CHOICE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup --timeout 600 -m 'not gpu' $(TESTS)

fuzz: $(VENV)/installed-dev-$(CHOICE)
	KERNELTUNE_FUZZ=100000 $(BIN)/python -m pytest tests/test_fuzz_tables.py

lint: $(VENV)/installed-dev-$(CHOICE)
	$(BIN)/ruff check
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

# Some systems' Python comes without the pip that `venv` wants to copy: then the system's pip brings it.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kerneltune needs Python 3.11 or newer: PYTHON=python3.11 make ...")'
	@echo 'setting up $(VENV)'
	@$(PYTHON) -m venv $(VENV) > /dev/null || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python --quiet install pip; }

$(VENV)/installed-$(CHOICE): pyproject.toml | $(BIN)/python
	@echo "installing kerneltune with" $(REQUIREMENTS)
	@$(PIP) install $(REQUIREMENTS) --editable .
	@rm -f $(VENV)/installed-* && touch $@

$(VENV)/installed-dev-$(CHOICE): pyproject.toml | $(BIN)/python
	@echo "installing kerneltune and what its tests need with" $(REQUIREMENTS)
	@$(PIP) install $(REQUIREMENTS) --editable '.[dev]'
	@rm -f $(VENV)/installed-* && touch $@ $(VENV)/installed-$(CHOICE)
