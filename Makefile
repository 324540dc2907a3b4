# make demo   set up, answer without vLLM, serve the bundled model through vLLM with the plugin, ask it, show the proof, stop
# make test   set up and run every check and test
# make setup  set up only: .venv/bin/moe-optimizer works afterwards
# make wheel  build dist/*.whl with the CPU and CUDA kernels, one per Python (PYTHONS="3.11 3.12")
.PHONY: help setup build wheel demo test lint clean
.DEFAULT_GOAL := help

DEVICE ?= auto
PYTHON ?= python3
PYTHONS ?=

help:
	@sed -n 's/^# //p' Makefile

setup:
	@bash scripts/setup.sh --device $(DEVICE)

build:
	@bash build.sh

wheel:
	@$(PYTHON) scripts/build_wheels.py $(if $(PYTHONS),--pythons $(PYTHONS))

demo: setup
	@.venv/bin/python scripts/demo.py

test: setup
	@bash scripts/check.sh

lint: setup
	@bash scripts/check.sh lint

clean:
	rm -rf .venv build dist runs .pytest_cache .ruff_cache .hypothesis
	rm -f moe_optimizer/ops/_kernels*.so moe_optimizer/ops/build_info.json
