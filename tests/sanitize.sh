#!/bin/sh
# make sanitize: the test program in builds that find what a plain run does not. Cases are
# fewer where a build is slow; all other tests are whole. gcc and clang run side by side.
cd "$(dirname "$0")/.." || exit 1
rm -rf build/sanitize && mkdir -p build/sanitize
unset CFLAGS LDFLAGS
[ -n "$SEED" ] && export MHA_TEST_SEED="$SEED"
export UBSAN_OPTIONS=print_stacktrace=1

# try NAME CC CASES FLAGS [ARGUMENTS OF THE TEST PROGRAM]
try() {
    name=$1 dir=build/sanitize/$1 cases=$3 args=$5
    export CC="$2" CFLAGS="$4"
    mkdir -p "$dir"
    command -v "$CC" >/dev/null || { echo "skip $name ($CC is not installed)"; return; }
    echo 'int main(void) { return 0; }' >"$dir/probe.c"
    $CC $CFLAGS -o "$dir/probe" "$dir/probe.c" >"$dir/log" 2>&1 && "$dir/probe" >>"$dir/log" 2>&1 ||
        { echo "skip $name ($CC $CFLAGS does not work here: $(head -n 1 "$dir/log"))"; return; }
    begin=$(date +%s)
    if sh tests/build.sh "$dir" >"$dir/log" 2>&1 &&
        MHA_TEST_CASES=$cases "$dir/test" -v $args >>"$dir/log" 2>&1 &&
        tail -n 1 "$dir/log" | grep -q '^Pass: [1-9]'; then
        echo "ok $name: $(tail -n 1 "$dir/log") ($(($(date +%s) - begin)) s)"
    else
        grep -E '^FAIL|ERROR:|WARNING:|runtime error|error:|^Pass:' "$dir/log" | head -n 20
        tail -n 10 "$dir/log"
        echo "FAIL $name ($CC $CFLAGS); all output is in $dir/log"
        : >build/sanitize/failed
    fi
}

asan="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
common() {
    try asan-ubsan-$1 $1 200 "$asan"
    try tsan-$1 $1 200 "-O1 -g -fsanitize=thread" "-s threads_suite"
    try fast-math-$1 $1 1000 "-O2 -ffast-math -DTEST_FAST_MATH=1"
    try O0-$1 $1 200 "-O0"
    try gnu11-$1 $1 1000 "-O2 -std=gnu11" # a * b + c may become one operation
}
{ common gcc; try asan-no-simd-gcc gcc 200 "$asan -DMHA_NO_SIMD"; } &
{ common clang; try O2-clang clang 1000 "-O2"; try no-simd-clang clang 1000 "-O2 -DMHA_NO_SIMD"; } &
wait
[ ! -e build/sanitize/failed ]
