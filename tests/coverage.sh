#!/bin/sh
# make coverage: the lines and branches of mha.h that the test program runs, by gcov, with the
# tables of kernels this CPU has, in turn as any CPU asks for memory. Fails if less than 98 % of
# the lines run, or if one that does not run is not in the list below. Code that the preprocessor
# removes here does not count.
cd "$(dirname "$0")/.." || exit 1
out=build/coverage least=98
mkdir -p $out && rm -f $out/*.gc*
[ -n "$SEED" ] && export MHA_TEST_SEED="$SEED"
for tool in gcc gcov; do
    command -v $tool >/dev/null || { echo "skip ($tool is not installed)"; exit 0; }
done

# Lines that no test of this machine can run, as they stand in mha.h, and why.
cat >$out/expected <<'LIST'
return &mha__avx2[mha__cpu_asks()]; | a CPU without AVX2 and FMA
return &mha__avx512[mha__cpu_asks()]; | a CPU without AVX-512
LIST

# MHA__SANITIZED: inner functions are not forced inline, so that each is counted once.
CC=gcc CFLAGS="-O0 -DMHA__SANITIZED --coverage -fprofile-update=atomic
    -fprofile-filter-files=mha\.h -DMHA__ASKS=atoi(getenv(\"ASKS\"))" sh tests/build.sh $out || exit 1
for asks in 0 1 2; do
    ASKS=$asks MHA_TEST_CASES="${CASES:-200}" $out/test >$out/log 2>&1 ||
        { grep -A 3 '^FAIL' $out/log; echo "the tests fail; all output is in $out/log"; exit 1; }
done
gcov -b -c -t -o $out main.gcda >$out/gcov 2>$out/gcov.log || { cat $out/gcov.log; exit 1; }

# gcov gives "count:number:text" for a line, ##### if it was not run, - if it has no code, and
# below it a line for each branch. The section of a table that this CPU lacks does not count.
tables=$(sed -n 's/^mha.h .* cases, on //p' $out/log)
awk -v tables="$tables" -v least=$least -v list=$out/expected -v missed=$out/branches '
    BEGIN {
        while ((getline line < list) > 0) {
            at = index(line, " | ")
            why[substr(line, 1, at - 1)] = substr(line, at + 3)
        }
        printf "" >missed
    }
    /^ *-: *0:Source:/ { mine = /mha\.h$/ }
    !mine { next }
    /^branch/ {
        if (!absent) branches++
        if (!absent && /taken 0|never executed/) {
            untaken++
            if (last != said) print number ": " text >missed
            said = last
        }
        next
    }
    /^(call|function|unconditional)/ { next }
    {
        last = $0
        split($0, part, ":")
        number = part[2] + 0
        text = substr($0, index($0, ":") + 1)
        text = substr(text, index(text, ":") + 1)
        gsub(/^ +| +$/, "", text)
    }
    text ~ /^\/\* ==== >>/ {
        match(text, />>[a-z0-9]+/)
        tag = substr(text, RSTART + 2, RLENGTH - 2)
        absent = tag ~ /^(avx2|avx512|neon)$/ && index(" " tables " ", " " tag " ") == 0
    }
    absent || part[1] ~ /-$/ { next }
    { lines++ }
    part[1] ~ /[#=]$/ {
        not_run++
        if (text in why) print "  not run: line " number ": " text " (" why[text] ")"
        else {
            print "  NOT RUN: line " number ": " text
            unexpected++
        }
    }
    END {
        if (!lines) { print "FAIL: gcov says nothing of mha.h"; exit 1 }
        percent = 100 * (lines - not_run) / lines
        printf "mha.h on %s: %d of %d lines run (%.2f %%), ", tables, lines - not_run, lines, percent
        printf "%d of %d branches taken (%.2f %%; the others: %s)\n", branches - untaken, branches,
            100 * (branches - untaken) / branches, missed
        if (unexpected) print "FAIL: " unexpected " lines are neither run nor in the list of tests/coverage.sh"
        if (percent < least) print "FAIL: less than " least " % of the lines"
        exit unexpected > 0 || percent < least
    }' $out/gcov
