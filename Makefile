# `make help` prints the lines below that carry a `##`.
PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
CACHES := .pytest_cache .mypy_cache .ruff_cache .hypothesis build zeropods.egg-info
WORKERS ?= 2
KEPT := .git .venv .zeropods runs results
SHELL_FILES := .ci/run tools/setup $(wildcard benchmarks/gpu/*.sh cloud/*.sh docker/*.sh kubernetes/*.sh slurm/*.sh slurm/*.sbatch)
RUN ?= runs/demo

.DEFAULT_GOAL := help
.PHONY: help setup demo ask lab gallery test test-fast soak check hooks bench bench-plan-published wikisql bench-gpu gpu-pack image-check clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1@\2/p' Makefile | awk -F@ '{ printf "%-26s%s\n", $$1, $$2 }'

setup: ## make .venv with everything in it (the others do this first; TORCH_WHEELS=URL or DIR: torch from there)
	@tools/setup

demo: setup ## run the main job on the embedded data set and answer the four questions
	@$(PYTHON) tools/demo.py

ask: setup ## ask the trained model in a browser (RUN=runs/demo)
	@$(PYTHON) -m zeropods demo $(RUN)

lab: setup ## open JupyterLab on the notebooks
	@$(PYTHON) -m jupyterlab --config tools/jupyterlab/config.py

gallery: setup ## make pages and copies of the executed notebooks (build/gallery, docs/gallery); executes what has changed
	@$(PYTHON) tools/gallery.py

test: setup ## run every test, WORKERS=2 at a time; the slowest are named
	@$(PYTHON) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 25

test-fast: setup ## run the tests that need neither torch nor real data, WORKERS=2 at a time, in under a minute
	@$(PYTHON) -m pytest tests/fast -m "not real_data" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

soak: setup ## run the tests that take long: every technique on every number of pods and resumed on every other
	@ZEROPODS_SOAK=1 $(PYTHON) -m pytest --timeout 14400 -o faulthandler_timeout=0 tests/full/train/test_same_numbers.py \
		tests/full/train/test_transformers_versions.py tests/full/benchmarks/test_gpu_pack.py tests/full/project/test_kernel_gateway.py \
		tests/full/project/test_mlflow.py tests/full/project/test_notebooks_without_ssh.py tests/full/launch/test_agents.py
	@ZEROPODS_TRIAL_SECONDS=3600 $(PYTHON) -m pytest -o faulthandler_timeout=0 tests/full/pods/test_shared_folder.py
	@$(PYTHON) -m benchmarks.reliability --trials 56
	@$(PYTHON) -m benchmarks.reliability --trials 40 --busy 6
	@$(PYTHON) -m benchmarks.reliability --trials 28 --launcher agents

check: setup ## lint, formatting, types, notebooks without outputs, shell files
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@$(PYTHON) tools/house.py
	@$(PYTHON) -m nbstripout --verify --keep-id notebooks/*.ipynb
	@if command -v shellcheck >/dev/null; then shellcheck $(SHELL_FILES); else echo "no shellcheck here: shell files not checked"; fi

hooks: setup ## run the quick checks at each commit, and the types at each push
	@$(PYTHON) -m pre_commit install

bench: setup ## measure the figures of docs/benchmarks.md
	@$(PYTHON) -m benchmarks

bench-plan-published: setup ## hold the plan against published runs, and put the tables into docs/plan.md (PUBLISHED=DIR)
	@$(PYTHON) -m benchmarks.published $(PUBLISHED)

wikisql: setup ## train the base model t5-tiny on all of WikiSQL, and score it on tables that it never saw (resumes)
	@$(PYTHON) -m zeropods data get wikisql --out data/wikisql
	@$(PYTHON) tools/base_data.py --wikisql data/wikisql --out data/base
	@$(PYTHON) -m zeropods sweep matrices/wikisql.yaml --out runs/wikisql
	@$(PYTHON) -m zeropods sweep matrices/wikisql_second.yaml --out runs/wikisql-second
	@$(PYTHON) -m zeropods summary runs/wikisql runs/wikisql-second --out runs/wikisql-second/summary

bench-gpu: ## measure on a machine with a GPU, without a network (OUT=DIR DATA=DIR FLAGS=..., see docs/gpu.md)
	@test -n "$(OUT)" && test -n "$(DATA)" || { echo "make bench-gpu: say OUT=DIR DATA=DIR; see docs/gpu.md" >&2; exit 2; }
	@$(or $(wildcard $(PYTHON)),python3) -m benchmarks.gpu --out "$(OUT)" --data "$(DATA)" $(FLAGS)

gpu-pack: setup ## pack what a machine with a GPU but no network lacks (OUT=DIR DATA=data [PYTHON=3.12], see docs/gpu.md)
	@test -n "$(OUT)" || { echo "make gpu-pack: say OUT=DIR; see docs/gpu.md" >&2; exit 2; }
	@.venv/bin/python -m benchmarks.gpu.pack --out "$(OUT)" --data "$(or $(DATA),data)" \
		$(if $(filter command line,$(origin PYTHON)),--python "$(PYTHON)")

image-check: setup ## build docker/Dockerfile on a stand-in base and train on two pods in it, as root (see docs/image_check.md)
	@$(PYTHON) tools/image_check.py

clean: ## remove caches and build products; never runs, results or .venv
	@rm -rf $(CACHES)
	@find . $(foreach name,$(KEPT),-path ./$(name) -prune -o) -type d \
		\( -name __pycache__ -o -name .ipynb_checkpoints \) -exec rm -rf {} +
