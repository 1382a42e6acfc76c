#!/bin/sh
# Builds the test program: sh tests/build.sh DIR makes DIR/test, with $CC $CFLAGS $LDFLAGS.
# With $TESTS, a folder where that was done before, its objects are taken, but for the files that
# hold the library or look at a -DTEST_... of $CFLAGS.
# Uses the first greatest.h there is: folder $GREATEST, the compiler's own include path,
# build/ (from `make greatest`), tests/standin.
cd "$(dirname "$0")/.." || exit 1
out=$1
mkdir -p "$out" && rm -f "$out"/*.o "$out/test"

strict="-std=c99 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wcast-qual
    -Wstrict-prototypes -Wmissing-prototypes -Wundef"

echo '#include <greatest.h>' >"$out/probe.c"
if [ -n "$GREATEST" ]; then
    [ -f "$GREATEST/greatest.h" ] || { echo "there is no greatest.h in GREATEST=$GREATEST"; exit 1; }
    inc="-isystem $GREATEST" which="$GREATEST/greatest.h"
elif ${CC:-cc} $CFLAGS -E "$out/probe.c" >/dev/null 2>&1; then
    inc= which="greatest.h of the system"
elif [ -f build/greatest.h ] && sh tests/greatest.sh verify; then
    inc="-isystem build" which=build/greatest.h
else
    inc="-Itests/standin" which="tests/standin/greatest.h (make greatest fetches the real one)"
fi
echo "building the tests with ${CC:-cc} ${CFLAGS--O2}, $which"

anew='^#define MHA_IMPLEMENTATION'
for flag in $CFLAGS; do
    case $flag in -DTEST_*) flag=${flag#-D} anew="$anew|${flag%%=*}" ;; esac
done
pids= objs=
for src in tests/main.c tests/support.c tests/oracle.c tests/test_*.c; do
    obj=$out/$(basename "$src" .c).o
    if [ -n "$TESTS" ] && ! grep -qE "$anew" "$src"; then
        objs="$objs $TESTS/$(basename "$src" .c).o"
        continue
    fi
    ${CC:-cc} $strict ${CFLAGS--O2} $inc -c -o "$obj" "$src" &
    pids="$pids $!" objs="$objs $obj"
done
for pid in $pids; do wait "$pid" || failed=1; done
[ -z "$failed" ] && ${CC:-cc} ${CFLAGS--O2} -o "$out/test" $objs $LDFLAGS -lm -pthread
