# Everything runs in .venv; the reference wheel, which only tests use, lives in an environment of its own.
VENV := .venv
PY := $(VENV)/bin/python
REFERENCE := build/reference
COMPILED := build/compiled
TYPES := build/types/g2sim

.PHONY: demo test check docs differential swarm fuzz reference install compiled test-compiled clean

demo: $(VENV)/installed
	$(VENV)/bin/g2sim run scenarios/library/agentx-g2-shared.yaml

test: $(VENV)/test-installed check
	$(PY) -m pytest -n auto

check: $(VENV)/test-installed $(TYPES)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy -p g2sim

# The documentation as a site, build/site; broken links and anchors, and pages that the menu lacks, fail.
docs: $(VENV)/docs-installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# make differential COUNT=5000 FIRST=1; without FIRST a fresh seed is drawn and printed. First round robin, then the KV router.
COUNT ?= 300
SEEDS = --reference $(REFERENCE)/bin/python --count $(COUNT) $(if $(FIRST),--first $(FIRST))
differential: $(VENV)/test-installed $(REFERENCE)/installed
	$(PY) tests/differential/run.py $(SEEDS)
	$(PY) tests/differential/run_router.py $(SEEDS)

# Random runs with every audit on; COUNT and FIRST as above.
swarm: $(VENV)/test-installed
	$(PY) tests/swarm/swarm.py --count $(COUNT) $(if $(FIRST),--first $(FIRST))

# Damaged input for every reader; COUNT and FIRST as above.
fuzz: $(VENV)/test-installed
	$(PY) tests/fuzz/fuzz.py --count $(COUNT) $(if $(FIRST),--first $(FIRST))

reference: $(REFERENCE)/installed

install: $(VENV)/installed

# The optional compiled build in an environment of its own: build/compiled/bin/g2sim. Needs a C compiler.
compiled: $(COMPILED)/installed

# The same runs in pure Python and compiled: the same bytes.
test-compiled: $(VENV)/test-installed $(COMPILED)/installed
	G2SIM_COMPILED_PYTHON="$(CURDIR)/$(COMPILED)/bin/python" $(PY) -m pytest tests/compiled

$(VENV)/bin/python:
	python3 -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/test-installed: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[test,docs]'
	touch $@ $(VENV)/installed

$(VENV)/docs-installed: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

$(REFERENCE)/installed:
	python3 -m venv $(REFERENCE)
	$(REFERENCE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	$(REFERENCE)/bin/python -m pip install --quiet --disable-pip-version-check \
		pydantic uvloop pyyaml typing_extensions pyzmq msgspec
	touch $@

$(COMPILED)/installed: setup.py pyproject.toml $(shell find bus actors scenarios -type f -not -path '*/__pycache__/*')
	python3 -m venv $(COMPILED)
	rm -rf build/lib.*
	G2SIM_COMPILED=1 $(COMPILED)/bin/python -m pip install --quiet --disable-pip-version-check .
	touch $@

# The folders under the names they are imported by, for type checkers and editors.
$(TYPES):
	mkdir -p $@
	ln -sfn ../../../bus $@/bus
	ln -sfn ../../../actors $@/actors
	ln -sfn ../../../scenarios $@/scenarios

clean:
	rm -rf build $(VENV)
