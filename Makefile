# `make` lists what there is. Everything lands in this folder: .venv (the environment), .tidemark (what the demo keeps).

# The first Python 3.11 or 3.12 on the PATH; UV itself is brought where it is missing.
PYTHON := $(shell for p in python3.12 python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && command -v $$p && break; done)
UV := $(shell command -v uv || echo .uv/bin/uv)
RUN := .venv/bin
export UV_PYTHON_DOWNLOADS := never
# A home that cannot be written to is no reason to fail.
ifndef UV_CACHE_DIR
export UV_CACHE_DIR := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/uv
ifneq ($(shell mkdir -p "$(UV_CACHE_DIR)" 2>/dev/null && test -w "$(UV_CACHE_DIR)" && echo yes),yes)
UV_CACHE_DIR := $(CURDIR)/.uv/cache
endif
endif
export PIP_NO_CACHE_DIR := 1
unexport PYTHONDONTWRITEBYTECODE VIRTUAL_ENV

.DEFAULT_GOAL := help
.PHONY: help install jars demo clean-demo test test-all check lint bench drill soak hostile figures

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: jars  ## broker, stream, sample traffic, yesterday settled, the last hour moving; Ctrl-C ends it
	@exec $(RUN)/tidemark demo

clean-demo: install  ## forget what the demo kept
	@if $(RUN)/python -c 'from tidemark.settings import Settings as S; raise SystemExit(not (S().state / "demo.json").exists())'; then \
		$(RUN)/tidemark down; fi
	@$(RUN)/python -c 'from tidemark import local, settings; s = settings.Settings(); \
	kept = [f"nothing is forgotten while {it}, of which no demo knows" for it in local.others(s)]; \
	print(*local.forget(s) or kept or ["no demo has kept anything here"], sep="\n")'

# Three files at a time, since a fifth of their time is waiting, and those that take longest first.
PYTEST := $(RUN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

test: jars  ## what every change must pass, a real broker included
	$(PYTEST)

# All of Airflow over a stream has the machine to itself: what it promises is told in seconds.
ALONE := tests/integration/test_airflow.py tests/integration/test_demo.py tests/integration/test_postgres.py

test-all: jars  ## also what is marked long, and each law in four times as many worlds
	$(PYTEST) -m "" --hypothesis-profile=long $(ALONE:%=--ignore=%)
	$(RUN)/pytest -m "" $(ALONE)

# Of tests and benches mypy says which names and which arguments a call cannot have; of their data it is not to speak.
LOOSE := arg-type assignment dict-item func-returns-value has-type index method-assign misc operator return-value type-var \
	union-attr unused-ignore var-annotated

check: install  ## what CI looks at beside the tests: style, layers, types, the lock, the containers
	$(UV) lock --check
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/lint-imports
	$(RUN)/mypy
	@MYPYPATH=include:tests $(RUN)/mypy --explicit-package-bases $(LOOSE:%=--disable-error-code %) tests bench
	@env $$(sed -n 's/^\([A-Z_]*\)=$$/\1=x/p' .env.example) \
	$(RUN)/podman-compose --dry-run -f docker-compose.yaml --profile spark config --quiet

bench: jars  ## the race against plain Structured Streaming; writes bench/out/figures.json
	$(RUN)/python -m bench

drill: jars  ## break one part after the other beside traffic, and count what is lost; SEED=1 again, LONG=1 every fault
	$(RUN)/python -m bench.drill $(if $(SEED),--seed $(SEED)) $(if $(LONG),--long)

soak: jars  ## an hour of traffic, the stream killed every five minutes of the first forty; what grows is shown as a slope
	$(RUN)/python -m bench.soak $(if $(SEED),--seed $(SEED))

figures: install  ## write docs/figures.md and its pictures from the newest runs of bench, drill, soak and hostile
	$(RUN)/python -m bench.figures

hostile: jars  ## broken JSON, naughty strings, hostile SQL and names through the platform, and what held; SEED=1 again
	$(RUN)/python -m bench.hostile $(if $(SEED),--seed $(SEED))

jars: install  ## all of the installation: the environment, Spark's and the broker's jars, pinned in include/ivy.xml
	@$(RUN)/tidemark jars

install: .venv/.installed  ## the environment, from uv.lock

.venv/.installed: pyproject.toml uv.lock | prerequisites $(UV)
	$(UV) sync --locked --python $(PYTHON)
	@touch $@

.PHONY: prerequisites
prerequisites:
	@test -n "$(PYTHON)" || { echo "tidemark needs Python 3.11 or 3.12 on the PATH; found: $$(python3 --version 2>&1)" >&2; exit 1; }
	@for java in "$${JAVA_HOME:+$$JAVA_HOME/bin/java}" java; do \
	v=$$("$$java" -version 2>&1 | sed -n 's/.* version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p'); test "$${v:-0}" -ge 17 && exit; \
	found="$$found$${v:+ $$v}"; done; \
	echo "tidemark needs a Java runtime of version 17 or newer, on the PATH or in JAVA_HOME; found:$${found:- none}" >&2; exit 1
	@test "$(UV)" != .uv/bin/uv || test -x .uv/bin/uv || $(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	{ echo "tidemark brings uv in an environment of its own, and $(PYTHON) cannot make one; on Debian: apt install python3-venv; or install uv" >&2; exit 1; }

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet 'uv>=0.9,<0.14'
