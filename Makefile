# Two commands do everything: `make lessons` and `make test`. PYTHON=… names another interpreter or environment.
PYTHON ?= python3
# A path may have a space. A ~ is expanded here, because quotes keep it.
INTERPRETER := "$(patsubst ~/%,$(HOME)/%,$(PYTHON))"
ENVIRONMENT = $(INTERPRETER) src/repository/environment.py $(if $(filter file,$(origin PYTHON)),,--named)
PY = "$(shell $(ENVIRONMENT) --which)"
NOTEBOOKS = $(PY) src/repository/notebooks.py
# In a terminal Sphinx shows how far it is. Elsewhere it prints only warnings.
SPHINX = $(PY) -m sphinx -W --keep-going $(if $(MAKE_TERMOUT),,-q) -c lessons
# Sources and messages are UTF-8 in every locale.
export PYTHONUTF8 := 1
# Where the environment says that no bytecode is written, as containers do, each worker would compile all tests again.
export PYTHONDONTWRITEBYTECODE :=
# Kernels, fonts and Jupyter's files are kept in the home folder. If it cannot be written, build/home takes its place.
ifneq ($(shell test -w "$$HOME" && echo writable),writable)
export HOME := $(shell mkdir -p build/home)$(CURDIR)/build/home
endif

.PHONY: help environment lessons try lint stored again suite notebooks quick test test-full bench rehearse gpu-check lab changes refresh book clean

help:
	@echo "make lessons    run every lesson on this machine's best device and render the book into build/book"
	@echo "make try        the names of the kernels (K=flat_gemm: that kernel's smallest case, checked, in ten seconds)"
	@echo "make quick      lint, and one case of each test that is not slow, in two to three minutes"
	@echo "make test       everything CI checks"
	@echo "make test-full  every combination of the kernels' sizes and types, not a selection"
	@echo "make bench      what things cost on a CPU, as ratios of one run"
	@echo "make rehearse   the kernels' tests and the lessons as if there were a GPU (SM=8.0: an A100; TESTS=tests/...)"
	@echo "make gpu-check  what there is to know about this machine's GPU, in ten minutes (MINUTES=30: all of it)"
	@echo "make lab        open your own copy of the lessons, my_lessons, in JupyterLab"
	@echo "make changes    what the course has changed in the lessons that you have written in"
	@echo "make book       render the book from the stored outputs"
	@echo "make refresh    run the committed lessons again, in place (REMEASURE=1: timings too)"
	@echo "make clean      remove build/ and .venv/"

environment:
	@$(INTERPRETER) -c "" 2>/dev/null || { echo $(INTERPRETER) "does not run: install Python 3.11 or newer, or run make PYTHON=/path/to/python" >&2; exit 1; }
	@$(ENVIRONMENT)

lessons: environment
	@$(NOTEBOOKS) run lessons build/lessons
	@$(PY) src/repository/claims.py build/lessons
	@$(SPHINX) build/lessons build/book
	@echo "the book: open build/book/index.html"

try: environment
	@TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) tests/try_kernel.py $(K)

# A fifth of its time a test waits, for a browser, a server or a clock: one worker more than there are cores. Bytecode
# spares a hundred processes the compilation of the package. nproc would take OMP_NUM_THREADS for the number of cores.
CORES := $(shell cores=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$((cores < 8 ? cores : 8)))
WORKERS ?= $(shell echo $$(($(CORES) < 8 ? $(CORES) + 1 : 8)))
BESIDE := $(shell echo $$((($(CORES) + 1) / 2)))

test: environment
	$(PY) -m compileall -q --invalidation-mode checked-hash src
	$(MAKE) --no-print-directory -j 2 lint stored again
	$(MAKE) --no-print-directory -j 2 suite notebooks

# The book takes one core, and the notebooks begin beside it.
suite: book
	PAGEWISE_BOOK=build/book $(PY) -m pytest -n $(WORKERS) --dist worksteal -p no:nbval

