# Two commands do everything on a bare machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Pinned for reproducible installs; `octopipe doctor` says which versions were tried.
TORCH := torch==2.13.0
# `make test TRANSFORMERS="transformers==5.17.*"` tries the oldest that is supported.
TRANSFORMERS := transformers
# Hundreds of processes import the package in a test run: compiled modules must be kept, also where an image forbids it.
export PYTHONDONTWRITEBYTECODE =

.PHONY: guides demo test test-all test-torch lint types unit coverage fuzz soak mutate package bench docs pictures reproduce \
	reproduce-check clean
demo: $(VENV)/.demo
	@$(BIN)/python scripts/demo.py

# Types are checked beside the tests, which wait for each other's processes half of the time.
test: $(VENV)/.test
	@$(MAKE) --no-print-directory -j 2 lint types unit

# Everything, the slow tier included.
test-all: $(VENV)/.test
	@$(MAKE) --no-print-directory -j 2 lint types
	OCTOPIPE_TESTS=all $(BIN)/pytest -n 3 --dist worksteal -m "slow or not slow"

# What touches torch's own interfaces: run with TORCH="torch==2.9.*" or TORCH=torch for the oldest and the newest.
test-torch: $(VENV)/.test
	$(BIN)/pytest -n 3 --dist worksteal -m "slow or not slow" tests/adapters/test_torch_private.py tests/adapters/test_torch_engine.py \
		tests/adapters/test_torchtitan.py tests/runtime/test_runtime_private.py tests/runtime/test_executor.py tests/runtime/test_stage.py tests/runtime/test_wgrad.py tests/runtime/test_stage_values.py tests/runtime/test_odd_layers.py tests/runtime/test_checkpoint.py tests/runtime/test_meshes.py tests/runtime/test_mesh_experts.py

lint: $(VENV)/.test
	$(BIN)/ruff check octopipe tests benchmarks scripts examples
	$(BIN)/ruff format --check octopipe tests benchmarks scripts examples

types: $(VENV)/.test
	$(BIN)/mypy

# Every worker, and the server that ranks are forked from, would compile all modules of a fresh clone at the same time.
unit: $(VENV)/.test
	@$(BIN)/python -m compileall -q octopipe
	$(BIN)/pytest -n 3 --dist worksteal

# Which lines the quick tests run; the report is in out/coverage.
coverage: $(VENV)/.test
	$(BIN)/pytest -n 3 --dist worksteal --cov --cov-report=term --cov-report=html:out/coverage

# Damaged files for every reader, drawn and (where atheris is installed) guided by coverage; `CASES=1000000 make fuzz`
# for longer.
fuzz: $(VENV)/.test
	$(BIN)/python scripts/fuzz.py --cases $(or $(CASES),100000)
	$(BIN)/python scripts/fuzz.py --atheris --cases $(or $(CASES),100000)

# Two ranks for 2,000 steps, with plans that change and ranks that die.
soak: $(VENV)/.test
	$(BIN)/python scripts/soak.py

# README, guides and pages in a fresh clone and environment, block by block, as a newcomer runs them.
guides: $(VENV)/.test
	$(BIN)/python scripts/run_guides.py

# One operator flipped at a time; the nearest tests must notice.
mutate: $(VENV)/.test
	$(BIN)/python scripts/mutate.py

# Wheel and sdist in fresh environments.
package: $(VENV)/.test
	$(BIN)/python scripts/package.py

bench: $(VENV)/.test
	$(BIN)/python benchmarks/bench_simulate.py
	$(BIN)/python benchmarks/bench_tune.py

# The documentation site in out/site, built without network access once its packages are installed.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs out/site
	@echo "open out/site/index.html"

pictures: $(VENV)/.test
	$(BIN)/python scripts/make_pictures.py

# The paper's tables and figures, ours beside theirs; what is finished in out/reproduction is not run again.
reproduce: $(VENV)/.test
	$(BIN)/python -m octopipe reproduce all -o out/reproduction --page docs/reproduction.md

# Is the page what this code writes of the plans that are kept beside it? A few quick searches must find their plans again.
reproduce-check: $(VENV)/.test
	$(BIN)/python -m octopipe reproduce --check docs/reproduction.md

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/pip
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install -q --disable-pip-version-check -e ".[torch,exact]"
	@touch $@

# Browser tests drive Debian's Chromium; it is installed where that is allowed, and skipped elsewhere.
$(VENV)/.test: pyproject.toml | $(VENV)/bin/pip
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install -q --disable-pip-version-check -e ".[torch,exact,hf,train,dev]" "$(TRANSFORMERS)"
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get -qq update && apt-get -qq install -y chromium >/dev/null; } || echo "no chromium: browser tests are skipped"
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.test
	$(BIN)/pip install -q --disable-pip-version-check -e ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache
