# Each target sets .venv up first, and again only when what it should hold has changed.
# It needs Python 3.11 or newer, make, and a C++ compiler. `make PYTHON=python3.12 test` picks another Python,
# and LAB holds options of JupyterLab: `make lab LAB="--no-browser --allow-root"` in a container.

PYTHON ?= python3
VENV := .venv/bin/python

# Jupyter and Matplotlib keep their own files here, so that a read-only home does no harm.
export JUPYTER_RUNTIME_DIR := $(CURDIR)/build/jupyter
export IPYTHONDIR := $(CURDIR)/build/ipython
export MPLCONFIGDIR := $(CURDIR)/build/matplotlib

.PHONY: help setup notebooks lab test format

help:
	@echo "make notebooks  run every notebook top to bottom; executed copies and HTML pages go to build/"
	@echo "make lab        open JupyterLab on the first notebook"
	@echo "make test       run all tests, notebooks included"
	@echo "make format     bring code, notebooks and the README's generated parts into form"

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("nanoqwen needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Another one: make PYTHON=python3.12 ...")'
	@echo "set-up: installing nanoqwen and what it needs into .venv (some minutes, once)"
	@test -x $(VENV) || $(PYTHON) -m venv .venv
	@extra=$$($(VENV) -m nanoqwen.doctor --cupy-extra) && $(VENV) -m pip install -qq --disable-pip-version-check \
		-c constraints.txt -e ".[test,lab$${extra:+,$$extra}]"
	@touch .venv/ready

notebooks: setup
	@echo "notebooks: running each top to bottom"
	@$(VENV) -m nanoqwen.notebooks run

lab: setup
	@echo "lab: opening JupyterLab on the first notebook; Ctrl-C here stops it"
	@$(VENV) -m jupyter lab $(LAB) notebooks/00_the_machine.ipynb

test: setup
	@echo "test: running the tests, then every notebook"
	@$(VENV) -m pytest -q -rs --nbmake --nbmake-timeout=3600 tests notebooks

format: setup
	@echo "format: code, notebooks, README"
	@$(VENV) -m ruff check --quiet --fix .
	@$(VENV) -m ruff format --quiet .
	@$(VENV) -m nanoqwen.notebooks format
	@$(VENV) -m nanoqwen.readme
