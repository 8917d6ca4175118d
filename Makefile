# `make demo` trains a small BERT, `make test` runs the tests. Both need only make and Python 3.11
# or later. To choose the interpreter: make PYTHON=/path/to/python demo

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
# Interpreters to try, in this order.
CANDIDATES := $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3.14 python3)
DEMO_EXTRAS := plot
DEV_EXTRAS := plot,parquet,korean,tensorboard,onnx,openvino,search,serve,telemetry,docs,dev

# A virtual environment contains its absolute path, so it is created again after it was moved.
ifneq "$(shell cat $(VENV)/place 2>/dev/null)" "$(CURDIR)"
$(shell rm -f $(VENV)/ready-demo $(VENV)/ready-dev)
endif

# Sets $python to the interpreter to use; fails with a message if there is none.
define find_python
for candidate in $(CANDIDATES); do \
  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then python=$$candidate; break; fi; \
done; \
if [ -z "$$python" ]; then \
  echo "error: no Python 3.11 or later found (tried:" $(CANDIDATES)");" >&2; \
  echo "install it, or specify its path: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; \
  exit 1; \
fi; \
if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
  version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
  echo "error: $$python cannot create a virtual environment with pip (the module ensurepip is missing);" >&2; \
  echo "on Debian and Ubuntu: apt-get install python$$version-venv, then run make again" >&2; \
  exit 1; \
fi
endef

# Installs the extras $(1) in the versions that constraints.txt pins.
define install
@test -x $(BIN)/python && test "$$(cat $(VENV)/place 2>/dev/null)" = "$(CURDIR)" || { \
  $(find_python); \
  echo "creating $(VENV) with $$python"; \
  rm -rf $(VENV) && "$$python" -m venv $(VENV) && printf '%s\n' "$(CURDIR)" > $(VENV)/place; \
}
@echo "installing bertsmith[$(1)] into $(VENV)"
@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
  --editable '.[$(1)]'
endef

$(VENV)/ready-demo: pyproject.toml constraints.txt
	$(call install,$(DEMO_EXTRAS))
	@touch $@

$(VENV)/ready-dev: pyproject.toml constraints.txt
	$(call install,$(DEV_EXTRAS))
	@touch $@ $(VENV)/ready-demo

.PHONY: help demo test lint types docs site clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile

demo: $(VENV)/ready-demo ## train a small BERT on the documentation of installed packages
	@$(BIN)/bertsmith demo $(ARGS)

test: $(VENV)/ready-dev ## run the tests; ARGS="-k store" selects some
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

lint: $(VENV)/ready-dev ## check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/ready-dev ## check types with mypy in strict mode
	@$(BIN)/mypy

docs: $(VENV)/ready-dev ## regenerate the reference pages in docs/ and build the site
	@$(BIN)/python docs/generate.py
	@$(BIN)/mkdocs build --strict --quiet

site: $(VENV)/ready-dev ## build the documentation site in site/, without regenerating pages
	@$(BIN)/mkdocs build --strict --quiet

clean: ## remove the virtual environment, caches, build files and the demo's output
	rm -rf $(VENV) build dist site bertsmith.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis bertsmith-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
