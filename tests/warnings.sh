#!/bin/sh
# make warnings: mha.h without a warning, for each compiler x standard x option. The warnings of
# an optimiser come from the code, which is the same in every standard of C, and gcc alone has
# many: so gcc compiles every option with -O2 in C99 and in C++11, the fullest build with -O0 and
# -O3 too, and clang the fullest in both; all the rest is read, not compiled (-fsyntax-only).
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
    case $1 in
    *-fsyntax-only) object= ;;
    *) object="-c -o $dir/$$.o" ;;
    esac
    $1 -I. $object $2 && exit
    echo "FAIL $1 $2"
    exit 1
fi

rm -rf $dir && mkdir -p $dir
echo '#include "mha.h"' >$dir/declare.h.c
printf '#define MHA_IMPLEMENTATION\n#include "mha.h"\n' >$dir/implement.c
impl=$dir/implement.c
for cc in gcc clang; do
    command -v $cc >/dev/null || { echo "skip $cc (not installed)" >&2; continue; }
    for std in c99 c11 c17 c2x c++11 c++17 c++20; do
        case $std in
        c++*) probe="-x c++" ;;
        *) probe="-x c" ;;
        esac
        echo '#include <stddef.h>' >$dir/probe.c
        $cc $probe -std=$std -fsyntax-only $dir/probe.c >/dev/null 2>&1 ||
            { echo "skip $cc -std=$std (does not work here)" >&2; continue; }
        for what in $dir/declare.h.c $impl $impl,-DMHA_THREADS $impl,-DMHA_STATIC \
            $impl,-DMHA_NO_MALLOC $impl,-DMHA_NO_SIMD; do
            case $cc,$std,$what in
            gcc,c99,* | gcc,c++11,* | clang,c99,*THREADS | clang,c++11,*THREADS) echo "$cc $std -O2 $what" ;;
            *) echo "$cc $std -fsyntax-only $what" ;;
            esac
        done
    done
    echo "$cc c99 -O0 $impl,-DMHA_THREADS"
    echo "$cc c99 -O3 $impl,-DMHA_THREADS"
    how=-O2
    [ $cc = gcc ] || how=-fsyntax-only
    for f in examples/*.c; do echo "$cc c99 $how $f"; done
    for f in tests/*.c; do
        case $f in *readme_prelude.c) ;; *) echo "$cc c99 $how $f,-Itests/standin" ;; esac
    done
done >$dir/jobs
echo "$(wc -l <$dir/jobs) compilations"
xargs -P "${JOBS:-2}" -n 4 sh tests/warnings.sh <$dir/jobs
