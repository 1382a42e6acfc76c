#!/bin/sh
# make check: all that CI runs. Each step says what it does and what it skipped; the last line
# is that of the tests, the exit status is 0 only if every step passed.
# Steps use two cores (JOBS), or run beside another: written for 20 minutes on two cores.
cd "$(dirname "$0")/.." || exit 1
dir=build/check
rm -rf $dir && mkdir -p $dir
: "${MAKE:=make}"

step() {
    name=$1
    shift
    printf '\n==== %s\n' "$name"
    begin=$(date +%s)
    "$@" || { echo "==== FAILED: $name"; echo "$name" >>$dir/failed; }
    echo "==== $name: $(($(date +%s) - begin)) s"
}

tests() {
    if result=$(sh tests/stamp.sh read); then
        echo "this very tree has just passed make test with this compiler: not run again"
        echo "$result" >$dir/closing
        return 0
    fi
    { sh tests/run.sh; echo $? >$dir/status; } 2>&1 | tee $dir/log
    tail -n 1 $dir/log >$dir/closing
    return "$(cat $dir/status)"
}

# Other versions of clang-format wrap some lines in another way.
formatted() {
    case $(clang-format --version 2>/dev/null) in
    *"version 14."*) $MAKE -s format-check ;;
    *) echo "skip: clang-format 14 is not installed" ;;
    esac
}

installed() {
    root=$PWD/build/check-install
    rm -rf "$root"
    $MAKE -s install PREFIX="$root" &&
        printf '#define MHA_IMPLEMENTATION\n#include <mha.h>\nint main(void) { return !MHA_VERSION[0]; }\n' \
            >"$root/main.c" || return 1
    if command -v pkg-config >/dev/null; then
        flags=$(PKG_CONFIG_PATH=$root/share/pkgconfig pkg-config --cflags --libs mha) || return 1
    else
        echo "skip: mha.pc (pkg-config is not installed)"
        flags="-I$root/include -lm"
    fi
    ${CC:-cc} -o "$root/main" "$root/main.c" $flags && "$root/main"
}

step "tests" tests

# Fuzzing takes the time it is given on one core; on the other, what has no use for two.
fuzz() {
    [ -f tests/fuzz.sh ] || { echo "skip: there is no tests/fuzz.sh"; return 0; }
    FUZZ_SECONDS=${FUZZ_SECONDS:-120} FUZZ_JOBS=${FUZZ_JOBS:-1} sh tests/fuzz.sh
}
step "fuzzing" fuzz >$dir/fuzz 2>&1 &
step "size and compile time" sh tests/size.sh
step "assembly of the hot loops" sh tests/asm.sh
step "static analysis" env JOBS=1 sh tests/analyze.sh
step "format" formatted
step "examples" $MAKE -s examples
step "install" installed
wait
cat $dir/fuzz

step "warnings: gcc and clang, C99 to C23, C++11 to C++20" sh tests/warnings.sh
step "sanitizers, valgrind, -O0, -ffast-math, GNU mode, MHA_NO_SIMD" sh tests/sanitize.sh
step "other CPUs, systems, compilers and flags" sh tests/portable.sh

echo
[ ! -e $dir/failed ] || echo "make check FAILED in:$(sed 's/.*/ [&]/' $dir/failed | tr -d '\n')"
cat $dir/closing
[ ! -e $dir/failed ]
