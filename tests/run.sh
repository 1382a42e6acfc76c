#!/bin/sh
# make test: the test program, and what is tested from outside (hygiene.sh, readme.sh), side by
# side; the program's suites are processes of their own, $JOBS at a time (default 2).
# The last line is "N passed, N failed"; the exit status is 0 only if nothing failed.
cd "$(dirname "$0")/.." || exit 1
out=build/test passed=0 failed=0 skipped=0
[ -n "$SEED" ] && export MHA_TEST_SEED="$SEED"
[ -n "$CASES" ] && export MHA_TEST_CASES="$CASES"

# sh tests/run.sh --part NAME COMMAND...: its output and exit status go to $out.
if [ "$1" = --part ]; then
    name=$2
    shift 2
    "$@" >"$out/$name.log" 2>&1
    echo $? >"$out/$name.status"
    exit 0
fi

# part NAME: shows it and adds up the "Pass: N, fail: N, skip: N." it ended with.
# A program that crashed, or failed without a count, is one failure.
part() {
    log=$out/$1.log
    echo "== $1"
    sed '/^PASS /d' "$log"
    status=$(cat "$out/$1.status")
    total=$(sed -n 's/^Pass: \([0-9]*\), fail: \([0-9]*\), skip: \([0-9]*\)\.$/\1 \2 \3/p' "$log" | tail -n 1)
    name=$1
    set -- ${total:-0 0 0}
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
    if [ -z "$total" ] || { [ "$status" -ne 0 ] && [ "$2" -eq 0 ]; }; then
        echo "FAIL $name: exit status $status${total:+ although no test failed}; the end of $log:"
        tail -n 5 "$log"
        failed=$((failed + 1))
    fi
}

sh tests/stamp.sh forget
mkdir -p $out && rm -f $out/*.log $out/*.status
sh tests/run.sh --part hygiene sh tests/hygiene.sh &
sh tests/run.sh --part readme sh tests/readme.sh &
suites=
if sh tests/build.sh $out; then
    suites=$($out/test -l | sed -n 's/^\* Suite \([a-z_]*\):$/\1/p')
    echo $suites | tr ' ' '\n' |
        xargs -P "${JOBS:-2}" -I SUITE sh tests/run.sh --part SUITE $out/test -v -s SUITE
    [ -n "$suites" ] || { echo "FAIL: the test program lists no suite"; failed=1; }
else
    echo "FAIL: the test program does not build"
    failed=1
fi
wait
for name in $suites hygiene readme; do part "$name"; done

[ $skipped -eq 0 ] || printf '\n%s skipped (see "skip" above)\n' $skipped
[ $failed -eq 0 ] && [ $passed -gt 0 ] && sh tests/stamp.sh write "$passed passed, $failed failed"
printf '\n%s passed, %s failed\n' $passed $failed
[ $failed -eq 0 ] && [ $passed -gt 0 ]
