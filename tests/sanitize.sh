#!/bin/sh
# make sanitize: the test program in builds that find what a plain run does not, two at a time.
# Cases are fewer where a build is slow. Builds that differ in how the library is compiled, and not
# in what watches it, share the objects of the tests.
#   sh tests/sanitize.sh            all
#   sh tests/sanitize.sh NAME...    those alone, e.g. msan
cd "$(dirname "$0")/.." || exit 1
dir=build/sanitize
unset CFLAGS LDFLAGS TESTS
[ -n "$SEED" ] && export MHA_TEST_SEED="$SEED"
export UBSAN_OPTIONS=print_stacktrace=1

# The longest first.
names="asan-ubsan-clang asan-ubsan-gcc msan tsan valgrind fast-math-gcc
    fast-math-clang gnu11-gcc gnu11-clang O0-gcc O0-clang no-simd-clang"
asan="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
# threads share what is left over, and few rows take the terms of panels in turn, however little it is
share="-DMHA__SHARED_LEAST=1 -DMHA__NEAR=0 -DMHA__CACHED=0"
# memory is asked for as Intel's CPUs; as Zen 5, and each sequence of up to 32 tokens is a group
pages="$share -DMHA__ASKS=1" lines="$share -DMHA__ASKS=2 -DMHA__GROUP_ROWS=32"

# try CC CASES FLAGS [SUITE...]: all suites, or those.
try() {
    out=$dir/$name log=$dir/$name/log cases=$2
    export CC="$1" CFLAGS="$3"
    shift 3
    mkdir -p "$out"
    command -v "$CC" >/dev/null || { echo "skip $name ($CC is not installed)"; return; }
    echo 'int main(void) { return 0; }' >"$out/probe.c"
    $CC $CFLAGS -o "$out/probe" "$out/probe.c" >"$log" 2>&1 && "$out/probe" >>"$log" 2>&1 ||
        { echo "skip $name ($CC $CFLAGS does not work here: $(head -n 1 "$log"))"; return; }
    begin=$(date +%s)
    sh tests/build.sh "$out" >"$log" 2>&1 || { fail; return; }
    [ $# -gt 0 ] || set -- "" # part of every name
    : >"$out/runs"
    for suite; do
        MHA_TEST_CASES=$cases $under "$out/test" -v -s "${suite}_suite" >"$out/run" 2>&1
        status=$?
        cat "$out/run" >>"$log"
        tail -n 1 "$out/run" >>"$out/runs"
        [ $status -eq 0 ] && tail -n 1 "$out/run" | grep -q '^Pass: [1-9]' || { fail; return; }
    done
    times >"$out/times"
    echo "ok $name: $(tr -d ,. <"$out/runs" | awk '{ p += $2; s += $6 } END {
        print "Pass: " p ", fail: 0, skip: " s "." }') ($(($(date +%s) - begin)) s, $(sh tests/cpu.sh "$out/times") of a core)"
}
fail() {
    grep -E '^FAIL|ERROR:|WARNING:|^==[0-9]+==|runtime error|error:|^Pass:' "$log" | head -n 20
    tail -n 10 "$log"
    echo "FAIL $name ($CC $CFLAGS); all output is in $log"
    : >$dir/failed
}

one() {
    name=$1 under=
    case $name in
    asan-ubsan-clang) try clang 200 "$asan $pages" ;;
    asan-ubsan-gcc) # what checks results more than memory is left to clang
        try gcc 200 "$asan" kernels errors stages golden random cache compact memory
        ;;
    tsan) try clang 200 "-O1 -g -fsanitize=thread $lines" threads ;;
    msan)
        try clang 40 "-O1 -g -fsanitize=memory -fno-omit-frame-pointer -DTEST_UNDEFINED $pages" \
            kernels stages golden random cache compact
        ;;
    valgrind)
        # valgrind knows AVX2 and not AVX-512. What is never written and then excluded does no
        # harm in vectors; C kernels jump on it (see mha__cap), so they are MSan's.
        command -v valgrind >/dev/null || { echo "skip $name (valgrind is not installed)"; return; }
        [ "$(uname -m)" = x86_64 ] || { echo "skip $name (this machine is $(uname -m))"; return; }
        export TESTS=$dir/plain MHA_TEST_ISA=avx2
        under="valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite"
        try gcc 20 "-O2 -g -DTEST_UNDEFINED" golden errors random stages
        ;;
    *)
        export TESTS=$dir/plain
        case $name in
        fast-math-*) try "${name##*-}" 500 "-O2 -ffast-math -DTEST_FAST_MATH=1" ;;
        gnu11-*) try "${name##*-}" 500 "-O2 -std=gnu11" ;; # a * b + c may become one operation
        O0-gcc) try gcc 200 "-O0" ;;
        O0-clang) try clang 200 "-O0" kernels errors stages golden random compact ;;
        no-simd-clang) try clang 400 "-O2 -DMHA_NO_SIMD" ;;
        *) echo "FAIL: there is no build $name"; : >$dir/failed ;;
        esac
        ;;
    esac
}

if [ "$1" = --one ]; then
    one "$2"
    exit
fi
rm -rf $dir && mkdir -p $dir/plain
[ $# -gt 0 ] && names=$*
CC=${CC:-cc} CFLAGS=-O2 sh tests/build.sh $dir/plain >$dir/plain/log 2>&1 ||
    { tail -n 5 $dir/plain/log; echo "FAIL plain; all output is in $dir/plain/log"; exit 1; }
echo $names | tr ' ' '\n' | xargs -P "${JOBS:-2}" -n 1 sh tests/sanitize.sh --one
[ ! -e $dir/failed ]
