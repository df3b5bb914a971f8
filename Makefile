# Two commands for a newcomer: `make lab` (the main job) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := .venv-extras
OLDEST := .venv-oldest
NEWEST := .venv-newest

.PHONY: setup lab test docs test-slow test-browser test-extras test-real test-cluster test-cuda-dry test-portable test-oldest test-newest bench check clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "sinklab needs Python 3.11 or newer; run: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

lab: $(STAMP)
	$(BIN)/sinklab lab

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check

test: export PYTHONDONTWRITEBYTECODE =  # else every process of a test compiles the package again
test: check
	$(BIN)/pytest -n 2

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

test-browser: $(STAMP)
	@! command -v npm >/dev/null || npm install --prefix $(VENV) --no-save --silent axe-core@4
	$(BIN)/pytest -m browser

test-extras: $(EXTRAS)/.installed
	$(EXTRAS)/bin/pytest tests/attention/test_fla.py tests/train/test_track.py tests/data/test_data_corpora.py tests/measuring/test_measure_placed.py tests/measuring/test_measure_gguf.py \
		tests/measuring/test_measure_frames.py tests/measuring/test_monitor.py tests/models/test_models_as_held.py tests/tuning tests/evaluating tests/assessing/test_assess_kv_formats.py \
		tests/assessing/test_parity_llama_cpp.py tests/assessing/test_parity_vllm.py

test-real: $(EXTRAS)/.installed
	$(EXTRAS)/bin/pytest -m real

test-cluster: $(EXTRAS)/.installed
	$(EXTRAS)/bin/pytest -m cluster -rs tests/experiments/test_cluster_slurm.py tests/experiments/test_cluster_ray.py

test-cuda-dry: $(STAMP)
	$(BIN)/pytest -m cuda_dry -rs tests/cuda_dry

$(EXTRAS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(EXTRAS)
	$(EXTRAS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,data,track,quantised,gguf,adapters,lightning,cluster,sft,eval,fla]'
	@touch $@

test-portable: $(STAMP)
	tests/portable.sh $(BIN)/python

test-oldest: $(OLDEST)/.installed
	tests/portable.sh $(OLDEST)/bin/python

$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.11.0 transformers==5.21.0 -e '.[dev]'
	@touch $@

test-newest: $(STAMP)
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep ^torch== constraints.txt)" -e '.[dev]'
	$(NEWEST)/bin/pytest -n 2

bench: $(STAMP)
	$(BIN)/python -m benchmarks.import_time
	$(BIN)/python -m benchmarks.start
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.measure
	$(BIN)/python -m benchmarks.train_cpu
	$(BIN)/python -m benchmarks.data
	$(BIN)/python -m benchmarks.monitor

clean:
	rm -rf $(VENV) $(EXTRAS) $(OLDEST) $(NEWEST) .pytest_cache .ruff_cache .hypothesis
