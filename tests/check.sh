#!/bin/sh
# make check: all that CI runs. Each step says what it does and what it skipped; the last line
# is that of the tests, the exit status is 0 only if every step passed.
cd "$(dirname "$0")/.." || exit 1
mkdir -p build
failed= closing=build/check.closing
: "${MAKE:=make}"

step() {
    name=$1
    shift
    printf '\n==== %s\n' "$name"
    begin=$(date +%s)
    "$@" || { echo "==== FAILED: $name"; failed="$failed [$name]"; }
    echo "==== $name: $(($(date +%s) - begin)) s"
}

tests() {
    { sh tests/run.sh; echo $? >build/check.status; } 2>&1 | tee build/check.log
    tail -n 1 build/check.log >$closing
    return "$(cat build/check.status)"
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
step "warnings: gcc and clang, C99 to C17, C++11 and C++17" sh tests/warnings.sh
step "sanitizers, -O0, -ffast-math, GNU mode, MHA_NO_SIMD" sh tests/sanitize.sh
step "assembly of the hot loops" sh tests/asm.sh
step "NEON and AVX-512 emulated" sh tests/emulate.sh
step "format" formatted
step "examples" $MAKE -s examples
step "install" installed

echo
[ -z "$failed" ] || echo "make check FAILED in:$failed"
cat $closing
[ -z "$failed" ]
