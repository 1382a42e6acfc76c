#!/bin/sh
# make test: the test program, then what is tested from outside (hygiene.sh, readme.sh).
# The last line is "N passed, N failed"; the exit status is 0 only if nothing failed.
cd "$(dirname "$0")/.." || exit 1
out=build/test passed=0 failed=0 skipped=0
mkdir -p $out
[ -n "$SEED" ] && export MHA_TEST_SEED="$SEED"
[ -n "$CASES" ] && export MHA_TEST_CASES="$CASES"

# part NAME COMMAND...: runs it and adds up the "Pass: N, fail: N, skip: N." it ends with.
# A program that crashes, or fails without a count, is one failure.
part() {
    name=$1 log=$out/$1.log
    shift
    echo "== $name"
    { "$@"; echo $? >$out/status; } 2>&1 | tee "$log" | sed '/^PASS /d'
    status=$(cat $out/status)
    total=$(sed -n 's/^Pass: \([0-9]*\), fail: \([0-9]*\), skip: \([0-9]*\)\.$/\1 \2 \3/p' "$log" | tail -n 1)
    set -- ${total:-0 0 0}
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
    if [ -z "$total" ] || { [ "$status" -ne 0 ] && [ "$2" -eq 0 ]; }; then
        echo "FAIL $name: exit status $status${total:+ although no test failed}; the end of $log:"
        tail -n 5 "$log"
        failed=$((failed + 1))
    fi
}

if sh tests/build.sh $out; then
    part program $out/test -v
else
    echo "FAIL: the test program does not build"
    failed=1
fi
part hygiene sh tests/hygiene.sh
part readme sh tests/readme.sh

[ $skipped -eq 0 ] || printf '\n%s skipped (see "skip" above)\n' $skipped
printf '\n%s passed, %s failed\n' $passed $failed
[ $failed -eq 0 ] && [ $passed -gt 0 ]
