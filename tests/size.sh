#!/bin/sh
# make size: bytes of code in the fullest build under plain -O2, which may be 256 KiB, and seconds
# that one compilation takes, best of three, which should be 2. Time on a busy machine says little:
# above that there is a warning, not a failure. What was printed stays in build/size.log.
cd "$(dirname "$0")/.." || exit 1
mkdir -p build
status=0 limit=$((256 * 1024))
printf '#define MHA_IMPLEMENTATION\n#include "../mha.h"\n' >build/size.c

# Seconds of a core, so that what else runs here counts less.
seconds() {
    ("$@" && times >build/size.times) && sh tests/cpu.sh build/size.times
}

for cc in gcc clang; do
    command -v $cc >/dev/null || { echo "skip $cc (it is not installed)"; continue; }
    best=
    for i in 1 2 3; do
        t=$(seconds $cc -O2 -DMHA_THREADS -c -o build/size.o build/size.c)
        [ -n "$t" ] || { echo "FAIL $cc: it does not compile"; status=1; break 2; }
        best=$(printf '%s\n' $best $t | sort -n | head -n 1)
    done
    if command -v size >/dev/null; then
        # Code and constants: what size calls text.
        set -- $(size build/size.o | tail -n 1)
        echo "$cc -O2 -DMHA_THREADS: $1 bytes of code (of $limit), $best s to compile"
        [ "$1" -le $limit ] || { echo "FAIL $cc: more than 256 KiB of code"; status=1; }
    else
        echo "skip bytes of code (size is not installed); $cc: $best s to compile"
    fi
    awk -v t="$best" 'BEGIN { exit t <= 2 }' && echo "warning: $cc takes more than 2 s to compile mha.h"
done >build/size.log
cat build/size.log
exit $status