# They run beside the suite, in the time in which its tests wait. Their output comes at their end, in one piece.
notebooks: environment
	@mkdir -p build
	OMP_NUM_THREADS=1 PAGEWISE_ROUNDS=1 $(PY) -m pytest --nbval --nbval-sanitize-with tests/nbval.cfg -p forked_kernels -n $(BESIDE) \
		--dist loadscope --no-loadscope-reorder $$(ls -r build/again/*.ipynb) > build/notebooks.txt 2>&1; \
		status=$$?; cat build/notebooks.txt; exit $$status

lint: environment
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

stored: environment
	$(NOTEBOOKS) check lessons

again: environment
	$(PY) src/repository/again.py lessons build/again

quick: lint
	$(PY) -m pytest -q --quick -n $(CORES) --dist worksteal -p no:nbval

test-full: environment
	PAGEWISE_FULL=1 $(PY) -m pytest -n 2 tests/paged_attention tests/flash_attention tests/test_flash_decoding.py \
		tests/paged_attention_varlen tests/flash_decoding_plus_plus tests/test_decode_kernels.py \
		tests/test_triton_compiled_kernels.py tests/cudascope/test_through_ptx.py tests/cudascope/test_both_paths.py \
		tests/cudascope/test_shares.py tests/cudascope/test_kinds_of_faults.py tests/cudascope/test_turns.py \
		tests/cudascope/test_triton_programs.py tests/cudascope/test_views.py tests/cudascope/test_bulk_reductions.py \
		tests/cudascope/test_gallery.py \
		tests/test_lab.py \
		tests/test_attention_contract.py tests/test_packaging.py tests/distributed tests/engine tests/test_architectures_cuda.py \
		tests/exercises tests/test_covering.py tests/test_try_kernel.py tests/test_without_linux.py \
		tests/test_oldest_triton.py tests/cudascope/test_alone.py

bench: environment
	@$(PY) -m pagewise.experiments.cpu_speed

SM ?= 9.0
TESTS ?= tests/rehearsal/checks.py tests/cudascope/test_kernel.py tests/test_attention_contract.py \
         tests/paged_attention tests/flash_attention tests/test_flash_decoding.py tests/flash_decoding_plus_plus \
         tests/paged_attention_varlen tests/paged_blocks/test_write.py \
         tests/test_online_softmax.py tests/tools/test_benchmark.py tests/tools/test_work.py
REHEARSE = STUB_CC=$(SM) OMP_NUM_THREADS=1
SITE = $(CURDIR)/build/rehearsal

# Triton kernels are interpreted, except in the launches of every kernel: there, their PTX is executed.
COMPILED = tests/rehearsal/checks.py -k "runs_on or run_on or captured"

rehearse: environment
	$(REHEARSE) STUB_TRITON=compiled PYTHONPATH=src:tests PYTEST_PLUGINS=rehearsal.plugin $(PY) -m pytest -n 2 $(COMPILED)
	$(REHEARSE) PYTHONPATH=src:tests PYTEST_PLUGINS=rehearsal.plugin $(PY) -m pytest -n 2 $(TESTS)
	@mkdir -p "$(SITE)"
	@echo "import rehearsal; rehearsal.install(); rehearsal.launches.watch_cuda()" > "$(SITE)/sitecustomize.py"
	$(REHEARSE) PYTHONPATH="$(SITE):$(CURDIR)/src:$(CURDIR)/tests" $(PY) -m pytest --nbval -n 2 --dist loadscope lessons

MINUTES ?= 10

gpu-check: environment
	@$(PY) -m pagewise.tools.gpu_check --minutes $(MINUTES)

LAB ?=

lab: environment
	@$(PY) src/repository/my_lessons.py lab $(LAB)

changes: environment
	@$(PY) src/repository/my_lessons.py changes

refresh: environment
	@$(NOTEBOOKS) refresh lessons $(if $(REMEASURE),--remeasure)
	$(PY) src/repository/claims.py lessons
	$(PY) src/repository/measured.py lessons

book: environment
	@$(SPHINX) lessons build/book
	@echo "the book: open build/book/index.html"

clean:
	rm -rf build .venv

.DEFAULT:
	@echo "make has no target '$@'; make help lists them" >&2; exit 1
