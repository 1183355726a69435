# Two commands do all the set-up on a fresh machine: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test check eval gpu bench clean

demo: $(INSTALLED) data/stdlib/manifest.json
	$(BIN)/depthroute compare configs/demo_compare.toml

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist loadfile
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto --dist loadfile -m kernel tests/ops tests/models \
		tests/distributed

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# tests of evaluation, with lm-evaluation-harness: too large for every set-up
eval: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt -e '.[eval]'
	$(BIN)/python -m pytest tests/evaluate

# the lane that needs a CUDA device, with the python that has it: make gpu PYTHON=python3
gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/gpu

# one JSON object a line; needs a CUDA device too
bench:
	PYTHONPATH=src $(PYTHON) benchmarks/reads.py
	PYTHONPATH=src $(PYTHON) benchmarks/block_kernels.py
	PYTHONPATH=src $(PYTHON) benchmarks/step.py
	PYTHONPATH=src $(PYTHON) benchmarks/decode.py

clean:
	rm -rf .venv runs data

$(INSTALLED): pyproject.toml ci/constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt -e '.[dev]'
	touch $@

data/stdlib/manifest.json: | $(INSTALLED)
	$(BIN)/depthroute prepare data/stdlib source=stdlib tokenizer=bpe:2048 val_fraction=0.05
