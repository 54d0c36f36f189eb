# `make study` and `make test` set everything up on a fresh machine with Python 3.11 or newer, pip and make.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: study study-report docs pictures test test-all lint accuracy benchmark crash attack hf-suite sanitize hub-kernel wheel clean test-newest test-titan

study: $(READY)
	$(RUN) -m affine_attention study $(STUDY)

# The page docs/study-report.html, the tables docs/study-tables.md and those in docs/study.md, from the stored runs.
study-report: $(READY)
	$(RUN) -m affine_attention report studies/smollm2/*0m/*/ -o docs/study-report.html --markdown docs/study-tables.md
	$(RUN) -m studies.smollm2.details

# The documentation site, into site/. The variable silences an announcement of the theme, which is no warning of the build.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# The pictures of README and docs, from the stored runs, and the chart and tables of the newest benchmark results.
pictures: $(READY)
	$(RUN) -m studies.smollm2.pictures
	$(RUN) -m benchmarks.readme

# Two processes with a thread each: small tests gain little from torch's own threads. WORKERS=0 runs them in one process.
WORKERS ?= 2
test: lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal

test-all: lint
	$(RUN) -m pytest -m "slow or not slow"

# The tests of affine_attention.hf with the newest transformers, accelerate, peft and trl, in an environment of their own.
NEWEST := .venv-newest
NEWEST_TESTS := $(addprefix tests/hf/test_,accelerate.py adapters.py attach.py callback.py classes.py composite.py \
	continuous_batching.py dropout.py eviction.py families.py generation.py installation.py interface.py keywords.py loading.py \
	masks.py paged.py sequence.py serving.py students.py token_mixing.py training.py) tests/ops/test_finish.py
test-newest: $(NEWEST)/.ready
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(NEWEST_TESTS)

# The override of torchtitan, which needs datasets < 4.8 and so has an environment of its own.
TITAN := .venv-titan
test-titan: $(TITAN)/.ready
	OMP_NUM_THREADS=1 $(TITAN)/bin/python -m pytest -m "slow or not slow" tests/test_torchtitan.py

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

accuracy: $(READY)
	$(RUN) -m benchmarks.accuracy

benchmark: $(READY)
	$(RUN) -m benchmarks.attention

# Kills a run 100 times at random and at every file operation of a save, and goes on each time.
crash: $(READY)
	$(RUN) -m tests.lab.training.crash --random 100 --every-file-operation

# Kills, damages, forges and feeds hostile files, seeded, in 20 minutes at most; the table goes into docs/reliability.md.
attack: $(READY)
	$(RUN) -m tests.attack $(ATTACK)

# Transformers' own tests on models with a mechanism; TRANSFORMERS_TESTS is a checkout of transformers.
hf-suite: $(READY)
	$(RUN) -m tests.hf.suite $(TRANSFORMERS_TESTS) $(SUITE)

# Needs a CUDA GPU and NVIDIA's compute-sanitizer.
sanitize: $(READY)
	$(RUN) -m tests.ops.fused.sanitize --tools memcheck racecheck initcheck

# The operator as a kernel repository for the package `kernels` (flash-attention's functions), into build/hub-kernel.
hub-kernel: $(READY)
	$(RUN) -m affine_attention.hub_kernel build/hub-kernel

wheel: $(READY)
	$(RUN) -m build --wheel --no-isolation

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "setuptools>=77"
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $(READY)

$(NEWEST)/.ready: pyproject.toml constraints-newest.txt
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-newest.txt "setuptools>=77"
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-newest.txt --no-build-isolation --editable ".[test]"
	touch $(NEWEST)/.ready

$(TITAN)/.ready: pyproject.toml constraints-titan.txt
	$(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-titan.txt "setuptools>=77"
	$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-titan.txt \
		numpy pytest "torchtitan>=0.3" triton
	$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-titan.txt --no-build-isolation --editable .
	touch $(TITAN)/.ready

clean:
	rm -rf $(VENV) $(NEWEST) $(TITAN) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
