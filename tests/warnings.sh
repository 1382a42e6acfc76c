#!/bin/sh
# make warnings: mha.h without a warning, for each compiler x standard x option x -O level.
# Warnings depend on -O only through the code that is optimised, so every option is compiled
# with -O2, and -O0 and -O3 once per compiler and standard, in the fullest build.
cd "$(dirname "$0")/.." || exit 1
dir=build/warnings
W="-Werror -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wcast-align -Wcast-qual
    -Wundef -Wdouble-promotion"
WC="-Wstrict-prototypes -Wmissing-prototypes"

# One compilation: sh tests/warnings.sh CC STD OPT SOURCE[,-DOPTION]
if [ $# -eq 4 ]; then
    case $2 in
    c++*) lang="-x c++" ;;
    *) lang="-x c $WC" ;;
    esac
    set -- "$1 $lang $W -std=$2 $3" "$(echo "$4" | tr , ' ')"
    $1 -I. -c -o $dir/$$.o $2 && exit
    echo "FAIL $1 $2"
    exit 1
fi

rm -rf $dir && mkdir -p $dir
echo '#include "mha.h"' >$dir/declare.h.c
printf '#define MHA_IMPLEMENTATION\n#include "mha.h"\n' >$dir/implement.c
impl=$dir/implement.c
for cc in gcc clang; do
    command -v $cc >/dev/null || { echo "skip $cc (not installed)" >&2; continue; }
    for std in c99 c11 c17 c++11 c++17; do
        case $std in
        c++*) probe="-x c++" ;;
        *) probe="-x c" ;;
        esac
        echo '#include <stddef.h>' >$dir/probe.c
        $cc $probe -std=$std -fsyntax-only $dir/probe.c >/dev/null 2>&1 ||
            { echo "skip $cc -std=$std (does not work here)" >&2; continue; }
        for what in $dir/declare.h.c $impl $impl,-DMHA_THREADS $impl,-DMHA_STATIC \
            $impl,-DMHA_NO_MALLOC $impl,-DMHA_NO_SIMD; do
            echo "$cc $std -O2 $what"
        done
        echo "$cc $std -O0 $impl,-DMHA_THREADS"
        echo "$cc $std -O3 $impl,-DMHA_THREADS"
    done
    for f in examples/*.c; do echo "$cc c99 -O2 $f"; done
    for f in tests/*.c; do
        case $f in *readme_prelude.c) ;; *) echo "$cc c99 -O2 $f,-Itests/standin" ;; esac
    done
done >$dir/jobs
echo "$(wc -l <$dir/jobs) compilations"
xargs -P "${JOBS:-2}" -n 4 sh tests/warnings.sh <$dir/jobs
