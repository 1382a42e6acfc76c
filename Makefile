# mha.h is one header: nothing here needs to be built to use it. This file runs the examples,
# the tests and the checks. Everything it writes goes to build/.

CC ?= cc
CXX ?= c++
CFLAGS ?= -O2
PREFIX ?= /usr/local

# For make test: a folder that holds greatest.h; seed and number of the randomised cases.
GREATEST =
SEED =
CASES =

# For make mutate: how many.
MUTANTS = 150

# Arguments of the programs that make run, make bench and make bench-peers start.
ARGS =
BENCH_ARGS =

FORMATTED = mha.h examples/*.c tests/*.c tests/*.h tests/peers/*.c tests/standin/*.h \
    tests/simde/*.h

# What the scripts in tests/ take from here.
ENV = CC='$(CC)' CXX='$(CXX)' CFLAGS='$(CFLAGS)' LDFLAGS='$(LDFLAGS)' \
    GREATEST='$(GREATEST)' SEED='$(SEED)' CASES='$(CASES)'

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

run: ## build and run examples/encoder_layer.c; ARGS="--help" for more
	@mkdir -p build/examples
	$(CC) $(CFLAGS) -o build/examples/encoder_layer examples/encoder_layer.c $(LDFLAGS) -lm -pthread
	@build/examples/encoder_layer $(ARGS)

test: ## run the tests; SEED=n CASES=n GREATEST=dir CC=cc CFLAGS=-O2 JOBS=2
	@$(ENV) sh tests/run.sh

examples: ## build and run every example; they write to build/ only
	@mkdir -p build/examples
	@ls examples/*.c | xargs -P 2 -I FILE sh -c '$(CC) $(CFLAGS) -Wall -Wextra \
	    -o build/examples/`basename FILE .c` FILE $(LDFLAGS) -lm -pthread'
	@set -e; for f in examples/*.c; do echo "== $$f"; build/examples/`basename $$f .c`; done

bench: ## measure speed; BENCH_ARGS="--help" for more
	@mkdir -p build
	@$(CC) -O2 -DBENCH_FLAGS='"-O2"' -o build/bench tests/bench.c $(LDFLAGS) -lm -pthread
	@build/bench $(BENCH_ARGS)

bench-peers: ## measure OpenBLAS, ONNX Runtime and PyTorch too; BENCH_ARGS="--help"
	@CC='$(CC)' sh tests/peers/run.sh $(BENCH_ARGS)

check: ## all that CI runs: test, size, asm, analyze, examples, warnings, sanitize, portable, ...
	@$(ENV) sh tests/check.sh

warnings: ## compile with gcc and clang, every standard and option, strict warnings
	@sh tests/warnings.sh

sanitize: ## the tests under ASan, UBSan, MSan, TSan, valgrind; -O0, -ffast-math, MHA_NO_SIMD
	@GREATEST='$(GREATEST)' SEED='$(SEED)' sh tests/sanitize.sh

analyze: ## gcc -fanalyzer, clang-tidy and cppcheck find nothing in mha.h
	@sh tests/analyze.sh

size: ## bytes of code, seconds to compile
	@sh tests/size.sh

asm: ## what gcc and clang make of the hot loops: multiply-adds, no calls, no spills
	@sh tests/asm.sh

emulate: ## the tests on NEON under qemu-user, and on AVX-512 by SIMDe
	@GREATEST='$(GREATEST)' SEED='$(SEED)' sh tests/emulate.sh

fuzz: ## bytes into calls, against the oracle; FUZZ_SECONDS=120, 0: replay tests/corpus only
	@FUZZ_SECONDS='$(FUZZ_SECONDS)' sh tests/fuzz.sh

portable: ## other CPUs, systems and compilers: qemu, wine, node, bare metal, old and new ones
	@SEED='$(SEED)' sh tests/portable.sh

coverage: ## lines and branches of mha.h that the tests run (gcov); not in check
	@GREATEST='$(GREATEST)' SEED='$(SEED)' CASES='$(CASES)' sh tests/coverage.sh

mutate: ## break mha.h a little, many times: do the tests notice? MUTANTS=n SEED=n; not in check
	@CC='$(CC)' python3 tests/mutate.py -n '$(MUTANTS)' --seed '$(or $(SEED),1)'

format: ## rewrite the sources with clang-format
	clang-format -i $(FORMATTED)

format-check:
	@clang-format --dry-run -Werror $(FORMATTED)

greatest: ## fetch the test library greatest, pinned, to build/; else a stand-in is used
	@sh tests/greatest.sh

install: ## copy mha.h and mha.pc to PREFIX (default /usr/local)
	mkdir -p '$(DESTDIR)$(PREFIX)/include' '$(DESTDIR)$(PREFIX)/share/pkgconfig'
	cp mha.h '$(DESTDIR)$(PREFIX)/include/mha.h'
	@v=`sed -n 's/^#define MHA_VERSION "\(.*\)"/\1/p' mha.h`; printf '%s\n' \
	    'prefix=$(PREFIX)' 'includedir=$${prefix}/include' '' 'Name: mha' \
	    'Description: multi-head attention in one C99 header' "Version: $$v" \
	    'Cflags: -I$${includedir}' 'Libs: -lm' >'$(DESTDIR)$(PREFIX)/share/pkgconfig/mha.pc'

clean: ## remove build/
	rm -rf build

.PHONY: help run test examples bench bench-peers check warnings sanitize analyze size asm emulate portable format format-check greatest install clean coverage mutate fuzz
