# Every target sets up its own virtual environment; only python3 (>= 3.10, with venv) is needed beforehand.
PYTHON ?= python3
CUDA ?= cuda13
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-$(CUDA)

# pytest-xdist runs one worker per core: a thread pool in each would only make them wait for each other.
ONE_THREAD := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1

.PHONY: demo test deep mutants experiments lint clean

demo: $(STAMP)
	$(BIN)/python -m cupyflash demo

test: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto -q

deep: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto -q -m deep

mutants: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m tests.mutants

experiments: $(STAMP)
	$(BIN)/python -m experiments all

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(STAMP): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(CUDA),test]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
