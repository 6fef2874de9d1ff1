# Every target makes the virtual environment it needs; stamps keep the second run quick.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.base
TEST   := $(VENV)/.test
WORKERS ?= 3

.PHONY: demo serve test conformance browser screenshot check eval eval-tools soak chaos bench cluster-bench clean

$(BASE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(TEST): $(BASE)
	$(BIN)/pip install -q -c constraints.txt -e '.[test,cluster]'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install -q -c constraints.txt triton==3.6.0  # torch for GPUs has its own
	touch $@

demo: $(BASE)   ## answer a question with the embedded model
	$(BIN)/oscine chat "What is 27 + 58?"

serve: $(BASE)  ## serve the embedded model on port 8000
	$(BIN)/oscine serve

test: $(TEST)   ## the tests that need no GPU; some wait for processes, so there are more workers than cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

conformance: $(TEST)  ## clients' own types, the server's own description, odd token streams; part of `make test`
	$(BIN)/python -m pytest tests/conformance

browser:        ## Debian's chromium, for the tests of the playground; as root
	command -v chromium >/dev/null || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends chromium fonts-inter fonts-jetbrains-mono >/dev/null)

screenshot: $(TEST)  ## take the README's picture of the playground again
	OSCINE_SCREENSHOT=docs/img/playground.png $(BIN)/python -m pytest tests/web/test_appearance.py -k picture

check: $(TEST)  ## format, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

eval: $(BASE)   ## held-out accuracy of the embedded model, one line a skill
	$(BIN)/python -m training.evaluate

eval-tools: $(TEST)  ## the embedded model with tools and schemas, through the API: seven minutes
	$(BIN)/python -m benchmarks.serving.eval_tools

soak: $(TEST)   ## 1,000 mixed requests, one in ten cancelled
	$(BIN)/python -m benchmarks.serving.soak

chaos: $(TEST)  ## engines killed, hostile clients, stored responses after the death of everything
	$(BIN)/python -m benchmarks.serving.chaos

bench: $(TEST)  ## what the server itself costs, with a fake executor
	$(BIN)/python -m benchmarks.serving.overhead

cluster-bench: $(TEST)  ## what a cluster costs around its models: tokens through the whole path, CPU time of each hop
	$(BIN)/python -m benchmarks.cluster.throughput

clean:
	rm -rf $(VENV) *.egg-info
