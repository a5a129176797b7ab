# make demo    virtual environment, build, then the demo: trains a small model on Margay's and on PyTorch's functions
# make test    the same, then all tests
# make build   only the extension, in place in python/margay, with this Python; for work on the library
# make bench   benchmarks on this machine's GPU and CPU; results to benchmarks/results, tables and plots from them
# make clean   remove what was built (not .venv)
#
# PYTHON=python3.12   the interpreter        VENV=   none: use PYTHON's own packages and the extension built in place (make test VENV=)
# MARGAY_CUDA=0|1|auto, NVCC, CC, CXX, MAX_JOBS: see setup.py        DEMO, TEST, BENCH: more arguments for the programs that are run
# WORKERS=2    test processes at a time (default: the cores, at most 4)        FULL=1   tests repeat what differs in sizes only
PYTHON ?= python3
VENV ?= .venv
DEMO ?=
TEST ?=
BENCH ?=

ifeq ($(VENV),)
READY_DEMO := build
READY_TEST := build
RUN := PYTHONPATH=python$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
else
READY_DEMO := install
READY_TEST := $(VENV)/.requirements-test install
RUN := $(VENV)/bin/python
endif

.PHONY: demo test build install bench clean
.NOTPARALLEL:

demo: $(READY_DEMO)
	$(RUN) -m margay.demo --out build/demo $(DEMO)

# Files of tests side by side, where pytest-xdist is installed. Each process computes with two threads, as one alone would on two
# cores: races between threads stay in what is tested. Threads that wait sleep, because another process wants the core.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n < 4 ? n : 4)))
test: export OMP_NUM_THREADS ?= 2
test: export OMP_WAIT_POLICY ?= passive
test: export MARGAY_TEST_FULL ?= $(FULL)
test: $(READY_TEST)
	$(RUN) -m pytest $$($(RUN) -c 'import xdist' 2>/dev/null && printf %s '-n $(WORKERS) --dist loadfile') $(TEST)

bench: $(READY_TEST)
	$(RUN) -m margay.bench attention --dims 64,128,256 $(BENCH)
	$(RUN) -m margay.bench attention --dims 64,128,256 --dtype float8_e4m3fn $(BENCH)
	$(RUN) -m margay.bench features $(BENCH)
	$(RUN) -m margay.bench decode $(BENCH)
	$(RUN) -m margay.bench gemm $(BENCH)
	$(RUN) -m margay.bench linear_attention $(BENCH)
	$(RUN) -m margay.bench ssd $(BENCH)
	$(RUN) -m margay.bench steps $(BENCH)
	$(RUN) -m margay.bench causal_conv1d $(BENCH)
	$(RUN) -m margay.bench fft_conv $(BENCH)
	$(RUN) -m margay.bench based $(BENCH)
	$(RUN) -m margay.bench hedgehog $(BENCH)
	$(RUN) -m margay.bench delta $(BENCH)
	$(RUN) -m margay.bench rotary $(BENCH)
	$(RUN) -m margay.bench norm $(BENCH)
	$(RUN) -m margay.bench cross_entropy $(BENCH)
	$(RUN) -m margay.bench llama $(BENCH)
	$(RUN) -m margay.bench cpu $(BENCH)
	$(RUN) -m margay.bench overhead $(BENCH)
	$(RUN) tools/tables.py

build:
	$(PYTHON) setup.py -q egg_info build_ext --inplace

# The first command shows its progress, which pip would hide; pip then finds everything compiled. Left-over files of an older build in
# build/lib* would get into the package.
install: $(VENV)/.requirements
	$(VENV)/bin/python setup.py -q build_ext
	@rm -rf build/lib build/lib.* build/bdist*
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .

$(VENV)/.requirements: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Margay needs Python 3.10 or newer; make PYTHON=... says which")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.requirements-test: $(VENV)/.requirements requirements-test.txt
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -r requirements-test.txt
	@touch $@

clean:
	rm -rf build dist python/margay.egg-info python/margay/*.so
